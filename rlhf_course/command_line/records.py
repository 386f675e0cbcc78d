"""Write what a training run did into its output folder: statistics, evaluations, answers.

``log.jsonl`` has a row per logged step, ``evaluations.jsonl`` a row per evaluation on held-out
data (before, during and after training), and ``texts.jsonl`` the answers to a few fixed prompts.
An interrupted run leaves complete lines, and a resumed run continues them.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from accelerate import PartialState

from rlhf_course.course.run_card import peak_rss
from rlhf_course.runtime.files import atomic_file

LOG = "log.jsonl"
EVALUATIONS = "evaluations.jsonl"
TEXTS = "texts.jsonl"
SHOWN = 4  # fixed prompts whose answers are recorded
SECONDS = "time/run"  # since the run began, without interruptions
MEMORY = "peak_mb"  # the process's largest memory so far


class JsonLines:
    """Append rows, each with a step, to a JSON Lines file; only the first process writes.

    Rows of later steps than ``last_step`` are removed, because a resumed run takes these steps
    again. A row whose step, number and columns the file has already is not added.
    """

    def __init__(self, file: Path, last_step: int) -> None:
        self.file = file
        self.rows = []
        if not file.exists():
            return
        self.rows = [row for row in read_complete(file) if row["step"] <= last_step]
        if PartialState().is_main_process:
            with atomic_file(file) as path:
                path.write_text("".join(map(as_line, self.rows)), encoding="utf-8")

    def add(self, row: dict) -> None:
        """Write a row as one complete line, unless the file has such a row."""
        if any(identity(row) == identity(other) for other in self.rows):
            return
        self.rows.append(row)
        if PartialState().is_main_process:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(as_line(row))

    def has(self, step: int) -> bool:
        """Return whether there is a row of this step."""
        return any(row["step"] == step for row in self.rows)


class Records:
    """Hold the three files of a run's output folder, up to the step from which it continues."""

    def __init__(self, folder: Path, last_step: int = 0) -> None:
        self.log = JsonLines(folder / LOG, last_step)
        self.evaluations = JsonLines(folder / EVALUATIONS, last_step)
        self.texts = JsonLines(folder / TEXTS, last_step)
        earlier_rows = self.log.rows + self.evaluations.rows
        earlier = max((row.get(SECONDS, 0.0) for row in earlier_rows), default=0.0)
        self.started = time.perf_counter() - earlier

    def cost(self) -> dict[str, float]:
        """Return the run's seconds so far, with those before an interruption, and peak memory."""
        seconds = round(time.perf_counter() - self.started, 2)
        return {SECONDS: seconds, MEMORY: round(peak_rss() / 2**20)}

    def add_log(self, step: int, values: dict) -> None:
        """Log a step's numbers; texts and arrays among ``values`` are left out."""
        numbers = {}
        for name, value in values.items():
            if isinstance(value, int | float | np.number):
                numbers[name] = float(value)
        self.log.add({"step": step} | numbers | self.cost())

    def add_evaluation(self, step: int, values: dict) -> None:
        """Record measurements on held-out data."""
        self.evaluations.add({"step": step} | values | self.cost())

    def add_texts(self, step: int, rows: Sequence[dict]) -> None:
        """Record the first ``SHOWN`` rows, such as {prompt, answer}, and number them."""
        for number, row in enumerate(rows[:SHOWN], 1):
            self.texts.add({"step": step, "number": number} | row)


def identity(row: dict) -> tuple:
    """Return what two rows of the same measurement share."""
    return row["step"], row.get("number"), tuple(row)


def as_line(row: dict) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_complete(file: Path) -> list[dict]:
    """Return the rows of a JSON Lines file, up to the first incomplete line."""
    rows = []
    for line in file.read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
