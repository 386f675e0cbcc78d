"""What a run of several notebooks says while it runs: which one it is at, and about how long all will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm

CALM = 30  # seconds as measured, taken as done before the start: a short first notebook does not swing the estimate


class Progress:
    """One bar in a terminal, a line per notebook elsewhere.

    ``measured`` has the seconds that notebooks took where they were measured; what is left of them is scaled by what
    this machine has needed so far. Without them nothing is said of time.
    """

    def __init__(self, names: list[str], measured: dict[str, float]) -> None:
        self.names, self.measured, self.position = names, measured, 0
        self.known = all(name in measured for name in names)
        self.started = self.began = time.monotonic()
        self.here = self.there = float(CALM)

    def left(self) -> float:
        """Seconds until the last notebook ends; 0 where that is past."""
        expected = sum(self.measured[name] for name in self.names[self.position :]) * self.here / self.there
        return max(0.0, expected - (time.monotonic() - self.began))

    def line(self) -> str:
        """[3/8] 04_gpt2_imdb_ppo · about 4 min left"""
        text = f"[{self.position + 1}/{len(self.names)}] {self.names[self.position]}"
        return f"{text} · {duration(self.left())} left" if self.known else text

    def share(self) -> float:
        """How much of the run is over, 0 to 1."""
        if not self.known:
            return self.position / len(self.names)
        past = time.monotonic() - self.started
        return past / max(past + self.left(), 1e-9)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the next notebook."""
        self.began, ended = time.monotonic(), Event()
        thread = Thread(target=self._draw, args=(ended,), daemon=True)
        if sys.stderr.isatty():
            thread.start()
        else:
            print(self.line(), flush=True)
        try:
            yield
        finally:
            ended.set()
            if thread.ident:
                thread.join()
            self.here += time.monotonic() - self.began
            self.there += self.measured.get(self.names[self.position], 0)
            self.position, self.began = self.position + 1, time.monotonic()

    def _draw(self, ended: Event) -> None:
        look = {"bar_format": "{desc} |{bar}|", "leave": False, "dynamic_ncols": True}
        bar = tqdm(total=1, desc=self.line(), file=sys.stderr, **look)
        while not ended.is_set():
            bar.set_description_str(self.line(), refresh=False)
            bar.n = self.share()
            bar.refresh()
            ended.wait(1)
        bar.close()


def duration(seconds: float) -> str:
    """About how long, in words."""
    return f"about {seconds / 60:.0f} min" if seconds >= 60 else "under a minute"
