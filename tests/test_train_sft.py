"""train_sft.py: options, the loss on answers and EOS alone, adapters, resuming, and a sentence for
invalid inputs.
"""

import json
import math
import random
import shutil

import pytest
import torch
from builders import WORDS, difference, save_base, write_rows
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from rlhf_course.command_line import trl_run
from rlhf_course.course.presets import load_preset
from rlhf_course.data import hold_out, load_answers
from rlhf_course.synthetic.small_models import train_tokenizer
from scripts import train_sft as script

SHORT = "--per_device_train_batch_size=8 --num_train_epochs=2 --save_steps=3 --eval_share=0.12"
SHORT = SHORT.split()


def make_rows(count: int = 24, seed: int = 0) -> list[dict]:
    """Questions with three answers each, as in HC3."""
    rng = random.Random(seed)

    def text(most: int = 9) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    answers = [
        {"human_answers": [text(), text()], "chatgpt_answers": [text()]} for _ in range(count)
    ]
    return [{"question": f"What is {text(1)} {i}?"} | row for i, row in enumerate(answers)]


ROWS = make_rows()
USELESS = [
    ROWS[0],  # three repeated answers
    {"question": "Why?", "human_answers": ["", " "], "chatgpt_answers": []},
    {"question": "How long?", "human_answers": ["rain snow " * 60], "chatgpt_answers": ["fog"]},
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Answers of both kinds, and two bases of one layer without a padding token."""
    folder = tmp_path_factory.mktemp("world")
    write_rows(folder / "data", ROWS + USELESS, "all.jsonl")
    texts = [f"\n\nHuman: {r['question']}\n\nAssistant: {r['human_answers'][0]}" for r in ROWS]
    tokenizer = train_tokenizer(texts, 330)
    tokenizer.pad_token = None
    torch.manual_seed(0)
    save_base(folder / "llama", tokenizer, max_position_embeddings=96)
    save_base(folder / "gpt2", tokenizer, GPT2Config, n_positions=96)
    return folder


def arguments(world, output, *more) -> list[str]:
    given = {"dataset": world / "data", "model_name_or_path": world / "llama"}
    given |= {"output_dir": output, "max_length": 80, "disable_tqdm": "true"}
    return [*(f"--{key}={value}" for key, value in given.items()), *map(str, more)]


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """One finished LoRA run of two epochs of nine steps, with its checkpoints."""
    output = tmp_path_factory.mktemp("trained")
    assert script.main(arguments(world, output, *SHORT, "--save_total_limit=9")) == 0
    return output


def metrics(output) -> dict:
    return json.loads((output / "metrics.json").read_text())


@torch.no_grad()
def by_hand(model, tokenizer, answers) -> tuple[float, int]:
    """Mean −log p of answers and EOS, row by row and without padding, and how many tokens these
    are.
    """
    total, count = 0.0, 0
    for row in answers:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(" " + row["answer"])["input_ids"], tokenizer.eos_token_id]
        scores = model.eval()(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        total -= sum(scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer))
        count += len(answer)
    return total / count, count


def held_out(world, data="data", share=0.12):
    """The answers that the run held out, without those that are too long."""
    answers, _ = load_answers(world / data)
    return hold_out(answers, share, seed=0)[1].filter(lambda row: len(row["answer"]) < 500)


def test_metrics_are_those_of_the_held_out_answers_of_the_saved_adapter(world, trained):
    tokenizer, base = (
        kind.from_pretrained(world / "llama") for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    found, rows = metrics(trained), held_out(world)
    before, tokens = by_hand(base, tokenizer, rows)
    after, _ = by_hand(PeftModel.from_pretrained(base, trained / "model"), tokenizer, rows)
    assert found["loss_before"] == pytest.approx(before, abs=1e-5)
    assert found["held_out_tokens"] == tokens and after < before - 0.1
    assert found["loss"] == pytest.approx(after, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_only_adapter_weights_are_saved_with_the_tokenizer(world, trained):
    found = {path.name for path in trained.iterdir()}
    records = {"log.jsonl", "evaluations.jsonl", "texts.jsonl"}
    assert found == {"checkpoints", "metrics.json", "model", "run.json"} | records
    (file,) = (trained / "model").glob("*.safetensors")
    weights = load_file(file)
    assert len(weights) == 14 and all(".lora_" in name for name in weights)
    config = json.loads((trained / "model" / "adapter_config.json").read_text())
    settings = load_preset("05_lora_rlhf_baichuan", "tiny")
    assert sorted(config["target_modules"]) == sorted(settings.lora_target_modules)
    assert (config["r"], config["lora_alpha"]) == (settings.lora_r, settings.lora_alpha)
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("base", ["llama", "gpt2"])
def test_the_training_loss_is_that_of_answers_and_eos_alone(base, world, tmp_path, monkeypatch):
    kept, make = [], trl_run.make_trainer
    monkeypatch.setattr(trl_run, "make_trainer", lambda *a: kept.append(make(*a)) or kept[0])
    more = ["--use_peft=false", "--per_device_train_batch_size=7", "--max_steps=1"]
    more += [f"--model_name_or_path={world / base}"]
    assert script.main(arguments(world, tmp_path, *more)) == 0
    trainer, tokenizer = kept[0], AutoTokenizer.from_pretrained(world / base)
    answers, _ = load_answers(world / "data")
    known = {(row["prompt"], row["answer"]): row for row in answers}
    for batch in trainer.get_train_dataloader():
        rows = []
        triples = zip(*(batch[k] for k in ("input_ids", "labels", "attention_mask")), strict=True)
        for ids, labels, mask in triples:
            ids, labels = ids[mask == 1], labels[mask == 1]
            learnt = labels != -100
            assert learnt[-1] and ids[-1] == tokenizer.eos_token_id
            assert ids[:-1].ne(tokenizer.eos_token_id).all()
            assert (ids[learnt] == labels[learnt]).all() and learnt.long().diff().abs().sum() == 1
            prompt, answer = tokenizer.decode(ids[~learnt]), tokenizer.decode(ids[learnt][:-1])
            rows.append(known[prompt, answer.strip()])
        assert batch["labels"][batch["attention_mask"] == 0].eq(-100).all()
        wanted, _ = by_hand(trainer.model, tokenizer, rows)
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted, abs=1e-5)


def test_all_weights_learn_instructions_and_where_to_stop(world, tmp_path):
    rows = [{"instruction": f"{w}?", "input": "", "output": "fog road"} for w in WORDS]
    more = ["--use_peft=false", f"--dataset={write_rows(tmp_path / 'data', rows)}"]
    more += [f"--model_name_or_path={world / 'gpt2'}", "--num_train_epochs=40"]
    assert script.main(arguments(world, tmp_path / "out", *more, "--learning_rate=1e-2")) == 0
    folder = tmp_path / "out" / "model"
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.config.pad_token_id == tokenizer.pad_token_id
    prompt = tokenizer("\n\nHuman: bird?\n\nAssistant:", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
    said = tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert said == " fog road" + tokenizer.eos_token
    found = metrics(tmp_path / "out")
    assert found["loss"] < 0.1 < found["loss_before"] and found["train_rows"] == 13


@pytest.mark.parametrize("step", [3, 9, 12])  # within an epoch, between two, and within the second
def test_resuming_equals_never_having_stopped(step, world, trained, tmp_path):
    name = f"checkpoints/checkpoint-{step}"
    shutil.copytree(trained / name, tmp_path / "out" / name)
    shutil.copy(trained / "run.json", tmp_path / "out")
    resume = "--resume_from_checkpoint=true"
    assert script.main(arguments(world, tmp_path / "out", *SHORT, resume)) == 0
    folders = (trained / "model", tmp_path / "out" / "model", trained / name)
    whole, resumed, stopped = (
        load_file(folder / "adapter_model.safetensors") for folder in folders
    )
    assert difference(whole, stopped) > 1e-3 and difference(whole, resumed) < 1e-6
    assert metrics(tmp_path / "out") == metrics(trained)


def test_a_loss_that_explodes_ends_with_a_sentence(world, tmp_path, capsys):
    assert script.main(arguments(world, tmp_path, "--learning_rate=1e9", "--use_peft=false")) == 1
    assert "Diverged: " in capsys.readouterr().err and not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--preset=huge"],
            "Unknown preset 'huge' for 05_lora_rlhf_baichuan; choose one of tiny, scratch, full",
        ),
        (["--preset=scratch"], "--preset scratch needs --dataset"),
        (["--max_lenght=3"], "--max_lenght=3"),
        (["--subset=0"], "takes a whole number of at least 1"),
        (["--eval_share=1"], "--eval_share is 1.0; use a number between 0 and 1"),
        (["--packing"], "Omit --packing"),
        (["--trust_remote_code"], "unsupported here"),
        (["--resume_from_checkpoint=runs/a"], "must be true or false; got runs/a"),
        (["--load_in_4bit"], "unsupported here"),
    ],
)
def test_bad_options_end_with_a_sentence(given, message, fails):
    fails(script, given, message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--dataset=./nowhere", "No dataset folder at ./nowhere"),
        ("--dataset=NAMED", "No column answer in"),
        ("--dataset=ONE", "1 questions are too few to hold out 1"),
        ("--data_files=no.jsonl", "no.jsonl"),
        ("--model_name_or_path=./nowhere", "nowhere"),
        ("--max_length=97", "--max_length 97 exceeds the 96 positions"),
        ("--max_length=3", "rows are longer than max_length=3 tokens"),
        ("--lora_target_modules=c_attn", "the base has no c_attn"),
        ("--resume_from_checkpoint=true", "has no complete checkpoint"),
    ],
)
def test_bad_inputs_end_with_a_sentence_and_leave_nothing(given, message, world, tmp_path, fails):
    write_rows(tmp_path / "NAMED", [{"question": "a", "b": "c"}])
    write_rows(tmp_path / "ONE", ROWS[:1])
    given = given.replace("=NAMED", f"={tmp_path}/NAMED").replace("=ONE", f"={tmp_path}/ONE")
    fails(script, arguments(world, tmp_path / "out", given), message)
    assert not (tmp_path / "out").exists()
