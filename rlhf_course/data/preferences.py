"""Preference pairs, as hh-rlhf has them, and as tokens for a reward model."""

from collections.abc import Iterator
from pathlib import Path

import datasets

from rlhf_course.data.files import load_split
from rlhf_course.data.row_checks import check_columns, keep_short, keep_usable
from rlhf_course.data.transcripts import ASSISTANT, HUMAN, as_text, encode, split_answer

# Why a pair is of no use, in the order of the checks; both sides are (before, mark, answer)
FAULTS = {
    "no assistant turn": lambda c, r: not (c[1] and r[1]),
    "ends on the human": lambda c, r: HUMAN in c[2] or HUMAN in r[2],
    "chosen equals rejected": lambda c, r: c == r,
    "different prompts": lambda c, r: c[0] != r[0],
    "empty answer": lambda c, r: not (c[2] and r[2]),
}


def load_pairs(
    source: str | Path, split: str = "train", data_dir: str | None = None
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Preference pairs with the columns prompt, chosen and rejected (answers), and how many rows
    were dropped and why.

    chosen and rejected are transcripts as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862), or
    messages {role, content}; beside a column prompt they may be answers alone. Other columns stay.
    ``split`` may be a slice like ``train[:5000]``; ``data_dir`` is a subfolder. Raises ``OSError``
    where nothing is found, and ``ValueError`` for a missing column, what is no transcript, or no
    row left.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_dir=data_dir)
    advice = (
        "Preference pairs have the columns chosen and rejected, as whole transcripts or beside a"
        " column prompt."
    )
    check_columns(rows, ("chosen", "rejected"), where, advice)
    repeated = sum(map(_repeats_prompt, rows)) > len(rows) / 2

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        prompt = None if row.get("prompt") is None else as_text(row["prompt"])
        chosen, rejected = (
            split_answer(row[side], prompt, repeated) for side in ("chosen", "rejected")
        )
        pair = {"prompt": chosen[0] + ASSISTANT, "chosen": chosen[2], "rejected": rejected[2]}
        others = {name: value for name, value in row.items() if name not in pair}
        yield (
            pair | others,
            next((name for name, found in FAULTS.items() if found(chosen, rejected)), None),
        )

    return keep_usable(rows, parse, FAULTS, where)


def _repeats_prompt(row: dict) -> bool:
    """Whether both answers begin with the prompt's text; where most do, they all are whole
    transcripts.
    """
    texts = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return False
    return all(text.strip().startswith(texts[0].strip()) for text in texts[1:])


def tokenize_pairs(
    pairs: datasets.Dataset, tokenizer, max_length: int
) -> tuple[datasets.Dataset, int]:
    """Pairs with the columns chosen_ids, rejected_ids and length that trl's RewardTrainer takes,
    and how many are gone.

    A pair goes when either side has more than ``max_length`` tokens: cut, it would lose the very
    words that were judged. Raises ``ValueError`` when all of them go.
    """
    sides = {
        f"{side}_ids": encode(tokenizer, pairs["prompt"], pairs[side])
        for side in ("chosen", "rejected")
    }
    lengths = [max(map(len, both)) for both in zip(*sides.values(), strict=True)]
    return keep_short(
        datasets.Dataset.from_dict(pairs.to_dict() | sides | {"length": lengths}),
        lengths,
        max_length,
    )
