"""Where the memory of PPO with adapters goes: computed from a model's shape, and measured."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from peft import PeftConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig

FLOAT32 = 4  # bytes: adapters, gradients, optimizer state, everything of the vocabulary


def ppo_memory(
    config: PreTrainedConfig,
    lora: PeftConfig,
    mini_batch: int,
    query: int,
    response: int,
    batch: int | None = None,
    base_bytes: int = FLOAT32,
    activation_bytes: int | None = None,
    checkpointing: bool = False,
    chunk: int | None = None,
) -> dict[str, int]:
    """Bytes that a PPO step holds at most, by what they are for, for a Llama with adapters policy, ref and reward.

    Args:
        config, lora: shapes of the base and of each adapter.
        mini_batch, batch: samples per optimizer step, and per rollout (default: the same).
        query, response: their longest, in tokens.
        base_bytes, activation_bytes: per number: 2 for bfloat16 (activations: under autocast), 4 for float32.
        checkpointing: whether activations are recomputed layer by layer in the backward pass.
        chunk: ``logprob_chunk_size``, response tokens whose logits are in memory at once.

    Base, adapters, gradients and Adam's two moments are there all the time. On top comes the larger of two: the
    key-value cache while sampling, or activations and vocabulary in an update.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        base = sum(p.numel() for p in model.parameters())
        adapter = sum(p.numel() for p in get_peft_model(model, lora).parameters() if p.requires_grad)
    text, activation_bytes = config.get_text_config(), activation_bytes or base_bytes
    hidden, inner, layers = text.hidden_size, text.intermediate_size, text.num_hidden_layers
    tokens, predicted = mini_batch * (query + response), mini_batch * response
    # What one layer keeps per token for its backward pass. Of width `hidden`: input and output of two norms, q, k, v,
    # and attention's output, once more for the projection after it. Of width `inner`: gate, silu(gate), up, and their
    # product. In low precision the norms keep their inputs in float32 besides.
    upcast = 2 * FLOAT32 * hidden if activation_bytes < FLOAT32 else 0
    layer = tokens * (activation_bytes * (9 * hidden + 4 * inner) + upcast)
    inputs = layers * tokens * hidden * activation_bytes
    # Logits, log-probabilities, probabilities and two gradients: float32 numbers for every response token.
    vocabulary = 5 * min(predicted, chunk or predicted) * text.vocab_size * FLOAT32
    # Recomputed layers need memory one at a time, when that of the vocabulary is free again.
    update = inputs + max(layer, vocabulary) if checkpointing else layers * layer + vocabulary
    cache = (batch or mini_batch) * (query + response) * layers * 2 * hidden * activation_bytes
    return {
        "base": base * base_bytes,
        "adapters (policy, ref, reward)": 3 * adapter * FLOAT32,
        "gradients": adapter * FLOAT32,
        "optimizer": 2 * adapter * FLOAT32,
        "activations or cache": max(update, cache),
    }


@contextmanager
def peak_memory(held: Iterable[Tensor] = ()) -> Iterator[SimpleNamespace]:
    """Measures ``.bytes``, the most that tensors took at any time in the body, ``held`` ones included.

    On a GPU, its allocator knows (and knows all tensors). On a CPU every operation is watched, which is slow.
    """
    found = SimpleNamespace(bytes=0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield found
        found.bytes = torch.cuda.max_memory_allocated()
        return
    with _Watch(held) as watch:
        yield found
    found.bytes = watch.peak


class _Watch(TorchDispatchMode):
    """Adds up the storages that operations return, as long as anything refers to them."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0
        self.see(held)

    def see(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.alive and storage.nbytes():
                self.alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.forget, key)
        self.peak = max(self.peak, self.now)

    def forget(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.see(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
