"""Share the code of the tutorials on film reviews: the queries, a batch, and the scores."""

from collections.abc import Sequence

import torch
from datasets import Dataset, load_dataset
from torch import Tensor
from transformers import AutoTokenizer

from rlhf_course.data.reviews import LengthSampler
from rlhf_course.data.rows import check_columns, collate


def build_dataset(
    config,
    dataset_name: str = "stanfordnlp/imdb",
    input_min_text_length: int = 2,
    input_max_text_length: int = 8,
    min_characters: int = 200,
    split: str = "train",
) -> Dataset:
    """Return PPO's queries: the first tokens of the reviews in a folder or hub dataset.

    Each query has ``input_min_text_length`` to ``input_max_text_length - 1`` tokens. Reviews with
    at most ``min_characters`` characters are left out. The columns are those of the dataset, with
    ``review`` in place of ``text``, and ``input_ids`` (a tensor per row) and ``query`` (its text).
    Raises ``ValueError`` if the dataset has no column ``text``.
    """
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    reviews = load_dataset(dataset_name, split=split)
    check_columns(reviews, ("text",), f"split {split!r} of {dataset_name}")
    reviews = reviews.rename_columns({"text": "review"})
    # In memory, because a cached result would keep the lengths that another seed drew.
    reviews = reviews.filter(
        lambda sample: len(sample["review"]) > min_characters, keep_in_memory=True
    )
    input_size = LengthSampler(input_min_text_length, input_max_text_length)

    def tokenize(sample: dict) -> dict:
        sample["input_ids"] = tokenizer.encode(sample["review"])[: input_size()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    return reviews.map(tokenize, keep_in_memory=True).with_format("torch")


collator = collate  # the tutorials' name; a batch has one list per column


def sentiment_scores(pipe_outputs: Sequence[list[dict]], label: str = "POSITIVE") -> list[Tensor]:
    """Return the score of ``label`` for each text, as a list of B tensors without dimensions.

    ``pipe_outputs`` is the result of a sentiment pipeline for a list of B texts, called with
    ``top_k=None``, so that it has an entry per label. Entries are found by name, because the
    pipeline sorts them by score. Raises ``ValueError`` for an unknown label.
    """
    scores = []
    for output in pipe_outputs:
        by_label = {entry["label"]: entry["score"] for entry in output}
        if label not in by_label:
            raise ValueError(
                f"The classifier has no label {label!r}; pass one that it has as label:"
                f" {', '.join(sorted(by_label))}."
            )
        scores.append(torch.tensor(by_label[label]))
    return scores
