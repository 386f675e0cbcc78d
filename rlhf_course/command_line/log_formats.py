"""Read a training log as rows: run cards, trl's state, TensorBoard, CSV, JSON lines."""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from rlhf_course.runtime.files import read_json

FORMATS = "a run card, trl's trainer_state.json, a TensorBoard folder, CSV, or JSON lines"
STEPS = "step", "global_step", "training/global_step"


def read_rows(log: Path) -> list[dict]:
    """Return the rows of a log; raise ``ValueError`` if its format is unknown."""
    if log.is_dir():
        states = [*log.glob("**/trainer_state.json")]
        states.sort(key=lambda path: read_json(path).get("global_step", 0))
        if not states and [*log.glob("**/events.out.tfevents.*")]:
            return [*read_tensorboard(log)]
        if not states:
            seen = ", ".join(sorted(path.name for path in log.iterdir())[:8]) or "nothing"
            raise ValueError(f"{log} contains {seen}, not a log. Choose {FORMATS}.")
        print(f"Reading {(log := states[-1])}")
    try:
        if log.suffix == ".csv":
            table = pd.read_csv(log, dtype=str, keep_default_na=False)
            return [{k: x for k, x in row.items() if x} for row in table.to_dict("records")]
        if log.suffix == ".jsonl":
            return read_lines(log)
        content = json.loads(log.read_text("utf-8"))
    except (ValueError, pd.errors.ParserError) as error:
        raise ValueError(f"Cannot read {log}: {error} Choose {FORMATS}.") from None
    if isinstance(content, dict) and content.get("log_history"):
        return content["log_history"]
    if isinstance(content, dict) and content.get("curves", {}).get("history"):
        curves = content["curves"]["history"]
        return [dict(zip(curves, row, strict=True)) for row in zip(*curves.values(), strict=True)]
    keys = ", ".join([*content][:8]) if isinstance(content, dict) else type(content).__name__
    raise ValueError(f"{log} contains {keys}, not a log. Choose {FORMATS}.")


def read_lines(log: Path) -> list[dict]:
    """Return the rows of a JSON Lines file; ignore a last line that is still being written."""
    rows, lines = [], [line for line in log.read_text("utf-8").splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines) or not rows:
                raise ValueError(f"line {number}: {error}.") from None
            print("The last line is incomplete and is ignored.")
    return rows


def read_tensorboard(folder: Path) -> Iterator[dict]:
    """Yield a dict of scalars per step from TensorBoard's files."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    found = EventMultiplexer(size_guidance={"scalars": 0}).AddRunsFromDirectory(str(folder))
    rows, runs = {}, {}  # a resumed run writes some steps twice
    for run, tags in found.Reload().Runs().items():
        for tag in tags["scalars"]:
            for event in found.Scalars(run, tag):
                row = rows.setdefault(event.step, {"step": event.step})
                if runs.setdefault((event.step, tag), run) != run:
                    names = ", ".join(found.Runs())
                    raise ValueError(f"{folder} has several runs: {names}. Choose one of them.")
                row[tag] = event.value
    yield from (rows[step] for step in sorted(rows))


def last_run(rows: list[dict]) -> list[dict]:
    """Return the last run's rows; a file may have several runs."""
    steps = [float(next((row[name] for name in STEPS if name in row), "nan")) for row in rows]
    starts = [i for i in range(1, len(rows)) if steps[i] < steps[i - 1]]
    if starts:
        print(f"Steps restart at row {starts[-1] + 1}: earlier rows are ignored.")
    return rows[max(starts, default=0) :]
