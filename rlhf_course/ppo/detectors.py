"""Detect symptoms of a failing run in its statistics; notebook 06 provokes some of them.

A rule maps a table of statistics (a row per step, indexed from step 1) to a bool per row, and every
threshold is stated in one rule. After each step, the trainer applies the five rules in
``DETECTORS``; scripts/read_log.py applies :func:`rules` to a finished log. symptoms.yaml has each
symptom's causes and fixes.
"""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from rlhf_course.ppo.config import PPOConfig

STOP = "stop"
WATCH = "watch"
FIRST = 3  # steps that represent the start of a run, or its end
CONFIRMING = 5  # rows of a log that confirm a symptom

# Columns of the table.
SCORE = "ppo/mean_scores"
KL = "objective/kl"
LENGTH = "tokens/responses_len_mean"
RATE = "ppo/learning_rate"
ENTROPY = "objective/entropy"
GRADIENT = "gradient norm"
CLIPFRAC = "ppo/policy/clipfrac"
CRITIC = "ppo/val/var_explained_before"
CUT = "cut responses"
DEAD = "groups without signal"
HELD_OUT_LOSS = "held-out loss"
ACCURACY = "accuracy"
BELOW_CHANCE = 0.4  # an accuracy that noise does not explain
MARGIN = "margin"
CHOSEN_REWARD = "chosen reward"
# Columns that only the trainer has, because they need each sample's KL and length.
KL_ERROR = "standard error of the mean KL"
EMPTY = "share of responses of one or two tokens"


def smooth(values: pd.Series, rows: int = 5) -> pd.Series:
    return values.rolling(rows).mean()


def against_start(values: pd.Series) -> pd.Series:
    """Return a smoothed column, divided by the mean of the column's first values."""
    return smooth(values, FIRST) / values.iloc[:FIRST].mean()


def every_row(log: pd.DataFrame, holds: bool) -> pd.Series:
    return pd.Series(bool(holds), index=log.index)


def starts_apart(log: pd.DataFrame) -> pd.Series:
    """Return whether the first step's KL exceeds noise: both 0.05 nats and 0.002 nats per token."""
    is_first = (log.index <= 1) & (log.index == log.index[0])
    distance = log[KL].abs()
    return (distance > 0.05) & (distance > 0.002 * log[LENGTH]) & is_first


def has_tiny_rate(log: pd.DataFrame) -> pd.Series:
    """Return whether the largest learning rate is near 0."""
    return every_row(log, log[RATE].max() < 1e-7)


