"""Load preference pairs in hh-rlhf's format, and tokenize them for a reward model."""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from rlhf_course.data.rows import check_columns, keep_short, keep_usable, load_split
from rlhf_course.data.transcripts import (
    ASSISTANT,
    HUMAN,
    as_text,
    encode,
    last_question,
    refuse_eos,
    split_answer,
)

SIDES = ("chosen", "rejected")
# The first true test names the reason to drop a pair; c and r are split_answer's results.
FAULTS = {
    "no assistant turn": lambda c, r: not (c[1] and r[1]),
    "ends on the human": lambda c, r: HUMAN in c[2] or HUMAN in r[2],
    "chosen equals rejected": lambda c, r: c == r,
    "different prompts": lambda c, r: c[0] != r[0],
    "empty answer": lambda c, r: not (c[2] and r[2]),
    "prompt repeated": lambda c, r: (
        c[2].startswith(question := last_question(c[0]) or "\0") and r[2].startswith(question)
    ),
}


def load_pairs(
    source: str | Path, split: str = "train", data_dir: str | None = None
) -> tuple[Dataset, dict[str, int]]:
    """Return columns prompt, chosen and rejected, and the number of pairs dropped for each reason.

    The columns chosen and rejected contain transcripts as in hh-rlhf, or messages {role, content};
    with a prompt column, answers without prompts suffice. Other columns are kept. ``split`` may
    be a slice like ``train[:5000]``; ``data_dir`` is a subfolder. Raises :func:`load_split`'s
    errors, and ``ValueError`` for missing columns, values of the wrong type, or no usable pair.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_dir=data_dir)
    check_columns(rows, SIDES, where)

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        prompt = None if row.get("prompt") is None else as_text(row["prompt"])
        chosen, rejected = (split_answer(row[side], prompt) for side in SIDES)
        pair = {"prompt": chosen[0] + ASSISTANT, "chosen": chosen[2], "rejected": rejected[2]}
        others = {name: value for name, value in row.items() if name not in pair}
        reasons = (name for name, is_faulty in FAULTS.items() if is_faulty(chosen, rejected))
        yield pair | others, next(reasons, None)

    return keep_usable(rows, parse, FAULTS, where)


def tokenize_pairs(pairs: Dataset, tokenizer, max_length: int) -> tuple[Dataset, int]:
    """Return the pairs with the columns that trl's RewardTrainer needs, and how many were dropped.

    New columns: chosen_ids, rejected_ids and length. Pairs longer than ``max_length`` tokens are
    dropped, because truncation could remove the judged difference. Raises ``ValueError`` if no pair
    remains or a text contains EOS.
    """
    columns = pairs.to_dict()
    for side in SIDES:
        refuse_eos(tokenizer, pairs["prompt"], pairs[side])
        columns[f"{side}_ids"] = encode(tokenizer, pairs["prompt"], pairs[side])
    columns["length"] = [
        max(len(chosen), len(rejected))
        for chosen, rejected in zip(columns["chosen_ids"], columns["rejected_ids"], strict=True)
    ]
    return keep_short(Dataset.from_dict(columns), columns["length"], max_length)
