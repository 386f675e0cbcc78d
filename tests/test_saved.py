"""Adapters and value heads are found wherever a policy is saved: in folders and on the hub."""

import pytest
import torch
from builders import difference, edit_json, make_policy, snapshot
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

from dev.simulated_hub import serve
from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.policy.save_load import base_fingerprint, write_base
from rlhf_course.rewards import load_reward_model

LORA = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
load = AutoModelForCausalLMWithValueHead.from_pretrained


@pytest.fixture
def adapter(tmp_path):
    """A policy with a trained adapter, saved on a base that is on the hub."""
    make_policy(5).pretrained_model.save_pretrained(tmp_path / "base")
    base = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    policy = load(base, peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA))
    policy.save_pretrained(tmp_path / "adapter")
    edit_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path="me/base")
    return policy


def test_an_adapter_on_the_hub_is_recognised_as_a_folder_is(tmp_path, monkeypatch, adapter):
    repositories = {"me/base": tmp_path / "base", "me/adapter": tmp_path / "adapter"}
    with serve(repositories) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        both = load("me/adapter"), load(tmp_path / "adapter")
    for found in both:
        assert found.is_peft_model and difference(snapshot(adapter), snapshot(found)) == 0
        trained, wanted = (
            {n for n, p in each.named_parameters() if p.requires_grad} for each in (found, adapter)
        )
        assert trained == wanted


def test_an_adapter_is_found_in_a_revision_that_needs_a_token(tmp_path, monkeypatch, adapter):
    repositories = {"me/base": tmp_path / "base", "me/many@trial": tmp_path / "adapter"}
    with serve(repositories | {"me/many": {"README.md": "-"}}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        hub.gated.add("me/many")
        loaded = load("me/many", revision="trial", token="hf_a")
    assert loaded.is_peft_model and difference(snapshot(adapter), snapshot(loaded)) == 0


def test_a_policy_whose_adapter_is_merged_is_saved_as_a_model(tmp_path, adapter):
    ids = torch.arange(5).unsqueeze(0)
    expected = adapter(ids)
    adapter.pretrained_model = adapter.pretrained_model.merge_and_unload()
    assert not adapter.is_peft_model
    adapter.save_pretrained(tmp_path / "merged")
    loaded = load(tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    for index in (0, 2):  # logits and values
        torch.testing.assert_close(loaded(ids)[index], expected[index], atol=1e-4, rtol=0)


def test_an_adapter_of_a_reward_model_is_recognised_on_the_hub(tmp_path, monkeypatch):
    config = make_policy(num_labels=1).config
    torch.manual_seed(0)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "base")
    base = GPT2ForSequenceClassification.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **LORA)).eval()
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    edit_json(file, base_model_name_or_path="me/classifier")
    with serve({"me/classifier": tmp_path / "base", "me/judge": tmp_path / "adapter"}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        loaded = load_reward_model("me/judge")
    assert isinstance(loaded, PeftModel)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_new_value_head_is_said_once_and_a_saved_one_is_not(tmp_path, capsys):
    policy = make_policy()
    policy.pretrained_model.save_pretrained(tmp_path / "plain")
    (tmp_path / "policy").mkdir()
    for name in ("step1-backup", "00001-of-00002"):  # a backup, and a part of an earlier model
        (tmp_path / f"policy/model-{name}.safetensors").touch()
    (tmp_path / "policy/pytorch_model.bin").write_text("mine")
    policy.save_pretrained(tmp_path / "policy")
    assert [path.stem for path in (tmp_path / "policy").glob("model-*")] == ["model-step1-backup"]
    assert (tmp_path / "policy/pytorch_model.bin").read_text() == "mine"
    for _ in range(2):
        load(tmp_path / "plain")
    assert capsys.readouterr().out == "The value head is new: plain has none.\n"
    load(tmp_path / "policy")
    load(policy.pretrained_model)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_what_is_pushed_to_the_hub_loads_from_there_with_its_value_head(
    tmp_path, monkeypatch, kind, adapter
):
    policy = make_policy() if kind == "weights" else adapter
    with serve({"me/base": tmp_path / "base"}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        policy.save_pretrained(tmp_path / "gpt2-pos", push_to_hub=True, token="hf_a")
        assert "v_head.safetensors" in hub.files["me/gpt2-pos@main"]
        assert difference(snapshot(policy), snapshot(load("me/gpt2-pos"))) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_does_not_load_onto_another_base(tmp_path, adapter, dtype):
    """Two trainings of one architecture: every shape agrees, and the outputs would be wrong."""
    file = tmp_path / "adapter" / "adapter_config.json"
    edit_json(file, base_model_name_or_path=str(tmp_path / "base"))
    make_policy(6).pretrained_model.save_pretrained(tmp_path / "other")
    load(tmp_path / "adapter", dtype=dtype)  # without a record, as from the hub
    write_base(tmp_path / "adapter", adapter)
    load(tmp_path / "adapter", dtype=dtype)
    edit_json(file, base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="was trained on a base whose weights differ"):
        load(tmp_path / "adapter", dtype=dtype)


def test_one_changed_layer_is_another_base_and_an_adapter_is_not(adapter):
    base = make_policy(5)
    before = base_fingerprint(base)
    assert before == base_fingerprint(adapter) != ""
    with torch.no_grad():
        base.pretrained_model.transformer.h[1].mlp.c_proj.weight.mul_(1.01)
    assert base_fingerprint(base) != before
    assert base_fingerprint(base.half()) == ""
