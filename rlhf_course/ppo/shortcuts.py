"""What PPO does by itself to be fast: said once per run, and left out with ``PPOConfig(fast=False)``."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch
from accelerate import Accelerator, PartialState

from rlhf_course.policy import can_pack
from rlhf_course.ppo.config import PPOConfig

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def choose_shortcuts(
    config: PPOConfig, accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Print which shortcuts apply to this run; the one that belongs to no object is taken here."""
    if not config.fast:
        return
    on_cpu = accelerator.device.type == "cpu"
    chosen = {
        "several samples per row": on_cpu and can_pack(model),
        "the first epoch reuses the first pass": config.mini_batch_size == config.batch_size,
        "fused Adam": getattr(optimizer, "defaults", {}).get("fused"),
        "freed memory is kept": on_cpu and keep_freed_memory(),
    }
    names = ", ".join(name for name, applies in chosen.items() if applies)
    _say_once(f"PPO on {accelerator.device.type}: {names or 'as written'}; PPOConfig(fast=False) does without.")


@cache
def _say_once(sentence: str) -> None:
    PartialState().print(sentence)


def keep_freed_memory() -> bool:
    """Whether glibc was told to keep what this process frees (False where there is no glibc).

    Every pass allocates and frees the same activations. By default they go back to the system each time, and come
    again as page faults, one zeroed page after the other.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_MMAP_MAX, 0))
