"""Show how far a loop or a trainer of trl is: a bar on a screen, or lines in a log."""

import os
import sys
from collections.abc import Iterable, Iterator
from time import monotonic

from IPython import get_ipython
from tqdm.auto import tqdm
from transformers import TrainerCallback


class TrainingBar(TrainerCallback):
    """Show a trainer's steps and seconds left: a bar on a screen, or lines in a log."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, desc="training", leave=False, disable=None)
        self.lines = Lines("training", state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()
        self.lines.update()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def progress(items: Iterable, title: str) -> Iterator:
    """Yield the items, and show their number and seconds left; ``items`` needs a length."""
    lines = Lines(title, len(items))
    for item in tqdm(items, title, leave=False, disable=None):
        yield item
        lines.update()


class Lines:
    """Write a line to the log at each tenth of the steps, if no screen shows a bar."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.start = monotonic()
        self.log = log_descriptor()

    def update(self) -> None:
        """Count a step."""
        self.done += 1
        is_tenth = 10 * self.done // self.total > 10 * (self.done - 1) // self.total
        if is_tenth and self.log is not None:
            left = (monotonic() - self.start) / self.done * (self.total - self.done)
            line = f"{self.title}: {self.done} of {self.total} steps, {left:.0f} s left\n"
            os.write(self.log, line.encode())


def log_descriptor() -> int | None:
    """Return the file descriptor for lines of progress, or None if a screen shows bars.

    A notebook that papermill executes has no screen. Its lines go to the kernel's own stderr,
    which is papermill's log, so that they are not among the notebook's outputs.
    """
    shell = get_ipython()
    if not hasattr(shell, "kernel"):
        return None if sys.stderr.isatty() else 2
    if shell.kernel._allow_stdin:  # a user can type answers, so there is a frontend
        return None
    return getattr(sys.stderr, "_original_stdstream_copy", 2)  # 2, if ipykernel does not capture it
