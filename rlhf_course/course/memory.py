"""Compute, from a model's shape, the memory for PPO with adapters; measure peak memory."""

import weakref
from collections.abc import Iterable

import torch
from peft import PeftConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlhf_course.ppo.rollout import CPU_PIECE

FLOAT32 = 4  # bytes: adapters, gradients, optimizer state, probabilities
# Bytes per weight; at 4 bits, each block of 64 weights shares a float32 scale.
QUANTIZED = {"8bit": 1.0, "4bit": 0.5 + 4 / 64}


def ppo_memory(
    config: PreTrainedConfig,
    lora: PeftConfig,
    mini_batch: int,
    query: int,
    response: int,
    batch: int | None = None,
    base_bytes: int = FLOAT32,
    checkpointing: bool = False,
    chunk: int | None = None,
    layer_bytes: float | None = None,
) -> dict[str, int]:
    """Return a PPO step's peak bytes by purpose, for a Llama with three adapters.

    ``config``: the base's shape. ``lora``: each adapter's shape. ``mini_batch``: samples per
    optimizer step. ``batch``: samples per rollout. ``query``, ``response``: maximum tokens.
    ``base_bytes``: bytes per base weight or activation (2 for bfloat16). ``layer_bytes``: bytes per
    weight in quantized base matrices (``QUANTIZED``). ``chunk``: ``logprob_chunk_size``.

    The peak includes the larger of sampling's key-value cache and an update's activations.
    """
    matrices, others, adapter = _count(config, lora)
    text, length = config.get_text_config(), query + response
    sizes = mini_batch * length, mini_batch * response
    update = _update(text, *sizes, base_bytes, checkpointing, chunk)
    numbers = (batch or mini_batch) * length * text.num_hidden_layers
    numbers *= 2 * text.num_key_value_heads * text.head_dim  # keys and values
    return {
        "base": round(others * base_bytes + matrices * (layer_bytes or base_bytes)),
        "adapters (policy, ref, reward)": 3 * adapter * FLOAT32,
        "gradients": adapter * FLOAT32,
        "optimizer": 2 * adapter * FLOAT32,
        "activations or cache": max(update, numbers * base_bytes),
    }


def _count(config: PreTrainedConfig, lora: PeftConfig) -> tuple[int, int, int]:
    """Return three weight counts: the layers' matrices, all other base weights, one adapter."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        layers = (m for m in model.base_model.modules() if isinstance(m, nn.Linear))
        matrices = sum(layer.weight.numel() for layer in layers)
        others = sum(p.numel() for p in model.parameters()) - matrices
        trained = (p for p in get_peft_model(model, lora).parameters() if p.requires_grad)
        return matrices, others, sum(p.numel() for p in trained)


def _update(
    text: PreTrainedConfig,
    tokens: int,
    predicted: int,
    base_bytes: int,
    checkpointing: bool,
    chunk: int | None,
) -> int:
    """Return the bytes that activations and ``predicted`` tokens' logits need in an update."""
    hidden, inner, layers = text.hidden_size, text.intermediate_size, text.num_hidden_layers
    # For its backward pass, a layer stores these tensors per token. Width `hidden`: q, k, v, two
    # norms' inputs and outputs, and attention's output twice (once for the next projection). Width
    # `inner`: gate, silu(gate), up, and their product. In low precision, norms also store float32
    # inputs.
    upcast = 2 * FLOAT32 * hidden if base_bytes < FLOAT32 else 0
    layer = tokens * (base_bytes * (9 * hidden + 4 * inner) + upcast)
    inputs = layers * tokens * hidden * base_bytes
    # Count float32 logits and log-probabilities, or the gradients of both. On a CPU, add two
    # temporaries for one piece. On a GPU, temporaries of 64 MiB are negligible.
    logits = min(predicted, chunk or predicted) * text.vocab_size
    vocabulary = 2 * FLOAT32 * (logits + min(logits, CPU_PIECE))
    # Recomputed layers need memory one at a time, after the logits are freed.
    return inputs + max(layer, vocabulary) if checkpointing else layers * layer + vocabulary


class peak_memory(TorchDispatchMode):
    """Measure ``.bytes``, the peak total size of tensors in ``held`` and the with block.

    Each storage that an operation returns is counted until it is freed; counting is slow. A
    kernel's internal memory is not counted.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.bytes = 0
        self.add(held)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes and storage.nbytes():
                self.sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, key)
        self.bytes = max(self.bytes, self.now)

    def free(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
