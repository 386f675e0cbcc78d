"""Adapters on one base: the same numbers as separate full models, and nothing frozen moves."""

import copy

import pytest
import torch
from builders import invalid, make_samples, make_trainer, snapshot, word_tokenizer
from peft import LoraConfig, get_peft_model
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.course.memory import QUANTIZED, ppo_memory
from rlhf_course.policy.adapters import RewardAdapter, quantization
from rlhf_course.rewards import RewardModel

LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 39}
FAMILIES = {
    "llama": (LlamaConfig(**LLAMA, **IDS), LlamaForCausalLM, LlamaForSequenceClassification),
    "gpt2": (
        GPT2Config(**GPT2, **IDS, initializer_range=0.2),
        GPT2LMHeadModel,
        GPT2ForSequenceClassification,
    ),
}
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
HOW = {"mini_batch_size": 4, "learning_rate": 5e-3}


def randomise(model, seed: int) -> None:
    """LoRA begins at 0; give every adapter weight a value, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "score" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


@pytest.fixture(scope="module", params=FAMILIES)
def assets(request, tmp_path_factory):
    """Folders: a base, an SFT adapter and a reward adapter; and the two merged into full models."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    config, causal, classifier = FAMILIES[family]
    torch.manual_seed(0)
    causal(config).save_pretrained(folder / "base")
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": TARGETS[family]}
    lora["fan_in_fan_out"] = family == "gpt2"
    bases = [causal.from_pretrained(folder / "base")]
    bases += [classifier.from_pretrained(folder / "base", num_labels=1)]
    tasks = [{"task_type": "CAUSAL_LM"}, {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}]
    merged = {}
    for seed, (name, base, task) in enumerate(zip(("sft", "reward"), bases, tasks, strict=True)):
        model = get_peft_model(base, LoraConfig(**task, **lora))
        randomise(model, seed)
        model.save_pretrained(folder / name)
        merged[name] = model.merge_and_unload().eval()
    return folder, merged


def load_policy(folder) -> AutoModelForCausalLMWithValueHead:
    torch.manual_seed(3)  # the value head
    return AutoModelForCausalLMWithValueHead.from_pretrained(folder / "sft")


def make_tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", *(f"w{i}" for i in range(2, 38)), "<unk>", "</s>"]
    return word_tokenizer(
        words, pre_tokenizers.WhitespaceSplit(), unk_token="<unk>", padding_side=padding_side
    )


def test_steps_equal_those_with_a_merged_copy_as_the_reference(assets):
    folder, merged = assets
    histories = []
    for reference in (None, copy.deepcopy(merged["sft"])):
        trainer = make_trainer(load_policy(folder), reference, **HOW)
        histories.append([trainer.step(*make_samples(seed=step)) for step in range(3)])
    for ours, theirs in zip(*histories, strict=True):
        for key in (key for key in ours if not key.startswith("time/")):
            pair = torch.tensor(ours[key]), torch.tensor(theirs[key])
            torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
    kl = [stats["objective/kl"] for stats in histories[0]]
    assert abs(kl[0]) <= 1e-6 and abs(kl[2]) > 1e-3  # it moved, so the comparison is not empty


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_reward_scores_equal_the_merged_reward_model(assets, padding_side):
    folder, merged = assets
    policy, tokenizer = load_policy(folder), make_tokenizer(padding_side)
    prompts, answers = ["w2 w3", "w4", "w5 w6 w7 w8"], ["w9", "w10 w11 w12", ""]
    adapter = RewardAdapter(policy, folder / "reward")
    active = policy.pretrained_model.active_adapter
    scores = RewardModel(adapter, tokenizer)(prompts, answers)
    expected = RewardModel(copy.deepcopy(merged["reward"]), tokenizer)(prompts, answers)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert scores.std() > 1e-2
    assert policy.pretrained_model.active_adapter == active == "policy"


def test_training_moves_the_policy_adapter_and_the_value_head_alone(assets):
    folder, _ = assets
    policy = load_policy(folder)
    reward = RewardAdapter(policy, folder / "reward")
    trainer = make_trainer(policy, **HOW)
    before, head = snapshot(policy), reward.score.weight.clone()
    for step in range(2):
        RewardModel(reward, make_tokenizer())(["w2", "w3"], ["w4", "w5"])
        trainer.step(*make_samples(seed=step))
    after = policy.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(".policy." in name or name.startswith("v_head.") for name in moved)
    assert {name for name in before if ".policy." in name} <= moved
    assert torch.equal(head, reward.score.weight)
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert all(".policy." in name or name.startswith("v_head.") for name in trainable)


def test_one_copy_of_the_base(assets):
    folder, _ = assets
    policy = load_policy(folder)
    RewardAdapter(policy, folder / "reward")
    make_trainer(policy, **HOW)
    names = [name for name, _ in policy.named_parameters()]
    base = [name for name in names if "lora_" not in name and not name.startswith("v_head")]
    plain = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert len(base) == len([*plain.parameters()])
    assert set(policy.pretrained_model.peft_config) == {"policy", "ref", "reward"}


def test_a_base_that_trains_beside_its_adapter_is_refused(assets):
    policy = load_policy(assets[0])
    policy.pretrained_model.get_input_embeddings().requires_grad_(True)
    with invalid("weights of the base, such as .* are trained"):
        make_trainer(policy, **HOW)


def test_what_cannot_be_a_reward_adapter_is_refused(assets):
    folder, _ = assets
    with invalid("has no score head"):
        RewardAdapter(load_policy(folder), folder / "sft")


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_a_quantized_base_trains_its_adapter_and_takes_the_memory_that_was_computed(kind, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if kind == "4bit" and not torch.cuda.is_available():
        with invalid("needs a GPU"):
            quantization(kind)
        return
    sizes = {"vocab_size": 60, "hidden_size": 128, "intermediate_size": 256}
    config = LlamaConfig(**sizes, **IDS, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    how = {"quantization_config": quantization(kind), "peft_config": adapter}
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, **how)
    named = policy.named_parameters()
    base = {id(p): p for n, p in named if "lora" not in n and "v_head" not in n}.values()
    held = sum(p.numel() * p.element_size() for p in base)
    if kind == "4bit":  # the blocks' scales are no parameters
        held += sum(p.quant_state.absmax.numel() * 4 for p in base if hasattr(p, "quant_state"))
    plan = ppo_memory(config, adapter, 1, 1, 1, layer_bytes=QUANTIZED[kind])
    assert held == pytest.approx(plan["base"], rel=0.05)
    before = [p.clone() for p in base]
    trainer = make_trainer(policy, learning_rate=1e-3)
    first, second = (trainer.step(*make_samples(seed=seed)) for seed in range(2))
    assert abs(first["objective/kl"]) < 1e-4 < second["ppo/policy/approxkl"]
    assert all(torch.equal(*pair) for pair in zip(before, base, strict=True))
