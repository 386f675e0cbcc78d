"""The tensors of the pretend GPU, and the questions that torch, transformers and accelerate ask of
a real one.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch._dynamo
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from pretend_gpu import graphs
from pretend_gpu.counts import COUNTS, nbytes

DEVICE, HOST = torch.device("cuda:0"), torch.device("cpu")
INDEXING = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_unsafe_index",
    "aten::_index_put_impl_",
}
COPIES = {"aten::copy_", "aten::_to_copy"}
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")}


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend GPU; ``inner``, on the CPU, has its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        sizes = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        about = sizes | {
            "layout": inner.layout,
            "device": DEVICE,
            "requires_grad": inner.requires_grad,
        }
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **about)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        return run(function, arguments, keywords or {})

    # What torch asks of a subclass that wraps another tensor, so that Module.to() swaps parameters
    # in place.
    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors, meta, size, stride):
        return DeviceTensor(tensors["inner"])

    # What goes around the dispatcher.
    def __repr__(self, **_):
        return f"{self.inner!r} on {DEVICE}"

    def __format__(self, spec):
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def numpy(self, *_, **__):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

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

    def __reduce_ex__(self, protocol):  # in files it is a tensor like any other
        inner = self.inner.detach()
        if isinstance(self, torch.nn.Parameter):
            inner = torch.nn.Parameter(inner, self.requires_grad)
        return inner.__reduce_ex__(protocol)


def is_device(where) -> bool:
    return where is not None and torch.device(where).type == "cuda"


def run(function, arguments: tuple, keywords: dict):
    """An operation that has to do with the device: refused where it mixes devices, counted,
    computed on the CPU.
    """
    name, tensors = (
        function._schema.name,
        [x for x in tree_leaves((arguments, keywords)) if isinstance(x, torch.Tensor)],
    )
    on_device = [x for x in tensors if isinstance(x, DeviceTensor)]
    if "pin_memory" in keywords:
        keywords = keywords | {"pin_memory": False}
    if name in COPIES:
        return copy(function, arguments, keywords)
    boolean = False
    if name in INDEXING:
        boolean = check_indices(arguments)
    elif on_device:
        refuse([x for x in tensors if not isinstance(x, DeviceTensor) and x.dim() > 0], name)
        if name in PRODUCTS and not tensors[0].is_floating_point():
            raise NotImplementedError(f'"{name[6:]}_cuda" not implemented for {tensors[0].dtype}')
    if on_device or is_device(keywords.get("device")):
        COUNTS.operation(function, arguments, boolean)
    inner = {id(x.inner): x for x in on_device}
    plain, plain_keywords = tree_map_only(DeviceTensor, lambda x: x.inner, (arguments, keywords))
    if "device" in plain_keywords:
        plain_keywords = plain_keywords | {"device": HOST}
    if graphs.capturing:
        graphs.capturing.keep(function, plain)
    result = function(*plain, **plain_keywords)
    if graphs.capturing:
        graphs.capturing.record(function, plain, plain_keywords, result)
    stays = is_device(keywords["device"]) if keywords.get("device") is not None else bool(on_device)
    if not stays or name == "aten::_local_scalar_dense":
        return result
    result = tree_map_only(
        torch.Tensor, lambda x: inner.get(id(x)) if id(x) in inner else DeviceTensor(x), result
    )
    if function.is_view or torch.Tag.inplace_view in function.tags:
        return return_and_correct_aliasing(function, arguments, keywords, result)
    return result


def copy(function, arguments: tuple, keywords: dict):
    """Between host and device, or within the device."""
    into = function._schema.name == "aten::copy_"
    target, source = arguments[0], arguments[1 if into else 0]
    where = target.device if into else keywords.get("device") or source.device
    to_device, from_device = is_device(where), isinstance(source, DeviceTensor)
    if to_device and from_device:
        COUNTS.launch("copy_")
    elif to_device or from_device:
        asynchronous = bool(
            keywords.get("non_blocking") or (into and len(arguments) > 2 and arguments[2])
        )
        COUNTS.copy(to_device, nbytes(source), asynchronous, getattr(source, "pinned", False))
    plain, keywords = (
        tree_map_only(DeviceTensor, lambda x: x.inner, arguments),
        keywords if into else keywords | {"device": HOST},
    )
    if graphs.capturing:
        graphs.capturing.keep(function, plain)
    result = function(*plain, **keywords)
    if graphs.capturing:
        graphs.capturing.record(function, plain, keywords, result)
    if into:
        return target
    return DeviceTensor(result) if to_device else result


def check_indices(arguments: tuple) -> bool:
    """Whether an index is boolean, whose size the host has to wait for; CUDA takes indices from the
    host too.
    """
    tensor, indices, *values = arguments
    given = [index for index in indices if index is not None]
    if isinstance(tensor, DeviceTensor):
        refuse(
            [
                x
                for x in values
                if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor) and x.dim()
            ],
            "index",
        )
        for index in given:
            if not isinstance(index, DeviceTensor):
                COUNTS.copy(True, nbytes(index), False, False)
    elif any(isinstance(index, DeviceTensor) for index in given):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    return any(index.dtype in (torch.bool, torch.uint8) for index in given)


def refuse(strangers: list, name: str) -> None:
    if strangers:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0"
            f" and cpu! ({name})"
        )


class Operations(TorchDispatchMode):
    """Operations that make tensors on the device from none."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if "pin_memory" in function._schema.name:
            return arguments[0]
        if is_device(keywords.get("device")) or any(
            isinstance(x, DeviceTensor) for x in tree_leaves((arguments, keywords))
        ):
            return run(function, arguments, keywords)
        if keywords.get("pin_memory"):
            keywords = keywords | {"pin_memory": False}
        return function(*arguments, **keywords)


