"""Read a run's log: report each symptom with its first step, likely causes, and a test.

    python scripts/read_log.py LOG

LOG is the output folder of a training command or of trl, a run card with curves, trl's
trainer_state.json, a TensorBoard folder, a table in CSV or JSON lines, or a text with printed
values: trl's dicts, or lines like verl's "step:1 - actor/entropy:0.5". The trainer is recognized by
its columns, or chosen with --trainer; for one that is not known, pass --map FILE, formatted like
rlhf_course/command_line/log_columns.yaml. Writes log.html to --output. Exits with 2 if a symptom
is a reason to stop, or with 1 after an error.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml

from rlhf_course import ppo
from rlhf_course.command_line import exits
from rlhf_course.command_line.log_columns import COLUMNS, is_not_finite, read_maps, rename
from rlhf_course.command_line.log_formats import FORMATS, last_run, read_rows, step_of
from rlhf_course.ppo.detectors import CONFIRMING, FIRST, STOP, Rule, rules

SYMPTOMS = Path(ppo.__file__).with_name("symptoms.yaml")
HEADINGS = {
    "step": "since step",
    "symptom": "symptom",
    "causes": "likely causes",
    "test": "the test that distinguishes them",
    "change": "what to change",
    "level": "",
}


class Finding(NamedTuple):
    """Hold a symptom and the step at which it begins."""

    step: float
    level: str
    symptom: str  # an id in symptoms.yaml


def diagnose(rows: list[dict], log: pd.DataFrame) -> tuple[list[Finding], list[str]]:
    """Return a finding per symptom, and the symptoms whose columns are missing."""
    findings = not_finite(rows, log) + silent_rewards(log)
    missing = []
    for rule in rules():
        if not set(rule.needs) <= set(log.columns):
            missing.append(rule.symptom)
            continue
        step = first_step(rule, log)
        if step is not None:
            findings.append(Finding(step, rule.level, rule.symptom))
    earliest = {}
    for finding in sorted(findings):
        earliest.setdefault(finding.symptom, finding)
    return list(earliest.values()), missing


def first_step(rule: Rule, log: pd.DataFrame) -> float | None:
    """Return the step at which a rule's symptom begins, or None."""
    table = log[list(rule.needs)].dropna(how="all")
    holds = holds_for(rule.holds(table), rule.lasts)
    if not holds.any():
        return None
    detected = holds.idxmax()
    if not rule.is_trend:
        return detected
    until_confirmed = table.iloc[: table.index.get_loc(detected) + CONFIRMING]
    return min(detected, onset(until_confirmed[rule.needs[0]]))


def holds_for(holds: pd.Series, rows: int) -> pd.Series:
    """Return, per row, whether a series of bools is true in the ``rows`` rows that begin there."""
    backward = holds.astype(float)[::-1]
    return backward.rolling(rows).min()[::-1] == 1


def onset(values: pd.Series) -> float:
    """Return the step where a trend changes: the break in a least-squares fit with two lines."""
    y = values.dropna()
    x = np.arange(len(y))
    if len(y) < 8:
        return values.index[-1]

    def squared_error(position: int) -> float:
        is_after = x >= position
        lines = np.column_stack([np.ones(len(x)), x, is_after, (x - position) * is_after])
        _, residuals, _, _ = np.linalg.lstsq(lines, y, rcond=None)
        return residuals.sum()

    best = min(range(3, len(y) - 2), key=squared_error)
    return y.index[best]


def not_finite(rows: list[dict], log: pd.DataFrame) -> list[Finding]:
    """Return a finding for the first NaN or Inf, and one per column that ends with empty cells."""
    findings = []
    for number, row in enumerate(rows, 1):
        if any(is_not_finite(value) for value in row.values()):
            step = step_of(row)
            findings.append(Finding(number if math.isnan(step) else step, STOP, "not finite"))
            break
    for name in log:  # run cards write NaN as null
        is_empty = log[name].isna().to_numpy()
        first = is_empty.argmax()
        empty_rows = len(is_empty) - first
        if is_empty[first:].all() and first >= CONFIRMING and empty_rows >= CONFIRMING:
            findings.append(Finding(log.index[first], STOP, "not finite"))
    return findings


