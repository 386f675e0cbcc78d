"""Search a reward model for faults that PPO would exploit; finding none is not a license."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor

from rlhf_course.audit.probes import ARGUABLE, PASS, audit, make_probes
from rlhf_course.evaluation import mean_ci, words_of
from rlhf_course.rewards import require_finite

Score = Callable[[Sequence[str], Sequence[str]], Tensor]
STOP = "stop"
WATCH = "watch"
FINE = "fine"
EQUAL = 0.1  # answers whose lengths differ by at most this share count as equally long
GAIN = 0.25  # a bad answer is worth exploiting above this share of the pairs' mean margin
AUDITED = 300  # prompts in the audit
ALONE = 16  # answers that are scored again, each in a batch of its own
FOLDS = 5
ENOUGH_PAIRS = 100  # of equal length, for a verdict


class Finding(NamedTuple):
    """Store one check-up question, its measurement, its level, and advice."""

    question: str
    measured: str
    level: str  # STOP, WATCH or FINE
    advice: str = ""


class CheckUp(NamedTuple):
    """Store findings and the tables behind them; ``pairs`` has one row per held-out pair."""

    findings: list[Finding]
    pairs: pd.DataFrame  # chosen, rejected: scores; longer: relative length gap; right: 0, ½, 1
    audit: pd.DataFrame

    def advice(self, level: str) -> list[str]:
        return [finding.advice for finding in self.findings if finding.level == level]

    @property
    def verdict(self) -> str:
        """Return the reasons against PPO, or the risks to watch; it never recommends PPO."""
        if reasons := self.advice(STOP):
            return "Do not start PPO: " + "; ".join(reasons) + "."
        if risks := self.advice(WATCH):
            return "No objection to PPO, but watch: " + "; ".join(risks) + "."
        return "No objection to PPO."


def check_up(
    score: Score,
    pairs: Dataset,
    audited: dict[str, list[str]] | None = None,
    seed: int = 0,
) -> CheckUp:
    """Measure a reward model on held-out pairs (prompt, chosen, rejected) and on bad answers.

    ``score`` takes prompts and answers, as :class:`~rlhf_course.rewards.RewardModel` does. The
    audit uses the first 300 pairs. If ``audited`` is given, the audit uses its ``prompt`` and
    ``answer`` lists instead, and its other lists replace the generated bad answers. Generated
    answers can be four times as long as normal ones. Raises ``ValueError`` for fewer than 20 pairs,
    and ``FloatingPointError`` for NaN.
    """
    if len(pairs) < 20:
        raise ValueError(f"{len(pairs)} pairs are too few for a check-up; use 100 or more.")
    audited = plan_audit(pairs, audited, seed)
    prompts, answers = collect_texts(pairs, audited)
    known = score_once(score, prompts, answers)
    table = _score_pairs(known, pairs)
    probes = {name: texts for name, texts in audited.items() if name not in ("prompt", "answer")}
    audit_table = audit(known, audited["prompt"], audited["answer"], seed, probes)
    chosen = pairs["chosen"][:]
    findings = [
        *_accuracy(table, bag_of_words(chosen, pairs["rejected"][:], seed)),
        _length(table, chosen),
        _temperature(table),
        _alone(score, table, pairs["prompt"][:ALONE], chosen[:ALONE]),
        *_probes(audit_table, table),
    ]
    return CheckUp(findings, table, audit_table)


def plan_audit(
    pairs: Dataset, audited: dict[str, list[str]] | None = None, seed: int = 0
) -> dict[str, list[str]]:
    """Return the audit's texts: prompt, answer, and a list of bad answers for each probe."""
    if audited is None:
        audited = {"prompt": pairs["prompt"][:AUDITED], "answer": pairs["chosen"][:AUDITED]}
    if len(audited) > 2:
        return dict(audited)
    return audited | make_probes(audited["prompt"], audited["answer"], seed)


