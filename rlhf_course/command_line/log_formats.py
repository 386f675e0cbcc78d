"""Read a training log as rows: run cards, trl's state, TensorBoard, CSV, JSON lines."""

import json
import math
from pathlib import Path

import pandas as pd

from rlhf_course.command_line.records import LOG
from rlhf_course.runtime.files import read_json

FORMATS = (
    "a run's output folder, a run card, trl's trainer_state.json, a TensorBoard folder, CSV, or"
    " JSON lines"
)
STEPS = ("step", "global_step", "training/global_step")


def read_rows(log: Path) -> list[dict]:
    """Return the rows of a log; raise ``ValueError`` if its format is unknown."""
    if log.is_dir():
        return read_folder(log)
    try:
        if log.suffix == ".csv":
            return read_csv(log)
        if log.suffix == ".jsonl":
            return read_lines(log)
        content = json.loads(log.read_text("utf-8"))
    except (ValueError, pd.errors.ParserError) as error:
        raise ValueError(f"Cannot read {log}: {error} Choose {FORMATS}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{log} contains {type(content).__name__}, not a log. Choose {FORMATS}.")
    if content.get("log_history"):
        return content["log_history"]
    columns = content.get("curves", {}).get("history")
    if columns:
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]
    keys = ", ".join(list(content)[:8])
    raise ValueError(f"{log} contains {keys}, not a log. Choose {FORMATS}.")


def read_folder(folder: Path) -> list[dict]:
    """Return the rows of a run's log.jsonl, its last trainer_state.json, or TensorBoard files."""
    if (folder / LOG).exists():
        print(f"Reading {folder / LOG}")
        return read_lines(folder / LOG)
    states = list(folder.glob("**/trainer_state.json"))
    if states:
        last = max(states, key=lambda path: read_json(path).get("global_step", 0))
        print(f"Reading {last}")
        return read_rows(last)
    if any(folder.glob("**/events.out.tfevents.*")):
        return read_tensorboard(folder)
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ValueError(f"{folder} contains {names}, not a log. Choose {FORMATS}.")


def read_csv(log: Path) -> list[dict]:
    """Return the rows of a CSV file as text, without empty cells."""
    table = pd.read_csv(log, dtype=str, keep_default_na=False)
    return [{name: text for name, text in row.items() if text} for row in table.to_dict("records")]


def read_lines(log: Path) -> list[dict]:
    """Return the rows of a JSON Lines file; ignore a last line that is still being written."""
    lines = [line for line in log.read_text("utf-8").splitlines() if line.strip()]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines) or not rows:
                raise ValueError(f"line {number}: {error}.") from None
            print("The last line is incomplete and is ignored.")
    return rows


def read_tensorboard(folder: Path) -> list[dict]:
    """Return a dict of scalars per step from TensorBoard's files."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    events = EventMultiplexer(size_guidance={"scalars": 0})
    events.AddRunsFromDirectory(str(folder))
    events.Reload()
    rows = {}
    runs = {}  # (step, tag) → run; a resumed run writes some steps twice
    for run, tags in events.Runs().items():
        for tag in tags["scalars"]:
            for event in events.Scalars(run, tag):
                if runs.setdefault((event.step, tag), run) != run:
                    names = ", ".join(events.Runs())
                    raise ValueError(f"{folder} has several runs: {names}. Choose one of them.")
                row = rows.setdefault(event.step, {"step": event.step})
                row[tag] = event.value
    return [rows[step] for step in sorted(rows)]


def last_run(rows: list[dict]) -> list[dict]:
    """Return the last run's rows; a file may have several runs."""
    steps = [float(step_of(row)) for row in rows]
    starts = [row for row in range(1, len(rows)) if steps[row] < steps[row - 1]]
    if not starts:
        return rows
    print(f"Steps restart at row {starts[-1] + 1}: earlier rows are ignored.")
    return rows[starts[-1] :]


def step_of(row: dict) -> float | str:
    """Return a row's step, or NaN."""
    for name in STEPS:
        if name in row:
            return row[name]
    return math.nan
