"""Compute, from a model's shape, the memory of each stage with adapters; measure peak memory.

The sources of the formulas:

* adapters: LoRA, Hu et al. 2021, arXiv:2106.09685
* optimizer state, two moments per weight: Adam, Kingma and Ba 2014, arXiv:1412.6980
* 4-bit weights: QLoRA, Dettmers et al. 2023, arXiv:2305.14314, without double quantization
* 8-bit weights: LLM.int8(), Dettmers et al. 2022, arXiv:2208.07339
* recomputed activations: Chen et al. 2016, arXiv:1604.06174
* grouped keys and values: Ainslie et al. 2023, arXiv:2305.13245

The count of a layer's stored activations follows from Llama's code in transformers.
"""

import math
import weakref
from collections.abc import Iterable

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
)

from rlhf_course.course.presets import load_preset
from rlhf_course.ppo.rollout import CPU_PIECE

FILLED = 0.9  # of a GPU; the rest stays free for CUDA, fragmentation and other batches
BAICHUAN2_7B = LlamaConfig(  # after the conversion in notebook 05
    vocab_size=125_696,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
)
FLOAT32 = 4  # bytes: adapters, gradients, optimizer state, probabilities
# trl's fused loss: tokens and words whose logits are in memory together; copies that a CPU makes.
SFT_TOKENS = 4096
SFT_PIECE = 32_768
SFT_COPIES = 7
# Bytes per weight; at 4 bits, each block of 64 weights shares a float32 scale.
QUANTIZED = {"8bit": 1.0, "4bit": 0.5 + FLOAT32 / 64}


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

    Args:
        config: the base's shape.
        lora: each adapter's shape.
        mini_batch: samples per optimizer step.
        query: maximum tokens per query.
        response: maximum tokens per response.
        batch: samples per rollout; default: ``mini_batch``.
        base_bytes: bytes per base weight or activation (2 for bfloat16).
        checkpointing: whether the backward pass recomputes activations.
        chunk: ``logprob_chunk_size``, the tokens whose logits are in memory together.
        layer_bytes: bytes per weight in the layers' matrices, if quantized (``QUANTIZED``).

    The entries are, in bytes:

    * base: (weights in matrices) · ``layer_bytes`` + (other weights) · ``base_bytes``
    * adapters: 3 adapters · weights per adapter · 4
    * gradients: weights per adapter · 4
    * optimizer: 2 moments · weights per adapter · 4
    * activations or cache: the larger of :func:`_update_bytes` and :func:`_cache_bytes`, because
      sampling and updates alternate
    """
    matrices, others, adapter = _count_weights(config, lora)
    shape = config.get_text_config()
    length = query + response
    update = _update_bytes(
        shape,
        tokens=mini_batch * length,
        predicted=mini_batch * response,
        base_bytes=base_bytes,
        checkpointing=checkpointing,
        chunk=chunk,
    )
    cache = _cache_bytes(shape, tokens=(batch or mini_batch) * length, base_bytes=base_bytes)
    return {
        "base": round(others * base_bytes + matrices * (layer_bytes or base_bytes)),
        "adapters (policy, ref, reward)": 3 * adapter * FLOAT32,
        "gradients": adapter * FLOAT32,
        "optimizer": 2 * adapter * FLOAT32,
        "activations or cache": max(update, cache),
    }


def sft_memory(
    config: PreTrainedConfig,
    lora: PeftConfig,
    mini_batch: int,
    length: int,
    base_bytes: int = FLOAT32,
    checkpointing: bool = False,
    layer_bytes: float | None = None,
    on_cpu: bool = False,
) -> dict[str, int]:
    """Return an SFT step's peak bytes by purpose, for a Llama with one adapter.

    ``mini_batch`` counts the texts per forward and backward pass, and ``length`` the tokens per
    text; the other arguments are those of :func:`ppo_memory`. trl's SFTTrainer computes the logits
    of all tokens, but only ``SFT_TOKENS`` tokens by ``SFT_PIECE`` words at a time, and keeps none.
    On a CPU (``on_cpu``), the loss also needs ``SFT_COPIES`` float32 copies of these logits.
    """
    shape = config.get_text_config()
    tokens = mini_batch * length
    tile = min(tokens, SFT_TOKENS)
    vocabulary = tile * SFT_PIECE * base_bytes + tokens * shape.hidden_size * FLOAT32
    if on_cpu:
        vocabulary += SFT_COPIES * tile * min(shape.vocab_size, SFT_PIECE) * FLOAT32
    activations = _activation_bytes(shape, tokens, vocabulary, base_bytes, checkpointing)
    weights = _count_weights(config, lora)
    return _one_adapter(weights, activations, base_bytes, layer_bytes)


def reward_memory(
    config: PreTrainedConfig,
    lora: PeftConfig,
    mini_batch: int,
    length: int,
    base_bytes: int = FLOAT32,
    checkpointing: bool = False,
    layer_bytes: float | None = None,
) -> dict[str, int]:
    """Return the peak bytes, by purpose, of a step that trains a reward model with one adapter.

    ``mini_batch`` counts the pairs per forward and backward pass, and ``length`` the tokens per
    text; a pair has two texts. The other arguments are those of :func:`ppo_memory`. A reward model
    has one output instead of a vocabulary projection, and therefore no logits.
    """
    tokens = 2 * mini_batch * length
    shape = config.get_text_config()
    activations = _activation_bytes(shape, tokens, 0, base_bytes, checkpointing)
    weights = _count_weights(config, lora, AutoModelForSequenceClassification)
    return _one_adapter(weights, activations, base_bytes, layer_bytes)


def notebook_05_memory(
    layer_bytes: float | None = None,
) -> dict[str, dict[str, int]]:
    """Return the peak bytes, by purpose, of notebook 05's three stages at preset full."""
    full = load_preset("05_lora_rlhf_baichuan", "full")
    targets = list(full.lora_target_modules)
    lora = LoraConfig(task_type="CAUSAL_LM", r=full.lora_r, target_modules=targets)
    reward_lora = LoraConfig(task_type="SEQ_CLS", r=full.lora_r, target_modules=targets)
    options = {
        "base_bytes": getattr(torch, full.dtype).itemsize,
        "checkpointing": full.gradient_checkpointing,
        "layer_bytes": layer_bytes,
    }
    return {
        "SFT": sft_memory(BAICHUAN2_7B, lora, full.sft_batch_size, full.max_length, **options),
        "reward model": reward_memory(
            BAICHUAN2_7B, reward_lora, full.reward_batch_size, full.max_length, **options
        ),
        "PPO": ppo_memory(
            BAICHUAN2_7B,
            lora,
            full.mini_batch_size,
            full.max_prompt,
            full.max_new_tokens,
            batch=full.sample_batch_size,
            **options,
        ),
    }


