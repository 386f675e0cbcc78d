"""Start and end a command's processes: only rank 0 prints, and all end together."""

import gc
import os
import sys
import warnings

import torch

from rlhf_course.runtime.tracking import init_process


def init_quietly() -> None:
    """Initialize a command's rank; only rank 0 prints and warns."""
    if not init_process().is_main_process:
        sys.stdout = open(os.devnull, "w")
        warnings.simplefilter("ignore")


def shutdown() -> None:
    """Destroy the process group when no reference to a model remains.

    Freeing gloo's group waits for threads that may need the GIL. Deleting a Python reference
    releases the GIL, but deleting DDP's reference keeps the GIL and would deadlock. So ``group`` is
    the last reference to be deleted.
    """
    if torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()
        gc.collect()
        del group
