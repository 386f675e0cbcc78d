"""Load film reviews with their sentiment, and cut PPO's queries from them."""

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
from datasets import Dataset, Value

from rlhf_course.data.rows import as_numbers, check_columns, load_split

INCOMPLETE = "\ufffd"  # marks an incomplete character


def load_reviews(source: str | Path, split: str) -> Dataset:
    """Return text and label (0 negative, 1 positive) from one split of a folder or hub dataset.

    Raises :func:`load_split`'s errors, and ``ValueError`` for a missing column, text or class, or a
    ClassLabel whose names are not neg and pos.
    """
    where = f"split {split!r} of {source}"
    reviews = load_split(source, split)
    check_columns(reviews, ("text", "label"), where)
    reviews = as_numbers(reviews.select_columns(["text", "label"]), ["label"])
    for row, text in enumerate(reviews["text"]):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"Row {row} of {where} has no text: {text!r}. Remove it.")
    feature = reviews.features["label"]
    labels = set(reviews["label"])
    class_names = getattr(feature, "names", ("neg", "pos"))
    names_fit = [name.lower()[:3] for name in class_names] == ["neg", "pos"]
    if labels != {0, 1} or not names_fit:
        first_labels = sorted(str(label) for label in labels)[:5]
        raise ValueError(
            f"The labels in {where} are {', '.join(first_labels)}; both 0 (negative) and 1"
            f" (positive) are needed. Map the values of {feature!r:.40}."
        )
    return reviews.cast_column("label", Value("int64"))


class LengthSampler:
    """Draw a length uniformly from the integers min_value … max_value − 1 at each call."""

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 1 <= min_value < max_value:
            raise ValueError(
                f"LengthSampler({min_value}, {max_value}) has no lengths to draw. Choose 1 ≤ "
                "min_value < max_value; max_value is exclusive."
            )
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


def build_queries(
    reviews: Dataset, tokenizer, lengths: Callable[[], int], min_characters: int = 200
) -> Dataset:
    """Return input_ids and query: the first tokens of reviews longer than ``min_characters``.

    Each row's token count is drawn from ``lengths``, and changes if it would split a character.
    Raises ``ValueError`` if no review is long enough.
    """
    kept = [text for text in reviews["text"] if len(text) > min_characters]
    if not kept:
        longest = max(len(text) for text in reviews["text"])
        raise ValueError(
            f"None of the {len(reviews)} reviews has more than {min_characters} characters; the"
            f" longest has {longest}. Lower min_characters."
        )
    sizes = [lengths() for _ in kept]
    openings = [text[: 16 * max(sizes)] for text in kept]  # quicker to tokenize
    tokens = tokenizer(openings)["input_ids"]
    cut = [_cut(tokenizer, ids, size) for ids, size in zip(tokens, sizes, strict=True)]
    queries = Dataset.from_dict({"input_ids": cut, "query": tokenizer.batch_decode(cut)})
    return queries.with_format("torch")


def _cut(tokenizer, ids: list[int], length: int) -> list[int]:
    """Return the first ``length`` tokens, or fewer if the last character would be cut.

    If fewer tokens would also cut a character or give no text, return more than ``length``.
    """
    shorter = range(length, 0, -1)
    longer = range(length + 1, len(ids))
    for size in chain(shorter, longer):
        text = tokenizer.decode(ids[:size], skip_special_tokens=True)
        if text and not text.endswith(INCOMPLETE):
            return ids[:size]
    return ids[:length]


def held_out_reviews(reviews: Dataset, openings: str | Path) -> Dataset:
    """Return the reviews whose first words are in the dataset ``openings``, with HTML ignored.

    ``models/imdb-openings`` has the first 64 words of all IMDB reviews that no shipped model was
    trained on. Raises ``ValueError`` if there is no such review.
    """
    known = set()
    for split in ("train", "test"):
        known.update(load_reviews(openings, split)["text"])
    longest = max(len(text.split()) for text in known)
    kept = []
    for row, text in enumerate(reviews["text"]):
        words = re.sub(r"\s*(<br\s*/?>\s*)+", " ", text).split()
        if " ".join(words[:longest]) in known:
            kept.append(row)
    if not kept:
        raise ValueError(
            f"None of {len(reviews)} reviews begins like a text in {openings}. Name the openings"
            " of these reviews, or set judge_openings to null."
        )
    return reviews.select(kept)
