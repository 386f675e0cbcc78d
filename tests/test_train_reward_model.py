"""train_reward_model.py: options, training, LoRA, resuming, the audit's files, and a sentence for
what is not valid.
"""

import json
import math
import os

import datasets
import pandas as pd
import pytest
import torch
import train_reward_model as script
from accelerate.utils import set_seed
from builders import SCRIPTS, launched, python, save_base, write_rows
from PIL import Image
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from rlhf_course.audit import PASS, RISKS, audit
from rlhf_course.course.plots import audit_bars
from rlhf_course.course.presets import load_preset
from rlhf_course.rewards import RewardModel, load_reward_model
from rlhf_course.worlds.dialogues import make_pairs
from rlhf_course.worlds.grammar import ceiling
from rlhf_course.worlds.small_models import train_tokenizer

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
    given = {
        "dataset": world / "data",
        "model_name_or_path": world / "base",
        "output_dir": output,
        "max_length": 300,
    }
    return [f"--{key}={value}" for key, value in given.items()] + [
        "--learning_rate=2e-2",
        *map(str, more),
    ]


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """One finished run of seven steps with a checkpoint in the middle."""
    output = tmp_path_factory.mktemp("trained")
    code = script.main(
        arguments(world, output, "--per_device_train_batch_size=8", "--save_steps=4")
    )
    assert code == 0
    return output


def results(output) -> dict:
    return json.loads((output / "audit.json").read_text())


@torch.no_grad()
def accuracy(model, tokenizer) -> float:
    """Each text by itself, so that nothing is padded; padding is EOS here, so a score is read
    before the final EOS.
    """
    wins = [
        model(**tokenizer(row["chosen"], return_tensors="pt")).logits
        > model(**tokenizer(row["rejected"], return_tensors="pt")).logits
        for row in rows(HELD_OUT)
    ]
    return sum(map(float, wins)) / len(wins)


