"""Run PPO with or without a fault; as a script, write healthy.csv."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tiny_world import EOS, SAMPLING, draw_queries, make_trainer, score

STEPS = 20
HEALTHY = Path(__file__).with_name("healthy.csv")
CONFIG = {"ppo_epochs": 2, "learning_rate": 3e-3, "init_kl_coef": 0.1}
FAULTS = {
    "reward_sign": "the score is multiplied by -1",
    "no_kl": "the KL coefficient is 0",
    "large_rate": "the learning rate is 30 times as large",
    "critic_lost": "the value head is set to 0 and no longer trained",
    "huge_scores": "all scores are 30 times as large",
    "temperature": "responses are sampled at temperature 0.6",
    "no_eos": "EOS cannot be sampled; the log-probabilities still include it",
    "moving_reference": "the reference is a copy of the policy, updated at each step",
    "stale_samples": "no new samples are drawn: every step repeats one batch",
    "healthy": "no fault",
}


def make_run(seed: int, fault: str = "healthy", first: int = STEPS) -> pd.DataFrame:
    """Return a run's statistics, a row per step; the fault begins at step ``first``."""
    trainer, rows = make_trainer(seed, eos_shift=0.25, **CONFIG), []
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        on = fault if step >= first else "healthy"
        if on != "stale_samples" or step == first:
            queries = draw_queries(generator)
            more = {
                "temperature": {"temperature": 0.6},
                "no_eos": {"suppress_tokens": [EOS]},
            }
            sampling = SAMPLING | more.get(on, {})
            with warnings.catch_warnings(action="ignore"):  # warnings name the fault
                responses = trainer.generate(queries, return_prompt=False, **sampling)
            scores = score(responses)
        _plant(trainer, on, step == first)
        factor = {"reward_sign": -1, "huge_scores": 30}.get(on, 1)
        stats = trainer.step(queries, responses, list(factor * scores))
        rows.append(
            {key: float(np.std(x) if np.ndim(x) else x) for key, x in _plain(stats)}
        )
    return pd.DataFrame(rows).rename_axis("step")


def _plain(stats: dict):
    """Yield all statistics except times, which show nothing about training."""
    for key, x in stats.items():
        if not key.startswith("time/"):
            yield key, x.numpy() if torch.is_tensor(x) else x


def _plant(trainer, fault: str, is_first: bool) -> None:
    """Change the trainer's settings or weights as the fault requires."""
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


if __name__ == "__main__":  # takes a minute or two
    tables = {seed: make_run(seed) for seed in range(24)}
    table = pd.concat(tables, names=["run"])
    table.to_csv(HEALTHY, float_format="%.4g")
