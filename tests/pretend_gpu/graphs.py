"""CUDA graphs of the pretend GPU: operations are recorded with their tensors, and replayed on the
same memory.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves

from pretend_gpu.counts import COUNTS

capturing: Graph | None = None


class Graph:
    """What ``torch.cuda.CUDAGraph`` is on a GPU. Recording changes nothing, as there; replaying
    changes all.
    """

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, function, arguments: tuple) -> None:
        """Remember what the operation is about to overwrite."""
        for argument, about in zip(arguments, function._schema.arguments, strict=False):
            if about.alias_info is not None and about.alias_info.is_write:
                self.kept += [
                    (x, x.clone()) for x in tree_leaves(argument) if isinstance(x, torch.Tensor)
                ]

    def record(self, function, arguments: tuple, keywords: dict, result) -> None:
        if not function.is_view:
            self.calls.append((function, arguments, keywords, result))

    def replay(self) -> None:
        """Run what was recorded, into the memory it was recorded with: one launch."""
        COUNTS.launch("graph")
        COUNTS.replay([call[0] for call in self.calls])
        for function, arguments, keywords, result in self.calls:
            found = function(*arguments, **keywords)
            for new, old in zip(tree_leaves(found), tree_leaves(result), strict=True):
                if isinstance(new, torch.Tensor) and new is not old:
                    old.copy_(new)


@contextmanager
def capture(graph: Graph, *_, **__):
    """What ``torch.cuda.graph`` is: operations of the body are recorded, and do not happen."""
    global capturing
    random, capturing = torch.get_rng_state(), graph
    try:
        yield
    finally:
        capturing = None
        for tensor, before in reversed(graph.kept):
            tensor.copy_(before)
        torch.set_rng_state(random)
        graph.kept.clear()
