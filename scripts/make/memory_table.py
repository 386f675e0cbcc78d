"""Print what a PPO step holds on Baichuan2-7B's shape, and the smallest card that holds it:
site/larger-models.md.
"""

import pandas as pd
from peft import LoraConfig
from transformers import LlamaConfig

from rlhf_course.course.memory import QUANTIZED, ppo_memory

# GiB; a tenth is kept free for CUDA, fragmentation and the reward model's batches.
CARDS = (16, 24, 40, 80)
SIZES = {"vocab_size": 125_696, "hidden_size": 4096, "intermediate_size": 11_008}
BAICHUAN = LlamaConfig(**SIZES, num_hidden_layers=32, num_attention_heads=32)  # 2-7B, converted
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
CHUNKED = {"checkpointing": True, "chunk": 256}
WAYS = {
    "base in bfloat16": {},
    "+ gradient checkpointing": {"checkpointing": True},
    "+ `logprob_chunk_size=256`": CHUNKED,
    "both, base in 8 bits": CHUNKED | {"layer_bytes": QUANTIZED["8bit"]},
    "both, base in 4 bits": CHUNKED | {"layer_bytes": QUANTIZED["4bit"]},
}
MINI_BATCH, QUERY, RESPONSES = 8, 256, (256, 1024)  # samples, which are the batch, too; tokens


def what_fits() -> pd.DataFrame:
    """Return a row per way to save memory, two columns per response length: the computed peak in
    bf16 autocast, and the card.
    """
    table = pd.DataFrame(index=pd.Index(WAYS, name="7B, LoRA"))
    for response in RESPONSES:
        sizes = MINI_BATCH, QUERY, response
        plans = (ppo_memory(BAICHUAN, LORA, *sizes, base_bytes=2, **way) for way in WAYS.values())
        peaks = [sum(plan.values()) / 2**30 for plan in plans]
        cards = [next((f"{c} GB" for c in CARDS if peak <= 0.9 * c), "–") for peak in peaks]
        table[f"{response:,} new tokens"] = [f"{peak:.0f} GiB" for peak in peaks]
        table[f"{response:,}: fits on"] = cards
    return table


def as_markdown(table: pd.DataFrame) -> str:
    """Return a table of words as Markdown."""
    rows = [[table.index.name, *table.columns], ["---"] * (1 + table.shape[1])]
    rows += table.reset_index().to_numpy().tolist()
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def about_the_optimizer() -> str:
    """Return what moving the optimizer's state to the machine's memory would save, computed."""
    size = ppo_memory(BAICHUAN, LORA, 1, 1, 1)["optimizer"] / 2**30
    small = "too little to move them elsewhere"
    return f"Adam's two moments of the adapters are {size:.1f} GiB of it, {small}."


if __name__ == "__main__":
    print(as_markdown(what_fits()), about_the_optimizer(), sep="\n\n")