def is_negative(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether KL is below 0 by more than 0.05 nats and by more than chance.

    Three standard errors are chance. If the table lacks them, the rule averages five rows.
    """
    if KL_ERROR in log:
        return log[KL] < -3 * log[KL_ERROR] - 0.05
    return smooth(log[KL]) < -0.05


def is_far(log: pd.DataFrame, target: float) -> pd.Series:
    """Return, per row, whether KL exceeds three times its target."""
    return log[KL] > 3 * target


def becomes_empty(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether responses of one or two tokens, rare at first, are the majority."""
    return (log[EMPTY] > 0.5) & (log[EMPTY].iloc[0] < 0.25)


def becomes_shorter(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether responses have lost more than a third of their length."""
    return against_start(log[LENGTH]) < 0.65


def has_useless_critic(log: pd.DataFrame) -> pd.Series:
    """Return, for rows after the twentieth, whether the critic explains none of the variance."""
    return smooth(log[CRITIC], 10).iloc[20:] < 0


def has_flat_score(log: pd.DataFrame) -> pd.Series:
    """Return whether the first and last thirds' mean scores differ by under 2 standard errors."""
    third = len(log) // 3
    if third < 5:
        return every_row(log, False)
    first = log[SCORE].iloc[:third]
    last = log[SCORE].iloc[-third:]
    error = math.sqrt((first.var() + last.var()) / third)
    return every_row(log, abs(last.mean() - first.mean()) < 2 * error)


def has_falling_score(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether the score falls: from the first third of the log to the last.

    The means must differ by more than 3 standard errors, and the row's smoothed score must be
    below the first third's mean.
    """
    third = len(log) // 3
    if third < FIRST:
        return every_row(log, False)
    first = log[SCORE].iloc[:third]
    last = log[SCORE].iloc[-third:]
    error = math.sqrt((first.var() + last.var()) / third)
    falls = first.mean() - last.mean() > 3 * error
    return falls & (smooth(log[SCORE], FIRST) < first.mean())


def overfits(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether held-out loss exceeds its minimum so far by more than 5 %."""
    held_out = log[HELD_OUT_LOSS].ffill()
    return held_out > 1.05 * held_out.cummin()


def turns_round(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether smoothed accuracy has fallen below one half.

    It has if it is below 0.45 after it was above 0.55, or below 0.4 after the first 20 rows: DPO
    begins with equal rewards, which count as wrong.
    """
    accuracy = smooth(log[ACCURACY])
    has_turned = (accuracy < 0.45) & (accuracy.cummax() > 0.55)
    is_low = smooth(log[ACCURACY], 10) < BELOW_CHANCE
    is_low.iloc[:20] = False
    return has_turned | is_low


def stays_at_chance(log: pd.DataFrame) -> pd.Series:
    accuracy = smooth(log[ACCURACY], 10).iloc[20:]
    return (accuracy >= BELOW_CHANCE) & (accuracy < 0.53)


def has_no_margin(log: pd.DataFrame) -> pd.Series:
    """Return, for rows after the first, whether the margin is exactly 0."""
    return log[MARGIN].iloc[1:] == 0


def loses_chosen(log: pd.DataFrame) -> pd.Series:
    """Return, per row, whether the chosen answers' reward falls while the margin grows."""
    return (smooth(log[CHOSEN_REWARD]) < -1) & (smooth(log[MARGIN]) > 0.5)


def has_no_gradient(log: pd.DataFrame) -> pd.Series:
    return log[GRADIENT] < 1e-8


def clips_often(log: pd.DataFrame) -> pd.Series:
    return log[CLIPFRAC] > 0.4


def becomes_longer(log: pd.DataFrame) -> pd.Series:
    return against_start(log[LENGTH]) > 1.5


def is_often_cut(log: pd.DataFrame) -> pd.Series:
    return log[CUT] > 0.5


def loses_entropy(log: pd.DataFrame) -> pd.Series:
    return against_start(log[ENTROPY]) < 0.2


def has_dead_groups(log: pd.DataFrame) -> pd.Series:
    return log[DEAD] > 0.8


class Rule(NamedTuple):
    """Detect a symptom: ``holds`` maps the table to a bool per row."""

    symptom: str  # an id in symptoms.yaml
    level: str
    needs: tuple[str, ...]  # columns; the first shows when the symptom began
    holds: Callable[[pd.DataFrame], pd.Series]
    lasts: int = 1  # rows of a log for which the symptom must hold
    is_trend: bool = True  # whether the symptom can begin before it is detected


def rules(target: float = PPOConfig.target) -> list[Rule]:
    """Return all rules; ``target`` is the KL controller's target, in nats per response."""

    return [
        Rule("KL at the start", STOP, (KL, LENGTH), starts_apart, is_trend=False),
        Rule("negative KL", STOP, (KL,), is_negative),
        Rule("far", WATCH, (KL,), lambda log: is_far(log, target), lasts=3),
        Rule("tiny rate", STOP, (RATE,), has_tiny_rate, is_trend=False),
        Rule("no gradient", STOP, (GRADIENT,), has_no_gradient, lasts=3),
        Rule("clipfrac large", WATCH, (CLIPFRAC,), clips_often, lasts=3),
        Rule("critic", WATCH, (CRITIC,), has_useless_critic),
        Rule("flat score", WATCH, (SCORE,), has_flat_score, is_trend=False),
        Rule("score falls", WATCH, (SCORE,), has_falling_score, lasts=FIRST),
        Rule("shorter", WATCH, (LENGTH,), becomes_shorter),
        Rule("longer", WATCH, (LENGTH,), becomes_longer),
        Rule("cut", WATCH, (CUT,), is_often_cut, lasts=CONFIRMING),
        Rule("entropy", STOP, (ENTROPY,), loses_entropy),
        Rule("dead groups", WATCH, (DEAD,), has_dead_groups, lasts=CONFIRMING),
        Rule("overfit", WATCH, (HELD_OUT_LOSS,), overfits),
        Rule("swapped", STOP, (ACCURACY,), turns_round, lasts=CONFIRMING, is_trend=False),
        Rule("no margin", STOP, (MARGIN,), has_no_margin, lasts=CONFIRMING, is_trend=False),
        Rule("chance", WATCH, (ACCURACY,), stays_at_chance),
        Rule("chosen falls", WATCH, (CHOSEN_REWARD, MARGIN), loses_chosen),
    ]


# The warnings of a running trainer. Each uses a rule above, in the newest row of the table.


def reference_differs(log: pd.DataFrame, target: float) -> str | None:
    """Return a warning if KL is not 0 at the first step, where policy and reference are equal."""
    if not starts_apart(log).iloc[-1]:
        return None
    return (
        f"the KL is {log[KL].iloc[-1]:.2f} nats although nothing has been trained: is an adapter"
        " missing from the reference? Leave ref_model out for a frozen copy of the policy."
    )


def negative_kl(log: pd.DataFrame, target: float) -> str | None:
    """Return a warning if a step's mean KL is below 0 by more than chance."""
    if not is_negative(log).iloc[-1]:
        return None
    return (
        f"the KL is {log[KL].iloc[-1]:.2f} nats; below 0 it measures nothing. Sample from the"
        " distribution that is scored: top_k=0, top_p=1.0, no penalties; score every token."
    )


def empty_answers(log: pd.DataFrame, target: float) -> str | None:
    """Return a warning if most responses now have at most one token before EOS."""
    if not becomes_empty(log).iloc[-1]:
        return None
    before = log[EMPTY].iloc[0]
    now = log[EMPTY].iloc[-1]
    return (
        f"{now:.0%} of the responses are one or two tokens ({before:.0%} at first). The reward"
        " model scores empty answers high: train it with empty answers as rejected ones."
    )


def shorter_answers(log: pd.DataFrame, target: float) -> str | None:
    """Return a warning if responses lost more than a third of their length."""
    if not becomes_shorter(log).iloc[-1]:
        return None
    before = log[LENGTH].iloc[:FIRST].mean()
    now = log[LENGTH].iloc[-FIRST:].mean()
    return (
        f"responses have shrunk from {before:.0f} to {now:.0f} tokens. Read some: where they"
        " got worse, the reward model rewards brevity. Balance the pairs by length, and add"
        " truncated answers as rejected ones."
    )


def far_from_reference(log: pd.DataFrame, target: float) -> str | None:
    """Return a warning if KL exceeds three times its target: the policy may exploit the proxy."""
    if not is_far(log, target).iloc[-1]:
        return None
    return (
        f"the KL is {log[KL].iloc[-1]:.1f} nats per response; the target is {target:g}. Here the"
        " score may measure the reward model's mistakes (arXiv:2210.10760). Raise init_kl_coef or"
        " stop earlier."
    )


DETECTORS: dict[str, Callable[[pd.DataFrame, float], str | None]] = {
    "reference differs": reference_differs,
    "negative KL": negative_kl,
    "empty answers": empty_answers,
    "shorter answers": shorter_answers,
    "far from the reference": far_from_reference,
}


class Detectors:
    """Run all detectors during one run; ``fired`` maps a detector to the step at which it warned.

    ``target`` is the KL controller's target, in nats. "negative KL" can warn only if ``kl_penalty``
    is ``kl``.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.history: list[dict] = []
        self.fired: dict[str, int] = {}

    def check(self, stats: dict, step: int) -> None:
        """Check one step's statistics; warn (``UserWarning``) at most once per detector."""
        keys = ("objective/kl", "objective/kl_dist", "tokens/responses_dist")
        row = {key: np.asarray(stats[key]).tolist() for key in keys}
        self.history.append({"step": step} | row)
        del self.history[FIRST : -FIRST - 1]  # keep the run's first and latest steps
        log = self.table()
        for name, detect in DETECTORS.items():
            if name in self.fired:
                continue
            message = detect(log, self.target)
            if message is not None:
                self.fired[name] = step
                warnings.warn(f"Step {step + 1}, {name}: {message}", stacklevel=3)

    def table(self) -> pd.DataFrame:
        """Return the table of statistics that the rules read."""
        rows = []
        for row in self.history:
            kl = np.asarray(row["objective/kl_dist"])
            lengths = np.asarray(row["tokens/responses_dist"])
            statistics = {
                KL: row["objective/kl"],
                KL_ERROR: kl.std() / np.sqrt(len(kl)),
                LENGTH: lengths.mean(),
                EMPTY: (lengths <= 2).mean(),
            }
            rows.append(statistics)
        return pd.DataFrame(rows, index=[row["step"] + 1 for row in self.history])

    def state_dict(self) -> dict:
        """Return the statistics and warnings so far, as plain numbers and strings."""
        return {"history": self.history, "fired": self.fired}

    def load_state_dict(self, state: dict) -> None:
        self.history = list(state["history"])
        self.fired = dict(state["fired"])
