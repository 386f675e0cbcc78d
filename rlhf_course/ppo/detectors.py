"""Detect symptoms of a failing run in its statistics; notebook 06 provokes each symptom."""

import warnings
from collections.abc import Callable

import numpy as np

FIRST = 3  # steps that represent the start of a run, or its end


def reference_differs(history: list[dict], target: float) -> str | None:
    """Return a warning if KL is not 0 at the first step, where policy and reference are equal."""
    kl = history[0]["objective/kl"]
    if history[0]["step"] == 0 and len(history) == 1 and abs(kl) > 0.05:
        return (
            f"the KL is {kl:.2f} nats although nothing has been trained: is an adapter missing from"
            " the reference? Leave ref_model out for a frozen copy of the policy."
        )


def negative_kl(history: list[dict], target: float) -> str | None:
    """Return a warning if a step's mean KL is below 0 by more than chance."""
    kl = np.asarray(history[-1]["objective/kl_dist"])
    if kl.mean() < -3 * kl.std() / np.sqrt(len(kl)) - 0.05:
        return (
            f"the KL is {kl.mean():.2f} nats; below 0 it measures nothing. Sample from the"
            " distribution that is scored: top_k=0, top_p=1.0, no penalties; score every token."
        )


def empty_answers(history: list[dict], target: float) -> str | None:
    """Return a warning if most responses now have at most one token before EOS."""
    lengths = (np.asarray(row["tokens/responses_dist"]) for row in (history[0], history[-1]))
    at_first, now = (float((x <= 2).mean()) for x in lengths)
    if at_first < 0.25 and now > 0.5:
        return (
            f"{now:.0%} of the responses are one or two tokens ({at_first:.0%} at first). The"
            " reward model scores empty answers high: train it with empty answers as rejected"
            " ones."
        )


def shorter_answers(history: list[dict], target: float) -> str | None:
    """Return a warning if responses lost more than a third of their length."""
    lengths = [np.mean(row["tokens/responses_dist"]) for row in history]
    before, now = np.mean(lengths[:FIRST]), np.mean(lengths[-FIRST:])
    if len(lengths) > FIRST and now < 0.65 * before:
        return (
            f"responses have shrunk from {before:.0f} to {now:.0f} tokens. Read some: where they"
            " got worse, the reward model rewards brevity. Balance the pairs by length, and add"
            " truncated answers as rejected ones."
        )


def far_from_reference(history: list[dict], target: float) -> str | None:
    """Return a warning if KL exceeds three times its target: the policy may exploit the proxy."""
    kl = history[-1]["objective/kl"]
    if kl > 3 * target:
        return (
            f"the KL is {kl:.1f} nats per response; the target is {target:g}. Here the score may"
            " measure the reward model's mistakes (arXiv:2210.10760). Raise init_kl_coef or stop"
            " earlier."
        )


DETECTORS: dict[str, Callable[[list[dict], float], str | None]] = {
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
        self.target, self.history, self.fired = target, [], {}

    def check(self, stats: dict, step: int) -> None:
        """Check one step's statistics; warn (``UserWarning``) at most once per detector."""
        keys = ("objective/kl", "objective/kl_dist", "tokens/responses_dist")
        row = {key: np.asarray(stats[key]).tolist() for key in keys}
        self.history.append({"step": step} | row)
        del self.history[FIRST : -FIRST - 1]  # keep the run's first and latest steps
        for name, detect in DETECTORS.items():
            if name not in self.fired and (message := detect(self.history, self.target)):
                self.fired[name] = step
                warnings.warn(f"Step {step + 1}, {name}: {message}", stacklevel=3)

    def state_dict(self) -> dict:
        """Return the statistics and warnings so far, as plain numbers and strings."""
        return {"history": self.history, "fired": self.fired}

    def load_state_dict(self, state: dict) -> None:
        self.history, self.fired = list(state["history"]), dict(state["fired"])
