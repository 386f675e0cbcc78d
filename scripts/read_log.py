"""Read a run's log: report each symptom with its first step, likely causes, and a test.

    python scripts/read_log.py LOG

LOG is this course's log (a run card with curves), trl's log (trainer_state.json or the output
folder), a TensorBoard folder, or a table in CSV or JSON lines. verl's and OpenRLHF's columns are
known; for another trainer, pass --map FILE, formatted like
rlhf_course/command_line/log_columns.yaml. Writes log.html to --output. Exits with 2 if a symptom
is a reason to stop, or with 1 after an error.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml

from rlhf_course import ppo
from rlhf_course.command_line import exits, log_formats
from rlhf_course.command_line.log_formats import FORMATS, STEPS, last_run, read_rows

COLUMNS = Path(log_formats.__file__).with_name("log_columns.yaml")
SYMPTOMS = Path(ppo.__file__).with_name("symptoms.yaml")
STOP, WATCH = "stop", "watch"
LATER = 5  # rows that confirm a symptom
SCORE, KL, LENGTH, RATE = (
    "ppo/mean_scores",
    "objective/kl",
    "tokens/responses_len_mean",
    "ppo/learning_rate",
)
ENTROPY, GRADIENT, CRITIC = "objective/entropy", "gradient norm", "ppo/val/var_explained_before"


class Detector(NamedTuple):
    """Detect a symptom: ``find`` maps the log (a row per step) to a bool per row."""

    symptom: str  # an id in symptoms.yaml
    level: str
    needs: tuple[str, ...]
    find: Callable[[pd.DataFrame], pd.Series]
    lasts: int = 1  # rows for which the symptom must hold
    is_trend: bool = True  # whether the symptom can begin before it is detected


def smooth(values: pd.Series, rows: int = 5) -> pd.Series:
    return values.rolling(rows).mean()


def against_start(values: pd.Series) -> pd.Series:
    """Return a smoothed column, divided by the mean of the column's first three values."""
    return smooth(values, 3) / values[:3].mean()


def everywhere(log: pd.DataFrame, holds: bool) -> pd.Series:
    return pd.Series(bool(holds), log.index)


def is_flat(log: pd.DataFrame) -> pd.Series:
    """Return whether the first and last thirds' mean scores differ by under 2 standard errors."""
    third = len(log) // 3
    first, last = log[SCORE][:third], log[SCORE][-third:]
    error = math.sqrt((first.var() + last.var()) / max(1, third))
    return everywhere(log, third >= 5 and abs(last.mean() - first.mean()) < 2 * error)


def starts_apart(log: pd.DataFrame) -> pd.Series:
    """Return whether the first step's KL exceeds noise: both 0.05 nats and 0.002 nats per token."""
    is_first = (log.index <= 1) & (log.index == log.index[0])
    return (log[KL].abs() > 0.05) & (log[KL].abs() > 0.002 * log[LENGTH]) & is_first


def onset(values: pd.Series) -> float:
    """Return the step where a trend changes: the break in a least-squares fit with two lines."""
    y, x = values.dropna(), np.arange(values.count())
    if len(y) < 8:
        return values.index[-1]

    def error(k: int) -> float:
        lines = np.column_stack([np.ones(len(x)), x, x >= k, (x - k) * (x >= k)])
        return np.linalg.lstsq(lines, y, rcond=None)[1].sum()

    return y.index[min(range(3, len(y) - 2), key=error)]