class Attention(torch.autograd.Function):
    """Attention as the one kernel that it is on a GPU, forward and backward."""

    @staticmethod
    def forward(context, query, key, value, mask, options):
        COUNTS.launch("attention")
        context.inputs = [
            x.inner.detach().requires_grad_(x.requires_grad) for x in (query, key, value)
        ]
        with torch.enable_grad():
            mask = mask.inner if mask is not None else None
            context.output = scaled_dot_product_attention(*context.inputs, mask, **options)
        if graphs.capturing:
            compute, inputs = (
                torch.no_grad()(scaled_dot_product_attention),
                [x.detach() for x in context.inputs],
            )
            graphs.capturing.calls.append(
                (compute, (*inputs, mask), options, context.output.detach())
            )
        return DeviceTensor(context.output.detach())

    @staticmethod
    def backward(context, gradient):
        COUNTS.launch("attention's gradient")
        wanted = [x for x in context.inputs if x.requires_grad]
        found = iter(torch.autograd.grad(context.output, wanted, gradient.inner, retain_graph=True))
        return (
            *(DeviceTensor(next(found)) if x.requires_grad else None for x in context.inputs),
            None,
            None,
        )


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """torch's scaled_dot_product_attention, which chooses its kernel before the dispatcher is
    asked.
    """
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    if not isinstance(query, DeviceTensor):
        return scaled_dot_product_attention(query, key, value, attn_mask, **options)
    refuse(
        [x for x in (key, value, attn_mask) if x is not None and not isinstance(x, DeviceTensor)],
        "attention",
    )
    heads = [query, key, value]
    if torch.is_autocast_enabled("cuda"):
        heads = [x.to(torch.get_autocast_dtype("cuda")) for x in heads]
    return Attention.apply(*heads, attn_mask, options)


def answers() -> dict:
    """What ``torch.cuda`` answers on this machine."""
    card = SimpleNamespace(
        name="Pretend GPU", major=8, minor=0, total_memory=80 * 2**30, multi_processor_count=108
    )
    card.gcnArchName = ""
    numbers = {
        name: 0
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "current_device",
        )
    }
    truths = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
    }
    more = {
        "device_count": 1,
        "get_device_name": card.name,
        "get_device_properties": card,
        "max_memory_reserved": 0,
    }
    more |= {
        "get_device_capability": (8, 0),
        "mem_get_info": (card.total_memory, card.total_memory),
    }
    nothing = (
        "_lazy_init",
        "init",
        "set_device",
        "reset_peak_memory_stats",
        "empty_cache",
        "manual_seed",
    )
    nothing += ("manual_seed_all", "set_rng_state", "set_rng_state_all", "ipc_collect")
    return numbers | truths | more | dict.fromkeys(nothing) | {"is_current_stream_capturing": False}


def install() -> None:
    """Replace what torch answers, and switch the mode on for good."""
    for name, answer in answers().items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.synchronize = lambda *_: COUNTS.wait("synchronize")
    torch.cuda.get_rng_state = lambda *_: (
        torch.get_rng_state()
    )  # both sides draw from the CPU's generator
    torch.cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    torch.cuda.CUDAGraph, torch.cuda.graph = graphs.Graph, graphs.capture
    for name in ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(..., device="cuda") is made on the host, then copied
    load = torch.load
    torch.load = lambda *a, map_location=None, **k: _moved(
        load(*a, map_location="cpu", **k), map_location
    )
    compatible = torch._has_compatible_shallow_copy_type
    torch._has_compatible_shallow_copy_type = lambda a, b: type(a) is type(b) and compatible(a, b)
    torch.Tensor.pin_memory = _pinned
    Operations().__enter__()
    torch.nn.functional.scaled_dot_product_attention = attention
    _foreach_utils._foreach_supported_types.append(
        DeviceTensor
    )  # torch's own type is all it would see on a real one


def _pinned(tensor: torch.Tensor, *_) -> torch.Tensor:
    copy = tensor.clone()
    copy.pinned = True
    return copy


def _moved(loaded, where):
    if isinstance(where, str | torch.device) and is_device(where):
        return tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), loaded)
    return loaded
