"""Read a training log as rows: run cards, trl's state, TensorBoard, tables, JSON, printed lines."""

import ast
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pandas as pd

from rlhf_course.command_line.records import LOG
from rlhf_course.runtime.files import read_json

FORMATS = (
    "a run's output folder, a run card, trl's trainer_state.json, a TensorBoard folder, CSV,"
    " JSON lines, or printed lines with the values of each step"
)
STEPS = (
    "step",
    "global_step",
    "training/global_step",
    "Step",
    "current_steps",
    "global_step/max_steps",
    "_step",
    "iteration",
)
TABLES = (".csv", ".tsv")
SEPARATORS = ",;\t"
EMPTY = ("", "No log")  # cells without a value; a notebook's progress table has "No log"
NOTEBOOK_NAMES = {"Training Loss": "loss", "Validation Loss": "eval_loss"}
WRAPPERS = ("data", "metrics", "logs")  # keys around a step's values, as in verl's {step, data}
COLORS = re.compile(r"\x1b\[[0-9;]*m")
RAY = re.compile(r"^\(\w[\w.]*[^)]*pid=[^)]*\)\s*")
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
# "actor/pg_loss:0.01", "Actor Loss: 0.01" or "lr=1e-6"
NAME = r"[A-Za-z_][\w/.@%-]*(?: [A-Za-z][\w/.@%-]*)*"
PRINTED = re.compile(rf"({NAME})\s*[:=]\s*({NUMBER})(?![\w:])", re.IGNORECASE)
WRAPPED_NUMBER = re.compile(rf"(?:np\.\w+|tensor)\(({NUMBER})[^)]*\)")
BARE_NAN = re.compile(r":\s*(-?(?:nan|inf))(?=\s*[,}])")


def read_rows(log: Path) -> list[dict]:
    """Return the rows of a log; raise ``ValueError`` if its format is unknown."""
    if log.is_dir():
        return read_folder(log)
    try:
        if log.suffix in TABLES:
            return read_table(log)
        text = log.read_text("utf-8")
        try:
            content = json.loads(text)
        except ValueError:
            return read_lines(text)
    except (ValueError, pd.errors.ParserError) as error:
        raise ValueError(f"Cannot read {log}: {error} Choose {FORMATS}.") from None
    if isinstance(content, dict):
        content = find_history(content, log)
    is_table = isinstance(content, list) and all(isinstance(row, dict) for row in content)
    if not is_table:
        raise ValueError(f"{log} contains {type(content).__name__}, not a log. Choose {FORMATS}.")
    return [flatten(row) for row in content]


def find_history(content: dict, log: Path) -> list[dict]:
    """Return the rows of trl's state, a run card, or a file with one row."""
    if content.get("log_history"):
        return content["log_history"]
    columns = content.get("curves", {}).get("history")
    if columns:
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]
    if step_of(content) == step_of(content):  # not NaN: a JSON Lines file with one line
        return [content]
    keys = ", ".join(list(content)[:8])
    raise ValueError(f"{log} contains {keys}, not a log. Choose {FORMATS}.")


def flatten(row: dict) -> dict:
    """Return a row whose nested values have names such as "actor/kl"; ``WRAPPERS`` add no name."""
    flat = {}
    for name, value in row.items():
        if not isinstance(value, dict):
            flat[name] = value
            continue
        prefix = "" if name in WRAPPERS else f"{name}/"
        flat |= {f"{prefix}{inner}": entry for inner, entry in flatten(value).items()}
    return flat


def read_folder(folder: Path) -> list[dict]:
    """Return the rows of a run's log.jsonl, its last trainer_state.json, or TensorBoard files."""
    if (folder / LOG).exists():
        print(f"Reading {folder / LOG}")
        return read_rows(folder / LOG)
    states = list(folder.glob("**/trainer_state.json"))
    if states:
        last = max(states, key=lambda path: read_json(path).get("global_step", 0))
        print(f"Reading {last}")
        return read_rows(last)
    if any(folder.glob("**/events.out.tfevents.*")):
        return read_tensorboard(folder)
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ValueError(f"{folder} contains {names}, not a log. Choose {FORMATS}.")


def read_table(log: Path) -> list[dict]:
    """Return the rows of a table as text, without empty cells.

    Fields may be separated by commas, semicolons or tabs. wandb's exports name the run before
    each column, "my-run - reward", and add a minimum and a maximum. Raises ``ValueError`` for
    several runs.
    """
    header = log.read_text("utf-8").partition("\n")[0]
    separator = max(SEPARATORS, key=header.count)  # the most frequent of the three
    table = pd.read_csv(log, dtype=str, keep_default_na=False, sep=separator)
    table = table[[name for name in table if not name.endswith(("__MIN", "__MAX"))]]
    runs = {name.rpartition(" - ")[0] for name in table if " - " in name}
    if len(runs) > 1:
        raise ValueError(f"it has several runs: {', '.join(sorted(runs))}. Export one of them.")
    table = table.rename(columns=lambda name: column_name(name.rpartition(" - ")[2]))
    return [without_empty(row) for row in table.to_dict("records")]


def column_name(name: str) -> str:
    """Return a column's name in the trainer's log, for its name in a notebook's table."""
    return NOTEBOOK_NAMES.get(name, name.replace(" / ", "/"))


