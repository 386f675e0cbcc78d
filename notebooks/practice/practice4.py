"""Check exercise 4, budget: twenty PPO steps for trials and for the scored last run."""

import functools
import random

import numpy as np
import torch
from rlhf_course.evaluation import evaluate

from tiny_world import SAMPLING, draw_queries, make_trainer, score

BUDGET = 20
MAX_KL = 6.0
DEFAULT = {"init_kl_coef": 0.2, "learning_rate": 3e-4, "ppo_epochs": 4}
LIMITS = {"init_kl_coef": (0, 100), "learning_rate": (0, 1), "ppo_epochs": (1, 8)}
MARGIN = 0.4
UNSEEN = 3  # number of unseen seeds in a check


def _score_texts(queries: list[str], answers: list[str]) -> torch.Tensor:
    return score([torch.tensor([int(x) for x in answer.split()]) for answer in answers])


def measure(trainer) -> tuple[float, float]:
    """Return the mean score of 256 held-out queries, and the KL per response."""
    queries = draw_queries(torch.Generator().manual_seed(10**6), 256)
    table = evaluate(trainer, _score_texts, queries, seed=10**6, **SAMPLING)
    return float(table["score"].mean()), float(table["kl"].mean())


def run(settings: dict, steps: int, seed: int) -> tuple[float, float]:
    """Train for some steps; return held-out score and KL at the end."""
    trainer = make_trainer(seed, **settings, adap_kl_ctrl=False)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        queries = draw_queries(generator)
        responses = trainer.generate(queries, return_prompt=False, **SAMPLING)
        trainer.step(queries, responses, list(score(responses)))
    return measure(trainer)


@functools.lru_cache(maxsize=64)
def _kept(
    init_kl_coef: float, learning_rate: float, ppo_epochs: int, steps: int, seed: int
):
    settings = dict(zip(DEFAULT, (init_kl_coef, learning_rate, ppo_epochs)))
    try:
        return run(settings, steps, seed)
    except FloatingPointError:  # NaN or Inf: the policy has diverged
        return float("-inf"), float("inf")


class Budget:
    """Count the spent steps out of twenty; each trial spends some."""

    def __init__(self) -> None:
        self.spent = 0

    def try_run(self, settings: dict, steps: int, seed: int = 0) -> tuple[float, float]:
        """Spend ``steps`` on a trial; print and return held-out score and KL."""
        if problem := _problem(settings, steps):
            raise ValueError(problem)
        if self.spent + steps > BUDGET:
            raise ValueError(
                f"{steps} steps exceed the budget: {BUDGET - self.spent} are left."
            )
        self.spent += steps
        found = _kept(*(settings[key] for key in DEFAULT), steps, seed)
        print(
            f"score {found[0]:.2f}, KL {found[1]:.2f}; {BUDGET - self.spent} steps left"
        )
        return found


def _problem(settings, steps) -> str | None:
    """Return the problem with settings or a number of steps, or None."""
    if not isinstance(settings, dict) or set(settings) != set(DEFAULT):
        return f"settings must be a dict with the keys {', '.join(DEFAULT)}."
    for key, (low, high) in LIMITS.items():
        value = settings[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{key} is {value!r}; it must be a number."
        if not low <= value <= high:
            return f"{key} is {value}; it must be between {low} and {high}."
    if not isinstance(settings["ppo_epochs"], int):
        return f"ppo_epochs is {settings['ppo_epochs']}; it must be a whole number."
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        return f"steps is {steps!r}; it must be a whole number of at least 1."
    return None


def points(
    settings: dict, steps: int, seeds: list[int]
) -> list[tuple[float, float, float]]:
    """Return (points, score, KL) per seed; KL above 6 gives the untrained score."""
    start = run(DEFAULT, 0, 0)[0]
    found = [_kept(*(settings[key] for key in DEFAULT), steps, seed) for seed in seeds]
    return [(mean if kl <= MAX_KL else start, mean, kl) for mean, kl in found]


def verdict(
    answer: dict, budget: Budget, seed: int = 0, show=lambda line: None
) -> str | None:
    """Return what is wrong with an answer, or None; ``show`` gets each result line."""
    if not isinstance(answer, dict) or set(answer) != {"settings", "steps"}:
        return "the answer must be a dict with the keys settings and steps."
    settings, steps = answer["settings"], answer["steps"]
    if problem := _problem(settings, steps):
        return problem
    if budget.spent + steps > BUDGET:
        return f"{budget.spent} trial steps plus {steps} steps are more than {BUDGET}."
    seeds = random.Random(f"unseen {seed}").sample(range(10**4, 10**6), UNSEEN)
    yours, default = points(settings, steps, seeds), points(DEFAULT, BUDGET, seeds)
    for number, (mine, its) in enumerate(zip(yours, default), start=1):
        late = "" if mine[2] <= MAX_KL else f": more than {MAX_KL:g} nats"
        show(
            f"seed {number}: score {mine[1]:.2f}, KL {mine[2]:.2f}{late};"
            f" default: score {its[1]:.2f}, KL {its[2]:.2f}"
        )
    gain = np.mean([mine[0] - its[0] for mine, its in zip(yours, default)])
    show(f"points minus those of the default: {gain:+.2f}; needed: {MARGIN:+.2f}")
    if any(kl > MAX_KL for *_, kl in yours):
        return f"a run moves more than {MAX_KL:g} nats from the reference."
    return None if gain >= MARGIN else "your settings do not clearly beat the default."


def check(answer: dict, budget: Budget, seed: int = 0) -> None:
    """Train on unseen seeds and print the verdict."""
    problem = verdict(answer, budget, seed, print)
    print(f"✘ {problem}" if problem else "✔ The budget is well spent.")
