"""Plans: which texts to show in the next question."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rlhf_course.feedback.linear_model import question_features
from rlhf_course.feedback.session import Plan


def question_about(table: pd.DataFrame, rows: Sequence[int], number: int, of: int) -> dict:
    """Return a question about rows of a table with the columns ``opening`` and ``text``."""
    texts = table.iloc[list(rows)]
    return {
        "number": number,
        "of": of,
        "rows": [int(row) for row in rows],
        "openings": texts["opening"].tolist(),
        "texts": texts["text"].tolist(),
    }


def plan_pairs(table: pd.DataFrame, pairs: Sequence[Sequence[int]]) -> Plan:
    """Return a plan that asks about these pairs of rows in order."""

    def plan(answers: list[dict]) -> dict | None:
        number = len(answers)
        if number == len(pairs):
            return None
        return question_about(table, pairs[number], number=number + 1, of=len(pairs))

    return plan


def random_pairs(count: int, openings: int, per_opening: int, seed) -> np.ndarray:
    """Draw pairs of rows (count, 2) of a table that holds ``per_opening`` texts of each opening.

    Both rows of a pair have the same opening. ``seed`` is a whole number or a NumPy generator.
    """
    generator = np.random.default_rng(seed)
    places = [generator.choice(per_opening, 2, replace=False) for _ in range(count)]
    chosen_openings = generator.integers(openings, size=(count, 1))
    return per_opening * chosen_openings + np.array(places)


def thompson(weights, covariance, unseen, generator, features: Tensor, k: int = 4):
    """Return k unseen rows: each of k draws of the weights names its favorite (Thompson 1933)."""
    noise = torch.from_numpy(generator.normal(size=(len(weights), k)))
    draws = weights[:, None] + torch.linalg.cholesky(covariance) @ noise
    scores = features[unseen] @ draws
    picked = []
    for draw in range(k):
        scores[picked, draw] = -torch.inf
        picked.append(int(scores[:, draw].argmax()))
    return generator.permutation(unseen[picked])


def others(answer: dict) -> list[int]:
    """Return the rows of a question except the chosen one."""
    if answer["best"] == "equal":
        return answer["rows"]
    chosen = answer["rows"][answer["best"]]
    return [row for row in answer["rows"] if row != chosen]


def plan_best_and_worst(
    table: pd.DataFrame,
    features: Tensor,
    learn: Callable[[list[Tensor]], tuple[Tensor, Tensor]],
    count: int,
    seed: int,
    before: Sequence[Tensor] = (),
) -> Plan:
    """Return a plan that asks for the best of four texts, then for the worst of the others.

    Thompson sampling chooses each of the ``count`` sets of four texts: ``learn`` turns the
    answered questions, those of ``before`` included, into weights and their covariance.
    """

    def plan(answers: list[dict]) -> dict | None:
        number, asked_best = divmod(len(answers), 2)
        if number == count:
            return None
        position = {"number": len(answers) + 1, "of": 2 * count}
        if asked_best:
            return question_about(table, others(answers[-1]), **position) | {"ask": "worst"}
        weights, covariance = learn([*before, *question_features(answers, features)])
        shown = {row for answer in answers for row in answer["rows"]}
        unseen = np.array([row for row in range(len(table)) if row not in shown])
        generator = np.random.default_rng([seed, number])
        rows = thompson(weights, covariance, unseen, generator, features)
        return question_about(table, rows, **position)

    return plan
