"""Join several processes (ranks) into one run, as ``accelerate launch`` starts them."""

import os

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def init(cpu: bool = False) -> PartialState:
    """Initialize this process (rank) before accelerate is used; return its state.

    ``cpu`` and ``ACCELERATE_USE_CPU=1`` leave GPUs unused, unless this process already uses one.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    wanted = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    return PartialState(cpu=wanted or (several and not torch.cuda.is_available()))
