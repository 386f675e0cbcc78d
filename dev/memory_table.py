"""Print the tables of computed PPO memory for docs/larger-models.md.

The tables give a PPO step's peak memory and the smallest GPU with enough memory, for Baichuan2-7B
and for Llamas of several sizes. With --measure, the script instead takes a PPO step and prints its
measured memory as JSON.
"""

import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_course.course.memory import (
    BAICHUAN2_7B,
    FILLED,
    QUANTIZED,
    notebook_05_memory,
    notebook_05_needs,
    peak_memory,
    ppo_memory,
)
from rlhf_course.course.presets import load_preset

# GiB; a tenth stays free for CUDA, fragmentation and the reward model's batches.
CARDS = (16, 24, 40, 80)
TOY = LlamaConfig(
    vocab_size=2000,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=2,
)
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
CHUNKED = {"checkpointing": True, "chunk": 256}
WAYS = {
    "base in bfloat16": {},
    "with gradient checkpointing": {"checkpointing": True},
    "+ `logprob_chunk_size=256`": CHUNKED,
    "both, base in 8 bits": CHUNKED | {"layer_bytes": QUANTIZED["8bit"]},
    "both, base in 4 bits": CHUNKED | {"layer_bytes": QUANTIZED["4bit"]},
}
VOCABULARY = 128_000
SHAPES = {  # published Llamas: width, inner width, layers, heads, key-value heads
    "7B": (4096, 11_008, 32, 32, 32),
    "13B": (5120, 13_824, 40, 40, 40),
    "34B": (8192, 22_016, 48, 64, 8),
    "70B": (8192, 28_672, 80, 64, 8),
}
MINI_BATCH = 8  # samples (one mini-batch per batch)
QUERY = 256  # tokens
RESPONSES = (256, 1024)  # tokens


def what_fits() -> pd.DataFrame:
    """Return a table with a row per way to save memory, and two columns per response length.

    The columns give the computed peak in bf16 autocast, and the smallest GPU for it.
    """
    table = pd.DataFrame(index=pd.Index(WAYS, name="7B, LoRA"))
    for response in RESPONSES:
        peaks = []
        for way in WAYS.values():
            plan = ppo_memory(BAICHUAN2_7B, LORA, MINI_BATCH, QUERY, response, base_bytes=2, **way)
            peaks.append(sum(plan.values()) / 2**30)
        table[f"{response:,} new tokens"] = [f"{peak:.0f} GiB" for peak in peaks]
        table[f"{response:,}: fits on"] = [card(peak) for peak in peaks]
    return table


def stages() -> pd.DataFrame:
    """Return a table with a row per stage of notebook 05 at preset full.

    The columns give, per precision of the base, the computed peak and the smallest GPU for it.
    """
    bases = {"bfloat16": None, "8 bits": QUANTIZED["8bit"], "4 bits": QUANTIZED["4bit"]}
    table = pd.DataFrame()
    for base, layer_bytes in bases.items():
        plans = notebook_05_memory(layer_bytes)
        peaks = [sum(plan.values()) / 2**30 for plan in plans.values()]
        table = table.reindex(pd.Index(plans, name="notebook 05 at `full`"))
        table[f"base in {base}"] = [f"{peak:.1f} GiB" for peak in peaks]
        table[f"{base}: fits on"] = [card(peak) for peak in peaks]
    return table


def about_notebook_05() -> str:
    """Return a sentence with the number that the notebook, its gate and the pages state."""
    return f"Notebook 05 at `full` needs {notebook_05_needs()} GiB of GPU memory (computed)."


def when_to_leave() -> pd.DataFrame:
    """Return a table of peak memory and smallest GPU by Llama size and base precision.

    All rows use gradient checkpointing and compute log-probabilities in chunks.
    """
    table = pd.DataFrame(index=pd.Index(SHAPES, name="LoRA, 1,024 new tokens"))
    for base, way in {"bfloat16": {}, "4 bits": {"layer_bytes": QUANTIZED["4bit"]}}.items():
        peaks = []
        for hidden, inner, layers, heads, groups in SHAPES.values():
            config = LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=groups,
            )
            savings = CHUNKED | way
            plan = ppo_memory(
                config, LORA, MINI_BATCH, QUERY, RESPONSES[1], base_bytes=2, **savings
            )
            peaks.append(sum(plan.values()) / 2**30)
        table[f"base in {base}"] = [f"{peak:.0f} GiB" for peak in peaks]
        table[f"{base}: fits on"] = [card(peak) for peak in peaks]
    return table


