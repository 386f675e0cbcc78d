"""Load both grammars' tables, draw from them, and draw pairs with a verdict."""

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
    """Store a prompt, two different answers, and their gold utilities in nats."""

    prompt: str
    chosen: str
    rejected: str
    gold_chosen: float
    gold_rejected: float


def load(name: str) -> dict:
    """Return the tables in grammars/``name``.yaml."""
    file = Path(__file__).parent / "grammars" / f"{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def pick(rng: random.Random, options: list[str], about: str = "") -> str:
    """Draw an option, then a choice from each (this/that) in it; ``about`` replaces {}."""
    text = rng.choice(options).format(about)
    return re.sub(r"\((.*?)\)", lambda m: rng.choice(m[1].split("/")), text)


def sample_in_order(rng: random.Random, options: list, count: int) -> list:
    """Draw ``count`` different options, and return them in their original order."""
    indices = rng.sample(range(len(options)), count)
    return [options[i] for i in sorted(indices)]


def sentences(text: str) -> list[list[str]]:
    """Return the lowercased words of each English sentence or line that has words."""
    all_words = [WORD.findall(sentence) for sentence in re.split(r"[.!?\n]", text.lower())]
    return [words for words in all_words if words]


def draw_pair(
    rng: random.Random,
    prompt: str,
    draw: Callable[[], str],
    gold_utility: Callable[[str, str], float],
) -> Pair:
    """Draw two different answers; a is chosen over b with probability sigmoid(u_a − u_b).

    This is Bradley and Terry's model, Biometrika 39, 1952.
    """
    a = draw()
    b = draw()
    while a == b:
        b = draw()
    u_a = gold_utility(prompt, a)
    u_b = gold_utility(prompt, b)
    a_wins = rng.random() < 1 / (1 + math.exp(u_b - u_a))
    if a_wins:
        return Pair(prompt, chosen=a, rejected=b, gold_chosen=u_a, gold_rejected=u_b)
    return Pair(prompt, chosen=b, rejected=a, gold_chosen=u_b, gold_rejected=u_a)
