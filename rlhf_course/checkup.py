"""The check-up of a reward model: is it good enough to start PPO with it?"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor

from rlhf_course.audit import ARGUABLE, PASS, audit
from rlhf_course.evaluation import mean_ci, words_of
from rlhf_course.rewards import finite

Score = Callable[[Sequence[str], Sequence[str]], Tensor]
STOP, WATCH, FINE = "stop", "watch", "fine"
EQUAL, GAIN = 0.1, 0.25  # relative differences: of lengths, of scores
PROBED, WORDS, FOLDS = 300, 2000, 5


class Finding(NamedTuple):
    """One question of the check-up, what was measured, and what follows from it."""

    question: str
    measured: str
    level: str  # STOP, WATCH or FINE
    advice: str = ""


class CheckUp(NamedTuple):
    """All findings and the tables behind them: ``pairs`` has a row per held-out pair."""

    findings: list[Finding]
    pairs: pd.DataFrame  # chosen and rejected (scores), longer (relative), right
    calibration: pd.DataFrame  # predicted, observed, ci
    audit: pd.DataFrame

    def advice(self, level: str) -> list[str]:
        return [finding.advice for finding in self.findings if finding.level == level]

    @property
    def verdict(self) -> str:
        """Whether to start PPO, and why not or what to watch."""
        if reasons := self.advice(STOP):
            return "Do not start PPO: " + "; ".join(reasons) + "."
        watched = "; ".join(self.advice(WATCH))
        return f"Start PPO{watched and f', and watch: {watched}'}."


def check_up(
    score: Score,
    pairs: Dataset,
    audited: dict[str, list[str]] | None = None,
    seed: int = 0,
) -> CheckUp:
    """Measure a reward model on held-out pairs (prompt, chosen, rejected) and on bad answers.

    ``score`` takes prompts and answers, as :class:`~rlhf_course.rewards.RewardModel` does. The
    first 300 pairs are audited, or the prompt and answer in ``audited``, which may hold bad answers
    of your own, a list per kind. A bad answer can be four times as long as the normal one. Raises
    ``ValueError`` for fewer than two pairs and ``FloatingPointError`` where a score is NaN or Inf.
    """
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs are too few for a check-up; give a hundred or more.")
    columns = {name: pairs[name][:] for name in ("prompt", "chosen", "rejected")}
    table = _score_pairs(score, **columns)
    some = {"prompt": columns["prompt"][:PROBED], "answer": columns["chosen"][:PROBED]}
    own = dict(audited or some)
    normal = own.pop("prompt"), own.pop("answer")
    probes, curve = audit(score, *normal, seed, own), calibrate(table, seed)
    findings = [
        *_accuracy(table, bag_of_words(columns["chosen"], columns["rejected"], seed)),
        _length(table, columns["chosen"]),
        _temperature(table),
        _alone(score, table, columns["prompt"], columns["chosen"]),
        *_probes(probes, table),
    ]
    return CheckUp(findings, table, curve, probes)


def _score_pairs(score: Score, prompt, chosen, rejected) -> pd.DataFrame:
    scores = {"chosen": chosen, "rejected": rejected}
    table = pd.DataFrame({k: finite(score(prompt, x), x).double() for k, x in scores.items()})
    sizes = np.array([(len(a), len(b)) for a, b in zip(chosen, rejected, strict=True)])
    table["longer"] = (sizes[:, 0] - sizes[:, 1]) / sizes.mean(1).clip(min=1)
    return table.assign(right=_half_for_ties(table["chosen"] - table["rejected"]))


def _half_for_ties(difference) -> np.ndarray:
    """Return 1 where the difference is positive, ½ where it is 0, and 0 elsewhere."""
    return (np.sign(np.asarray(difference)) + 1) / 2


def bag_of_words(chosen: Sequence[str], rejected: Sequence[str], seed: int = 0) -> np.ndarray:
    """Return whether a logistic regression on counts of words orders each pair (N,): 1, ½ or 0.

    Each pair is judged by weights that were fitted to the other folds, with a ridge of 1. Words are
    those of a to z; where there are none, as in Chinese, single characters.
    """
    texts = [*chosen, *rejected]
    words = [words_of(text) for text in texts]
    words = words if any(words) else [list(text) for text in texts]
    known = pd.Series([word for row in words for word in {*row}]).value_counts().index[:WORDS]
    place, counts = {word: i for i, word in enumerate(known)}, torch.zeros(len(texts), len(known))
    for row, own in enumerate(words):
        for word in own:
            if word in place:
                counts[row, place[word]] += 1
    x = counts[: len(chosen)] - counts[len(chosen) :]
    folds = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)) % FOLDS)
    right = np.zeros(len(x))
    for fold in range(FOLDS):
        weight = _fit(x[folds != fold])
        right[(folds == fold).numpy()] = _half_for_ties(x[folds == fold] @ weight)
    return right


def _fit(x: Tensor) -> Tensor:
    """Return the weights of a logistic regression without a bias, in which every label is 1."""
    weight = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.softplus(-x @ weight).sum() + weight @ weight / 2
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach()


def calibrate(table: pd.DataFrame, seed: int = 0, bins: int = 8) -> pd.DataFrame:
    """Return predicted and observed preference (shares) of bins with at least 20 pairs, and ci."""
    first = np.random.default_rng(seed).random(len(table)) < 0.5  # the chosen answer is first
    margin = (table["chosen"] - table["rejected"]).where(first, table["rejected"] - table["chosen"])
    shown = pd.DataFrame({"predicted": 1 / (1 + np.exp(-margin)), "observed": first.astype(float)})
    groups = shown.groupby(pd.cut(shown["predicted"], np.linspace(0, 1, bins + 1)), observed=True)
    found = groups.mean()[groups.size() >= 20]
    spread = found["observed"] * (1 - found["observed"]) / groups.size()
    return found.assign(ci=1.96 * np.sqrt(spread))


def _accuracy(table: pd.DataFrame, by_words: np.ndarray) -> list[Finding]:
    """Compare the accuracy with chance, length and words, and find it at equal length."""
    right = table["right"]
    lower, text = _interval(right)
    findings = [
        Finding(
            "Does it order held-out pairs?",
            f"accuracy {text}, mean margin {(table['chosen'] - table['rejected']).mean():.2f}",
            FINE if lower > 0.5 else STOP,
            "it orders held-out pairs no better than chance",
        )
    ]
    baselines = {
        "the longer answer wins": (_half_for_ties(table["longer"]), STOP),
        "a bag of words": (by_words, WATCH),
    }
    for name, (baseline, level) in baselines.items():
        lower, text = _interval(right - baseline)
        question = f"Is it better than a rule: {name}?"
        measured = f"rule {np.mean(baseline):.3f}, difference {text}"
        advice = f"a rule does as well ({name})"
        findings.append(Finding(question, measured, FINE if lower > 0 else level, advice))
    equal = right[table["longer"].abs() <= EQUAL]
    lower, text = _interval(equal)
    level = FINE if lower > 0.5 else STOP if len(equal) >= 100 else WATCH
    advice = "it cannot order answers of equal length"
    measured = f"accuracy {text}, {len(equal)} pairs"
    return [*findings, Finding("And among answers of equal length?", measured, level, advice)]


def _interval(values) -> tuple[float, str]:
    """Return the lower end of the mean's 95 % interval, −inf for fewer than two, and a text."""
    if len(values) < 2:
        return -np.inf, "unknown"
    mean, half = mean_ci(values)
    return mean - half, f"{mean:.3f} ± {half:.3f}"


