"""train_reward_model.py: options, training, LoRA, resuming, the audit's files, and a sentence for
what is not valid.
"""

import json
import math

import datasets
import pytest
import torch
from accelerate.utils import set_seed
from builders import save_base, write_rows
from PIL import Image
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from rlhf_course.audit import RISKS
from rlhf_course.command_line import trl_run
from rlhf_course.rewards import RewardModel, load_reward_model
from rlhf_course.synthetic.dialogues import make_pairs
from rlhf_course.synthetic.small_models import train_tokenizer
from scripts import train_reward_model as script

PAIRS = make_pairs(80)
HELD_OUT = PAIRS[:24]


def rows(pairs) -> list[dict]:
    keys = ("chosen", "rejected", "gold_chosen", "gold_rejected")
    full = [vars(p) | {side: f"{p.prompt} {getattr(p, side)}" for side in keys[:2]} for p in pairs]
    return [{key: row[key] for key in keys} for row in full]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of pairs, and a base of one layer without a padding token."""
    folder = tmp_path_factory.mktemp("world")
    same = [row | {"rejected": row["chosen"]} for row in rows(PAIRS[24:25])]  # of no use
    write_rows(folder / "data", rows(PAIRS[24:]) + same, "train.parquet")
    write_rows(folder / "data", rows(HELD_OUT), "test.parquet")
    tokenizer = train_tokenizer([f"{p.prompt} {p.chosen}" for p in PAIRS], 400)
    tokenizer.pad_token = None
    torch.manual_seed(0)
    save_base(folder / "base", tokenizer, GPT2Config, n_positions=320)
    return folder


def arguments(world, output, *more) -> list[str]:
    given = {"dataset": world / "data", "model_name_or_path": world / "base", "output_dir": output}
    given |= {"max_length": 300, "learning_rate": 2e-2}
    return [*(f"--{key}={value}" for key, value in given.items()), *map(str, more)]


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """One finished run of seven steps."""
    output = tmp_path_factory.mktemp("trained")
    assert script.main(arguments(world, output, "--per_device_train_batch_size=8")) == 0
    return output


def results(output) -> dict:
    return json.loads((output / "audit.json").read_text())


@torch.no_grad()
def accuracy(model, tokenizer) -> float:
    """Each text by itself, so that nothing is padded; padding is EOS here, so a score is read
    before the final EOS.
    """

    def score(text):
        return model(**tokenizer(text, return_tensors="pt")).logits.item()

    wins = [score(row["chosen"]) > score(row["rejected"]) for row in rows(HELD_OUT)]
    return sum(wins) / len(wins)


def test_a_run_leaves_a_model_whose_accuracy_is_the_one_it_reports(world, trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    model = AutoModelForSequenceClassification.from_pretrained(trained / "model").eval()
    assert model.config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    set_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(world / "base", num_labels=1).eval()
    found, before = results(trained), accuracy(base, tokenizer)
    assert found["accuracy"] == pytest.approx(share := accuracy(model, tokenizer))
    assert found["accuracy_before"] == pytest.approx(before) != pytest.approx(share)
    half = 1.96 * math.sqrt(share * (1 - share) / len(HELD_OUT))
    assert found["accuracy_ci"] == pytest.approx(half)


def test_the_baselines_and_the_dropped_rows_are_reported(trained):
    found = results(trained)
    longer = [
        (len(p.chosen) > len(p.rejected)) + (len(p.chosen) == len(p.rejected)) / 2 for p in HELD_OUT
    ]
    assert found["length_baseline"] == pytest.approx(sum(longer) / len(longer))
    best = [1 / (1 + math.exp(-abs(p.gold_chosen - p.gold_rejected))) for p in HELD_OUT]
    assert found["ceiling"] == pytest.approx(sum(best) / len(best))
    assert found["dropped"]["train"]["chosen equals rejected"] == 1
    assert found["train_pairs"] == 56 and found["held_out_pairs"] == 24


def test_the_audit_covers_every_probe_and_is_drawn(trained):
    probes = results(trained)["probes"]
    assert list(probes) == list(RISKS)
    assert all(probe["passed"] == (probe["share"] >= 0.9) for probe in probes.values())
    with Image.open(trained / "audit.png") as image:
        assert image.width > 600 and image.convert("L").getextrema()[0] < 100


def test_an_answer_that_does_not_fit_is_cut_for_the_audit(trained):
    pairs = datasets.Dataset.from_list([vars(pair) for pair in HELD_OUT])
    scorer = RewardModel(str(trained / "model"), max_length=100)
    cut, whole = script.run_audit(scorer, pairs)["margin"], results(trained)["probes"]
    assert cut["empty"] != 0 and cut["very long"] != whole["very long"]["margin"]


def test_lora_saves_an_adapter_that_scores_like_the_trained_model(world, tmp_path, monkeypatch):
    kept, make = [], trl_run.make_trainer
    monkeypatch.setattr(trl_run, "make_trainer", lambda *a: kept.append(make(*a)) or kept[0])
    lora = ("--use_peft", "--lora_r=4", "--lora_target_modules=c_attn", "--train_subset=32")
    assert script.main(arguments(world, tmp_path, *lora)) == 0
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and "score" in config["modules_to_save"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    loaded = load_reward_model(tmp_path / "model")
    loaded.config.pad_token_id = tokenizer.pad_token_id  # the base has none
    texts = [p.prompt for p in HELD_OUT], [p.chosen for p in HELD_OUT]
    wanted, found = (RewardModel(model, tokenizer)(*texts) for model in (kept[0].model, loaded))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    with loaded.disable_adapter():
        assert (RewardModel(loaded, tokenizer)(*texts) - wanted).abs().max() > 1e-3


def test_without_a_split_test_prompts_are_set_aside_with_all_their_pairs(tmp_path, capsys):
    """Three pairs each: none of a held-out prompt was trained on."""
    pairs = [
        {side: f"\n\nHuman: Why {n}?\n\nAssistant: {side} {i}" for side in ("chosen", "rejected")}
        for n in range(30)
        for i in range(3)
    ]
    write_rows(tmp_path, pairs, "pairs.jsonl")
    given = [f"--dataset={tmp_path}", "--eval_subset=6"]
    own, *_ = script.parse_arguments(given)
    train, held_out, _ = script.load_data(str(tmp_path), own, seed=0)
    assert "has no test split: 6 pairs of the train split are held out" in capsys.readouterr().out
    assert len(held_out) == 6 and len(train) == 81
    assert not {*train["prompt"]} & {*held_out["prompt"]}
    (tmp_path / "pairs.jsonl").rename(tmp_path / "train.jsonl")
    write_rows(tmp_path, pairs[:9:-2], "test.jsonl")
    script.load_data(str(tmp_path), own, seed=0)
    assert "6 held-out pairs are also training pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--preset=scratch"], "This preset needs a dataset"),
        (["--config=missing.yaml"], "missing.yaml"),
        (["--config=BAD"], "--lerning_rate"),
        (["--max_length=0"], "takes a whole number of at least 1"),
    ],
)
def test_bad_options_end_with_a_sentence(given, message, fails, tmp_path):
    (tmp_path / "my.yaml").write_text("lerning_rate: 1")
    out = f"--output_dir={tmp_path}/out"
    fails(script, [given[0].replace("BAD", str(tmp_path / "my.yaml")), out], message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chosen": "a", "other": "b"}, "No column rejected"),
        ({"chosen": "a", "rejected": "b"}, "No usable row remains of the 1"),
        ("--max_length=321", "--max_length 321 exceeds the 320 positions"),
        ("--max_length=3", "All 56 rows are longer than max_length=3"),
        ("--resume_from_checkpoint=true", "has no complete checkpoint"),
    ],
)
def test_bad_inputs_end_with_a_sentence_and_leave_nothing(given, message, world, tmp_path, fails):
    if isinstance(given, dict):
        given = f"--dataset={write_rows(tmp_path / 'data', [given], 'train.parquet')}"
    fails(script, arguments(world, tmp_path / "out", given), message)
    assert not (tmp_path / "out").exists()
