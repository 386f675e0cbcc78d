"""Several processes (ranks) as one run: what ``accelerate launch`` has to be told, gathering and
sharding.
"""

import ctypes
import gc
import os
import signal
import sys
import warnings

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import parse_flag_from_env, recursively_apply
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def init(cpu: bool = False) -> PartialState:
    """Initialize this rank, the only one without ``accelerate launch``, before anything else uses
    accelerate.

    ``cpu`` and ``ACCELERATE_USE_CPU=1`` leave GPUs alone. Raises ``ValueError`` when a CPU is asked
    for too late.
    """
    if not os.environ.get("WORLD_SIZE"):
        os.environ.pop("WORLD_SIZE", None)  # accelerate takes an empty one for a number
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and sys.platform == "linux":  # a launcher that is killed takes its ranks with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    wanted = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(
        cpu=wanted or (several and not torch.cuda.is_available())
    )  # True: CPUs talk over gloo
    if wanted and state.device.type != "cpu":
        raise ValueError(
            f"A CPU was asked for, but this process already runs on {state.device}, and accelerate"
            " keeps one device per process. Restart the kernel and ask for the CPU first, or set"
            " ACCELERATE_USE_CPU=1."
        )
    if state.distributed_type == DistributedType.MULTI_CPU and parse_flag_from_env(
        "ACCELERATE_USE_FSDP"
    ):
        state.distributed_type = (
            DistributedType.MULTI_GPU
        )  # accelerate asks for GPUs where FSDP itself does not
    return state


def init_quietly() -> PartialState:
    """As :func:`init`, for commands: only rank 0 prints and warns, but a rank that dies says why."""
    state = init()
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")
        warnings.simplefilter("ignore")
    return state


def shutdown() -> None:
    """Destroy the process group, at the very end, when nothing refers to models and trainers any
    more.

    Freeing gloo's group waits for its threads, which may wait for the GIL. A Python reference
    releases the GIL meanwhile; DDP's own does not, and would deadlock. So ours has to be the last.
    """
    if torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()
        gc.collect()
        del group


def check_sharding(accelerator: Accelerator, model, num_shared_layers: int | None) -> None:
    """Raise ``ValueError`` where PPO cannot run as it was launched."""
    kind, problem = accelerator.distributed_type, None
    if not accelerator.is_fsdp2:
        if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            problem = f"{kind.value}, but shards weights by FSDP2 alone"
    elif model.is_peft_model:
        problem = "FSDP2 with adapters, but under DDP, where the frozen base can be in 8 or 4 bits"
    elif num_shared_layers:
        problem = "FSDP2 with num_shared_layers"
    elif accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        problem = "FSDP2 with fsdp_cpu_ram_efficient_loading: true"
    elif isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        problem = "FSDP2 with fsdp_offload_params: true"
    if problem:
        cure = (
            "Change that, or launch with scripts/accelerate/fsdp.yaml (FSDP2) or ddp.yaml (DDP, a"
            " copy on each GPU)."
        )
        raise ValueError(f"PPOTrainer does not run under {problem}. {cure}")


def prepare(accelerator: Accelerator, model, ref_model, optimizer: torch.optim.Optimizer) -> tuple:
    """Policy, reference (None stays None) and optimizer, replicated or sharded as ``accelerate
    launch`` was told.
    """
    if not accelerator.is_fsdp2:
        model, optimizer = accelerator.prepare(model, optimizer)
        if ref_model is not None:  # prepared too, so that both run at the same precision
            ref_model = accelerator.prepare_model(ref_model, evaluation_mode=True)
        return model, ref_model, optimizer
    # Autocast alone lowers the precision: FSDP's own policy would lower that of the heads too.
    accelerator.state.fsdp_plugin.mixed_precision_policy = None
    model, optimizer = accelerator.prepare(model, optimizer)
    for network in [model] if ref_model is None else [model, ref_model]:
        fsdp2_prepare_model(accelerator, network)  # a no-op for the policy
        network.forward = accelerator.autocast()(network.forward)
        register_fsdp_forward_method(network, "generate")
    return model, ref_model, optimizer


def gather_full(state):
    """Gather sharded tensors, in dicts and lists, in full on rank 0's CPU; other ranks get None for
    each tensor.

    Collective: all ranks call it. Tied weights stay tied.
    """
    is_main, gathered = PartialState().is_main_process, {}

    def gather(tensor: Tensor) -> Tensor | None:
        if id(tensor) not in gathered:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            gathered[id(tensor)] = full.detach().cpu() if is_main else None
        return gathered[id(tensor)]

    return recursively_apply(gather, state)


def shard(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a full tensor, where ``like``, of the same shape, is sharded; else the
    tensor.
    """
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
