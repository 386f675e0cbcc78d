"""Preset full with its own ids, and what is wrong with a hub, on a hub that runs on this machine."""

import datasets
import pytest
from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from peft import LoraConfig, get_peft_model
from pretend_hub import serve
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rlhf_course import AutoModelForCausalLMWithValueHead


@pytest.fixture(scope="module")
def network():
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=1))


def test_the_hub_serves_files_folders_branches_and_both_kinds_of_repository(tmp_path, monkeypatch):
    repositories = {
        "me/model": {"config.json": "{}", "sub/weights.bin": b"1234"},
        "datasets/me/data": {"folder/train.jsonl": '{"x": 1}\n', "folder/test.jsonl": '{"x": 2}\n'},
        "datasets/me/data@refs/other": {"train.jsonl": '{"x": 3}\n'},
    }
    with serve(repositories) as hub:
        hub.use(monkeypatch, tmp_path)
        assert list_repo_files("me/model") == ["config.json", "sub/weights.bin"]
        folder = snapshot_download("me/model", allow_patterns=["*.bin"])
        assert open(f"{folder}/sub/weights.bin", "rb").read() == b"1234"
        found = datasets.load_dataset("me/data", data_dir="folder")
        assert {split: rows["x"][:] for split, rows in found.items()} == {"train": [1], "test": [2]}
        assert datasets.load_dataset("me/data", revision="refs/other", split="train")["x"][:] == [3]
        hub.renamed["old/name"] = "me/model"
        assert open(hf_hub_download("old/name", "config.json")).read() == "{}"


def test_the_hub_refuses_as_the_real_one_does(tmp_path, monkeypatch):
    with serve({"me/model": {"config.json": "{}"}, "me/gated": {"config.json": "{}"}}) as hub:
        hub.use(monkeypatch, tmp_path)
        hub.gated.add("me/gated")
        for error, arguments in (
            (EntryNotFoundError, ("me/model", "nothing.json")),
            (RepositoryNotFoundError, ("me/nothing", "config.json")),
            (GatedRepoError, ("me/gated", "config.json")),
            (RevisionNotFoundError, ("me/model", "config.json", "--", "nowhere")),
        ):
            revision = {"revision": arguments[3]} if len(arguments) > 2 else {}
            with pytest.raises(error):
                hf_hub_download(*arguments[:2], **revision)
        assert open(hf_hub_download("me/gated", "config.json", token="hf_a")).read() == "{}"


def test_models_and_adapters_load_from_the_hub(tmp_path, monkeypatch, network):
    policy = AutoModelForCausalLMWithValueHead(network)
    policy.save_pretrained(tmp_path / "model")
    with serve({"me/model": tmp_path / "model"}) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained("me/model")
        assert (loaded.v_head.summary.weight == policy.v_head.summary.weight).all()
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained("me/model"), LoraConfig(r=2))
        adapted.save_pretrained(tmp_path / "adapter")
    with serve({"me/model": tmp_path / "model", "me/adapter": tmp_path / "adapter"}) as hub:
        hub.use(monkeypatch, tmp_path / "other")
        loaded = AutoModelForCausalLM.from_pretrained("me/adapter")
        assert loaded.peft_config["default"].base_model_name_or_path == "me/model"
