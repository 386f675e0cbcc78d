"""Rename a log's columns to the course's names, as log_columns.yaml maps them."""

from pathlib import Path

import pandas as pd
import yaml

from rlhf_course.command_line.log_formats import STEPS

COLUMNS = Path(__file__).with_name("log_columns.yaml")


def read_maps(file: Path) -> dict[str, dict]:
    """Return a dict from trainer to its map; raise ``ValueError`` if one has no columns."""
    maps = yaml.safe_load(file.read_text("utf-8"))
    for entry in maps.values():
        if not isinstance(entry, dict) or not isinstance(entry.get("columns"), dict):
            raise ValueError(f"{file} has no columns. Format it like {COLUMNS}.")
    return maps


def is_not_finite(value) -> bool:
    """Return whether a log's entry is NaN or Inf in any spelling, such as C's -nan(ind)."""
    text = str(value).lower().lstrip("-+").partition("(")[0]
    return text in ("nan", "inf", "infinity")


def rename(rows: list[dict], maps: dict[str, dict]) -> tuple[str, pd.DataFrame]:
    """Return the trainer that wrote the rows, and a table of the course's columns by step.

    Raises ``ValueError`` if no map matches at least two columns, or if a column that a map needs
    has an entry that is not a number (NaN and Inf are allowed).
    """
    rows = [{name.removeprefix("train/"): x for name, x in row.items()} for row in rows]
    texts = pd.DataFrame(rows)
    step_columns = [name for name in STEPS if name in texts]
    if step_columns:
        texts.index = pd.to_numeric(texts[step_columns[0]])
    else:
        texts.index = range(1, len(texts) + 1)
    numbers = texts.apply(pd.to_numeric, errors="coerce")
    # Every other entry of this table is NaN.
    not_numbers = texts.where(texts.notna() & numbers.isna() & ~texts.map(is_not_finite))
    log = numbers.groupby(level=0).first()

    tables = {
        trainer: apply_map(entry["columns"], log, not_numbers) for trainer, entry in maps.items()
    }
    trainer = max(tables, key=lambda name: len(tables[name]))
    columns = tables[trainer]
    if len(columns) < 2:
        names = ", ".join(str(name) for name in log.columns[:12])
        raise ValueError(f"No known trainer has these columns: {names}. Map them with --map FILE.")
    if "accuracy" in columns and columns["accuracy"].max() > 1:
        raise ValueError("The accuracy exceeds 1. Divide percentages by 100.")
    for name, spread in log.filter(regex="^rewards/.*/std$").items():  # GRPO's reward functions
        columns[name] = spread
    return trainer, pd.DataFrame(columns)


def apply_map(
    columns: dict[str, str | dict], log: pd.DataFrame, not_numbers: pd.DataFrame
) -> dict[str, pd.Series]:
    """Return the course's columns that a trainer's map finds in the log."""
    renamed = {}
    for name, source in columns.items():
        needed = [source] if isinstance(source, str) else [source["column"], source["times"]]
        if not set(needed) <= set(log.columns):
            continue
        for column in needed:
            wrong = not_numbers[column].dropna()
            if len(wrong):
                raise ValueError(f"{column} is {wrong.iloc[0]!r}, not a number. Correct the log.")
        if isinstance(source, str):
            renamed[name] = log[source]
        else:
            renamed[name] = log[source["column"]] * log[source["times"]]
    return renamed
