"""A linear reward model on a language model's hidden states, for sixty answers or so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Encoder = tuple  # (a model with hidden states, its tokenizer)


@torch.no_grad()
def mean_states(model, tokenizer, openings: Sequence[str], texts: Sequence[str]) -> Tensor:
    """Return the hidden states of all layers, averaged over each text's tokens: (N, L · D)."""
    opening_ids = tokenizer(list(openings), add_special_tokens=False)["input_ids"]
    text_ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    rows = []
    is_text = []
    for opening, text in zip(opening_ids, text_ids, strict=True):
        ids = opening + text or [tokenizer.pad_token_id]
        rows.append(torch.tensor(ids))
        is_text.append(torch.arange(len(ids)) >= len(opening))
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    attention = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    output = model(
        ids.to(model.device),
        attention_mask=attention.to(model.device),
        output_hidden_states=True,
    )
    states = torch.stack(output.hidden_states, dim=2).float()  # (N, T, L, D)
    weights = pad_sequence(is_text, batch_first=True).float().to(model.device)
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.einsum("nt,ntld->nld", weights, states).flatten(1).cpu()


def states_of(encoders: Sequence[Encoder], openings, texts, batch_size: int = 64) -> Tensor:
    """Return the mean states of all encoders side by side: (N, D)."""
    batches = []
    for start in range(0, len(texts), batch_size):
        batch = slice(start, start + batch_size)
        parts = [
            mean_states(model, tokenizer, list(openings)[batch], list(texts)[batch])
            for model, tokenizer in encoders
        ]
        batches.append(torch.cat(parts, dim=1))
    return torch.cat(batches)


class TextFeatures:
    """Describe a text by the directions along which texts with the same opening differ most.

    The directions come from a table with ``per_opening`` consecutive texts of each opening.
    """

    def __init__(self, encoders: Sequence[Encoder], table, per_opening: int, directions: int):
        self.encoders = encoders
        states = states_of(encoders, table["opening"], table["text"])
        self.center = states.mean(dim=0)
        self.scale = states.std(dim=0) + 1e-6
        standard = (states - self.center) / self.scale
        groups = standard.view(-1, per_opening, states.shape[1])
        within = (groups - groups.mean(dim=1, keepdim=True)).flatten(0, 1)
        self.basis = torch.linalg.svd(within, full_matrices=False).Vh[:directions].T
        self.typical_norm = (within @ self.basis).square().sum(dim=1).mean().sqrt()

    def __call__(self, openings, texts) -> Tensor:
        """Return the features of each text: (N, directions), in float64."""
        states = states_of(self.encoders, openings, texts)
        standard = (states - self.center) / self.scale
        return (standard @ self.basis / self.typical_norm).double()


def question_features(answers: Sequence[dict], features: Tensor) -> list[Tensor]:
    """Return the features (k, d) of each answered question's texts, with the best text first.

    If the question asks for the worst text, the features are negated, so that the chosen text
    counts as the best. Questions answered with *equal* are left out.
    """
    results = []
    for answer in answers:
        if answer["best"] == "equal":
            continue
        best = answer["rows"][answer["best"]]
        others = [row for row in answer["rows"] if row != best]
        sign = -1 if answer.get("ask") == "worst" else 1
        results.append(sign * features[[best, *others]])
    return results


def fit(questions: Sequence[Tensor], width: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Fit weights (d,) and their covariance (d, d) by Newton's method.

    A softmax over the scores of a question's texts (k, d) predicts which text is best; for two
    texts, this is the Bradley-Terry model. The inverse Hessian of the loss with its ridge penalty
    is the covariance of the weights (Laplace's approximation).
    """
    weights = torch.zeros(width, dtype=torch.float64)
    hessian = ridge * torch.eye(width, dtype=torch.float64)
    sizes = {len(question) for question in questions}
    groups = [torch.stack([q for q in questions if len(q) == size]) for size in sizes]
    for _ in range(6):
        gradient = ridge * weights
        hessian = ridge * torch.eye(width, dtype=torch.float64)
        for texts in groups:  # (n, k, d)
            shares = (texts @ weights).softmax(dim=1)[..., None]
            mean = (shares * texts).sum(dim=1)
            gradient = gradient + (mean - texts[:, 0]).sum(dim=0)
            second_moment = (shares * texts).flatten(0, 1).T @ texts.flatten(0, 1)
            hessian = hessian + second_moment - mean.T @ mean
        weights = weights - torch.linalg.solve(hessian, gradient)
    return weights, torch.linalg.inv(hessian)


def share_of_gain(weights: Tensor, utility, features: Tensor, per_opening: int) -> float:
    """Return the share of the possible gain that best-of-n reaches; n is ``per_opening``.

    The gain is the mean utility of each opening's highest-scored text minus the mean utility of
    all its texts; the possible gain takes the text with the highest utility.
    """
    utility = torch.as_tensor(utility).view(-1, per_opening)
    scores = (features @ weights).view_as(utility)
    picked = utility.gather(1, scores.argmax(dim=1, keepdim=True)).mean()
    best = utility.max(dim=1).values.mean()
    return ((picked - utility.mean()) / (best - utility.mean())).item()
