"""Film reviews with their sentiment, and the queries that PPO takes from them."""

from collections.abc import Callable
from pathlib import Path

import datasets

from rlhf_course.data.files import load_split
from rlhf_course.data.row_checks import check_columns

INCOMPLETE = "\ufffd"  # what the first bytes of a character are decoded as
SENTIMENTS = {
    "0": 0,
    "1": 1,
    "negative": 0,
    "positive": 1,
    "neg": 0,
    "pos": 1,
    "false": 0,
    "true": 1,
}


def load_reviews(source: str | Path, split: str) -> datasets.Dataset:
    """The columns text (str) and label (0 negative, 1 positive) of one split of a local folder or a
    hub dataset.

    Labels may be numbers, truth values, or names, as words or as a ClassLabel has them: see
    ``SENTIMENTS``. Raises ``OSError`` where nothing is found, and ``ValueError`` when a column,
    text or class is missing.
    """
    where = f"split {split!r} of {source}"
    reviews = load_split(source, split)
    check_columns(
        reviews,
        ("text", "label"),
        where,
        "Rename the columns to text and label (0 negative, 1 positive).",
    )
    reviews = reviews.select_columns(["text", "label"])
    for row, text in enumerate(reviews["text"]):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"Row {row} of {where} has no text: {text!r}. Remove such rows from the dataset."
            )
    of_class_label = enumerate(getattr(reviews.features["label"], "names", ()))
    names = {index: name for index, name in of_class_label if name.lower() in SENTIMENTS}
    given = [str(names.get(label, label)) for label in reviews["label"]]
    labels = [SENTIMENTS.get(label.strip().lower().removesuffix(".0")) for label in given]
    if {*labels} != {0, 1}:
        found = ", ".join(sorted({*given})[:5])
        raise ValueError(
            f"The labels in {where} are {found}; both 0 (negative) and 1 (positive) are needed."
        )
    return reviews.remove_columns("label").add_column("label", labels)


def build_queries(
    reviews: datasets.Dataset, tokenizer, lengths: Callable[[], int], min_characters: int = 200
) -> datasets.Dataset:
    """The first few tokens of every review longer than ``min_characters``, as columns input_ids and
    query.

    Each row draws its own length from ``lengths``, and is shorter where that ends inside a
    character. Raises ``ValueError`` when no review is long enough.
    """
    kept = [text for text in reviews["text"] if len(text) > min_characters]
    if not kept:
        longest = max(map(len, reviews["text"]))
        raise ValueError(
            f"None of the {len(reviews)} reviews has more than {min_characters} characters; the"
            f" longest has {longest}. Lower min_characters, or check that the column holds whole"
            " reviews."
        )
    drawn = [lengths() for _ in kept]
    tokens = tokenizer([text[: 16 * max(drawn)] for text in kept])["input_ids"]
    cut = [ids[:length] for ids, length in zip(tokens, drawn, strict=True)]
    texts = tokenizer.batch_decode(cut)
    for row, text in enumerate(texts):
        if text.endswith(INCOMPLETE):
            cut[row] = _complete_characters(tokenizer, tokens[row], drawn[row])
            texts[row] = tokenizer.decode(cut[row])
    return datasets.Dataset.from_dict({"input_ids": cut, "query": texts}).with_format("torch")


def _complete_characters(tokenizer, ids: list[int], length: int) -> list[int]:
    """The first tokens, fewer than ``length``, that end with a character; more, where the first one
    needs them.
    """
    for size in (*range(length - 1, 0, -1), *range(length + 1, len(ids))):
        text = tokenizer.decode(ids[:size], skip_special_tokens=True)
        if text and not text.endswith(INCOMPLETE):
            return ids[:size]
    return ids[:length]
