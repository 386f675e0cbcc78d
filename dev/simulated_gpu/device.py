"""The tensors of the simulated GPU, and its answers to torch, transformers and accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch._dynamo
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from dev.simulated_gpu.counts import COUNTS

DEVICE = torch.device("cuda:0")
HOST = torch.device("cpu")
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
INDEXING |= {"aten::_unsafe_index", "aten::_index_put_impl_"}
COPIES = {"aten::copy_", "aten::_to_copy"}
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")}


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated GPU; ``inner``, on the CPU, holds its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        names = ("dtype", "layout", "requires_grad")
        about = {name: getattr(inner, name) for name in names} | {"device": DEVICE}
        about |= {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **about)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        return run(function, arguments, keywords or {})

    # torch asks for these so that Module.to() swaps parameters in place.
    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors, meta, size, stride):
        return DeviceTensor(tensors["inner"])

    # The dispatcher does not see these.
    def __repr__(self, **_):
        return f"{self.inner!r} on {DEVICE}"

    def __format__(self, spec):
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = DeviceTensor(self.inner.detach().clone())
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol):  # files hold an ordinary tensor
        inner = self.inner.detach()
        if isinstance(self, torch.nn.Parameter):
            inner = torch.nn.Parameter(inner, self.requires_grad)
        return inner.__reduce_ex__(protocol)


def is_device(where) -> bool:
    return where is not None and torch.device(where).type == "cuda"


def run(function, arguments: tuple, keywords: dict):
    """Compute an operation that involves the device on the CPU, and count it.

    Raises ``RuntimeError`` where it mixes devices, as CUDA does.
    """
    name = function._schema.name
    if "pin_memory" in keywords:
        keywords = keywords | {"pin_memory": False}
    if name in COPIES:
        return copy(function, arguments, keywords)
    tensors = [x for x in tree_leaves((arguments, keywords)) if isinstance(x, torch.Tensor)]
    on_device = [x for x in tensors if isinstance(x, DeviceTensor)]
    boolean = False
    if on_device and name == "aten::multinomial":  # on CUDA, kernels check the numbers
        COUNTS.broken |= not on_device[0].inner.isfinite().all()
    if on_device and COUNTS.broken:
        raise RuntimeError("CUDA error: device-side assert triggered")
    if name in INDEXING:
        boolean = check_indices(arguments[0], arguments[1], arguments[2:3])
    elif on_device:
        refuse_host(tensors, name)
        if name in PRODUCTS and not tensors[0].is_floating_point():
            raise NotImplementedError(f'"{name[6:]}_cuda" not implemented for {tensors[0].dtype}')
    where = keywords.get("device")
    stays = is_device(where) if where is not None else bool(on_device)
    if on_device or stays:
        COUNTS.operation(name.removeprefix("aten::"), boolean)
    inner = {id(x.inner): x for x in on_device}
    plain, plain_keywords = to_host(arguments, keywords)
    if name in PRODUCTS and function._overloadname.startswith("dtype"):  # not on a CPU
        *factors, dtype = plain
        plain = [factor.to(dtype) for factor in factors]
        packet = function.overloadpacket
        result = (packet.out if "out" in keywords else packet.default)(*plain, **plain_keywords)
    else:
        result = function(*plain, **plain_keywords)
    if not stays or name == "aten::_local_scalar_dense":
        return result
    result = tree_map_only(
        torch.Tensor, lambda x: inner[id(x)] if id(x) in inner else DeviceTensor(x), result
    )
    if function.is_view or torch.Tag.inplace_view in function.tags:
        return return_and_correct_aliasing(function, arguments, keywords, result)
    return result


def copy(function, arguments: tuple, keywords: dict):
    """Copy between host and device, or within the device."""
    into = function._schema.name == "aten::copy_"
    target = arguments[0]
    source = arguments[1 if into else 0]
    to_device = is_device(target.device if into else keywords.get("device") or source.device)
    COUNTS.operations += 1
    if to_device != isinstance(source, DeviceTensor):
        asynchronous = keywords.get("non_blocking") or into and len(arguments) > 2 and arguments[2]
        if not (to_device and asynchronous):
            COUNTS.wait("copy to the device" if to_device else "copy to the host")
    plain, keywords = to_host(arguments, keywords if into else keywords | {"device": HOST})
    result = function(*plain, **keywords)
    if into:
        return target
    return DeviceTensor(result) if to_device else result


def to_host(arguments: tuple, keywords: dict) -> tuple[tuple, dict]:
    """Return the arguments of the same operation on the CPU."""
    plain, keywords = tree_map_only(DeviceTensor, lambda x: x.inner, (arguments, keywords))
    return plain, keywords | {"device": HOST} if "device" in keywords else keywords


def check_indices(tensor, indices, values: Sequence) -> bool:
    """Return whether an index is boolean: the host waits for the size of the result.

    CUDA accepts indices that are on the host, after a copy.
    """
    tensors = [index for index in indices if index is not None]
    if isinstance(tensor, DeviceTensor):
        refuse_host(values, "index")
        for index in tensors:
            if not isinstance(index, DeviceTensor):
                COUNTS.wait("copy to the device")
    elif any(isinstance(index, DeviceTensor) for index in tensors):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors)


def refuse_host(tensors: list, name: str) -> None:
    """Raise ``RuntimeError`` for a tensor on the host, except a scalar."""
    if any(not isinstance(x, DeviceTensor) and x.dim() > 0 for x in tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, not cuda:0 and cpu: {name}"
        )


class Operations(TorchDispatchMode):
    """Sees the operations that create tensors on the device without taking one."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        tensors = tree_leaves((arguments, keywords))
        if is_device(keywords.get("device")) or any(isinstance(x, DeviceTensor) for x in tensors):
            return run(function, arguments, keywords)
        if keywords.get("pin_memory"):
            keywords = keywords | {"pin_memory": False}
        return function(*arguments, **keywords)


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """torch's scaled_dot_product_attention, which would choose a CUDA kernel for the device."""
    if not isinstance(query, DeviceTensor):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # this operation adds the mask
        hidden = attn_mask.logical_not()
        attn_mask = query.new_zeros(attn_mask.shape).masked_fill(hidden, -torch.inf)
    attended, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )
    return attended


