"""The trainer's test of its policy, and the sampling settings that users pass."""

import pytest
import torch
from builders import EOS, SAMPLING, PadTokenizer, invalid, make_policy, make_trainer
from peft import PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconH1Config,
    GenerationConfig,
    Lfm2Config,
    LlamaConfig,
    Qwen3Config,
    RobertaConfig,
)

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.ppo.settings import normalize

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
SMALL_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}


def toy(config) -> AutoModelForCausalLMWithValueHead:
    """A random policy of a transformers configuration, with uneven distributions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    return AutoModelForCausalLMWithValueHead(model).eval()


def test_the_self_test_changes_no_random_state():
    make_trainer(make_policy(), self_test=False)
    expected = torch.rand(4)
    make_trainer(make_policy())
    assert torch.equal(torch.rand(4), expected)


def test_a_bidirectional_model_is_refused():
    config = BertConfig(**SIZES, is_decoder=False)
    with invalid("self-test of the policy failed: the logits of a token depend on later tokens"):
        make_trainer(toy(config))
    make_trainer(toy(config), self_test=False)


def test_positions_that_do_not_begin_at_0_are_named():
    config = RobertaConfig(**SIZES | {"pad_token_id": 1}, is_decoder=True)
    with invalid("the model does not number its positions 0, 1, 2.*whose positions begin at 0"):
        make_trainer(toy(config))


def test_prompt_tuning_is_refused():
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    base = make_policy().pretrained_model
    with invalid("PromptTuningConfig adds tokens before each query.*such as LoraConfig"):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=prompt)
    with invalid("PromptTuningConfig adds tokens before each query"):
        AutoModelForCausalLMWithValueHead(get_peft_model(base, prompt))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen3Config(**SIZES, head_dim=8),
        Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
        FalconH1Config(**SIZES, **SMALL_MAMBA),
    ],
    ids=lambda config: config.model_type,
)
def test_rows_that_end_early_are_sampled_and_scored_alike(config):
    trainer = make_trainer(toy(config))
    torch.manual_seed(0)
    queries = [torch.randint(0, EOS, (2 + row % 3,)) for row in range(8)]
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=40, **SAMPLING)
    assert len({len(response) for response in responses}) > 1
    stats = trainer.step(queries, responses, [torch.tensor(float(row)) for row in range(8)])
    assert abs(stats["objective/kl"]) < 1e-4


def test_settings_have_one_form():
    policy = make_policy()
    queries = [torch.tensor([1, 2]), torch.tensor([3])]

    def normalized(**given):
        return normalize(policy, PadTokenizer(), queries, None, given)

    settings, limits = normalized(max_length=6, min_length=-1, eos_token_id=0)
    assert limits.tolist() == [4, 5]
    assert settings["eos_token_id"] == [0]
    assert not {"min_length", "max_length"} & set(settings)
    in_config = GenerationConfig(do_sample=True, max_new_tokens=5)
    settings, limits = normalized(generation_config=in_config)
    assert limits.tolist() == [5, 5]
    assert settings["do_sample"]
    with invalid("generation_config is a int"):
        normalized(generation_config=3)
    with invalid("pad_token_id 99 is not in"):
        normalized(pad_token_id=99)
