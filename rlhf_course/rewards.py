"""Rewards: what a text is worth to a sentiment classifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class SentimentReward:
    """Scores texts by the raw logit of a classifier's POSITIVE label; texts → (B,) in float32, on the CPU.

    Args:
        model_name_or_path: a sequence classifier, as a folder or a hub id.
        label: picked by its name in the model's config, never by its position.
        batch_size: texts per forward pass; batches are sorted by length to waste little padding.
        device: where to run; default the GPU where there is one.

    Raises ``ValueError`` when the classifier has no such label.
    """

    def __init__(
        self, model_name_or_path: str, label: str = "POSITIVE", batch_size: int = 64, device: str | None = None
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)
        model = AutoModelForSequenceClassification.from_pretrained(model_name_or_path, dtype=torch.float32)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = model.to(self.device).requires_grad_(False).eval()
        labels = {name.upper(): index for index, name in self.model.config.id2label.items()}
        if label.upper() not in labels:
            raise ValueError(
                f"The classifier {model_name_or_path} has no label {label!r}; it has "
                f"{', '.join(self.model.config.id2label.values())}. Name the one that should be rewarded."
            )
        self.index, self.batch_size = labels[label.upper()], batch_size

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> Tensor:
        """All logits (B, labels) of the texts, in the order given."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found = torch.empty(len(texts), self.model.config.num_labels)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            batch = self.tokenizer(
                [texts[i] for i in rows],
                padding=True,
                truncation=True,
                max_length=self.model.config.max_position_embeddings,
                return_tensors="pt",
            ).to(self.device)
            found[rows] = self.model(**batch).logits.float().cpu()
        return found

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Scores (B,) of the texts: higher is more positive."""
        return self.logits(texts)[:, self.index]
