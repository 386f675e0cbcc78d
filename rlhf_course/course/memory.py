"""Where the memory of PPO with adapters goes: computed from a model's shape, and measured."""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pandas as pd
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from rlhf_course.ppo.logprobs import CPU_PIECE

FLOAT32 = 4  # bytes: adapters, gradients, optimizer state, probabilities
QUANTIZED = {"8bit": 1.0, "4bit": 0.5 + 4 / 64}  # bytes per weight; 4 bits share a float32 scale per block of 64


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
    layer_bytes: float | None = None,
) -> dict[str, int]:
    """Bytes that a PPO step holds at most, by what they are for, for a Llama with adapters policy, ref and reward.

    Args:
        config, lora: shapes of the base and of each adapter.
        mini_batch, batch: samples per optimizer step, and per rollout (default: the same).
        query, response: their longest, in tokens.
        base_bytes, activation_bytes: per number: 2 for bfloat16 (activations: under autocast), 4 for float32.
        layer_bytes: per weight of the layers' matrices, where the base is quantized: see ``QUANTIZED``.
        checkpointing: whether activations are recomputed layer by layer in the backward pass.
        chunk: ``logprob_chunk_size``, response tokens whose logits are in memory at once.

    Base, adapters, gradients and Adam's two moments are there all the time. On top comes the larger of two: the
    key-value cache while sampling, or activations and vocabulary in an update.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        matrices = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, nn.Linear))
        others = sum(p.numel() for p in model.parameters()) - matrices
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
    # Logits in float32, whose place probabilities and gradient take; in low precision those of the projection besides.
    # And two temporaries for a piece of them, here a CPU's; a GPU's 64 MiB each are within the tenth that is left free.
    logits, projected = min(predicted, chunk or predicted) * text.vocab_size, base_bytes if base_bytes < FLOAT32 else 0
    vocabulary = logits * (FLOAT32 + projected) + 2 * min(logits, CPU_PIECE) * FLOAT32
    # Recomputed layers need memory one at a time, when that of the vocabulary is free again.
    update = inputs + max(layer, vocabulary) if checkpointing else layers * layer + vocabulary
    cache = (batch or mini_batch) * (query + response) * layers * 2 * hidden * activation_bytes
    return {
        "base": round(others * base_bytes + matrices * (layer_bytes or base_bytes)),
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


CARDS = (16, 24, 40, 80)  # GiB; a tenth of it is left to CUDA, fragments and the reward model's batches


SIZES = {"vocab_size": 125_696, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32}
BAICHUAN = LlamaConfig(**SIZES, num_attention_heads=32)  # 2-7B, after conversion
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")


def what_fits(mini_batch: int = 8, query: int = 256, responses: Sequence[int] = (256, 1024)) -> pd.DataFrame:
    """PPO's peak with LoRA (rank 8) on Baichuan2-7B's shape, and the smallest card that holds it: computed.

    A row per way to save memory, two columns per response length. The batch is one mini-batch of samples with so many
    tokens, in bf16 autocast.
    """
    ways = {
        "base in bfloat16": {},
        "+ gradient checkpointing": {"checkpointing": True},
        "+ `logprob_chunk_size=256`": {"checkpointing": True, "chunk": 256},
        "both, base in 8 bits": {"checkpointing": True, "chunk": 256, "layer_bytes": QUANTIZED["8bit"]},
        "both, base in 4 bits": {"checkpointing": True, "chunk": 256, "layer_bytes": QUANTIZED["4bit"]},
    }
    table = pd.DataFrame(index=pd.Index(ways, name="7B, LoRA"))
    for response in responses:
        plans = [ppo_memory(BAICHUAN, LORA, mini_batch, query, response, base_bytes=2, **way) for way in ways.values()]
        peaks = [sum(plan.values()) / 2**30 for plan in plans]
        cards = [next((f"{card} GB" for card in CARDS if peak <= 0.9 * card), "–") for peak in peaks]
        table[f"{response:,} new tokens"] = [f"{peak:.0f} GiB" for peak in peaks]
        table[f"{response:,}: fits on"] = cards
    return table


def as_markdown(table: pd.DataFrame) -> str:
    """A table of words, as Markdown."""
    rows = [[table.index.name, *table.columns], ["---"] * (1 + table.shape[1]), *table.reset_index().to_numpy()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def about_the_optimizer() -> str:
    """A sentence: what moving the optimizer's state to the machine's memory would save, computed."""
    size = ppo_memory(BAICHUAN, LORA, 1, 1, 1)["optimizer"] / 2**30
    return f"Adam's two moments of the adapters are {size:.1f} GiB of it, too little to move them elsewhere."


if __name__ == "__main__":
    argparse.ArgumentParser("python -m rlhf_course.course.memory").parse_args()  # it has no options, and says so
    print(as_markdown(what_fits()), about_the_optimizer(), sep="\n\n")
