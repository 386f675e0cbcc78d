"""The embedded Chinese world: folders that load as the hub's would, a base in Baichuan's layout, an
SFT adapter.
"""

from pathlib import Path

import pytest
import torch
from builders import write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_course.baichuan import toy_checkpoint
from rlhf_course.course.presets import load_preset
from rlhf_course.data import as_prompt, load_answers, load_pairs
from rlhf_course.evaluation import evaluate
from rlhf_course.worlds import build, chinese

EXPERIMENT = "05_lora_rlhf_baichuan"


@pytest.fixture(scope="module")
def settings():
    return load_preset(EXPERIMENT, "tiny")


def test_a_preset_without_datasets_says_which_are_missing(settings):
    with pytest.raises(ValueError, match='columns question, .* overrides={"sft_dataset": FOLDER}'):
        build.prepare_chat(load_preset(EXPERIMENT, "scratch"))
    with pytest.raises(
        ValueError, match='columns chosen and rejected: overrides={"dataset": FOLDER}'
    ):
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


def test_the_checkpoint_is_laid_out_as_baichuan(settings):
    folder = Path(build.prepare_chat(settings).checkpoint)
    assert {path.name for path in folder.iterdir()} >= {
        "tokenizer.model",
        "pytorch_model.bin.index.json",
    }
    shard = torch.load(folder / "pytorch_model-00001-of-00002.bin", weights_only=True)
    assert "model.layers.0.self_attn.W_pack.weight" in shard


def test_the_base_does_not_answer_and_the_adapter_does(settings):
    base, sft = build.build_base(settings), build.build_sft_adapter(settings)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    policies = [
        AutoModelForCausalLM.from_pretrained(base),
        AutoModelForCausalLMWithValueHead.from_pretrained(sft),
    ]
    questions = [row["question"] for row in chinese.make_qa(60, seed=5)]
    batch = tokenizer([*map(as_prompt, questions)], return_tensors="pt", padding=True)
    shares = []
    for policy in policies:
        torch.manual_seed(0)
        output = policy.generate(**batch, do_sample=True, top_k=0, max_new_tokens=40)
        texts = tokenizer.batch_decode(
            output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        answered = [chinese.is_answer(*both) for both in zip(questions, texts, strict=True)]
        shares.append(sum(answered) / len(answered))
    assert shares[0] < 0.2 and shares[1] > 0.4


def test_answers_are_evaluated_against_the_trainers_reference(settings):
    base, sft = build.build_base(settings), build.build_sft_adapter(settings)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(sft)
    sizes = {
        "batch_size": 8,
        "mini_batch_size": 8,
        "begin_suppress_tokens": [tokenizer.eos_token_id],
    }
    trainer = PPOTrainer(PPOConfig(**sizes, learning_rate=1e-2), policy, tokenizer=tokenizer)
    prompts = [as_prompt(row["question"]) for row in chinese.make_qa(8, seed=6)]

    def reward(prompts, answers):
        return torch.tensor([float(len(answer)) for answer in answers])

    generation = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
    state = torch.get_rng_state()
    before = evaluate(trainer, reward, prompts, seed=1, **generation)
    assert torch.equal(state, torch.get_rng_state())
    assert before["kl"].abs().max() < 1e-5 and (before["length"] <= 12).all()
    assert (before["score"] == before["response"].str.len()).all()
    assert (before["finished"] == [length < 12 for length in before["length"]]).mean() > 0.8
    assert evaluate(trainer, reward, prompts, seed=1, **generation).equals(before)
    queries = [torch.tensor(ids) for ids in tokenizer(prompts)["input_ids"]]
    trainer.step(
        queries, trainer.generate(queries, return_prompt=False, **generation), list(torch.randn(8))
    )
    assert evaluate(trainer, reward, prompts, seed=1, **generation)["kl"].abs().max() > 1e-3


def test_a_base_for_real_folders_is_pretrained_on_their_answers(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "cache"))
    answers = [
        {"question": f"{i}?", "human_answers": [row], "chatgpt_answers": []}
        for i, row in enumerate(PROSE)
    ]
    pairs = [{"prompt": "问？", "chosen": row, "rejected": row[:-3]} for row in PROSE]
    rows = {"sft_dataset": answers, "dataset": pairs}
    folders = {
        key: str(write_rows(tmp_path / key, rows[key], "train-00000-of-00001.parquet"))
        for key in rows
    }
    small = {"vocab_size": 1100, "n_layer": 1, "n_embd": 32, "base_steps": 2}
    base = build.build_base(load_preset(EXPERIMENT, "scratch", folders | small))
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.decode(tokenizer(PROSE[0])["input_ids"]) == PROSE[0]
    assert AutoModelForCausalLM.from_pretrained(base).config.vocab_size == len(tokenizer)


def test_too_few_pieces_for_the_characters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="300 pieces are too few for these texts' characters"):
        toy_checkpoint.train_sentencepiece(PROSE, 300, tmp_path)


PROSE = [text for text in chinese.make_prose(200, seed=3) if "\n" not in text]