def _length(table: pd.DataFrame, chosen: Sequence[str]) -> Finding:
    ranks = [pd.Series(x).rank() for x in (table["chosen"], [len(text) for text in chosen])]
    rho = ranks[0].corr(ranks[1])
    level = WATCH if not abs(rho) < 0.7 else FINE
    return Finding(
        "Does the score follow length?",
        f"rank correlation {rho:.2f}",
        level,
        "the length of responses, which the score follows",
    )


def _temperature(table: pd.DataFrame) -> Finding:
    temperatures = np.geomspace(0.1, 10, 201)
    margin = (table["chosen"] - table["rejected"]).to_numpy()
    best = temperatures[np.logaddexp(0, -margin / temperatures[:, None]).mean(1).argmin()]
    level, advice = FINE if 0.5 <= best <= 2 else WATCH, f"β: divide scores by {best:.1f} first"
    return Finding("Is it calibrated?", f"temperature {best:.2f}", level, advice)


def _alone(score: Score, table: pd.DataFrame, prompts, answers, some: int = 16) -> Finding:
    """Score answers one at a time: neither padding nor the batch may change a score."""
    alone = [float(score([p], [a])[0]) for p, a in zip(prompts[:some], answers[:some], strict=True)]
    gap = np.abs(table["chosen"].to_numpy()[: len(alone)] - alone).max()
    level = FINE if gap <= 1e-3 * max(1.0, table["chosen"].std()) else STOP
    advice = "a score depends on the padding or on what else is in the batch"
    return Finding("Same score alone and in a batch?", f"largest gap {gap:.0e}", level, advice)


def _probes(audited: pd.DataFrame, pairs: pd.DataFrame) -> list[Finding]:
    """Return a finding per bad answer.

    PPO is stopped by one that usually wins, and by a margin of at least ``GAIN`` times the mean
    difference within a pair. This limit is a choice, not a law.
    """
    usual, findings = (pairs["chosen"] - pairs["rejected"]).mean(), []
    for name, row in audited.iterrows():
        wins = row["share"] + row["ci"] < 0.5 and -row["margin"] >= GAIN * usual
        level = STOP if wins and name not in ARGUABLE else WATCH
        level = FINE if row["share"] >= PASS else level
        share = f"{row['share']:.2f} ± {row['ci']:.2f}"
        measured = f"the normal answer wins {share}, mean margin {row['margin']:.2f}"
        advice = f"{name}: {row['risk']}".removesuffix(": ")
        findings.append(Finding(f"Bad answers: {name}", measured, level, advice))
    return findings
