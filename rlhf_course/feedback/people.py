"""Simulated people, who compare texts by a hidden taste; programs, not recorded persons."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

WORDS = {
    "people": "actor actors actress cast character characters role roles played plays "
    "performance performances acting star stars director he she his her man woman "
    "girl guy people",
    "good": "great wonderful excellent best love loved good beautiful amazing perfect "
    "brilliant fun funny enjoyed superb fantastic favorite masterpiece impressed "
    "classic",
    "bad": "bad worst boring awful terrible poor stupid waste dull horrible",
    "me": "i me my i'm i've i'd i'll myself",
    "loud": "! very so really ever never best worst most all extremely absolutely must "
    "nothing every totally",
}


@cache
def count_words(name: str, text: str) -> int:
    """Return how many words of a text occur in ``WORDS[name]``."""
    listed = set(WORDS[name].split())
    return sum(word in listed for word in re.findall(r"[a-z']+|!", text.lower()))


TASTES: dict[str, Callable[[str], int]] = {
    "people and acting": lambda text: min(count_words("people", text), 4),
    "praise": lambda text: count_words("good", text) - count_words("bad", text),
    "the first person": lambda text: min(count_words("me", text), 4),
    "calm": lambda text: -min(count_words("loud", text), 4),
}


class SimulatedPerson:
    """Answer questions by a hidden utility plus noise; call a person with a question.

    ``pool`` is a list of texts whose utilities set the unit: over the pool, the utility has mean 0
    and standard deviation 1. ``settings`` has the noise: ``sharpness`` (nats of log-odds per unit
    of utility), ``tired`` and ``rest`` (attention shrinks with each question until a rest),
    ``left`` (log-odds for the first text) and ``equal`` (smaller differences are called equal).
    """

    def __init__(self, taste: str, seed: int, pool: Sequence[str], settings) -> None:
        self.taste = taste
        self.settings = settings
        self.generator = np.random.default_rng(seed)
        self.questions = 0
        values = self._raw_utility(pool)
        self.mean = values.mean()
        self.std = values.std()

    def _raw_utility(self, texts: Sequence[str]) -> np.ndarray:
        taste = TASTES[self.taste]
        return np.array([taste(text) for text in texts], float)

    def utility(self, texts: Sequence[str]) -> np.ndarray:
        """Return the hidden utility (N,), in standard deviations of the pool."""
        return (self._raw_utility(texts) - self.mean) / self.std

    def __call__(self, question: dict) -> int | str:
        """Return the chosen text's place, or ``"equal"``."""
        settings = self.settings
        attention = np.exp(-settings.tired * (self.questions % settings.rest))
        self.questions += 1
        utility = self.utility(question["texts"])
        if question.get("ask") == "worst":
            utility = -utility
        # Gumbel noise gives the Bradley-Terry model for two texts, and a softmax for more.
        noise = self.generator.gumbel(size=len(utility))
        value = settings.sharpness * attention * utility + noise
        value[0] += settings.left
        if np.ptp(value) < settings.equal:
            return "equal"
        return int(value.argmax())
