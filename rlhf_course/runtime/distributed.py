"""Several processes as one run: ``accelerate launch`` starts them, this says what accelerate has to be told."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import warnings

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def join(cpu: bool = False) -> PartialState:
    """This process's place among those that were started together; one of one without ``accelerate launch``.

    Processes without GPUs talk over gloo, which accelerate chooses only when it is told that they are on CPUs; ``cpu``
    and ``ACCELERATE_USE_CPU=1`` leave GPUs alone. To be called before anything else that uses accelerate, which keeps
    one device per process: raises ``ValueError`` when a CPU is asked for too late.
    """
    if not os.environ.get("WORLD_SIZE"):
        os.environ.pop("WORLD_SIZE", None)  # accelerate takes an empty one for a number
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and sys.platform == "linux":  # a launcher that is killed takes its processes with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    wanted = cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true")
    state = PartialState(cpu=wanted or (several and not torch.cuda.is_available()))
    if wanted and state.device.type != "cpu":
        raise ValueError(
            f"A CPU was asked for, but this process already runs on {state.device}, and accelerate keeps one device "
            "per process. Restart the kernel and ask for the CPU first, or set ACCELERATE_USE_CPU=1."
        )
    if state.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state.distributed_type = DistributedType.MULTI_GPU  # accelerate asks for GPUs where FSDP itself does not
    return state


def join_quietly() -> PartialState:
    """As :func:`join`, for commands: what all processes would print or warn of is heard from the first alone.

    Errors are not held back: a process that dies says why.
    """
    state = join()
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")
        warnings.simplefilter("ignore")
    return state


def leave() -> None:
    """Leave the other processes, at the very end, when nothing refers to models and trainers any more.

    Whoever frees gloo's group waits for its threads, which may wait for Python's lock. A Python reference gives that
    lock away; data parallelism's own would not, and both would wait for ever. So this one is the last.
    """
    if torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()
        gc.collect()
        del group


def check_sharing(accelerator: Accelerator, model, num_shared_layers: int | None) -> None:
    """Raise ``ValueError``, with the cure, where PPO cannot run under the way of sharing that was launched."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ValueError(
            f"PPOTrainer does not share out weights by {kind.value}, but by FSDP2 alone: launch it with "
            "scripts/accelerate/fsdp.yaml, or with ddp.yaml, a copy on each GPU."
        )
    if not accelerator.is_fsdp2:
        return
    if model.is_peft_model:
        raise ValueError(
            "PPOTrainer does not share out the weights of a policy with adapters: launch it with "
            "scripts/accelerate/ddp.yaml; what needs room is the frozen base, which can be in 8 or 4 bits."
        )
    if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "PPOTrainer needs fsdp_cpu_ram_efficient_loading: false, as in scripts/accelerate/fsdp.yaml: otherwise "
            "only the first process has weights."
        )
    if isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            "PPOTrainer needs fsdp_offload_params: false, as in scripts/accelerate/fsdp.yaml: its optimizer steps on "
            "the GPU. For more room, take more GPUs, or adapters with ddp.yaml."
        )
    if num_shared_layers:
        raise ValueError("Under FSDP2 policy and reference cannot share layers: leave num_shared_layers out.")


def prepare(accelerator: Accelerator, model, ref_model, optimizer: torch.optim.Optimizer) -> tuple:
    """Policy, reference (None stays None) and optimizer, as ``accelerate launch`` was told to spread them.

    Under FSDP2 each process keeps a share of every weight and of the optimizer's state. Autocast alone lowers the
    precision then: FSDP's own way would take the heads with it.
    """
    if accelerator.is_fsdp2:
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
        model, optimizer = accelerator.prepare(model, optimizer)
        for network in filter(None, (model, ref_model)):
            fsdp2_prepare_model(accelerator, network)  # the policy is by now
            network.forward = accelerator.autocast()(network.forward)
            register_fsdp_forward_method(network, "generate")
        return model, ref_model, optimizer
    model, optimizer = accelerator.prepare(model.to(accelerator.device), optimizer)
    if ref_model is not None:  # prepared too, so that both run at the same precision
        ref_model = accelerator.prepare_model(ref_model.to(accelerator.device), evaluation_mode=True)
    return model, ref_model, optimizer


def whole(state):
    """Tensors put together from all processes' shares, on the first one's CPU; the others get None in their place.

    ``state`` is a tensor, or dicts and lists of them; what is no tensor stays as it is. A tensor that is met twice, as
    tied weights are, is one afterwards too. All processes have to take part.
    """
    main, found = PartialState().is_main_process, {}

    def put_together(value):
        if isinstance(value, dict):
            return {key: put_together(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [put_together(entry) for entry in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in found:
            full = value.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            found[id(value)] = full.cpu() if main else None
        return found[id(value)]

    return put_together(state)


def share_out(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's share of a whole tensor, where ``like``, of the same shape, is shared out; else the tensor."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
