"""Combine the processes (ranks) that ``accelerate launch`` starts into one run."""

import os

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def init(cpu: bool = False) -> PartialState:
    """Initialize this process (rank) before accelerate is used; return its state.

    ``cpu`` or ``ACCELERATE_USE_CPU=1`` leaves GPUs unused, unless this process already uses a GPU.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    wanted = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    return PartialState(cpu=wanted or (several and not torch.cuda.is_available()))
