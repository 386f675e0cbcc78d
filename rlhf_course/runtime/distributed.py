"""Several processes (ranks) as one run, as ``accelerate launch`` starts them."""

import gc
import os
import sys
import warnings

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def init(cpu: bool = False) -> PartialState:
    """Initialize this rank, the only one without ``accelerate launch``, before accelerate is used.

    ``cpu`` and ``ACCELERATE_USE_CPU=1`` leave GPUs unused, unless this process has begun with one.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    wanted = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    return PartialState(cpu=wanted or (several and not torch.cuda.is_available()))


def init_quietly() -> PartialState:
    """Initialize a command's rank; only rank 0 prints and warns."""
    state = init()
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")
        warnings.simplefilter("ignore")
    return state


def shutdown() -> None:
    """Destroy the process group, at the end, when nothing refers to models any more.

    Freeing gloo's group waits for threads that may need the GIL. A Python reference releases it;
    DDP's own does not, and would deadlock. So ours has to be the last.
    """
    if torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()
        gc.collect()
        del group
