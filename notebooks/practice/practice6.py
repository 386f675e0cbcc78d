"""Exercise 6, predict, then run: a prediction is committed by its hash before the run.

A policy of one layer writes four of six tokens; each token at each place has a reward of
its own. PPO takes 12 steps in the base setting and in one with a single change.
"""

import functools
import hashlib
import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_course.course.presets import ROOT
from rlhf_course.course.run_card import RunCard
from rlhf_course.runtime.files import atomic_file, read_json

V, L, BATCH, STEPS, RUNS = 6, 4, 64, 12, 4
FACTOR = 3  # how far off the size of a change may be
FOLDER = ROOT / "build" / "practice"
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
    """The one setting that differs from ``BASE``."""
    return CHANGES[seed % len(CHANGES)]


def policy(seed: int) -> AutoModelForCausalLMWithValueHead:
    """A random GPT-2 of one layer."""
    torch.manual_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    shape = {"vocab_size": V, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0)
    config = GPT2Config(**shape, **special, **rates, initializer_range=0.1)
    return AutoModelForCausalLMWithValueHead(GPT2LMHeadModel(config)).eval()


def train(seed: int, settings: dict) -> list[list[float]]:
    """The five statistics at each step of one run."""
    sizes = {"batch_size": BATCH, "mini_batch_size": BATCH, "adap_kl_ctrl": False}
    config = PPOConfig(**sizes, **BASE | settings, vf_coef=0.5, seed=seed)
    parts = policy(seed), policy(seed), SimpleNamespace(pad_token_id=0, eos_token_id=None)
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
    """The five statistics of every step of four runs, (RUNS, STEPS, 5)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a large step size is meant
        return np.array([train(RUNS * seed + i, dict(settings)) for i in range(RUNS)])


def base(seed: int = 0) -> pd.DataFrame:
    """The base setting, step by step and on average; means over four runs."""
    table = pd.DataFrame(runs(seed, ()).mean(0), range(1, STEPS + 1), STATS)
    table.loc["mean"] = table.mean()
    return table.round(3)


def digest(prediction: dict, seed: int) -> str:
    """SHA-256 of a prediction as canonical JSON: sorted keys, floats, no spaces."""
    if set(prediction) != set(STATS):
        raise ValueError(f"A prediction has a number for each of {', '.join(STATS)}.")
    numbers = {name: float(value) for name, value in prediction.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"Every prediction must be a finite number; got {numbers}.")
    text = json.dumps([seed, numbers], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def files(seed: int, folder) -> tuple[Path, Path]:
    """Where the commitment and the run card of a seed are."""
    name = f"6_predict_then_run_{seed}.json"
    return Path(folder) / "commitments" / name, Path(folder) / "run_cards" / name


def commit(prediction: dict, seed: int = 0, folder=FOLDER) -> None:
    """Write a prediction's hash, unless the run that it predicts has been made."""
    commitment, card = files(seed, folder)
    if card.exists():
        print(f"✘ The runs of seed {seed} exist already. Predict those of another seed.")
        return
    with atomic_file(commitment) as path:
        path.write_text(json.dumps({"sha256": digest(prediction, seed)}), encoding="utf-8")
    print(f"committed for {change(seed)}: {digest(prediction, seed)}")


def run_both(committed: str, seed: int, folder) -> None:
    """Run both settings and write the run card, which holds the commitment."""
    card = RunCard(f"6_predict_then_run_{seed}", "tiny", seed, folder)
    before = runs(seed, ()).mean(1)
    after = runs(seed, tuple(change(seed).items())).mean(1)
    noise = (after - before).std(0, ddof=1) / RUNS**0.5
    for i, name in enumerate(STATS):
        card.metric(f"{name}_before", before[:, i].mean())
        card.metric(f"{name}_after", after[:, i].mean())
        card.metric(f"{name}_noise", noise[i])
    card.curve("commitment", pd.DataFrame({"sha256": [committed]}))
    card.finish()


def check(prediction: dict, seed: int = 0, folder=FOLDER) -> bool:
    """Make the runs if there are none, and print which predictions came true."""
    commitment, card = files(seed, folder)
    if not commitment.exists():
        print(f"✘ No commitment. Run commit(prediction, seed={seed}) first.")
        return False
    committed = read_json(commitment)["sha256"]
    if digest(prediction, seed) != committed:
        print("✘ This is not the prediction that you committed. Use the committed one.")
        return False
    if not card.exists():
        run_both(committed, seed, folder)
    found = read_json(card)
    if found["curves"]["commitment"]["sha256"] != [committed]:
        print("✘ The runs were made under another commitment: yours is younger.")
        return False
    return score(prediction, found["metrics"])


def score(prediction: dict, metrics: dict) -> bool:
    """Print a line for each statistic; directions must be right, sizes except for one."""
    wrong, sizes, decided = 0, 0, 0
    for name in STATS:
        before, after, noise = (metrics[f"{name}_{x}"] for x in ("before", "after", "noise"))
        moved, guessed = after - before, float(prediction[name]) - before
        said = "too close to call, not scored"
        if abs(moved) > 3 * noise:
            is_right = moved * guessed > 0
            is_near = is_right and 1 / FACTOR <= guessed / moved <= FACTOR
            decided, wrong, sizes = decided + 1, wrong + (not is_right), sizes + is_near
            said = "✔" if is_near else "✘ size" if is_right else "✘ direction"
        print(f"{name:<30}{before:8.3f} → {after:7.3f}, predicted {prediction[name]:7.3f}  {said}")
    passed = not wrong and sizes >= decided - 1
    print(f"{'✔' if passed else '✘'} {wrong} wrong directions, {sizes} of {decided} sizes right")
    return passed
