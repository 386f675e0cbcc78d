"""Rename a log's columns to the course's names, as log_columns.yaml maps them."""

from pathlib import Path

import pandas as pd
import yaml

from rlhf_course.command_line.log_formats import STEPS, step_of

COLUMNS = Path(__file__).with_name("log_columns.yaml")
SHOWN = 16  # names of columns in a message
TIMES = ("epoch", "percentage", "elapsed_time", "remaining_time", "total_steps", "_runtime")


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


def rename(
    rows: list[dict], maps: dict[str, dict], trainer: str | None = None
) -> tuple[str, pd.DataFrame]:
    """Return the trainer that wrote the rows, and a table of the course's columns by step.

    The trainer is recognized unless it is given. Prints the log's columns that are not used. Raises
    ``ValueError`` if no trainer or several are recognized, if fewer than two columns are known, or
    if a column that is used has an entry that is not a number (NaN and Inf are allowed).
    """
    rows = [{name.removeprefix("train/"): x for name, x in row.items()} for row in rows]
    texts = pd.DataFrame(rows).dropna(axis="columns", how="all")  # a null says nothing
    steps = [step_of(row) for row in rows]
    has_steps = any(step == step for step in steps)  # not NaN
    texts.index = steps if has_steps else range(1, len(texts) + 1)
    numbers = texts.apply(pd.to_numeric, errors="coerce")
    # Every other entry of this table is NaN.
    not_numbers = texts.where(texts.notna() & numbers.isna() & ~texts.map(is_not_finite))
    log = numbers.groupby(level=0).first()

    needed = 1 if trainer else 2
    if trainer:
        trainer = choose(trainer, maps)
    else:
        trainer = recognize(list(log.columns), maps)
    columns, used = apply_map(maps[trainer]["columns"], log, not_numbers)
    if len(columns) < needed:
        raise ValueError(
            f"No known trainer has these columns: {shorten(log.columns)}. Map them with --map FILE,"
            f" or choose a trainer with --trainer: {'; '.join(maps)}."
        )
    if "accuracy" in columns and columns["accuracy"].max() > 1:
        raise ValueError("The accuracy exceeds 1. Divide percentages by 100.")
    for name, spread in log.filter(regex="^rewards/.*/std$").items():  # GRPO's reward functions
        columns[name] = spread
        used.add(name)
    values_per_step = texts[sorted(used)].groupby(level=0).count()
    if (values_per_step > 1).any(axis=None):
        print("Several rows have the same step and columns: the first is used. Is this one run?")
    unused = [name for name in log.columns if name not in used and name not in (*STEPS, *TIMES)]
    if unused:
        print(f"Not used: {shorten(unused)}. Map a column with --map FILE.")
    return trainer, pd.DataFrame(columns)


def choose(start: str, maps: dict[str, dict]) -> str:
    """Return the trainer whose name begins like this; raise ``ValueError`` unless it is one."""
    candidates = [name for name in maps if name.lower().startswith(start.lower())]
    if len(candidates) != 1:
        raise ValueError(
            f"--trainer {start} is the beginning of {len(candidates)} names. Choose from"
            f" {'; '.join(maps)}."
        )
    return candidates[0]


def recognize(names: list[str], maps: dict[str, dict]) -> str:
    """Return the trainer with most signature columns in a log.

    A map without signature matches only if no signature does; among these, the most columns count.
    Raises ``ValueError`` if several trainers have equally many.
    """
    signed = {}
    unsigned = {}
    for trainer, entry in maps.items():
        if "signature" in entry:
            signed[trainer] = len(set(entry["signature"]) & set(names))
        else:
            sources = [source for source in entry["columns"].values() if _find(source, names)]
            unsigned[trainer] = len(sources)
    counts = signed if any(signed.values()) else unsigned
    most = max(counts.values(), default=0)
    candidates = [trainer for trainer, count in counts.items() if count == most]
    if most and len(candidates) > 1:
        raise ValueError(
            f"These columns could be of {' or '.join(candidates)}: {shorten(names)}. Choose one"
            " with --trainer NAME."
        )
    if not candidates:
        raise ValueError(f"No known trainer has these columns: {shorten(names)}. Use --map FILE.")
    return candidates[0]


def shorten(names) -> str:
    """Return the first names of columns as text."""
    names = [str(name) for name in names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def apply_map(
    columns: dict[str, str | dict | list], log: pd.DataFrame, not_numbers: pd.DataFrame
) -> tuple[dict[str, pd.Series], set[str]]:
    """Return the course's columns that a trainer's map finds in the log, and the names it used."""
    renamed = {}
    used = set()
    for name, source in columns.items():
        needed = _find(source, log.columns)
        for column in needed:
            wrong = not_numbers[column].dropna()
            if len(wrong):
                raise ValueError(f"{column} is {wrong.iloc[0]!r}, not a number. Correct the log.")
        if needed:
            renamed[name] = log[needed].prod(axis="columns", skipna=False)
            used.update(needed)
    return renamed, used


def _find(source: str | dict | list, names) -> list[str]:
    """Return the columns that a map's entry reads: a name, a product, or the first of a list."""
    alternatives = source if isinstance(source, list) else [source]
    for alternative in alternatives:
        if isinstance(alternative, str):
            needed = [alternative]
        else:
            needed = [alternative["column"], alternative["times"]]
        if set(needed) <= set(names):
            return needed
    return []
