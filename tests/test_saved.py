"""Adapters and value heads are found wherever a policy is saved: in folders, on the hub, in shards,
in subfolders.
"""

import subprocess
import sys

import pytest
import torch
from builders import difference, edit_json, make_policy, save_old_checkpoint, snapshot
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, PeftModel, get_peft_model
from pretend_hub import serve
from safetensors.torch import save_file
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.course.presets import ROOT
from rlhf_course.rewards import load_reward_model

LORA = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
WEIGHTS = ["model.safetensors", "pytorch_model.bin"]
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


def files_of(folder, where: str = "") -> dict:
    """A folder's files as a repository's, in a subfolder of it."""
    return {f"{where}{path.name}": path for path in folder.iterdir()}


def test_an_adapter_on_the_hub_is_recognised_as_a_folder_is(tmp_path, monkeypatch, adapter):
    repositories = {"me/base": tmp_path / "base", "me/adapter": tmp_path / "adapter"}
    with serve(repositories) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        loaded = load("me/adapter")
        folder = load(tmp_path / "adapter")
    for found in (loaded, folder):
        assert found.is_peft_model and difference(snapshot(adapter), snapshot(found)) == 0
        assert {n for n, p in found.named_parameters() if p.requires_grad} == {
            n for n, p in adapter.named_parameters() if p.requires_grad
        }


def test_an_adapter_is_found_in_a_subfolder_of_a_revision_that_needs_a_token(
    tmp_path, monkeypatch, adapter
):
    there = files_of(tmp_path / "adapter", "best/")
    with serve(
        {"me/base": tmp_path / "base", "me/many@trial": there, "me/many": {"README.md": "-"}}
    ) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        hub.gated.add("me/many")
        loaded = load("me/many", revision="trial", subfolder="best", token="hf_a")
        assert loaded.is_peft_model and difference(snapshot(adapter), snapshot(loaded)) == 0
        (tmp_path / "many").mkdir()
        (tmp_path / "adapter").rename(tmp_path / "many" / "best")
        again = load(tmp_path / "many", subfolder="best")
    assert again.is_peft_model and difference(snapshot(adapter), snapshot(again)) == 0


@pytest.mark.parametrize("where", ["", "best/"])
def test_an_adapter_of_a_reward_model_is_recognised_on_the_hub(tmp_path, monkeypatch, where):
    config = make_policy().config
    config.num_labels = 1
    torch.manual_seed(0)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "base")
    with serve({"me/classifier": tmp_path / "base"}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        base = GPT2ForSequenceClassification.from_pretrained("me/classifier")
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **LORA)).eval()
    model.save_pretrained(tmp_path / "adapter")
    with serve(
        {"me/classifier": tmp_path / "base", "me/judge": files_of(tmp_path / "adapter", where)}
    ) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        loaded = load_reward_model("me/judge", subfolder=where.strip("/"))
    assert isinstance(loaded, PeftModel)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["v_head.safetensors", *WEIGHTS])
def test_a_value_head_is_found_in_a_subfolder_of_a_revision_that_needs_a_token(
    tmp_path, monkeypatch, name
):
    policy = make_policy()
    if name in WEIGHTS:
        save_old_checkpoint(policy, tmp_path / "policy", name)
    else:
        policy.save_pretrained(tmp_path / "policy")
    there = files_of(tmp_path / "policy", "best/")
    with serve({"me/policy@trial": there, "me/policy": {"README.md": "-"}}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        hub.gated.add("me/policy")
        loaded = load("me/policy", revision="trial", subfolder="best", token="hf_a")
    assert difference(snapshot(policy), snapshot(loaded)) == 0


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_value_head_is_found_among_shards(tmp_path, monkeypatch, name):
    policy = make_policy()
    save_old_checkpoint(policy, tmp_path / "policy", name, sharded=True)
    with serve({"me/policy": tmp_path / "policy"}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        for source in (tmp_path / "policy", "me/policy"):
            assert difference(snapshot(policy), snapshot(load(source))) == 0


def test_a_value_head_in_a_file_of_torch_before_1_6_is_found(tmp_path):
    policy = make_policy()
    save_old_checkpoint(policy, tmp_path, "pytorch_model.bin")
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert difference(snapshot(policy), snapshot(load(tmp_path))) == 0


def test_looking_for_a_value_head_downloads_no_weights_in_a_second_format(tmp_path, monkeypatch):
    make_policy().pretrained_model.save_pretrained(tmp_path / "model")
    files = files_of(tmp_path / "model") | {"pytorch_model.bin": b"never read"}
    with serve({"me/model": files}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        load("me/model")
    downloads = [
        path
        for method, path in hub.asked
        if method == "GET" and path.endswith(("bin", "safetensors"))
    ]
    assert not any("pytorch_model" in path for path in downloads)


@pytest.mark.parametrize("name", WEIGHTS)
def test_looking_for_a_value_head_reads_no_other_weights(tmp_path, name):
    """In a process of its own, whose peak memory grows by far less than the 128 MB that lie beside
    the head.

    A shell starts it: the peak of a process begins at the memory of the one that it was forked
    from.
    """
    big, head = {"big": torch.zeros(2**25)}, {"v_head.summary.bias": torch.ones(1)}
    save = torch.save if name.endswith(".bin") else save_file
    save(big | head, tmp_path / name)
    code = (
        "from rlhf_course.course.run_card import peak_memory\nfrom rlhf_course.policy.save_load"
        " import read_value_head\nbefore = peak_memory(); head ="
        f" read_value_head({str(tmp_path)!r}); print(*head, peak_memory() - before)"
    )
    command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    key, grown = done.stdout.split()
    assert key == "summary.bias" and int(grown) < 32e6


def test_a_new_value_head_is_said_once_and_a_saved_one_is_not(tmp_path, capsys):
    policy = make_policy()
    policy.pretrained_model.save_pretrained(tmp_path / "plain")
    policy.save_pretrained(tmp_path / "policy")
    for _ in range(2):
        load(tmp_path / "plain")
    assert capsys.readouterr().out == "The value head is new: plain holds none.\n"
    load(tmp_path / "policy")
    load(policy.pretrained_model)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_what_is_pushed_to_the_hub_holds_the_value_head(tmp_path, monkeypatch, kind):
    uploads, repositories = [], []

    def create_repo(self, repo_id, **options):
        repositories.append((self.token, repo_id, options))
        return type("RepoUrl", (), {"repo_id": f"me/{repo_id}"})

    def upload_folder(self, *, repo_id, folder_path, allow_patterns=None, **options):
        names = sorted(path.name for path in folder_path.iterdir())
        uploads.append(
            (repo_id, [*filter_repo_objects(names, allow_patterns=allow_patterns)], options)
        )

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    policy, weights = make_policy(), "model.safetensors"
    if kind == "adapter":
        policy = load(
            policy.pretrained_model, peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA)
        )
        weights = "adapter_model.safetensors"
    policy.save_pretrained(
        tmp_path / "gpt2-pos", push_to_hub=True, private=True, token="hf_a", commit_message="best"
    )
    policy.save_pretrained(tmp_path / "gpt2-pos", push_to_hub=True, repo_id="other")
    assert repositories[0] == ("hf_a", "gpt2-pos", {"private": True, "exist_ok": True})
    assert [uploads[0][0], uploads[1][0]] == ["me/gpt2-pos", "me/other"] and uploads[0][2] == {
        "commit_message": "best"
    }
    for _, names, _ in uploads:
        assert {"v_head.safetensors", weights} <= {*names}
        assert names == sorted(path.name for path in (tmp_path / "gpt2-pos").iterdir())
