"""Check whether a reward model is good enough to start PPO."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from datasets import Dataset
from torch import Tensor

from rlhf_course.audit.probes import ARGUABLE, PASS, audit
from rlhf_course.evaluation import mean_ci, words_of
from rlhf_course.rewards import require_finite

Score = Callable[[Sequence[str], Sequence[str]], Tensor]
STOP, WATCH, FINE = "stop", "watch", "fine"
EQUAL, GAIN = 0.1, 0.25  # relative differences in length and in score
PROBED, FOLDS = 300, 5


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
        """Return a sentence on whether to start PPO: the reasons not to, or the risks to watch."""
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
    audit uses the first 300 pairs. If ``audited`` is given, the audit uses its ``prompt`` and
    ``answer`` lists instead, and its other lists replace the generated bad answers. Generated
    answers can be four times as long as normal ones. Raises ``ValueError`` for fewer than 20 pairs,
    and ``FloatingPointError`` for NaN.
    """
    if len(pairs) < 20:
        raise ValueError(f"{len(pairs)} pairs are too few for a check-up; use 100 or more.")
    columns = {name: pairs[name][:] for name in ("prompt", "chosen", "rejected")}
    table = _score_pairs(score, **columns)
    some = {"prompt": columns["prompt"][:PROBED], "answer": columns["chosen"][:PROBED]}
    own = dict(audited or some)
    probes = audit(score, own.pop("prompt"), own.pop("answer"), seed, own)
    findings = [
        *_accuracy(table, bag_of_words(columns["chosen"], columns["rejected"], seed)),
        _length(table, columns["chosen"]),
        _temperature(table),
        _alone(score, table, columns["prompt"], columns["chosen"]),
        *_probes(probes, table),
    ]
    return CheckUp(findings, table, probes)


def _score_pairs(score: Score, prompt, chosen, rejected) -> pd.DataFrame:
    sides = {"chosen": chosen, "rejected": rejected}.items()
    table = pd.DataFrame({k: require_finite(score(prompt, x), x).double() for k, x in sides})
    sizes = np.array([(len(a), len(b)) for a, b in zip(chosen, rejected, strict=True)])
    table["longer"] = (sizes[:, 0] - sizes[:, 1]) / sizes.mean(1).clip(min=1)
    return table.assign(right=_half_for_ties(table["chosen"] - table["rejected"]))


def _half_for_ties(difference) -> np.ndarray:
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
    words = (words if words.str.len().any() else pd.Series([*map(list, texts)])).explode()
    counts = pd.crosstab(words.index, words).reindex(range(len(texts)), fill_value=0).to_numpy()
    first, second = np.split(counts, 2)
    fold = np.random.default_rng(seed).permutation(len(first)) % FOLDS
    right = np.zeros(len(first))
    for part in range(FOLDS):
        others, own = fold != part, fold == part
        odds = np.log((1 + first[others].sum(0)) / (1 + second[others].sum(0)))
        right[own] = _half_for_ties((first[own] - second[own]) @ odds)
    return right


def _accuracy(table: pd.DataFrame, by_words: np.ndarray) -> list[Finding]:
    """Compare accuracy with chance (also at equal length) and with rules by length and by words."""
    right = table["right"]
    lower, text = _interval(right)
    findings = [
        Finding(
            "Does it order held-out pairs?",
            f"accuracy {text}, mean margin {(table['chosen'] - table['rejected']).mean():.2f}",
            FINE if lower > 0.5 else STOP,
            "the model's order of held-out pairs may be chance",
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
        advice = f"no gain over a rule is shown ({name})"
        findings.append(Finding(question, measured, FINE if lower > 0 else level, advice))
    equal = right[table["longer"].abs() <= EQUAL]
    lower, text = _interval(equal)
    level = FINE if lower > 0.5 else STOP if len(equal) >= 100 else WATCH
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
    level, advice = FINE if 0.5 <= best <= 2 else WATCH, f"β: divide scores by {best:.1f} first"
    return Finding("Is it calibrated?", f"temperature {best:.2f}", level, advice)


def _alone(score: Score, table: pd.DataFrame, prompts, answers, some: int = 16) -> Finding:
    """Check that an answer gets the same score alone as in a batch."""
    alone = [float(score([p], [a])[0]) for p, a in zip(prompts[:some], answers[:some], strict=True)]
    gap = np.abs(table["chosen"].to_numpy()[: len(alone)] - alone).max()
    level = FINE if gap <= 1e-3 * max(1.0, table["chosen"].std()) else STOP
    advice = "a score depends on the padding or on what else is in the batch"
    return Finding("Same score alone and in a batch?", f"largest gap {gap:.0e}", level, advice)


def _probes(audited: pd.DataFrame, pairs: pd.DataFrame) -> list[Finding]:
    """Return one finding per kind of bad answer.

    A kind outside ``ARGUABLE`` gets ``STOP`` if it usually beats the normal answer, by a mean
    margin of at least ``GAIN`` times the pairs' mean margin. ``GAIN`` is chosen, not measured.
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
