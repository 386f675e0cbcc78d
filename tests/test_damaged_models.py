"""Models that are incomplete, damaged, of another kind or size, and classifiers of long texts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from builders import EOS, edit_json, make_policy, review_tokenizer, reviews, save_classifier
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_course.course.presets import ROOT
from rlhf_course.data import encode
from rlhf_course.policy.save_load import load_tokenizer
from rlhf_course.rewards import RewardModel, SentimentReward, load_reward_model

TEXTS = [review["text"] for review in reviews(60)]
LORA = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2}
load = AutoModelForCausalLMWithValueHead.from_pretrained


@pytest.fixture(scope="module")
def tokenizer():
    return review_tokenizer()


@pytest.fixture
def folders(tmp_path, tokenizer):
    """A policy, adapters on it for SFT and reward, and classifiers with one and two labels."""
    torch.manual_seed(0)
    policy = make_policy()
    policy.save_pretrained(tmp_path / "policy")
    sft = load(tmp_path / "policy", peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA))
    sft.save_pretrained(tmp_path / "sft")
    judge = load_reward_model(tmp_path / "policy", new_head=True)
    judge.add_adapter(LoraConfig(task_type="SEQ_CLS", modules_to_save=["score"], **LORA))
    judge.save_pretrained(tmp_path / "judge")
    for name in ("sft", "judge"):
        base = str(tmp_path / "policy")
        edit_json(tmp_path / name / "adapter_config.json", base_model_name_or_path=base)
    for labels in (1, 2):
        config = make_policy(vocab_size=40, num_labels=labels, pad_token_id=EOS).config
        GPT2ForSequenceClassification(config).save_pretrained(tmp_path / f"labels-{labels}")
    sizes = {"n_heads": 2, "initializer_range": 0.5, "max_position_embeddings": 32}
    save_classifier(tmp_path / "classifier", tokenizer=tokenizer, **sizes)
    return tmp_path


def said(call, error=ValueError) -> str:
    """The sentence that a call ends with."""
    with pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    assert len(text) < 400 and text.endswith(".") and "trust_remote_code" not in text, text
    return text


def rewrite(file: Path, change) -> None:
    """A file of weights with what ``change`` makes of its tensors."""
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


# --- not whole


@pytest.mark.parametrize(
    "case",
    [
        ("policy", load, ".h.1."),
        ("classifier", SentimentReward, "classifier."),
        ("sft", load, ".h.1."),
        ("judge", load_reward_model, "score"),
        ("judge", load_reward_model, "lora_B"),
    ],
)
def test_a_missing_tensor_is_an_error(folders, case):
    name, use, part = case
    (file,) = (folders / name).glob("*model.safetensors")
    rewrite(file, lambda tensors: {key: value for key, value in tensors.items() if part not in key})
    text = said(lambda: use(folders / name))
    assert "has no " in text and part in text and str(folders / name) in text


def test_a_language_model_is_no_reward_model(folders):
    text = said(lambda: load_reward_model(folders / "policy"))
    assert "has no score.weight" in text and "new_head=True" in text


def test_a_model_of_images_and_text_is_no_policy(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    text = said(lambda: load(tmp_path))
    assert "is no text model that transformers can load for this purpose" in text


def test_a_head_of_llama_factory_is_named_and_its_conversion_works(tmp_path, folders):
    """The lines of docs/troubleshooting.md."""
    shutil.copytree(folders / "policy", tmp_path / "OLD")
    weight = torch.arange(16.0)[None]
    head = {"v_head.summary.weight": weight, "v_head.summary.bias": torch.ones(1)}
    save_file(head, tmp_path / "OLD/value_head.safetensors")
    assert "has its score head in value_head.safetensors" in said(
        lambda: load_reward_model(tmp_path / "OLD")
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    code = page.split("```python")[-1].split("```")[0]
    exec(code.replace('"OLD', f'"{tmp_path}/OLD').replace('"NEW', f'"{tmp_path}/NEW'), {})
    assert torch.equal(load_reward_model(tmp_path / "NEW").score.weight, weight)


def test_two_labels_are_no_reward_model(folders):
    load_reward_model(folders / "labels-1")
    text = said(lambda: load_reward_model(folders / "labels-2"))
    assert "has 2 labels (LABEL_0, LABEL_1)" in text and "SentimentReward" in text


@pytest.mark.parametrize(
    "case",
    [
        ("policy", "model.safetensors", load),
        ("policy", "v_head.safetensors", load),
        ("policy", "config.json", load),
        ("sft", "adapter_config.json", load),
        ("judge", "adapter_model.safetensors", load_reward_model),
        ("classifier", "tokenizer.json", SentimentReward),
    ],
)
def test_a_damaged_file_is_named(folders, case):
    name, file, use = case
    path = folders / name / file
    for content in (path.read_bytes()[: path.stat().st_size // 2], b"", b"something else" * 99):
        path.write_bytes(content)
        assert said(lambda: use(folders / name)).startswith(f"{path} is damaged")


def test_an_empty_tokenizer_is_none(folders):
    """transformers makes one of no tokens out of the model's type."""
    text = said(lambda: RewardModel(folders / "labels-1"))
    assert "has no tokenizer" in text


