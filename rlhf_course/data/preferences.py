"""Preference pairs, as hh-rlhf has them, and as tokens for a reward model."""

from __future__ import annotations

from pathlib import Path

import datasets

from rlhf_course.data.files import describe, load_split
from rlhf_course.data.transcripts import ASSISTANT, HUMAN, as_text, encode, split_answer

FAULTS = {  # why a pair is of no use, in the order in which it is looked for
    "no assistant turn": lambda c, r: not (c[1] and r[1]),
    "ends on the human": lambda c, r: HUMAN in c[2] or HUMAN in r[2],
    "chosen equals rejected": lambda c, r: c == r,
    "different prompts": lambda c, r: c[0] != r[0],
    "empty answer": lambda c, r: not (c[2] and r[2]),
}


def load_pairs(
    source: str | Path, split: str = "train", data_dir: str | None = None
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Preference pairs with the columns prompt, chosen and rejected (answers), and how many rows were dropped and why.

    Rows are transcripts as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862): chosen and rejected hold the whole dialogue,
    "\\n\\nHuman: … \\n\\nAssistant: …", or its messages {role, content}. With a column prompt, chosen and rejected may
    be the answers alone. ``split`` may be a slice like ``train[:5000]``; ``data_dir`` is a subfolder. Other columns are
    kept.

    Raises ``FileNotFoundError`` when nothing is there, and ``ValueError`` for a missing column, no row, or no row left.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_dir=data_dir)
    if missing := {"chosen", "rejected"} - set(rows.column_names):
        raise ValueError(
            f"No column {' or '.join(sorted(missing))} in {where}; it has {', '.join(rows.column_names)}. Preference "
            "pairs have the columns chosen and rejected (whole transcripts), or prompt, chosen and rejected."
        )
    report, kept, parsed = dict.fromkeys(FAULTS, 0), [], {"prompt": [], "chosen": [], "rejected": []}
    table = [*rows.select_columns([c for c in parsed if c in rows.column_names])]
    repeated = sum(map(_repeats_prompt, table)) > len(table) / 2
    for index, row in enumerate(table):
        try:
            prompt = None if row.get("prompt") is None else as_text(row["prompt"])
            chosen, rejected = (split_answer(row[side], prompt, repeated) for side in ("chosen", "rejected"))
        except ValueError as error:
            raise ValueError(f"Row {index} of {where}: {error}") from None
        fault = next((name for name, found in FAULTS.items() if found(chosen, rejected)), None)
        if fault:
            report[fault] += 1
            continue
        kept.append(index)
        for name, text in zip(parsed, (chosen[0] + ASSISTANT, chosen[2], rejected[2]), strict=True):
            parsed[name].append(text)
    if not kept:
        raise ValueError(f"No usable pair is left of the {len(rows)} in {where}: {describe(report)}.")
    others = {name: rows.select(kept)[name][:] for name in rows.column_names if name not in parsed}
    return datasets.Dataset.from_dict(parsed | others), report


def _repeats_prompt(row: dict) -> bool:
    """Whether both answers begin with the prompt's text; where most do, they all are whole transcripts."""
    texts = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return False
    return all(text.strip().startswith(texts[0].strip()) for text in texts[1:])


def tokenize_pairs(pairs: datasets.Dataset, tokenizer, max_length: int) -> tuple[datasets.Dataset, int]:
    """Pairs with the columns chosen_ids, rejected_ids and length that trl's RewardTrainer takes, and how many are gone.

    A pair goes when either side has more than ``max_length`` tokens: cut at the end it would lose the very words that
    were judged. Raises ``ValueError`` when all of them go.
    """
    sides = {f"{side}_ids": encode(tokenizer, pairs["prompt"], pairs[side]) for side in ("chosen", "rejected")}
    lengths = [max(map(len, both)) for both in zip(*sides.values(), strict=True)]
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if not kept:
        raise ValueError(
            f"All {len(pairs)} pairs are longer than max_length={max_length} tokens; the shortest has {min(lengths)}. "
            "Raise max_length."
        )
    columns = pairs.to_dict() | sides | {"length": lengths}
    tokens = {name: [values[row] for row in kept] for name, values in columns.items()}
    return datasets.Dataset.from_dict(tokens), len(pairs) - len(kept)
