"""What a real GPU would have been asked to do: operations that launch a kernel, and waits of the
host for it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# No kernel: only metadata, or memory from the allocator.
SILENT = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_local_scalar_dense",
}
SILENT |= {
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "lift_fresh",
    "set_",
    "resize_",
    "is_pinned",
    "pin_memory",
}
# The host has to know a result, or its size, before it can go on.
READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
}
READS |= {"equal", "repeat_interleave"}
TENSORS_PER_LAUNCH = (
    30  # of an operation on lists of tensors; a real one depends on their sizes too
)
ASYNCHRONOUS = (
    64 * 1024
)  # bytes that a non_blocking copy takes from ordinary memory without waiting (CUDA's guide)


class Counts:
    """Launches by operation and waits by line of code, of the phase that is running."""

    def __init__(self) -> None:
        self.launches: dict[str, Counter] = {}
        self.waits: dict[str, Counter] = {}
        self.replayed: dict[str, int] = {}  # kernels that a graph's launch brings with it
        self.phase = ""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what happens in the body under this name."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def launch(self, name: str, times: int = 1) -> None:
        self.launches.setdefault(self.phase, Counter())[name] += times

    def wait(self, why: str) -> None:
        from pretend_gpu import graphs

        if graphs.capturing:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({why})"
            )
        self.waits.setdefault(self.phase, Counter())[f"{why} at {_line()}"] += 1

    def clear(self) -> None:
        self.launches.clear()
        self.waits.clear()
        self.replayed.clear()

    def replay(self, functions: list) -> None:
        """Take note of a graph's kernels, for which the host does nothing."""
        kernels = [
            f
            for f in functions
            if not hasattr(f, "_schema") or f._schema.name.removeprefix("aten::") not in SILENT
        ]
        self.replayed[self.phase] = self.replayed.get(self.phase, 0) + len(kernels)

    def operation(self, function, arguments: tuple, boolean_index: bool) -> None:
        """Take note of an operation on tensors of the device."""
        name = function._schema.name.removeprefix("aten::")
        if name in READS or boolean_index:
            self.wait(name)
        if name in SILENT or function.is_view:
            return
        tensors = (
            len(arguments[0]) if name.startswith(("_foreach", "_fused", "_amp_foreach")) else 1
        )
        self.launch(name, -(-tensors // TENSORS_PER_LAUNCH))

    def copy(self, to_device: bool, nbytes: int, asynchronous: bool, pinned: bool) -> None:
        """Take note of a copy between host and device; one to the device need not be waited for."""
        self.launch("copy to the device" if to_device else "copy to the host")
        if not (to_device and asynchronous and (pinned or nbytes <= ASYNCHRONOUS)):
            self.wait("copy to the device" if to_device else "copy to the host")


def _line() -> str:
    """Where the latest line of the course, a script or a cell asked for it."""
    frame = sys._getframe(2)
    while frame:
        place = frame.f_code.co_filename
        if "pretend_gpu" not in place and (
            "rlhf_course" in place or "/scripts/" in place or "ipykernel" in place
        ):
            return f"{place.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


COUNTS = Counts()


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