def test_an_adapter_without_its_tokenizer(folders):
    """transformers asks for sentencepiece or tiktoken."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folders / "judge" / name).unlink(missing_ok=True)
    assert "has no tokenizer" in said(lambda: load_tokenizer(folders / "judge"))


def test_an_adapter_of_another_task(folders):
    said(lambda: load(folders / "judge"))


# --- of another kind


@pytest.mark.parametrize("use", [load, SentimentReward, RewardModel, load_tokenizer])
@pytest.mark.parametrize("config", [{"model_type": "weird"}, {}])
def test_code_of_a_model_is_neither_run_nor_offered(tmp_path, monkeypatch, use, config):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")
    source = tmp_path / "model"
    source.mkdir()
    kinds = ("Config", "ModelForCausalLM", "Tokenizer", "ModelForSequenceClassification")
    places = {f"Auto{kind}": "code.Mine" for kind in kinds}
    (source / "config.json").write_text(json.dumps(config | {"auto_map": places}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (source / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    text = said(lambda: use(source))
    assert "that needs its own code, which the course does not run. Convert the model first" in text
    assert not asked and not (tmp_path / "ran").exists()


# --- classifiers and what they read


def test_a_roberta_scores_as_alone(tmp_path, tokenizer):
    """Positions from its padding index on, and padding never where it reads: at the first token."""
    torch.manual_seed(0)
    pad = tokenizer.pad_token_id
    special = {"pad_token_id": pad, "initializer_range": 0.5, "max_position_embeddings": pad + 41}
    config = RobertaConfig(vocab_size=len(tokenizer), num_labels=1, **SMALL, **special)
    network = RobertaForSequenceClassification(config).eval()
    texts, answers = [TEXTS[0][:20], TEXTS[1][:60], TEXTS[2] * 9], ["good", "bad", "a good film"]
    tokenizer.model_max_length = 40

    def shorten(ids: list[int]) -> list[int]:
        first = [ids[0]] if ids[0] == tokenizer.cls_token_id else []
        return first + ids[len(first) - 40 :]

    def alone(rows) -> list[float]:
        rows = [ids if len(ids) <= 40 else shorten(ids) for ids in rows]
        places = [torch.arange(len(ids))[None] + pad + 1 for ids in rows]
        both = zip(rows, places, strict=True)
        logits = [network(torch.tensor([ids]), position_ids=place).logits for ids, place in both]
        return pytest.approx([found.item() for found in logits], abs=1e-5)

    for tokenizer.padding_side in ("left", "right"):
        scores = RewardModel(network, tokenizer)(texts, answers).tolist()
        assert scores == alone(encode(tokenizer, texts, answers, "pair"))
    network.config.id2label = {0: "POSITIVE"}
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    wanted = alone([tokenizer(text)["input_ids"] for text in texts])
    assert SentimentReward(tmp_path)(texts).tolist() == wanted


def test_the_end_of_a_long_text_is_scored(folders):
    reward, start = SentimentReward(folders / "classifier"), " ".join(TEXTS[:3])
    good, bad, other = reward(
        [f"{start} wonderful", f"{start} terrible", f"A beginning. {start} wonderful"]
    ).tolist()
    assert abs(good - bad) > 1e-3 and good == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("use", ["policy", "classifier"])
def test_a_tokenizer_larger_than_the_model(folders, tokenizer, use):
    if use == "policy":
        text = said(lambda: PPOTrainer(PPOConfig(), make_policy(), None, tokenizer))
    else:
        tokenizer.save_pretrained(folders / "labels-1")
        text = said(lambda: SentimentReward(folders / "labels-1", label="LABEL_0"))
    assert f"has {len(tokenizer)} tokens, but the model has 40." in text


# --- what is given in place of numbers


def test_one_text_is_no_list(folders):
    reward = SentimentReward(folders / "classifier")
    assert reward([]).shape == (0,)
    said(lambda: reward("A good film."), TypeError)


def test_weights_of_more_layers_than_the_config_has(folders):
    edit_json(folders / "policy" / "config.json", n_layer=1)
    with pytest.raises(ValueError, match="config.json has 1 layers, but there is a .*h.1"):
        load(folders / "policy")