def collect_texts(pairs: Dataset, audited: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Return the prompts and the answers that a check-up scores, each combination once."""
    rows = [*zip(pairs["prompt"], pairs["chosen"], strict=True)]
    rows += zip(pairs["prompt"], pairs["rejected"], strict=True)
    for name, texts in audited.items():
        if name != "prompt":
            rows += zip(audited["prompt"], texts, strict=True)
    distinct = list(dict.fromkeys(rows))
    return [prompt for prompt, _ in distinct], [answer for _, answer in distinct]


def score_once(score: Score, prompts: list[str], answers: list[str]) -> Score:
    """Score all texts in one call; return a function that looks the scores up."""
    scores = require_finite(score(prompts, answers), answers)
    rows = zip(prompts, answers, strict=True)
    known = dict(zip(rows, scores.tolist(), strict=True))

    def look_up(prompts: Sequence[str], answers: Sequence[str]) -> Tensor:
        rows = zip(prompts, answers, strict=True)
        return torch.tensor([known[row] for row in rows], dtype=torch.float64)

    return look_up


def _score_pairs(score: Score, pairs: Dataset) -> pd.DataFrame:
    """Return one row per pair: both scores, the relative length gap, and which answer wins."""
    chosen = pairs["chosen"][:]
    rejected = pairs["rejected"][:]
    prompts = pairs["prompt"][:]
    table = pd.DataFrame({"chosen": score(prompts, chosen), "rejected": score(prompts, rejected)})
    chosen_length = np.array([len(text) for text in chosen])
    rejected_length = np.array([len(text) for text in rejected])
    mean_length = ((chosen_length + rejected_length) / 2).clip(min=1)
    table["longer"] = (chosen_length - rejected_length) / mean_length
    table["right"] = _wins(table["chosen"] - table["rejected"])
    return table


def _wins(difference) -> np.ndarray:
    """Return 1 for a positive, ½ for a zero, and 0 for a negative difference."""
    return (np.sign(np.asarray(difference)) + 1) / 2


def bag_of_words(chosen: Sequence[str], rejected: Sequence[str], seed: int = 0) -> np.ndarray:
    """Return (N,): 1 where the words' log-odds prefer the chosen answer, ½ for a tie, else 0.

    A pair's log-odds come from the other folds (naive Bayes, one added to each count).
    Words contain only the letters a to z. If no text has such a word, as in Chinese, each character
    is a word.
    """
    texts = [*chosen, *rejected]
    words = pd.Series([words_of(text) for text in texts])
    if not words.str.len().any():
        words = pd.Series([list(text) for text in texts])
    words = words.explode()
    counts = pd.crosstab(words.index, words).reindex(range(len(texts)), fill_value=0).to_numpy()
    first, second = np.split(counts, 2)
    fold = np.random.default_rng(seed).permutation(len(first)) % FOLDS
    right = np.zeros(len(first))
    for number in range(FOLDS):
        inside = fold == number
        chosen_counts = 1 + first[~inside].sum(0)
        rejected_counts = 1 + second[~inside].sum(0)
        odds = np.log(chosen_counts / rejected_counts)
        right[inside] = _wins((first[inside] - second[inside]) @ odds)
    return right


def _accuracy(table: pd.DataFrame, by_words: np.ndarray) -> list[Finding]:
    """Compare accuracy with chance (also at equal length) and with rules by length and by words."""
    right = table["right"]
    lower, text = _interval(right)
    margin = (table["chosen"] - table["rejected"]).mean()
    findings = [
        Finding(
            "Does it order held-out pairs?",
            f"accuracy {text}, mean margin {margin:.2f}",
            FINE if lower > 0.5 else STOP,
            "the model's order of held-out pairs may be chance",
        )
    ]
    baselines = {
        "the longer answer wins": (_wins(table["longer"]), STOP),
        "a bag of words": (by_words, WATCH),
    }
    for name, (baseline, level) in baselines.items():
        lower, text = _interval(right - baseline)
        question = f"Is it better than a rule: {name}?"
        measured = f"rule {np.mean(baseline):.3f}, difference {text}"
        advice = f"no gain over a rule is shown ({name})"
        findings.append(Finding(question, measured, FINE if lower > 0 else level, advice))
    equal = right[table["longer"].abs() <= EQUAL]
    lower, text = _interval(equal)
    if lower > 0.5:
        level = FINE
    elif len(equal) >= ENOUGH_PAIRS:
        level = STOP
    else:
        level = WATCH
    advice = "the model cannot order answers of equal length"
    measured = f"accuracy {text}, {len(equal)} pairs"
    return [*findings, Finding("And among answers of equal length?", measured, level, advice)]


def _interval(values) -> tuple[float, str]:
    """Return the lower end of the mean's 95 % interval, and the interval as text.

    For fewer than two values, the lower end is −inf and the text is "unknown".
    """
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
    level = FINE if 0.5 <= best <= 2 else WATCH
    advice = f"β: divide scores by {best:.1f} first"
    return Finding("Is it calibrated?", f"temperature {best:.2f}", level, advice)


def _alone(score: Score, table: pd.DataFrame, prompts: list[str], answers: list[str]) -> Finding:
    """Check that an answer gets the same score alone as in a batch."""
    alone = [
        float(score([prompt], [answer])[0]) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    in_batch = table["chosen"].to_numpy()[: len(alone)]
    gap = np.abs(in_batch - alone).max()
    level = FINE if gap <= 1e-3 * max(1.0, table["chosen"].std()) else STOP
    advice = "a score depends on the padding or on what else is in the batch"
    return Finding("Same score alone and in a batch?", f"largest gap {gap:.0e}", level, advice)


def _probes(audited: pd.DataFrame, pairs: pd.DataFrame) -> list[Finding]:
    """Return one finding per kind of bad answer.

    A kind outside ``ARGUABLE`` gets ``STOP`` if it usually beats the normal answer, by a mean
    margin of at least ``GAIN`` times the pairs' mean margin. ``GAIN`` is chosen, not measured.
    """
    usual = (pairs["chosen"] - pairs["rejected"]).mean()
    findings = []
    for name, row in audited.iterrows():
        wins = row["share"] + row["ci"] < 0.5 and -row["margin"] >= GAIN * usual
        level = STOP if wins and name not in ARGUABLE else WATCH
        level = FINE if row["share"] >= PASS else level
        share = f"{row['share']:.2f} ± {row['ci']:.2f}"
        measured = f"the normal answer wins {share}, mean margin {row['margin']:.2f}"
        advice = f"{name}: {row['risk']}".removesuffix(": ")
        findings.append(Finding(f"Bad answers: {name}", measured, level, advice))
    return findings
