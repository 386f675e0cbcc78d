"""Samples that share rows have the numbers, and the gradients, of samples in rows of their own."""

import pytest
import torch
from builders import EOS, difference, make_policy, make_samples, make_trainer
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
)

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.rollout import Samples, forward, make_inputs, pack_samples

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "initializer_range": 0.2,
}
PACK = [GPT2Config, LlamaConfig, Qwen3Config, OPTConfig, GPTNeoConfig, CohereConfig]
REFUSE = [BloomConfig, MambaConfig, MistralConfig, Gemma3TextConfig]


def make(kind, **options) -> AutoModelForCausalLMWithValueHead:
    torch.manual_seed(0)
    names = {
        OPTConfig: {"ffn_dim": 32, "word_embed_proj_dim": 16},
        GPTNeoConfig: {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    }
    sizes = dict(SIZES)
    if kind is FalconConfig:
        del sizes["head_dim"]  # computed
    config = kind(**sizes | names.get(kind, {}) | options)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        AutoModelForCausalLM.from_config(config)
    )


def batch(n: int = 8) -> Samples:
    queries, responses, scores = make_samples(n)
    return Samples.from_lists(queries, responses, torch.stack(scores), pad_token_id=EOS)


def outputs_and_gradients(policy, pack: bool, **options) -> tuple[dict, dict]:
    """A model's outputs, and the gradients of a loss that weights each token differently."""
    samples = batch()
    outputs = forward(policy, samples, pack=pack, **options)
    torch.manual_seed(1)
    weights = torch.randn_like(outputs.logprobs) * samples.mask
    policy.zero_grad()
    (weights * (outputs.logprobs + outputs.values)).sum().backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in policy.named_parameters()
        if weight.grad is not None
    }
    return {k: v.detach() for k, v in outputs._asdict().items() if v is not None}, gradients


def assert_packing_changes_nothing(policy, **options) -> None:
    assert policy.can_pack
    packed, packed_gradients = outputs_and_gradients(policy, pack=True, **options)
    separate, gradients = outputs_and_gradients(policy, pack=False, **options)
    assert difference(packed, separate) < 1e-5
    assert gradients.keys() == packed_gradients.keys()
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    assert difference(packed_gradients, gradients) < 1e-5 * max(1, scale)


@pytest.mark.parametrize("kind", PACK)
def test_packing_changes_no_output_and_no_gradient(kind):
    assert_packing_changes_nothing(make(kind))


@pytest.mark.parametrize(
    "options",
    [
        {"at_most": 4},
        {"chunk_size": 3},
        {"begin_suppress": [EOS, 3]},
        {"whole_vocabulary": True},
    ],
)
def test_packing_changes_nothing_with_other_options(options):
    assert_packing_changes_nothing(make_policy(), **options)


def test_packing_changes_nothing_with_eager_attention():
    assert_packing_changes_nothing(make(LlamaConfig, attn_implementation="eager"))


def test_packing_changes_nothing_with_a_lora_adapter():
    network = make(LlamaConfig).pretrained_model
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False
    )
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(network, peft_config=lora)
    assert_packing_changes_nothing(policy)


@pytest.mark.parametrize("kind", REFUSE)
def test_models_that_cannot_pack_stay_unpacked(kind):
    """ALiBi that reads a mask (B, T), recurrence, and sliding windows, even wide ones."""
    assert not make(kind).can_pack


def test_falcon_can_pack_unless_it_has_alibi():
    sizes = {"alibi": False, "num_kv_heads": 1}
    assert make(FalconConfig, **sizes).can_pack
    assert not make(FalconConfig, **sizes | {"alibi": True}).can_pack


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_a_network_that_ignores_an_argument_stays_unpacked(ignored, monkeypatch):
    """Its signature has the argument, so only the comparison of logits can tell."""
    policy = make(GPT2Config)
    plain = policy.pretrained_model.forward

    def forward_without(input_ids, attention_mask, position_ids=None, **rest):
        if ignored == "position_ids":
            position_ids = None
        else:
            attention_mask = torch.ones_like(input_ids)
        return plain(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **rest
        )

    monkeypatch.setattr(policy.pretrained_model, "forward", forward_without)
    assert not policy.can_pack


@pytest.mark.parametrize("fast", [True, False])
def test_a_trainer_packs_only_if_fast(fast, monkeypatch):
    policy = make_policy()
    seen = []
    plain = policy.forward

    def spy(ids, **arguments):
        seen.append("position_ids" in arguments)
        return plain(ids, **arguments)

    monkeypatch.setattr(policy, "forward", spy)
    make_trainer(policy, fast=fast).step(*make_samples())
    assert seen and set(seen) == {fast}


def test_rows_of_the_example_in_the_docstring():
    lengths = [5, 3, 2, 4]
    texts = [torch.arange(10 * i, 10 * i + length + 1) for i, length in enumerate(lengths)]
    queries = [text[:2] for text in texts]
    responses = [text[2:] for text in texts]
    samples = Samples.from_lists(queries, responses, torch.zeros(4), pad_token_id=EOS)
    inputs = make_inputs(samples, torch.arange(4), pack=True)
    assert inputs.input_ids.tolist() == [
        [0, 1, 2, 3, 4, 20, 21],
        [30, 31, 32, 33, 10, 11, 12],
    ]
    assert inputs.arguments["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 0, 1],
        [0, 1, 2, 3, 0, 1, 2],
    ]
    attends = inputs.arguments["attention_mask"][1, 0] == 0
    assert attends.sum(1).tolist() == [1, 2, 3, 4, 1, 2, 3]
    assert inputs.labels.tolist() == [2, 3, 4, 5, 22, 32, 33, 34, 12, 13]
    assert inputs.row.tolist() == [0, 0, 0, 0, 2, 3, 3, 3, 1, 1]
    assert inputs.t.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 0, 1]


def test_samples_of_one_length_stay_in_rows_of_their_own():
    texts = [torch.arange(6)] * 5
    samples = Samples.from_lists(texts, texts, torch.zeros(5), pad_token_id=EOS)
    inputs = make_inputs(samples, torch.arange(5), pack=True)
    assert inputs.arguments.keys() == {"attention_mask"}
    assert inputs.input_ids.shape == (5, 11)


def test_the_longest_sample_is_placed_first():
    layout = pack_samples(torch.tensor([2, 5, 3, 4]))
    assert layout.width == 7
    assert layout.line.tolist() == [0, 0, 1, 1]
    assert layout.start.tolist() == [5, 0, 4, 0]
