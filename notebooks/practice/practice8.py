"""Check exercise 8 ("Is GRPO better?"): simulate experiments with a known effect.

A run's score is the method's mean, plus noise that all runs with the same seed share,
plus the run's own noise. Both are normal; their sizes differ between experiments.
"""

import functools
import secrets

import numpy as np
from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import read_json

BUDGET = 12  # training runs in all
EXPERIMENTS = 2000
MISSES = 0.07  # 95 % intervals miss 5 %; 2,000 experiments measure this to ± 1 point
WIDTH = 1.5  # relative to an interval that uses the true noise
EFFECTS = 0.0, 0.0, 0.5, 1.0, -1.0, 2.0  # in standard deviations of a single run


@functools.lru_cache(maxsize=64)
def t_quantile(p: float, df: float) -> float:
    """Return the quantile p > 0.5 of Student's t with df ≥ 1 degrees of freedom."""
    x = np.tan(np.linspace(0, np.pi / 2, 20_001)[:-1])
    density = (1 + x**2 / df) ** (-(df + 1) / 2) * (1 + x**2)
    area = np.concatenate([[0], (density[1:] + density[:-1]).cumsum()])
    return float(np.interp(2 * p - 1, area / area[-1], x))


def as_seeds(seeds) -> tuple[list[int], list[int]]:
    """Return both lists of seeds; raise ``ValueError`` for unusable seeds."""
    lists = [list(some) for some in seeds]
    if len(lists) != 2 or not all(lists):
        raise ValueError(
            f"seeds must be two nonempty lists, PPO's and GRPO's; got {seeds}."
        )
    if not all(isinstance(x, int | np.integer) for some in lists for x in some):
        raise ValueError(f"Every seed must be a whole number; got {lists}.")
    if (total := sum(map(len, lists))) > BUDGET:
        raise ValueError(f"{total} runs exceed the budget of {BUDGET}. Drop seeds.")
    return lists[0], lists[1]


def simulate(lists: tuple[list[int], list[int]], seed: int):
    """Return two methods' scores, (E, runs) each, and three arrays (E,).

    The arrays are the true difference, the noise's standard deviation, and the share of
    the noise that runs with the same seed have in common.
    """
    dice = np.random.default_rng(seed)
    known = sorted(set(lists[0]) | set(lists[1]))
    size = np.exp(dice.uniform(np.log(0.02), np.log(2), EXPERIMENTS))
    alike = dice.uniform(
        0.6, 0.9, EXPERIMENTS
    )  # correlation of runs with the same seed
    effect = size * np.resize(EFFECTS, EXPERIMENTS)
    mean = size * dice.normal(0, 3, EXPERIMENTS)
    common = dice.normal(size=(EXPERIMENTS, len(known))) * (size * alike**0.5)[:, None]
    own = (
        dice.normal(size=(2, EXPERIMENTS, len(known)))
        * (size * (1 - alike) ** 0.5)[:, None]
    )
    by_seed = mean[:, None] + common + own
    by_seed[1] += effect[:, None]
    scores = [by_seed[i][:, [known.index(x) for x in lists[i]]] for i in (0, 1)]
    return scores, effect, size, alike


def intervals(interval, scores: list[np.ndarray]) -> np.ndarray:
    """Return the intervals that a student's function computes, (E, 2)."""
    found = []
    for ppo, grpo in zip(*scores):
        low, high = map(float, interval(ppo.copy(), grpo.copy()))
        if not low <= high:
            raise ValueError(f"The interval must have low ≤ high; got ({low}, {high}).")
        found.append((low, high))
    return np.array(found)


def check(seeds, interval, seed: int | None = None) -> bool:
    """Print misses and width over simulated experiments; return whether both pass."""
    seed = secrets.randbelow(10**6) if seed is None else seed
    try:
        lists = as_seeds(seeds)
        scores, effect, size, alike = simulate(lists, seed)
        found = intervals(interval, scores)
    except NotImplementedError:
        print("✘ Not written yet: return (low, high).")
        return False
    except Exception as error:
        print(f"✘ {type(error).__name__}: {error}")
        return False
    low, high = found.T
    missed = ((low > effect) | (high < effect)).mean()
    best = 2 * 1.96 * size * (2 * (1 - alike) / (BUDGET // 2)) ** 0.5
    width = ((high - low) / best).mean()
    honest, narrow = missed <= MISSES, width <= WIDTH
    said = "✔" if honest else "✘ overclaimed:"
    print(f"{said} {missed:.1%} of the intervals miss the truth; limit {MISSES:.0%}")
    said = "✔" if narrow else "✘ too wide:"
    print(f"{said} {width:.2f} times the best width; limit {WIDTH}")
    claims = (low > 0) | (high < 0)
    for units in (0.0, 0.5, 1.0, 2.0):
        share = claims[np.isclose(np.abs(effect), units * size)].mean()
        print(
            f"  true difference {units:g} standard deviations: claimed in {share:.0%}"
        )
    print(f"  `check(seeds, interval, seed={seed})` repeats these experiments.")
    return bool(honest and narrow)


def recorded(what: str = "J") -> tuple[np.ndarray, np.ndarray]:
    """Return a held-out statistic of notebook 07's PPO and GRPO runs, (5,) each.

    ``what`` is the statistic: "J" (score − β·KL), "score" or "KL".
    """
    folder, seeds = ROOT / "figs" / "measured" / "methods", range(5)
    names = [
        [next(folder.glob(f"{m}-[0-9]*-{seed}.json")) for seed in seeds]
        for m in ("ppo", "grpo")
    ]
    rows = [
        [read_json(path)["held_out"][-1][what] for path in paths] for paths in names
    ]
    return np.array(rows[0]), np.array(rows[1])
