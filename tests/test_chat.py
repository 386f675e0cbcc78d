"""The embedded Chinese world: folders that load as the hub's would, a base in Baichuan's layout, an
SFT adapter.
"""

import pytest
import torch
from builders import invalid, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.course.presets import load_preset
from rlhf_course.data import as_prompt, load_answers, load_pairs
from rlhf_course.synthetic import build, chinese

EXPERIMENT = "05_lora_rlhf_baichuan"


@pytest.fixture(scope="module")
def settings():
    return load_preset(EXPERIMENT, "tiny")


def test_a_preset_without_datasets_says_which_are_missing(settings):
    with invalid('columns question, .* overrides={"sft_dataset": FOLDER}'):
        build.prepare_chat(load_preset(EXPERIMENT, "scratch"))
    with invalid('columns chosen and rejected: pass overrides={"dataset": FOLDER}'):
        build.prepare_chat(load_preset(EXPERIMENT, "scratch", {"sft_dataset": "offline"}))


def test_the_folders_load_as_real_ones_do(settings):
    found = build.prepare_chat(settings)
    answers, report = load_answers(found.sft_dataset)
    assert (
        len(answers) > 6000 and report["empty question or answer"] > 50
    )  # scraped answers are like that
    pairs, report = load_pairs(found.dataset, "test")
    assert len(pairs) == 1000 and not any(report.values())
    row = pairs[0]
    assert row["gold_chosen"] == chinese.gold_utility(row["prompt"], row["chosen"])


def test_the_base_does_not_answer_and_the_adapter_does(settings):
    base, sft = build.build_base(settings), build.build_sft_adapter(settings)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    policies = [AutoModelForCausalLM.from_pretrained(base)]
    policies += [AutoModelForCausalLMWithValueHead.from_pretrained(sft)]
    questions = [row["question"] for row in chinese.make_qa(60, seed=5)]
    batch = tokenizer([*map(as_prompt, questions)], return_tensors="pt", padding=True)
    shares, start = [], batch["input_ids"].shape[1]
    for policy in policies:
        torch.manual_seed(0)
        output = policy.generate(**batch, do_sample=True, top_k=0, max_new_tokens=40)
        texts = tokenizer.batch_decode(output[:, start:], skip_special_tokens=True)
        answered = [chinese.is_answer(*both) for both in zip(questions, texts, strict=True)]
        shares.append(sum(answered) / len(answered))
    assert shares[0] < 0.25 and shares[1] > 0.8


def test_a_base_for_real_folders_is_pretrained_on_their_answers(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "cache"))
    answers = [{"human_answers": [row], "chatgpt_answers": []} for row in PROSE]
    answers = [row | {"question": f"{i}?"} for i, row in enumerate(answers)]
    pairs = [{"prompt": "问？", "chosen": row, "rejected": row[:-3]} for row in PROSE]
    folders, name = {}, "train-00000-of-00001.parquet"
    for key, rows in (("sft_dataset", answers), ("dataset", pairs)):
        folders[key] = str(write_rows(tmp_path / key, rows, name))
    small = {"vocab_size": 1100, "n_layer": 1, "n_embd": 32, "base_steps": 2}
    base = build.build_base(load_preset(EXPERIMENT, "scratch", folders | small))
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.decode(tokenizer(PROSE[0])["input_ids"]) == PROSE[0]
    assert AutoModelForCausalLM.from_pretrained(base).config.vocab_size == len(tokenizer)


PROSE = [row.chosen for row in chinese.make_preferences(200, seed=3)]
