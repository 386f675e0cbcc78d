"""Where host and device meet: tensors of any shapes cross in one transfer, from whichever side they
are on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, in the order given; all that are on a device come in one transfer,
    which is waited for.

    These are expected to have one dtype.
    """
    away = [x for x in tensors if not x.is_cpu]
    if not away:
        return list(tensors)
    arrived = iter(
        torch.cat([x.detach().flatten() for x in away]).cpu().split([x.numel() for x in away])
    )
    return [x if x.is_cpu else next(arrived).view(x.shape) for x in tensors]


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one dtype on ``device``; all that are on the host go in one transfer, which
    nothing waits for.
    """
    here = [x for x in tensors if x.is_cpu]
    if device.type == "cpu" or not here:
        return [x.to(device) for x in tensors]
    flat = torch.cat([x.flatten() for x in here])
    flat = (
        flat.pin_memory() if device.type == "cuda" else flat
    )  # from other memory, large copies wait
    arrived = iter(flat.to(device, non_blocking=True).split([x.numel() for x in here]))
    return [next(arrived).view(x.shape) if x.is_cpu else x for x in tensors]