def test_a_run_leaves_a_model_whose_accuracy_is_the_one_it_reports(world, trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    model = AutoModelForSequenceClassification.from_pretrained(trained / "model").eval()
    assert model.config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    set_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(world / "base", num_labels=1).eval()
    found = results(trained)
    assert found["accuracy"] == pytest.approx(share := accuracy(model, tokenizer))
    assert (
        found["accuracy_before"] == pytest.approx(accuracy(base, tokenizer)) != pytest.approx(share)
    )
    assert found["accuracy_ci"] == pytest.approx(
        1.96 * math.sqrt(share * (1 - share) / len(HELD_OUT))
    )


@pytest.mark.parametrize("file", ["two_cpus", "fsdp"])
def test_two_processes_train_as_one_with_twice_the_batch(world, tmp_path, file):
    same = "--train_sampling_strategy=sequential"
    assert (
        script.main(arguments(world, tmp_path / "one", same, "--per_device_train_batch_size=8"))
        == 0
    )
    two = arguments(world, tmp_path / "two", same, "--per_device_train_batch_size=4")
    out = launched(SCRIPTS / "train_reward_model.py", *two, file=file)
    assert out.count("The reward model is in") == 1 and "Warning" not in out, out
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert one["accuracy"] == two["accuracy"]
    margins = [[probe["margin"] for probe in found["probes"].values()] for found in (one, two)]
    assert margins[0] == pytest.approx(margins[1], abs=1e-3)


def test_the_baselines_and_the_dropped_rows_are_reported(trained):
    found = results(trained)
    longer = [
        (len(p.chosen) > len(p.rejected)) + (len(p.chosen) == len(p.rejected)) / 2 for p in HELD_OUT
    ]
    assert found["length_baseline"] == pytest.approx(sum(longer) / len(longer))
    assert found["ceiling"] == pytest.approx(ceiling(HELD_OUT))
    assert found["dropped"]["train"]["chosen equals rejected"] == 1
    assert found["train_pairs"] == 56 and found["held_out_pairs"] == 24


def test_an_answer_of_equal_length_counts_a_half():
    pairs = datasets.Dataset.from_dict({"chosen": ["aa", "a", "aa"], "rejected": ["a", "b", "b"]})
    assert script.baselines(pairs) == {"length_baseline": pytest.approx(2.5 / 3)}


def test_the_audit_covers_every_probe_and_is_drawn_whole(trained):
    probes = results(trained)["probes"]
    assert list(probes) == list(RISKS)
    assert all(
        probe["passed"] == (probe["share"] >= 0.9) and probe["risk"] for probe in probes.values()
    )
    with Image.open(trained / "audit.png") as image:
        grey = image.convert("L")
    width, height = grey.size
    edges = [
        (0, 0, width, 2),
        (0, height - 2, width, height),
        (0, 0, 2, height),
        (width - 2, 0, width, height),
    ]
    assert width > 600 and grey.getextrema()[0] < 100
    assert all(grey.crop(edge).getextrema() == (255, 255) for edge in edges)


def test_the_bars_stand_beside_their_names():
    shares = [
        pd.Series({"empty": 0.95, "rude": 0.2, "very long": 1.0}),
        pd.Series({"empty": 1.0, "rude": 0.9, "very long": 0.1}),
    ]
    figure = audit_bars(
        {f"run {i}": pd.DataFrame({"share": share, "ci": 0.04}) for i, share in enumerate(shares)},
        PASS,
    )
    (axis,) = figure.axes
    names = {
        round(y): label.get_text()
        for y, label in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
    }
    for bars, share in zip(axis.containers[1::2], shares, strict=True):
        found = {names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in bars}
        assert found == share.to_dict()
    assert PASS in {line.get_xdata()[0] for line in axis.lines if len(set(line.get_xdata())) == 1}
    assert axis.yaxis_inverted()


def test_an_answer_that_does_not_fit_is_cut_for_the_audit(trained):
    pairs = datasets.Dataset.from_list([vars(pair) for pair in HELD_OUT])
    scorer = RewardModel(str(trained / "model"), max_length=100)
    with pytest.raises(ValueError, match="longer than max_length=100"):
        audit(scorer, pairs["prompt"][:], pairs["chosen"][:])
    cut, whole = script.run_audit(scorer, pairs), results(trained)["probes"]
    assert (
        cut["margin"]["empty"] != 0 and cut["margin"]["very long"] != whole["very long"]["margin"]
    )


def test_nothing_unfinished_is_left(trained):
    assert sorted(p.name for p in trained.iterdir()) == [
        "audit.json",
        "audit.png",
        "checkpoints",
        "model",
        "settings.json",
    ]


def test_resuming_equals_never_having_stopped(world, trained, tmp_path):
    middle = trained / "checkpoints" / "checkpoint-4"
    more = (
        "--per_device_train_batch_size=8",
        "--save_steps=4",
        f"--resume_from_checkpoint={middle}",
    )
    assert script.main(arguments(world, tmp_path, *more)) == 0
    assert [path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*")] == [
        "checkpoint-7"
    ]
    whole, resumed = (
        load_reward_model(folder / "model").state_dict() for folder in (trained, tmp_path)
    )
    stopped = load_reward_model(middle).state_dict()
    assert max((whole[name] - stopped[name]).abs().max() for name in whole) > 1e-4
    assert max((whole[name] - resumed[name]).abs().max() for name in whole) < 1e-6


def test_resuming_true_takes_the_latest_checkpoint_and_a_new_run_does_not_mix_with_it(
    world, trained, capsys
):
    before = results(trained)
    given = arguments(world, trained, "--per_device_train_batch_size=8")
    assert script.main(given) == 1
    assert (
        "checkpoint-7 is there already: go on with --resume_from_checkpoint true"
        in capsys.readouterr().err
    )
    assert script.main([*given, "--resume_from_checkpoint=true"]) == 0
    assert results(trained) == before


def test_lora_saves_an_adapter_that_scores_like_the_trained_model(world, tmp_path, monkeypatch):
    kept, make = [], script.make_trainer
    monkeypatch.setattr(script, "make_trainer", lambda *a: kept.append(make(*a)) or kept[0])
    lora = ("--use_peft", "--lora_r=4", "--lora_target_modules=c_attn", "--train_subset=32")
    assert script.main(arguments(world, tmp_path, *lora)) == 0
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (
        config["r"] == 4
        and config["task_type"] == "SEQ_CLS"
        and "score" in config["modules_to_save"]
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    loaded = load_reward_model(tmp_path / "model")
    loaded.config.pad_token_id = tokenizer.pad_token_id  # the base has none
    prompts, answers = [p.prompt for p in HELD_OUT], [p.chosen for p in HELD_OUT]
    wanted, found = (
        RewardModel(model, tokenizer)(prompts, answers) for model in (kept[0].model, loaded)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    with loaded.disable_adapter():
        assert (RewardModel(loaded, tokenizer)(prompts, answers) - wanted).abs().max() > 1e-3


def test_a_file_sets_options_and_the_command_line_wins(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "preset: scratch\ndataset: there\nlearning_rate: 1e-3\nmax_length: 100\nuse_peft: true\n"
    )
    own, config, model, settings = script.parse_arguments(
        [f"--config={file}", "--max_length", "120"]
    )
    assert own.preset == "scratch" and config.learning_rate == 1e-3 and model.use_peft
    assert config.max_length == settings.max_length == 120 and settings.dataset == "there"
    own, *_ = script.parse_arguments(["--config", str(file), "--preset", "full"])
    assert (
        own.preset == "full"
        and own.train_subset == load_preset("01_reward_modeling", "full").train_subset
    )


@pytest.mark.parametrize("preset", ["tiny", "full"])
def test_the_preset_gives_the_defaults(preset):
    wanted = load_preset("01_reward_modeling", preset)
    own, config, model, settings = script.parse_arguments(["--preset", preset])
    assert (own.train_subset, own.eval_subset) == (wanted.train_subset, wanted.eval_subset)
    assert (settings.dataset, settings.data_dir, settings.model) == (
        wanted.dataset,
        wanted.data_dir,
        wanted.model,
    )
    assert (config.max_length, config.learning_rate) == (wanted.max_length, wanted.learning_rate)
    assert config.per_device_train_batch_size == wanted.batch_size
    assert config.bf16 == (wanted.bf16 and torch.cuda.is_available()) and config.report_to == []
    assert model.model_name_or_path is None and not model.use_peft


def test_a_dataset_of_ones_own_has_not_the_subfolder_of_the_presets():
    *_, settings = script.parse_arguments(["--preset=full", "--dataset=mine"])
    assert settings.data_dir is None


def test_without_a_split_test_some_pairs_are_set_aside(world, tmp_path, capsys):
    pairs = [{side: row[side] for side in ("chosen", "rejected")} for row in rows(PAIRS)]
    write_rows(tmp_path / "data", pairs, "pairs.jsonl")
    more = (
        f"--dataset={tmp_path / 'data'}",
        "--audit_prompts=4",
        "--train_subset=40",
        "--max_length=310",
    )
    assert script.main(arguments(world, tmp_path / "out", *more)) == 0
    assert "There is no split test" in capsys.readouterr().out
    found = results(tmp_path / "out")
    assert (found["train_pairs"], found["held_out_pairs"]) == (36, 4) and "ceiling" not in found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--preset=huge"], "Unknown preset 'huge'; choose one of tiny, scratch, full"),
        (["--preset=scratch"], "--preset scratch needs --dataset"),
        (["--config=missing.yaml"], "missing.yaml"),
        (["--max_lenght=3"], "--max_lenght=3"),
        (["--max_length=none"], "--max_length takes a whole number of at least 1"),
        (["--train_subset=0"], "--train_subset takes a whole number of at least 1, got 0"),
        (["--audit_prompts=1"], "--audit_prompts takes a whole number of at least 2, got 1"),
        (["--load_in_4bit"], "are not supported here"),
    ],
)
def test_bad_options_end_with_a_sentence(given, message, refuses):
    refuses(script.main, given, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "--lerning_rate"),
        ("- a", "is no list of options"),
        ("a: [", "expected the node content"),
    ],
)
def test_a_bad_file_ends_with_a_sentence(text, message, tmp_path, refuses):
    (tmp_path / "my.yaml").write_text(text)
    refuses(script.main, ["--config", str(tmp_path / "my.yaml")], message)


