"""Check exercise 1, diagnose: six runs of a tiny policy, most of which have a fault.

The runs are real PPO runs. Each fault begins at some step and lasts until the end.
"""

import functools
import numbers
import random

import numpy as np
import pandas as pd

from planted_runs import FAULTS, HEALTHY, STEPS, make_run

RUNS = "ABCDEF"


@functools.lru_cache(maxsize=4)
def plan(seed: int) -> dict[str, tuple[int, str, int]]:
    """Map each run to (seed, fault, first step); at least one run is healthy."""
    dice = random.Random(seed)
    faults = dice.sample([name for name in FAULTS if name != "healthy"], 5) + [
        "healthy"
    ]
    dice.shuffle(faults)
    return {
        run: (
            1000 + 10 * seed + i,
            fault,
            STEPS if fault == "healthy" else dice.randint(5, 9),
        )
        for i, (run, fault) in enumerate(zip(RUNS, faults))
    }


@functools.lru_cache(maxsize=4)
def runs(seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return the six runs of an instance."""
    return {run: _visible_run(*what) for run, what in plan(seed).items()}


def _visible_run(seed: int, fault: str, first: int) -> pd.DataFrame:
    """Return a run; change its seed until at least three statistics are witnesses."""
    while True:
        run = make_run(seed, fault, first)
        if fault == "healthy" or sum(separates(run, key, first) for key in run) >= 3:
            return run
        seed += 10**6


@functools.lru_cache(maxsize=1)
def healthy_runs() -> list[pd.DataFrame]:
    """Return the healthy runs of the same policy from healthy.csv."""
    table = pd.read_csv(HEALTHY, index_col=["run", "step"])
    return [run.droplevel("run") for _, run in table.groupby(level="run")]


def separates(run: pd.DataFrame, key: str, first: int) -> bool:
    """Return whether a statistic is a witness: from ``first`` on, it is outside the
    range of the healthy runs at the same step, in more than half of the steps."""
    known = np.array([table[key] for table in healthy_runs()])
    rounding = 1e-3 * abs(known).max(0)  # healthy.csv has four digits
    low, high = known.min(0) - rounding, known.max(0) + rounding
    outside = (run[key] < low) | (run[key] > high)
    return bool(outside[first:].mean() > 0.5)


def _witness_problem(run: pd.DataFrame, keys, first: int) -> str | None:
    keys = [keys] if isinstance(keys, str) else list(keys)
    if len(set(keys)) != 2:
        return "name two different statistics as witnesses."
    for key in keys:
        if key not in run:
            return f"{key!r} is not a column of the table."
    for key in keys:
        if not separates(run, key, first):
            return f"after the fault begins, {key} is too often in the healthy range."
    one, other = (run[key] - run[key].mean() for key in keys)
    if abs(one @ other) > 0.9999 * np.sqrt((one @ one) * (other @ other)):
        return "the two witnesses are one statistic in two units. Replace one of them."
    return None


def _problem(run: pd.DataFrame, said, fault: str, first: int) -> str | None:
    """Return the problem with the student's diagnosis of one run, or None."""
    if not isinstance(said, dict) or not {"fault", "first", "witnesses"} <= set(said):
        return "give a dict with the keys fault, first and witnesses."
    if said["fault"] not in FAULTS:
        return f"{said['fault']!r} is not in the list of faults: {', '.join(FAULTS)}."
    if said["fault"] != fault:
        return "this run has another fault."
    if fault == "healthy":
        return None
    if (
        not isinstance(said["first"], numbers.Integral)
        or abs(said["first"] - first) > 2
    ):
        return f"the fault is right; the first step is not {said['first']} ± 2."
    return _witness_problem(run, said["witnesses"], first)


def verdict(answer: dict, seed: int = 0) -> dict[str, str]:
    """Return run → problem for each wrong diagnosis; an empty dict means a pass."""
    found = {}
    for run, (_, fault, first) in plan(seed).items():
        said = answer.get(run) if isinstance(answer, dict) else None
        if problem := _problem(runs(seed)[run], said, fault, first):
            found[run] = problem
    return found


def check(answer: dict, seed: int = 0) -> None:
    """Print the verdict on each run."""
    problems = verdict(answer, seed)
    for run in RUNS:
        print(
            f"{'✘' if run in problems else '✔'} {run}", problems.get(run, "diagnosed")
        )
    print("All six are diagnosed." if not problems else f"{6 - len(problems)} of 6.")
