"""What PPO does by itself to be fast: said once per run, and left out with ``PPOConfig(fast=False)``."""

from __future__ import annotations

from functools import cache

import torch
from accelerate import Accelerator, PartialState
from torch import nn

from rlhf_course.policy import can_pack
from rlhf_course.ppo.config import PPOConfig


def choose_shortcuts(
    config: PPOConfig,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Print which shortcuts apply to this run."""
    on_cpu = accelerator.device.type == "cpu"
    if not config.fast:
        return
    chosen = {
        "several samples per row": on_cpu and can_pack(model),
        "the first epoch reuses the first pass": config.mini_batch_size == config.batch_size,
        "fused Adam": getattr(optimizer, "defaults", {}).get("fused"),
    }
    names = ", ".join(name for name, applies in chosen.items() if applies)
    _say_once(f"PPO on {accelerator.device.type}: {names or 'as written'}; PPOConfig(fast=False) does without.")


@cache
def _say_once(sentence: str) -> None:
    PartialState().print(sentence)
