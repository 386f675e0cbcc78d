"""What the grammars of the embedded world share: their tables, choices among options, and pairs
with a verdict.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


@dataclass(frozen=True)
class Pair:
    """A prompt, two different answers, and the gold utility of each in nats."""

    prompt: str
    chosen: str
    rejected: str
    gold_chosen: float
    gold_rejected: float


def load(name: str) -> dict:
    """The tables of grammars/NAME.yaml."""
    return yaml.safe_load(
        (Path(__file__).parent / "grammars" / f"{name}.yaml").read_text(encoding="utf-8")
    )


def pick(rng: random.Random, options: list[str], about: str = "") -> str:
    """One option, with ``about`` in place of {} and one of each (this/that) drawn."""
    return re.sub(
        r"\((.*?)\)", lambda m: rng.choice(m[1].split("/")), rng.choice(options).format(about)
    )


def some(rng: random.Random, options: list, count: int) -> list:
    """So many of the options, in their order."""
    return [options[i] for i in sorted(rng.sample(range(len(options)), count))]


def sentences(text: str) -> list[list[str]]:
    """The words of each English sentence that has any, in lower case; a line end ends a sentence,
    too.
    """
    found = (WORD.findall(part) for part in re.split(r"[.!?\n]", text.lower()))
    return [words for words in found if words]


def draw_pair(
    rng: random.Random,
    prompt: str,
    draw: Callable[[], str],
    gold_utility: Callable[[str, str], float],
) -> Pair:
    """Two different answers and a noisy verdict: a beats b with probability sigmoid(utility of a -
    utility of b).

    That is the model of Bradley and Terry, "Rank analysis of incomplete block designs", Biometrika
    39, 1952.
    """
    a = b = draw()
    while a == b:
        b = draw()
    u_a, u_b = gold_utility(prompt, a), gold_utility(prompt, b)
    a_wins = rng.random() < 1 / (1 + math.exp(u_b - u_a))
    return Pair(prompt, a, b, u_a, u_b) if a_wins else Pair(prompt, b, a, u_b, u_a)


def ceiling(pairs: list[Pair]) -> float:
    """The best accuracy (0 to 1) a reward model can expect: the mean of sigmoid(|gold gap|)."""
    return sum(1 / (1 + math.exp(-abs(p.gold_chosen - p.gold_rejected))) for p in pairs) / len(
        pairs
    )