def card(peak: float) -> str:
    """Return the smallest card with enough memory for ``peak`` GiB, or a dash."""
    return next((f"{size} GB" for size in CARDS if peak <= FILLED * size), "–")


def about_all_weights() -> str:
    """Return, as text, how many weights the largest card can train, at 16 bytes per weight."""
    billions = FILLED * CARDS[-1] * 2**30 / 16 / 1e9
    return f"at most {billions:.1f} billion weights on {CARDS[-1]} GB"


def as_markdown(table: pd.DataFrame) -> str:
    """Return a table of strings as Markdown."""
    rows = [[table.index.name, *table.columns], ["---"] * (1 + table.shape[1])]
    rows += table.reset_index().to_numpy().tolist()
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def about_the_optimizer() -> str:
    """Return a sentence about the computed memory that offloading Adam would save."""
    size = ppo_memory(BAICHUAN2_7B, LORA, 1, 1, 1)["optimizer"] / 2**30
    small = "too little to be worth offloading"
    return f"Adam's two moments for the adapters take {size:.1f} GiB of this memory, {small}."


def measure_step() -> dict[str, float]:
    """Take a PPO step with random weights; return layers, seconds, peak GiB and computed GiB.

    Sizes and precision are those of notebook 05's full preset. The model has as many layers of a
    7B model as fit in 3/4 of free memory. Without a GPU, the tensors of a toy model are counted.
    """
    full = load_preset("05_lora_rlhf_baichuan", "full")
    is_card = torch.cuda.is_available()
    config = BAICHUAN2_7B if is_card else TOY
    free = 0.75 * torch.cuda.mem_get_info()[0] if is_card else float("inf")
    dtype = getattr(torch, full.dtype)
    batch = full.batch_size
    for layers in range(config.num_hidden_layers, 0, -1):
        config = LlamaConfig(**config.to_dict() | {"num_hidden_layers": layers})
        plan = ppo_memory(
            config,
            LORA,
            full.mini_batch_size,
            full.max_prompt,
            full.max_new_tokens,
            batch,
            base_bytes=dtype.itemsize,
            checkpointing=full.gradient_checkpointing,
        )
        computed = sum(plan.values())
        if computed <= free:
            break
    with torch.device("cuda" if is_card else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(model, peft_config=LORA)
    policy.pretrained_model.add_adapter("reward", LORA)
    policy.pretrained_model.set_adapter("policy")
    options = {"batch_size": batch, "mini_batch_size": full.mini_batch_size}
    options["gradient_checkpointing"] = full.gradient_checkpointing
    options["accelerator_kwargs"] = {"mixed_precision": full.mixed_precision}
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=config.eos_token_id)
    trainer = PPOTrainer(PPOConfig(**options), policy, None, tokenizer)
    queries = torch.randint(3, config.vocab_size, (batch, full.max_prompt))
    responses = torch.randint(3, config.vocab_size, (batch, full.max_new_tokens))
    held = [*policy.parameters(), *policy.buffers()]
    started = time.perf_counter()
    with nullcontext() if is_card else peak_memory(held) as peak:
        trainer.step(list(queries), list(responses), list(torch.randn(batch)))
    seconds = time.perf_counter() - started
    most = torch.cuda.max_memory_allocated() if is_card else peak.bytes
    return {
        "layers": layers,
        "seconds": seconds,
        "peak_gib": most / 2**30,
        "computed_gib": computed / 2**30,
    }


if __name__ == "__main__":
    if "--measure" in sys.argv:
        print(json.dumps(measure_step()))
    else:
        print(as_markdown(what_fits()), about_the_optimizer(), sep="\n\n")
        print(as_markdown(stages()), about_notebook_05(), sep="\n\n")
        print(as_markdown(when_to_leave()), about_all_weights(), sep="\n\n")
