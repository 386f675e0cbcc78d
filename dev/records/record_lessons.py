"""Run variants of PPO on film reviews, and record a card per variant and seed.

    python dev/records/record_lessons.py   # skips existing cards; an hour or more
    python docs/_ext/lessons.py                  # writes docs/lessons-on-text.md

The script runs PPO with the cells of deeper/methods_on_real_text that have the tag ``methods``.
"""

import argparse
import json
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch
from transformers import set_seed

from dev.records.record_methods import methods
from rlhf_course import PPOConfig, PPOTrainer
from rlhf_course.course.presets import ROOT
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.ppo.algorithm import masked_var, policy_loss
from rlhf_course.runtime.files import atomic_file

FOLDER = ROOT / "figs" / "measured" / "lessons"
# Short runs; other settings equal those of methods_on_real_text's PPO.
SETTING = {"text_steps": 16, "text_batch": 48, "text_epochs": 4, "response_tokens": 8}
BETA = 0.5  # of the KL variants
REUSE = {"ppo_epochs": 16, "steps": 4}
NO_CLIP = {"cliprange": 1e9}
SLOPES = {  # −d estimate / d log π(response), for x = log π_ref/π of the response
    "k1": lambda x: -torch.ones_like(x),
    "k2": lambda x: x,
    "k3": lambda x: x.exp() - 1,
}
VARIANTS = {"ppo": {}}
VARIANTS |= {k: {"kl_penalty": k, "init_kl_coef": BETA} for k in ("kl", "abs", "mse", "full")}
VARIANTS |= {"lam-0": {"lam": 0.0}, "lam-1": {"lam": 1.0}}
VARIANTS |= {"no-clip": NO_CLIP, "no-whitening": {}}
VARIANTS |= {"epochs-1": {"ppo_epochs": 1}, "epochs-1-step-4": {"ppo_epochs": 1, "speed": 4}}
VARIANTS |= {"epochs-16": REUSE, "epochs-16-no-clip": REUSE | NO_CLIP}
VARIANTS |= {k: {"init_kl_coef": 0.0} for k in SLOPES}


def raw(experience):
    """Return advantages (B, R) before whitening."""
    return experience.returns - experience.values


def unwhitened(experience, new, old, advantages, cliprange):
    """Return the policy loss without whitening."""
    return policy_loss(new, old, raw(experience), cliprange)


def kl_in_loss(slope, experience, new, old, advantages, cliprange):
    """Return the policy loss plus a term whose gradient is that of β·estimate / whitening scale."""
    loss, *others = policy_loss(new, old, advantages, cliprange)
    x = ((experience.ref_logprobs - new.detach()) * experience.mask).sum(1, keepdim=True)
    scale = masked_var(raw(experience), experience.mask).sqrt()
    return loss - BETA / scale * slope(x) * new, *others


def trainer_with(loss):
    """Return a trainer class that gives the experience to the loss; a mini-batch is a batch."""

    class Trainer(PPOTrainer):
        def _optimize(self, samples, experience, first_pass):
            self.config.policy_loss = partial(loss, experience)
            return super()._optimize(samples, experience, first_pass)

    return Trainer


def record(names: dict, folder: Path, name: str, seed: int) -> Path:
    """Run a variant unless its card exists; return the card's path."""
    path = folder / f"{name}-{seed}.json"
    if path.exists():
        return path
    settings = names["settings"]
    change = dict(VARIANTS[name])
    rate = names["rate_of"]("PPO") * change.pop("speed", 1)
    steps = change.pop("steps", settings.text_steps)
    names["PPOConfig"] = lambda **x: PPOConfig(**x | change)
    names["PPOTrainer"] = PPOTrainer
    if name in SLOPES:
        names["PPOTrainer"] = trainer_with(partial(kl_in_loss, SLOPES[name]))
    if name == "no-whitening":
        names["PPOTrainer"] = trainer_with(unwhitened)
    set_seed(seed)
    _, rows = names["run"]("PPO", seed, rate, steps)
    kept = {key: getattr(settings, key) for key in names["KEPT"]} | {"learning_rate": rate}
    card = {"name": name, "seed": seed, "change": VARIANTS[name], "settings": kept}
    with atomic_file(path) as part:
        part.write_text(json.dumps(card | {"held_out": rows}, indent=1, ensure_ascii=False) + "\n")
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--output", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    quiet_libraries()
    set_seed(0)  # fixes the openings' lengths
    names = methods(SETTING | {"text_look": SETTING["text_steps"]})
    for name, seed in product(VARIANTS, range(chosen.seeds)):
        print(record(names, chosen.output, name, seed), flush=True)


if __name__ == "__main__":
    sys.exit(main())