def answers() -> dict:
    """Return what each function of ``torch.cuda`` answers on this machine."""
    card = SimpleNamespace(name="Pretend GPU", major=8, minor=0, total_memory=80 * 2**30)
    card.multi_processor_count = 108
    card.gcnArchName = ""
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    truths = ("is_available", "is_initialized", "is_bf16_supported")
    nothing = ("_lazy_init", "init", "set_device", "reset_peak_memory_stats", "empty_cache")
    nothing += ("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all")
    return {
        **dict.fromkeys((*memory, "current_device"), 0),
        **dict.fromkeys(truths, True),
        **dict.fromkeys(("_is_in_bad_fork", "is_current_stream_capturing"), False),
        **dict.fromkeys((*nothing, "ipc_collect")),
        "device_count": 1,
        "get_device_name": card.name,
        "get_device_properties": card,
        "get_device_capability": (card.major, card.minor),
        "mem_get_info": (card.total_memory, card.total_memory),
    }


def install() -> None:
    """Replace the answers of torch, and switch the mode on permanently."""
    for name, answer in answers().items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.device = nullcontext  # transformers' pipelines choose the only device there is
    torch.cuda.synchronize = lambda *_: COUNTS.wait("synchronize")
    # Both sides draw from the CPU's generator.
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    for name in ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    # Create torch.tensor(..., device="cuda") on the host, then copy it.
    torch._C._set_only_lift_cpu_tensors(True)
    load = torch.load
    compatible = torch._has_compatible_shallow_copy_type

    def load_here(*arguments, map_location=None, **options):
        loaded = load(*arguments, map_location="cpu", **options)
        if not isinstance(map_location, str | torch.device) or not is_device(map_location):
            return loaded
        return tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), loaded)

    torch.load = load_here
    torch._has_compatible_shallow_copy_type = lambda a, b: type(a) is type(b) and compatible(a, b)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.nn.functional.scaled_dot_product_attention = attention
    # On CUDA, torch uses operations on lists of tensors for its own type only.
    _foreach_utils._foreach_supported_types.append(DeviceTensor)
    Operations().__enter__()