def overfits(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether held-out loss exceeds its minimum so far by more than 5 %."""
    held_out = log["held-out loss"].ffill()
    return held_out > 1.05 * held_out.cummin()


def turns_round(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether smoothed accuracy has fallen from above 0.55 to below 0.45."""
    accuracy = smooth(log["accuracy"])
    return (accuracy < 0.45) & (accuracy.cummax() > 0.55)


DETECTORS = [
    Detector("KL at the start", STOP, (KL, LENGTH), starts_apart, 1, False),
    Detector("negative KL", STOP, (KL,), lambda log: smooth(log[KL]) < -0.05),
    Detector("far", WATCH, (KL,), lambda log: log[KL] > 18, 3),
    Detector(
        "tiny rate", STOP, (RATE,), lambda log: everywhere(log, log[RATE].max() < 1e-7), 1, False
    ),
    Detector("no gradient", STOP, (GRADIENT,), lambda log: log[GRADIENT] < 1e-8, 3),
    Detector(
        "clipfrac large", WATCH, ("ppo/policy/clipfrac",), lambda log: log.iloc[:, 0] > 0.4, 3
    ),
    Detector("critic", WATCH, (CRITIC,), lambda log: smooth(log[CRITIC], 10).iloc[20:] < 0),
    Detector("flat score", WATCH, (SCORE,), is_flat, 1, False),
    Detector("shorter", WATCH, (LENGTH,), lambda log: against_start(log[LENGTH]) < 0.65),
    Detector("longer", WATCH, (LENGTH,), lambda log: against_start(log[LENGTH]) > 1.5),
    Detector("cut", WATCH, ("cut responses",), lambda log: log.iloc[:, 0] > 0.5, LATER),
    Detector("entropy", STOP, (ENTROPY,), lambda log: against_start(log[ENTROPY]) < 0.2),
    Detector("dead groups", WATCH, ("groups without signal",), lambda log: log.iloc[:, 0] > 0.8, 5),
    Detector("overfit", WATCH, ("held-out loss",), overfits),
    Detector("swapped", STOP, ("accuracy",), turns_round, LATER, False),
    Detector("no margin", STOP, ("margin",), lambda log: log.iloc[1:, 0] == 0, LATER, False),
    Detector(
        "chance", WATCH, ("accuracy",), lambda log: smooth(log.iloc[:, 0], 10).iloc[20:] < 0.53
    ),
    Detector(
        "chosen falls",
        WATCH,
        ("chosen reward", "margin"),
        lambda log: (smooth(log["chosen reward"]) < -1) & (smooth(log["margin"]) > 0.5),
    ),
]


def rename(rows: list[dict], maps: dict[str, dict]) -> tuple[str, pd.DataFrame]:
    """Return the trainer that wrote the rows, and a table of the course's columns by step.

    Raises ``ValueError`` if no map matches at least two columns, or if a column that a map needs
    has an entry that is not a number (NaN and Inf are allowed).
    """
    rows = [{key.removeprefix("train/"): x for key, x in row.items()} for row in rows]
    log = pd.DataFrame(rows)
    names = [name for name in STEPS if name in log]
    log.index = pd.to_numeric(log[names[0]]) if names else range(1, len(log) + 1)
    texts = log
    log = log.apply(pd.to_numeric, errors="coerce")
    unread = texts.where(texts.notna() & log.isna() & ~texts.map(is_not_finite))
    log = log.groupby(level=0).first()

    def known(columns: dict) -> dict[str, pd.Series]:
        found = {}
        for name, column in columns.items():
            parts = [column] if isinstance(column, str) else [column["column"], column["times"]]
            if all(part in log for part in parts):
                found[name] = log[parts].prod(axis=1, skipna=False)
                for part in parts:
                    if len(bad := unread[part].dropna()):
                        raise ValueError(
                            f"{part} is {bad.iloc[0]!r}, not a number. Correct the log."
                        )
        return found

    found = {trainer: known(entry["columns"]) for trainer, entry in maps.items()}
    trainer = max(found, key=lambda name: len(found[name]))
    if len(found[trainer]) < 2:
        seen = ", ".join(map(str, [*log][:12]))
        raise ValueError(f"No known trainer has these columns: {seen}. Map them with --map FILE.")
    if found[trainer].get("accuracy", pd.Series(0.0)).max() > 1:
        raise ValueError("The accuracy exceeds 1. Divide percentages by 100.")
    spreads = log.filter(regex="^rewards/.*/std$")  # GRPO's reward functions
    return trainer, pd.DataFrame(found[trainer] | dict(spreads.items()))


def is_not_finite(value) -> bool:
    """Return whether a log's entry is NaN or Inf in any spelling, such as C's -nan(ind)."""
    text = str(value).lower().lstrip("-+").partition("(")[0]
    return text in ("nan", "inf", "infinity")


def not_finite(rows: list[dict]) -> float | None:
    """Return the step of the first row with NaN or Inf, or None."""
    for number, row in enumerate(rows, 1):
        if any(map(is_not_finite, row.values())):
            return float(row.get("step", number))
    return None


def diagnose(rows: list[dict], log: pd.DataFrame) -> tuple[list[tuple], list[str]]:
    """Return (step, level, symptom) per symptom, and the symptoms whose columns are missing."""
    found, missing = [], []
    if (step := not_finite(rows)) is not None:
        found.append((step, STOP, "not finite"))
    for detector in DETECTORS:
        if not {*detector.needs} <= {*log}:
            missing.append(detector.symptom)
            continue
        table = log[[*detector.needs]].dropna(how="all")
        holds = detector.find(table).astype(float)
        since = holds[::-1].rolling(detector.lasts).min()[::-1] == 1
        if since.any():
            step = since.idxmax()
            if detector.is_trend:
                seen = table.iloc[: table.index.get_loc(step) + LATER]
                step = min(step, onset(seen[detector.needs[0]]))
            found.append((step, detector.level, detector.symptom))
    for name in log:  # run cards write NaN as null
        gone = log[name].isna().to_numpy()
        if (first := gone.argmax()) >= LATER and gone[first:].all() and gone.sum() >= LATER:
            found.append((log.index[first], STOP, "not finite"))
    for name in log.filter(like="rewards/"):
        silent = (log[name] == 0)[::-1].rolling(LATER).min()[::-1] == 1
        if silent.any():
            found.append((silent.idxmax(), STOP, "silent reward"))
    first = {symptom: (step, level) for step, level, symptom in sorted(found, reverse=True)}
    return sorted((step, level, symptom) for symptom, (step, level) in first.items()), missing


def main(arguments: list[str]) -> int:
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser("read_log.py", description=__doc__, **how)
    parser.add_argument("log", type=Path)
    parser.add_argument("--map", type=Path, help="YAML file with another trainer's columns")
    parser.add_argument("--output", type=Path, default=Path("build/log"))
    chosen = parser.parse_args(arguments)
    if not chosen.log.exists():
        raise FileNotFoundError(f"{chosen.log} does not exist. Choose {FORMATS}.")
    maps = yaml.safe_load((chosen.map or COLUMNS).read_text("utf-8"))
    if not all(isinstance(x, dict) and isinstance(x.get("columns"), dict) for x in maps.values()):
        raise ValueError(f"{chosen.map} has no columns. Format it like {COLUMNS}.")
    if not (rows := last_run(read_rows(chosen.log))):
        raise ValueError(f"{chosen.log} has no rows. Choose {FORMATS}.")
    trainer, log = rename(rows, maps)
    groups = yaml.safe_load(SYMPTOMS.read_text("utf-8"))
    known = {row["id"]: row for group in groups for row in group["symptoms"]}
    found, missing = diagnose(rows, log)
    told = [{"step": f"{step:g}", "level": level} | known[name] for step, level, name in found]
    print(f"{len(log)} steps, columns of {trainer}: {', '.join(log)}")
    for row in told:
        print(f"\nSince step {row['step']} · {row['level']} · {row['symptom']}")
        for name in ("causes", "test", "change"):
            print(f"  {name}: {row[name]}")
    print(f"\n{len(told)} symptoms. Not checked (columns missing): {', '.join(missing) or 'none'}.")
    write_page(chosen, told, [known[name]["symptom"] for name in missing], log)
    return 2 if any(row["level"] == STOP for row in told) else 0


def write_page(chosen: argparse.Namespace, told: list[dict], missing: list[str], log) -> None:
    from rlhf_course.command_line.page import picture, write  # loads matplotlib

    rows = -(-len(log.columns) // 3)
    how = {"subplots": True, "layout": (rows, 3), "legend": False, "figsize": (10, 2 * rows)}
    axes = log.plot(**how, title=[*log], fontsize=8)
    axes.flat[0].figure.set_layout_engine("constrained")
    for axis in axes.flat:
        for row in told:
            axis.axvline(float(row["step"]), color="0.6", lw=0.8, ls=":")
    names = {"step": "since step", "symptom": "symptom", "causes": "likely causes"}
    names |= {"test": "the test that distinguishes them", "change": "what to change", "level": ""}
    write(
        chosen.output / "log.html",
        title=f"Log {chosen.log.name}",
        verdict=f"{len(told)} symptoms" if told else "No symptom found",
        about=f"Not checked (columns missing): {'; '.join(missing) or 'none'}.".replace("`", ""),
        columns=names,
        rows=[{name: text.replace("`", "") for name, text in row.items()} for row in told],
        pictures={"Columns; dotted lines mark symptoms' first steps": picture(axes.flat[0].figure)},
    )
    print(f"Open next: {chosen.output / 'log.html'}")


if __name__ == "__main__":
    sys.exit(exits.run("read_log.py", main))
