"""Run PPO for exercise 6, in a base setting and in a setting with one change.

A one-layer policy generates four tokens from a vocabulary of six. The reward of a token
depends on its position. A run has 12 steps, and each setting has four runs.
"""

import functools
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from rlhf_course import PPOConfig, PPOTrainer

from tiny_world import random_policy

V, L, BATCH, STEPS, RUNS = 6, 4, 64, 12, 4
SHAPE = {"vocab_size": V, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SHAPE["initializer_range"] = 0.1
STATS = (
    "objective/kl",
    "ppo/mean_scores",
    "ppo/policy/clipfrac",
    "ppo/policy/entropy",
    "ppo/val/var_explained_before",
)
BASE = {"learning_rate": 2e-3, "init_kl_coef": 0.3, "ppo_epochs": 4, "cliprange": 0.2}
CHANGES = (
    {"learning_rate": 2e-4},
    {"ppo_epochs": 1},
    {"init_kl_coef": 2.0},
    {"cliprange": 0.01},
    {"learning_rate": 8e-3},
)


def change(seed: int) -> dict:
    """Return the setting that changes, with its value after the change."""
    return CHANGES[seed % len(CHANGES)]


def train(seed: int, settings: dict) -> list[list[float]]:
    """Train one run; return its statistics, (STEPS, 5)."""
    sizes = {"batch_size": BATCH, "mini_batch_size": BATCH, "adap_kl_ctrl": False}
    sizes["accelerator_kwargs"] = {"cpu": True}
    config = PPOConfig(**sizes, **BASE | settings, vf_coef=0.5, seed=seed)
    policy, reference = (random_policy(seed, **SHAPE) for _ in range(2))
    parts = policy, reference, SimpleNamespace(pad_token_id=0, eos_token_id=None)
    adam = torch.optim.Adam(parts[0].parameters(), lr=config.learning_rate)
    trainer = PPOTrainer(config, *parts, optimizer=adam)
    generator = torch.Generator().manual_seed(seed)
    worth = torch.randn(L, V, generator=generator)
    queries, rows = [torch.zeros(1, dtype=torch.long)] * BATCH, []
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": L}
    for _ in range(STEPS):
        responses = trainer.generate(queries, return_prompt=False, **how)
        scores = [worth[torch.arange(L), x.cpu()].sum() for x in responses]
        stats = trainer.step(queries, responses, scores)
        rows.append([stats[name] for name in STATS])
    return rows


@functools.lru_cache(maxsize=8)
def runs(seed: int, settings: tuple) -> np.ndarray:
    """Return the statistics of four runs, (RUNS, STEPS, 5)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one learning rate is large on purpose
        return np.array([train(RUNS * seed + i, dict(settings)) for i in range(RUNS)])
