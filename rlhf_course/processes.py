"""Several processes as one run: ``accelerate launch`` starts them, this says what accelerate has to be told."""

from __future__ import annotations

import os
import sys
import warnings

import torch
from accelerate import PartialState


def join() -> PartialState:
    """This process's place among those that were started together; one of one without ``accelerate launch``.

    Processes without GPUs talk over gloo, which accelerate chooses only when it is told that they are on CPUs;
    ``ACCELERATE_USE_CPU=1`` leaves GPUs alone. To be called before anything else that uses accelerate.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    wanted = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true")
    return PartialState(cpu=wanted or (several and not torch.cuda.is_available()))


def join_quietly() -> PartialState:
    """As :func:`join`, for commands: what all processes would print or warn of is heard from the first alone.

    Errors are not held back: a process that dies says why.
    """
    state = join()
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")
        warnings.simplefilter("ignore")
    return state
