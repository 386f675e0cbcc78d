"""Computed memory against measured memory."""

import gc

import pytest
import torch
from builders import make_trainer
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from dev.memory_table import (
    about_all_weights,
    about_notebook_05,
    about_the_optimizer,
    as_markdown,
    stages,
    what_fits,
    when_to_leave,
)
from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.course.memory import (
    notebook_05_needs,
    peak_memory,
    ppo_memory,
    reward_memory,
    sft_memory,
)
from rlhf_course.course.presets import ROOT, shipped
from rlhf_course.policy.adapters import REWARD
from scripts.gpu_day import FULL

pytestmark = pytest.mark.quick

QUERY, RESPONSE, BATCH = 24, 32, 16
LORA = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def measure(
    vocabulary: int, layers: int, mini_batch: int, checkpointing: bool, chunk: int | None = None
) -> tuple[int, dict]:
    """Bytes of a PPO step with three adapters, measured and computed."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 64, "pad_token_id": 0}
    sizes |= {"eos_token_id": 39}  # the tokenizer of the tests
    config = LlamaConfig(vocab_size=vocabulary, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    adapter = {"peft_config": LoraConfig(**LORA)}
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(model, **adapter)
    policy.pretrained_model.add_adapter(REWARD, LoraConfig(**LORA))
    policy.pretrained_model.set_adapter("policy")
    options = {"batch_size": BATCH, "mini_batch_size": mini_batch, "logprob_chunk_size": chunk}
    trainer = make_trainer(policy, gradient_checkpointing=checkpointing, **options)
    queries = [torch.randint(1, vocabulary, (QUERY,)) for _ in range(BATCH)]
    responses = [torch.randint(1, vocabulary, (RESPONSE,)) for _ in range(BATCH)]
    with peak_memory([*policy.parameters(), *policy.buffers()]) as peak:
        trainer.step(queries, responses, list(torch.randn(BATCH)))
    how = {"checkpointing": checkpointing, "chunk": chunk}
    plan = ppo_memory(config, LoraConfig(**LORA), mini_batch, QUERY, RESPONSE, BATCH, **how)
    return peak.bytes, plan


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("vocabulary", "layers"), [(100, 4), (2000, 2)])
@pytest.mark.parametrize("mini_batch", [4, 16])
def test_what_is_computed_is_what_is_measured(vocabulary, layers, mini_batch, checkpointing):
    measured, plan = measure(vocabulary, layers, mini_batch, checkpointing)
    assert 0.9 < measured / sum(plan.values()) <= 1.3


def test_chunks_of_the_vocabulary_take_less_as_computed():
    """With 8,000 words most of a step's memory is for numbers per word."""
    whole, _ = measure(8000, 2, 16, checkpointing=True)
    measured, plan = measure(8000, 2, 16, checkpointing=True, chunk=64)
    assert measured < 0.5 * whole and 0.9 < measured / sum(plan.values()) <= 1.3


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped("models/sums-mini"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("vocabulary", [500, 4000])
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_sft_and_reward_training_take_what_is_computed(
    stage, vocabulary, checkpointing, tokenizer, tmp_path
):
    """One step of trl's trainers, on texts of one length."""
    length, rows = 56, 8
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 4, "max_position_embeddings": 64, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=vocabulary, num_labels=1, **sizes)
    texts = torch.randint(3, 400, (2, rows, length)).tolist()
    options = {"per_device_train_batch_size": rows, "max_steps": 1, "max_length": None}
    options |= {"gradient_checkpointing": checkpointing, "use_cpu": True, "bf16": False}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    options |= {"output_dir": str(tmp_path)}
    if stage == "sft":
        lora = LoraConfig(**LORA)
        trainer = SFTTrainer(
            LlamaForCausalLM(config),
            SFTConfig(**options),
            train_dataset=Dataset.from_dict({"input_ids": texts[0]}),
            processing_class=tokenizer,
            peft_config=lora,
        )
    else:
        lora = LoraConfig(**LORA | {"task_type": "SEQ_CLS"}, modules_to_save=["score"])
        pairs = {"chosen_ids": texts[0], "rejected_ids": texts[1]}
        trainer = RewardTrainer(
            LlamaForSequenceClassification(config),
            RewardConfig(**options),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer,
            peft_config=lora,
        )
    options = {"checkpointing": checkpointing}
    if stage == "sft":
        plan = sft_memory(config, lora, rows, length, on_cpu=True, **options)
    else:
        plan = reward_memory(config, lora, rows, length, **options)
    with peak_memory([*trainer.model.parameters(), *trainer.model.buffers()]) as peak:
        trainer.train()
    assert 0.9 < peak.bytes / sum(plan.values()) <= 1.3


def test_seven_billion_weights_are_counted_exactly():
    sizes = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32}
    config = LlamaConfig(vocab_size=125_696, num_attention_heads=32, **sizes)
    plan = ppo_memory(config, LoraConfig(**LORA), 1, 8, 8, base_bytes=2)
    layer = 4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096
    assert plan["base"] == 2 * (32 * layer + 2 * 125_696 * 4096 + 4096)
    adapter = 32 * 8 * (8 * 4096 + 3 * (4096 + 11_008))
    assert plan["optimizer"] == 2 * plan["gradients"] == 2 * 4 * adapter


def test_the_peak_is_the_most_that_was_alive_at_once():
    held = torch.zeros(1000)
    with peak_memory([held]) as peak:
        first = torch.zeros(2000)
        second = first + 1
        view = second[:10]
        del first, second
        gc.collect()
        third = torch.zeros(1500)  # 1,000 + 2,000 (the view's) + 1,500 < 1,000 + 2 · 2,000
    assert peak.bytes == 4 * 5000
    assert len(view) == 10 and len(third) == 1500


def test_the_page_about_larger_models_says_what_is_computed():
    page = (ROOT / "docs/larger-models.md").read_text(encoding="utf-8")
    assert as_markdown(what_fits()) in page and about_the_optimizer() in page
    assert as_markdown(when_to_leave()) in page and about_all_weights() in page
    assert as_markdown(stages()) in page


def test_one_number_says_what_notebook_05_needs_at_full():
    """It fits a 24 GB card; the notebook's header, the pages and the gate state the same number."""
    needed = notebook_05_needs()
    assert needed <= 24
    for page in ("larger-models", "own-run", "on-a-gpu"):
        assert about_notebook_05() in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    header = (ROOT / "notebooks/05_lora_rlhf_baichuan.ipynb").read_text(encoding="utf-8")
    assert f"one GPU with {needed} GiB of free memory (computed" in header
    assert FULL["05"]["memory"] == needed
