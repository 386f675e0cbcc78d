"""What a run of several notebooks says while it runs: which it is at, and about how long all will
take.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm

# Seconds as measured, taken as done before the start: a short first notebook does not swing the
# estimate
CALM = 30
BESIDE = 1.4  # how many times longer a notebook is expected to take beside another one


class Progress:
    """One bar in a terminal, a line per notebook elsewhere.

    ``measured`` has the seconds that notebooks took alone, where they were measured; what is left
    of them, ``jobs`` at a time, is scaled by what this machine has needed so far. Without them
    nothing is said of time.
    """

    def __init__(self, names: list[str], measured: dict[str, float], jobs: int = 1) -> None:
        self.names, self.measured, self.jobs = names, measured, jobs
        self.known = all(name in measured for name in names)
        self.began: dict[str, float] = {}
        self.ended: set[str] = set()
        self.started = time.monotonic()
        self.here, self.there = CALM * (BESIDE if jobs > 1 else 1.0), float(CALM)

    def running(self) -> list[str]:
        """Names of the notebooks that run now."""
        return [name for name in list(self.began) if name not in self.ended]

    def left(self) -> float:
        """Seconds until the last notebook ends; 0 where that is past."""
        now, scale = time.monotonic(), self.here / self.there
        open_ones = (name for name in self.names if name not in self.ended)
        rest = [
            max(0.0, self.measured[name] * scale - now + self.began.get(name, now))
            for name in open_ones
        ]
        return max([sum(rest) / self.jobs, *rest])

    def line(self) -> str:
        """[3/8] 04_gpt2_imdb_ppo · about 4 min left"""
        text = f"[{len(self.began)}/{len(self.names)}] {', '.join(self.running())}"
        return f"{text} · {duration(self.left())} left" if self.known else text

    def share(self) -> float:
        """How much of the run is over, 0 to 1."""
        if not self.known:
            return len(self.ended) / len(self.names)
        past = time.monotonic() - self.started
        return past / max(past + self.left(), 1e-9)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around the whole run: the bar of a terminal."""
        ended = Event()
        thread = Thread(target=self._draw, args=(ended,), daemon=True)
        if sys.stderr.isatty():
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident:
                thread.join()

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Around one notebook."""
        self.began[name] = time.monotonic()
        if not sys.stderr.isatty():
            print(self.line(), flush=True)
        try:
            yield
        finally:
            self.here += time.monotonic() - self.began[name]
            self.there += self.measured.get(name, 0)
            self.ended.add(name)

    def _draw(self, ended: Event) -> None:
        look = {"bar_format": "{desc} |{bar}|", "leave": False, "dynamic_ncols": True}
        bar = tqdm(total=1, desc="", file=sys.stderr, **look)
        while not ended.wait(1):
            bar.set_description_str(self.line(), refresh=False)
            bar.n = self.share()
            bar.refresh()
        bar.close()


def duration(seconds: float) -> str:
    """About how long, in words."""
    return f"about {seconds / 60:.0f} min" if seconds >= 60 else "under a minute"