def without_empty(row: dict[str, str]) -> dict[str, str]:
    """Return a table's row without its empty cells."""
    return {name: text for name, text in row.items() if text not in EMPTY}


def read_pasted_table(lines: list[str]) -> list[dict]:
    """Return the rows below each header whose first column is the step; [] without a header."""
    rows = []
    header: list[str] = []
    separator = "\t"
    for line in lines:
        likely = max(SEPARATORS, key=line.count)
        names = split_cells(line, likely)
        if len(names) > 1 and names[0] in STEPS:
            header = [column_name(name) for name in names]
            separator = likely
            continue
        cells = split_cells(line, separator)
        if 1 < len(cells) <= len(header) and cells[0].isdecimal():
            rows.append(without_empty(dict(zip(header, cells, strict=False))))
    return rows


def split_cells(line: str, separator: str) -> list[str]:
    """Return a line's cells without spaces and quotation marks around them."""
    return [cell.strip().strip('"') for cell in line.split(separator)]


def read_lines(text: str) -> list[dict]:
    """Return a row per line with values: JSON, a table, a printed dict, or "name: value" pairs.

    Other lines, such as progress bars, are ignored, and so is a last JSON line that is still being
    written. Raises ``ValueError`` for a damaged JSON line, and if no line has values.
    """
    lines = [COLORS.sub("", line).strip() for line in re.split(r"[\r\n]+", text)]
    lines = [WRAPPED_NUMBER.sub(r"\1", RAY.sub("", line)) for line in lines if line]
    if lines and lines[0].startswith("{"):
        try:
            json.loads(lines[0])
        except ValueError:
            pass
        else:
            return read_json_lines(lines)
    rows = read_pasted_table(lines) or list(read_printed(lines))
    if not rows:
        first = lines[0] if lines else "nothing"
        raise ValueError(f"no line has values by name, such as loss: 0.1; it begins {first!r:.60}.")
    return rows


def read_json_lines(lines: list[str]) -> list[dict]:
    """Return a row per line of JSON; ignore a last line that is still being written."""
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"line {number}: {error}.") from None
            print("The last line is incomplete and is ignored.")
            continue
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is {type(row).__name__}, not a dict.")
        rows.append(flatten(row))
    return rows


def read_printed(lines: list[str]) -> Iterator[dict]:
    """Yield a row per line with a dict, or with at least two values; others keep the last step."""
    step = {}
    for line in lines:
        before, brace, rest = line.partition("{")
        row = read_dict(brace + rest) if brace else None
        if row is None:
            row = {name.strip(): value for name, value in PRINTED.findall(line)}
            if len(row) < 2:
                continue
        else:
            row = dict(PRINTED.findall(before)) | row  # such as "step: 3 - {…}"
        named_step = {name: row[name] for name in STEPS if name in row}
        step = named_step or step
        yield step | row


def read_dict(text: str) -> dict | None:
    """Return the Python dict with which a text begins, or None if there is none."""
    text = BARE_NAN.sub(r": '\1'", text[: text.rfind("}") + 1])
    try:
        row = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    if not isinstance(row, dict):
        return None
    return flatten(row)


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
    """Return the last run's rows in the order of their steps.

    A file may have several runs, and a resumed run repeats steps. If no step repeats a column, the
    rows are one run, in any order. Rows without steps are in order, and their epochs are compared.
    """
    unit = "step"
    steps = [step_of(row) for row in rows]
    if any(math.isnan(step) for step in steps):
        unit = "epoch"
        steps = epochs_of(rows)
    elif not repeats(rows, steps):
        return [rows[index] for index in sorted(range(len(rows)), key=steps.__getitem__)]
    starts = [index for index, (one, two) in enumerate(pairwise(steps), 1) if two < one]
    kept = []
    for start, end in pairwise([0, *starts, len(rows)]):
        before = [index for index in kept if steps[index] < steps[start]]
        if kept and not before:
            print(f"{unit.title()}s restart at row {start + 1}: earlier rows are ignored.")
        elif kept:
            place = f"{unit} {steps[start]:g}"
            print(f"The run resumes at {place}: rows that it repeats are ignored.")
        kept = [*before, *range(start, end)]
    return [rows[index] for index in kept]


def epochs_of(rows: list[dict]) -> list[float]:
    """Return each row's epoch; a row without one has the epoch of the row before it.

    All are 0 if every epoch is whole: it may be the number of a pass over one batch.
    """
    epochs = []
    last = 0.0
    for row in rows:
        with suppress(TypeError, ValueError):
            last = float(row.get("epoch"))
        epochs.append(last)
    if all(epoch.is_integer() for epoch in epochs):
        return [0.0] * len(rows)
    return epochs


def repeats(rows: list[dict], steps: list[float]) -> bool:
    """Return whether a later row gives another value of a column at the same step."""
    seen = set()
    for step, row in zip(steps, rows, strict=True):
        for name, value in row.items():
            if value is None or name in STEPS or name == "epoch":
                continue
            if (step, name) in seen:
                return True
            seen.add((step, name))
    return False


def step_of(row: dict) -> float:
    """Return a row's step, or NaN; "3/100" is step 3."""
    for name in STEPS:
        if row.get(name) is None:
            continue
        try:
            return float(str(row[name]).partition("/")[0])
        except ValueError:
            continue
    return math.nan
