"""Sampling on a GPU with one launch per token: a CUDA graph in place of the hundreds of kernels of
a small model.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import StaticCache

from rlhf_course.ppo.sampling import GPU_SYNC, draw

MULTIPLE = (
    32  # rooms are multiples of so many tokens, so that batches of similar lengths share a graph
)
LARGEST_CACHE = (
    2**30
)  # bytes of keys and values; where there are more, kernels are not waiting for the host any more


class Decoder:
    """Samples batches of one shape from one model; whatever a token changes stays at its place in
    memory.

    A graph replays kernels with the addresses they were recorded with, so a moved weight needs
    another decoder.

    Args:
        model: a policy with value head, on a GPU, whose layers follow one mask of (T, T).
        batch, room: rows, and tokens of a query and its response together, at most.
        eos: (n,), tokens that end a response.
    """

    def __init__(self, model, batch: int, room: int, eos: Tensor) -> None:
        self.model, self.eos, self.graph, self.captures = model, eos, None, True
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        long = {"dtype": torch.long, "device": eos.device}
        for layer in self.cache.layers:
            layer.cumulative_length = torch.zeros((), **long)
        self.tokens, self.positions, self.limits = (torch.zeros(batch, 1, **long) for _ in range(3))
        self.responses = torch.zeros(batch, room, **long)
        self.column, self.place = (
            torch.zeros(1, **long),
            torch.zeros(1, **long),
        )  # in the cache, in the response
        self.visible = torch.zeros(batch, 1, 1, room, dtype=torch.bool, device=eos.device)
        self.running = torch.zeros(batch, 1, dtype=torch.bool, device=eos.device)
        self.total = torch.zeros(
            (), dtype=torch.float64, device=eos.device
        )  # of all probabilities: NaN once one was

    def sample(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        limits: Tensor,
        longest: int,
        begin_suppress: Sequence[int],
    ) -> tuple[Tensor, bool]:
        """Responses (B, longest) to left-padded queries (B, T), and whether all probabilities were
        finite.

        Row i ends after ``limits[i]`` tokens or after its first EOS; what follows is arbitrary.
        """
        width = input_ids.shape[1]
        torch._foreach_zero_(
            [layer.cumulative_length for layer in self.cache.layers] + [self.place]
        )
        self.total.zero_()
        self.running.fill_(True)
        self.visible.zero_()
        self.visible[..., :width] = attention_mask.bool()[:, None, None]
        self.column.fill_(width)
        self.limits.copy_(limits.unsqueeze(1))
        self.positions.copy_(attention_mask.sum(1, keepdim=True))
        causal = torch.ones(width, width, dtype=torch.bool, device=input_ids.device).tril()
        mask = torch.zeros(
            len(input_ids),
            1,
            width,
            self.visible.shape[-1],
            dtype=torch.bool,
            device=input_ids.device,
        )
        mask[..., :width] = (
            attention_mask.bool()[:, None, None] & causal | causal & causal.T
        )  # no row is empty
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        self._draw(self._logits(input_ids, mask, positions), begin_suppress)
        for t in range(1, longest):
            if t % GPU_SYNC == 0 and not self._sync()[0]:
                break
            self._next()
        return self.responses[:, :longest].clone(), self._sync()[1]

    def _logits(self, input_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        arguments = {
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": self.cache,
        }
        return self.model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **arguments)[0][
            :, -1
        ]

    def _draw(self, logits: Tensor, suppress: Sequence[int] = ()) -> None:
        """The next token of every row."""
        tokens, total = draw(logits, suppress, torch.float64)
        self.tokens.copy_(tokens)
        self.total += total.sum()
        self.responses.index_copy_(1, self.place, self.tokens)
        self.place += 1
        self.running &= (self.limits > self.place) & ~torch.isin(self.tokens, self.eos)

    def _token(self) -> None:
        """One token further, without anything that depends on the host."""
        self.visible.index_fill_(-1, self.column, True)
        logits = self._logits(self.tokens, self.visible, self.positions)
        self.column += 1
        self.positions += 1
        self._draw(logits)

    def _next(self) -> None:
        """One token further: the first time as it is written, which loads the kernels, and from
        then on replayed.
        """
        if self.graph is not None:
            return self.graph.replay()
        self._token()
        if self.captures:
            self.graph = self._capture()
            self.captures = self.graph is not None

    def _capture(self):
        """A graph of the next token, which is not sampled yet; None, with a warning, for a model
        that cannot be.
        """
        graph = torch.cuda.CUDAGraph()
        # Weights cast before would be read by the graph when they are long gone
        torch.clear_autocast_cache()
        try:
            with torch.cuda.graph(
                graph, capture_error_mode="thread_local"
            ):  # other threads may talk to other GPUs
                self._token()
        except RuntimeError as error:
            warnings.warn(
                "Sampling goes on without a CUDA graph, which this model cannot be captured in:"
                f" {error}. PPOConfig(fast=False) does not try.",
                stacklevel=2,
            )
            return None
        finally:
            torch.clear_autocast_cache()
        return graph

    def _sync(self) -> tuple[bool, bool]:
        """Whether any row goes on, and whether all numbers were finite."""
        running, total = torch.stack([self.running.any(), self.total]).tolist()
        return running > 0, math.isfinite(total)


class Decoders:
    """The latest decoder of a trainer, used again as long as shapes and weights' places stay what
    they are.
    """

    def __init__(self) -> None:
        self.key, self.decoder = None, None

    def find(
        self, model, input_ids: Tensor, longest: int, eos: Tensor, ends: tuple[int, ...]
    ) -> Decoder | None:
        """A decoder for this batch; None for a model that transformers does not call capturable as
        a whole, and where keys and values take too much memory to keep."""
        if not getattr(model.pretrained_model, "_can_compile_fullgraph", False):
            return None
        text, batch = model.config.get_text_config(), len(input_ids)
        room = -(-(input_ids.shape[1] + longest) // MULTIPLE) * MULTIPLE
        if 8 * batch * room * text.num_hidden_layers * text.hidden_size > LARGEST_CACHE:
            return None
        places = tuple(weight.data_ptr() for weight in model.parameters())
        adapter = getattr(model.pretrained_model, "active_adapter", None)
        precision = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key = (batch, room, ends, adapter, precision, places)
        if key != self.key:
            self.key, self.decoder = None, None  # its memory goes first
            self.key, self.decoder = key, Decoder(model, batch, room, eos)
        return self.decoder