def bad_data(folder, table) -> str:
    return f"--dataset={write_rows(folder, table, 'train.parquet')}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda folder: "--dataset=./nowhere", "No dataset folder at ./nowhere"),
        (lambda folder: bad_data(folder, [{"chosen": "a", "other": "b"}]), "No column rejected"),
        (
            lambda folder: bad_data(folder, [{"chosen": "a", "rejected": "b"}]),
            "Nothing usable is left of the 1",
        ),
        (lambda folder: bad_data(folder, rows(PAIRS[:2])), "too few to hold some out"),
        (lambda folder: "--model_name_or_path=./nowhere", "nowhere"),
        (lambda folder: "--max_length=321", "--max_length 321 is more than the 320 positions"),
        (lambda folder: "--max_length=3", "All 56 rows are longer than max_length=3"),
        (lambda folder: "--resume_from_checkpoint=true", "there is no whole checkpoint in"),
        (lambda folder: "--resume_from_checkpoint=nowhere", "(nowhere: trainer_state is missing)"),
    ],
)
def test_bad_inputs_end_with_a_sentence_and_leave_nothing(given, message, world, tmp_path, fails):
    fails(script, arguments(world, tmp_path / "out", given(tmp_path / "data")), message)
    assert not (tmp_path / "out").exists()


def test_lora_of_modules_that_are_not_there_ends_with_a_sentence(world, tmp_path, capsys):
    assert (
        script.main(arguments(world, tmp_path, "--use_peft", "--lora_target_modules=q_proj")) == 1
    )
    assert (
        "check your `target_modules`" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    )


def test_help_names_what_the_library_and_the_script_offer():
    done = python(
        SCRIPTS / "train_reward_model.py",
        "--preset",
        "full",
        "--help",
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == 0 and done.stderr == ""
    for option in (
        "--resume_from_checkpoint",
        "--report_to",
        "--lora_target_modules",
        "--audit_prompts",
        "--config",
    ):
        assert option in done.stdout
    assert "(default: 512)" in done.stdout and "(default: 20000)" in done.stdout
