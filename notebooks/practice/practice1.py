"""Diagnose: six real runs of a tiny policy, most of them with a fault from some step on."""

import functools
import random

import numpy as np
import pandas as pd
import torch
from tiny_world import EOS, SAMPLING, draw_queries, make_trainer, score

STEPS = 20
RUNS = "ABCDEF"
CONFIG = {"ppo_epochs": 2, "learning_rate": 3e-3, "init_kl_coef": 0.1}
FAULTS = {
    "reward_sign": "the score is multiplied by -1",
    "no_kl": "the KL coefficient is 0",
    "large_rate": "the learning rate is 30 times as large",
    "critic_lost": "the value head is set to 0 and no longer trained",
    "huge_scores": "all scores are 30 times as large",
    "temperature": "responses are sampled at temperature 0.6",
    "no_eos": "EOS cannot be sampled; the log-probabilities still contain it",
    "moving_reference": "the reference is a copy of the policy, renewed before each step",
    "stale_samples": "the samples are not renewed: every step repeats one batch",
    "healthy": "no fault",
}


def make_run(seed: int, fault: str = "healthy", first: int = STEPS) -> pd.DataFrame:
    """Return a run's 41 statistics, (STEPS, 41); the fault begins at step ``first``."""
    trainer, rows = make_trainer(seed, **CONFIG), []
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        on = fault if step >= first else "healthy"
        if on != "stale_samples" or step == first:
            queries = draw_queries(generator)
            more = {"temperature": {"temperature": 0.6}, "no_eos": {"suppress_tokens": [EOS]}}
            sampling = SAMPLING | more.get(on, {})
            responses = trainer.generate(queries, return_prompt=False, **sampling)
            scores = score(responses)
        _plant(trainer, on, step == first)
        factor = {"reward_sign": -1, "huge_scores": 30}.get(on, 1)
        stats = trainer.step(queries, responses, list(factor * scores))
        rows.append({key: float(np.std(x) if np.ndim(x) else x) for key, x in _plain(stats)})
    return pd.DataFrame(rows).rename_axis("step")


def _plain(stats: dict):
    return ((key, x.numpy() if torch.is_tensor(x) else x) for key, x in stats.items())


def _plant(trainer, fault: str, is_first: bool) -> None:
    """Change what the fault changes in the trainer."""
    if fault == "no_kl":
        trainer.kl_ctl.value = 0.0
    elif fault == "large_rate" and is_first:
        trainer.optimizer.param_groups[0]["lr"] *= 30
    elif fault == "critic_lost" and is_first:
        trainer.config.vf_coef = 0.0
        for parameter in trainer.policy.v_head.parameters():
            parameter.data.zero_()
            parameter.requires_grad_(False)
    elif fault == "moving_reference":
        trainer.ref_model.load_state_dict(trainer.policy.state_dict())


@functools.lru_cache(maxsize=4)
def plan(seed: int) -> dict[str, tuple[int, str, int]]:
    """Return run → (seed of the run, fault, first step); one run at least is healthy."""
    dice = random.Random(seed)
    faults = dice.sample([name for name in FAULTS if name != "healthy"], 5) + ["healthy"]
    dice.shuffle(faults)
    return {
        run: (1000 + 10 * seed + i, fault, STEPS if fault == "healthy" else dice.randint(5, 12))
        for i, (run, fault) in enumerate(zip(RUNS, faults))
    }


@functools.lru_cache(maxsize=4)
def runs(seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return the six runs of an instance."""
    return {run: make_run(*what) for run, what in plan(seed).items()}


@functools.lru_cache(maxsize=1)
def healthy_runs() -> list[pd.DataFrame]:
    """Return eight healthy runs of other policies."""
    return [make_run(seed) for seed in range(8)]


def separates(run: pd.DataFrame, key: str, first: int) -> bool:
    """Whether a statistic after ``first`` lies outside all healthy runs, by half their range.

    Compared are its mean from ``first`` on, this mean minus the mean of the five steps before,
    its spread, and its jump between two neighboring steps at ``first``.
    """

    def features(table: pd.DataFrame) -> np.ndarray:
        x = table[key].to_numpy()
        late, before = x[first:], x[first - 5 : first]
        jump = x[first] - x[first - 1]
        return np.array([late.mean(), late.mean() - before.mean(), late.std(), jump])

    known = np.array([features(table) for table in healthy_runs()])
    low, high = known.min(0), known.max(0)
    slack = 0.5 * (high - low) + 1e-6
    found = features(run)
    return bool(((found < low - slack) | (found > high + slack)).any())