def notebook_05_needs() -> int:
    """Return the GiB of GPU memory for notebook 05 at preset full, with a tenth left free."""
    peak = max(sum(plan.values()) for plan in notebook_05_memory().values())
    return math.ceil(peak / FILLED / 2**30)


def _one_adapter(
    weights: tuple[int, int, int], activations: int, base_bytes: int, layer_bytes: float | None
) -> dict[str, int]:
    """Return the bytes by purpose of training one adapter; ``weights`` has three counts."""
    matrices, others, adapter = weights
    return {
        "base": round(others * base_bytes + matrices * (layer_bytes or base_bytes)),
        "adapter": adapter * FLOAT32,
        "gradients": adapter * FLOAT32,
        "optimizer": 2 * adapter * FLOAT32,
        "activations": activations,
    }


def _count_weights(
    config: PreTrainedConfig, lora: PeftConfig, model_class=AutoModelForCausalLM
) -> tuple[int, int, int]:
    """Return three counts of weights: the layers' matrices, all other base weights, one adapter."""
    with torch.device("meta"):
        model = model_class.from_config(config)
        layers = [m for m in model.base_model.modules() if isinstance(m, nn.Linear)]
        matrices = sum(layer.weight.numel() for layer in layers)
        others = sum(p.numel() for p in model.parameters()) - matrices
        adapted = get_peft_model(model, lora)
        adapter = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return matrices, others, adapter


def _cache_bytes(shape: PreTrainedConfig, tokens: int, base_bytes: int) -> int:
    """Return the bytes of sampling's cache: a key and a value per token, layer and key-value head.

    bytes = tokens · layers · 2 · heads · (width of a head) · ``base_bytes``
    """
    per_layer = 2 * shape.num_key_value_heads * shape.head_dim
    return tokens * shape.num_hidden_layers * per_layer * base_bytes


def _update_bytes(
    shape: PreTrainedConfig,
    tokens: int,
    predicted: int,
    base_bytes: int,
    checkpointing: bool,
    chunk: int | None,
) -> int:
    """Return the bytes of activations (all ``tokens``) and logits (``predicted`` tokens).

    A logit needs one float32 number, which becomes a probability and then a gradient. In low
    precision, the model's own logit or its gradient is in memory at the same time.
    """
    logits = min(predicted, chunk or predicted) * shape.vocab_size
    bytes_per_logit = FLOAT32
    if base_bytes < FLOAT32:
        bytes_per_logit += base_bytes
    # On a CPU, add two temporaries for one piece. On a GPU, temporaries of 64 MiB are negligible.
    temporaries = 2 * FLOAT32 * min(logits, CPU_PIECE)
    vocabulary = bytes_per_logit * logits + temporaries
    return _activation_bytes(shape, tokens, vocabulary, base_bytes, checkpointing)


def _activation_bytes(
    shape: PreTrainedConfig, tokens: int, vocabulary: int, base_bytes: int, checkpointing: bool
) -> int:
    """Return the bytes of all layers' activations, with ``vocabulary`` bytes for the logits.

    For its backward pass, a layer stores these tensors per token:

    * 9 of the hidden width: q, k and v, two norms' inputs and outputs, and attention's output twice
      (once for the next projection)
    * 4 of the inner width: gate, silu(gate), up, and the product of silu(gate) and up
    * in low precision, 2 more of the hidden width in float32: the norms' inputs

    Recomputation stores each layer's input (1 of the hidden width), and one layer's tensors at a
    time.
    """
    hidden = shape.hidden_size
    layer = tokens * base_bytes * (9 * hidden + 4 * shape.intermediate_size)
    if base_bytes < FLOAT32:
        layer += tokens * 2 * hidden * FLOAT32
    layers = shape.num_hidden_layers
    if checkpointing:
        inputs = layers * tokens * hidden * base_bytes
        return inputs + max(layer, vocabulary)  # the logits are freed before layers are recomputed
    return layers * layer + vocabulary


class peak_memory(TorchDispatchMode):
    """Measure ``.bytes``, the peak total size of tensors in ``held`` and the with block.

    Each storage that an operation returns is counted until it is freed; counting is slow. A
    kernel's internal memory is not counted.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # of the living storages
        self.now = 0
        self.bytes = 0
        self.add(held)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the tensors' storages from now until each is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes and storage.nbytes():
                self.sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, key)
        self.bytes = max(self.bytes, self.now)

    def free(self, key: int) -> None:
        """Stop counting a storage."""
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        """Run an operation and count what it returns."""
        result = function(*arguments, **(keywords or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
