"""Film reviews as a dataset, and the queries that PPO starts from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets

from rlhf_course.ppo.generation import LengthSampler


def load_reviews(source: str | Path, split: str) -> datasets.Dataset:
    """The columns text (str) and label (0 negative, 1 positive) of one split of a local folder or a hub dataset.

    Raises ``FileNotFoundError`` when nothing is there and ``ValueError`` when a column, text or class is missing.
    """
    where = f"split {split!r} of {source}"
    if Path(source).is_dir() is False and (str(source).count("/") != 1 or str(source).startswith((".", "/", "~"))):
        raise FileNotFoundError(f"No dataset folder at {source}. Give an existing folder, or a hub id like owner/name.")
    splits = datasets.load_dataset(str(source))
    if split not in splits:
        raise ValueError(f"No split {split!r} in {source}; it has {', '.join(splits)}.")
    reviews = splits[split]
    missing = {"text", "label"} - set(reviews.column_names)
    if missing:
        raise ValueError(
            f"No column {' or '.join(sorted(missing))} in {where}; it has {', '.join(reviews.column_names)}. "
            "Rename the columns to text and label (0 negative, 1 positive)."
        )
    reviews = reviews.select_columns(["text", "label"])
    for row, text in enumerate(reviews["text"]):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"Row {row} of {where} has no text: {text!r}. Remove such rows from the dataset.")
    classes = set(reviews["label"])
    if classes != {0, 1}:
        found = ", ".join(sorted(map(str, classes)))
        raise ValueError(f"The labels in {where} are {found}; both 0 (negative) and 1 (positive) are needed.")
    return reviews


def build_queries(
    reviews: datasets.Dataset, tokenizer, lengths: LengthSampler, min_characters: int = 200
) -> datasets.Dataset:
    """The first few tokens of every review longer than ``min_characters``, as columns input_ids and query.

    Each row draws its own length from ``lengths``. Raises ``ValueError`` when no review is long enough.
    """
    kept = reviews.filter(lambda texts: [len(t) > min_characters for t in texts], batched=True, input_columns="text")
    if len(kept) == 0:
        longest = max(map(len, reviews["text"]))
        raise ValueError(
            f"None of the {len(reviews)} reviews has more than {min_characters} characters; the longest has {longest}. "
            "Lower min_characters, or check that the column holds whole reviews."
        )
    tokens = tokenizer([text[: 16 * max(lengths.values)] for text in kept["text"]])["input_ids"]
    tokens = [ids[: lengths()] for ids in tokens]
    queries = datasets.Dataset.from_dict({"input_ids": tokens, "query": tokenizer.batch_decode(tokens)})
    return queries.with_format("torch")


def collate(rows: list[dict]) -> dict[str, list]:
    """Rows as one dictionary of lists: queries stay ragged."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def endless(loader: Iterable) -> Iterator:
    """A loader's batches, epoch after epoch, each in a new order."""
    while True:
        yield from loader