def silent_rewards(log: pd.DataFrame) -> list[Finding]:
    """Return a finding per reward function that gives every response the same number."""
    findings = []
    for name in log.filter(like="rewards/"):
        holds = holds_for(log[name] == 0, CONFIRMING)
        if holds.any():
            findings.append(Finding(holds.idxmax(), STOP, "silent reward"))
    return findings


def summarize(log: pd.DataFrame) -> str:
    """Return each column's mean over the first and over the last steps, as text."""
    changes = []
    for name, values in log.items():
        known = values.dropna()
        if len(known):
            first = known.iloc[:FIRST].mean()
            last = known.iloc[-FIRST:].mean()
            changes.append(f"{name} {first:.3g} → {last:.3g}")
    return ", ".join(changes) or "no numbers"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "read_log.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--map", type=Path, help="YAML file with another trainer's columns")
    parser.add_argument("--trainer", help="trainer that wrote the log, as in the file of --map")
    parser.add_argument("--output", type=Path, default=Path("build/log"))
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Print the symptoms and write the page; return 2 if one is a reason to stop, else 0."""
    chosen = parse_arguments(arguments)
    if not chosen.log.exists():
        raise FileNotFoundError(f"{chosen.log} does not exist. Choose {FORMATS}.")
    maps = read_maps(chosen.map or COLUMNS)
    rows = last_run(read_rows(chosen.log))
    if not rows:
        raise ValueError(f"{chosen.log} has no rows. Choose {FORMATS}.")
    trainer, log = rename(rows, maps, chosen.trainer)
    findings, missing = diagnose(rows, log)

    texts = {}
    for group in yaml.safe_load(SYMPTOMS.read_text("utf-8")):
        for entry in group["symptoms"]:
            texts[entry["id"]] = entry
    symptoms = [
        {"step": f"{step:g}", "level": level} | texts[symptom] for step, level, symptom in findings
    ]
    print(f"{len(log)} steps, columns of {trainer}: {', '.join(log)}")
    print(f"From the first steps to the last: {summarize(log)}.")
    for symptom in symptoms:
        print(f"\nSince step {symptom['step']} · {symptom['level']} · {symptom['symptom']}")
        for name in ("causes", "test", "change"):
            print(f"  {name}: {symptom[name]}")
    unchecked = ", ".join(missing) or "none"
    print(f"\n{len(symptoms)} symptoms. Not checked (columns missing): {unchecked}.")
    write_page(chosen, symptoms, [texts[name]["symptom"] for name in missing], log)
    return 2 if any(finding.level == STOP for finding in findings) else 0


def write_page(
    chosen: argparse.Namespace, symptoms: list[dict], missing: list[str], log: pd.DataFrame
) -> None:
    """Write log.html: a table of the symptoms, and a plot per column."""
    from rlhf_course.command_line import page  # loads matplotlib

    rows = math.ceil(len(log.columns) / 3)
    axes = log.plot(
        subplots=True,
        layout=(rows, 3),
        legend=False,
        figsize=(10, 2 * rows),
        title=list(log.columns),
        fontsize=8,
    )
    figure = axes.flat[0].figure
    figure.set_layout_engine("constrained")
    for axis in axes.flat:
        for symptom in symptoms:
            axis.axvline(float(symptom["step"]), color="0.6", lw=0.8, ls=":")
    unchecked = "; ".join(missing) or "none"
    page.write(
        chosen.output / "log.html",
        title=f"Log {chosen.log.name}",
        verdict=f"{len(symptoms)} symptoms" if symptoms else "No symptom found",
        about=f"Not checked (columns missing): {unchecked}.".replace("`", ""),
        columns=HEADINGS,
        rows=[{name: text.replace("`", "") for name, text in row.items()} for row in symptoms],
        pictures={"Columns; dotted lines mark symptoms' first steps": page.picture(figure)},
    )
    print(f"Open next: {chosen.output / 'log.html'}")


if __name__ == "__main__":
    sys.exit(exits.run("read_log.py", main))
