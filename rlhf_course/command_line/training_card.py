"""Read a training command's output folder as a run card, for the report."""

import math
from pathlib import Path

from rlhf_course.command_line.records import (
    EVALUATIONS,
    LOG,
    MEMORY,
    SECONDS,
    TEXTS,
    read_complete,
)
from rlhf_course.runtime.files import read_json

RESULTS = ("policy", "model")  # a finished run's subfolder
NOT_MEASURED = ("step", "prompts", SECONDS, MEMORY)


def read_training(folder: Path) -> dict:
    """Return a run card's contents: checks, metrics before and after, curves, answers."""
    log = by_step(read_rows(folder / LOG))
    evaluations = by_step(read_rows(folder / EVALUATIONS))
    last = log[-1]
    finished = any((folder / name).exists() for name in RESULTS)
    check = {"passed": finished, "value": last["step"], "want": "a saved model"}
    settings = read_json(folder / "run.json")["settings"]
    return {
        "wall_s": max(row[SECONDS] for row in log),
        "peak_rss_mb": max(row[MEMORY] for row in log),
        "preset": settings.get("preset", settings.get("command", "–")),
        "checks": {"the run finished": check},
        "metrics": compare(evaluations),
        "curves": {
            "log": as_table(log),
            "held-out": as_table(evaluations),
            "answers": as_table(read_rows(folder / TEXTS)),
        },
    }


def read_rows(file: Path) -> list[dict]:
    """Return a file's complete rows; none if there is no file."""
    return read_complete(file) if file.exists() else []


def by_step(rows: list[dict]) -> list[dict]:
    """Return one row per step: trl logs training, evaluation and the whole run separately."""
    merged = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def compare(evaluations: list[dict]) -> dict[str, float]:
    """Return each held-out measurement before and after training."""
    metrics = {}
    if len(evaluations) < 2:
        return metrics
    for name in evaluations[-1]:
        if name not in NOT_MEASURED:
            metrics[f"{name}_before"] = finite(evaluations[0].get(name))
            metrics[f"{name}_after"] = finite(evaluations[-1][name])
    return metrics


def as_table(rows: list[dict]) -> dict[str, list]:
    """Return rows as columns of equal length; missing and infinite numbers are None."""
    names = dict.fromkeys(name for row in rows for name in row if name not in (SECONDS, MEMORY))
    return {name: [finite(row.get(name)) for row in rows] for name in names}


def finite(value):
    """Return None for NaN and Inf, and any other value unchanged."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
