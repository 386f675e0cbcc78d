"""What every training command leaves: a log, evaluations and texts, which a resumed run continues
and the other commands read; and what it says of its time, its data and its step size.
"""

import json
import shutil

import pytest
import torch
from training_runs import as_options, options_of, resume, run

from rlhf_course.command_line import base_checks, command_presets, progress, run_report
from rlhf_course.command_line.ppo_options import CHAT
from rlhf_course.command_line.records import JsonLines, Records, read_complete
from scripts import read_log, report, train_ppo, train_sft

KINDS = pytest.mark.parametrize("kind", ["PPO", "SFT", "the reward model"])
MEASURED = {"PPO": "score", "SFT": "loss", "the reward model": "accuracy"}
LAST = {"PPO": 3, "SFT": 4, "the reward model": 4}


def read(folder, name: str) -> list[dict]:
    """A file's rows without times, memory, and trl's speeds."""
    rows = read_complete(folder / f"{name}.jsonl")
    slow = (
        "time/",
        "peak_mb",
        "train_",
        "eval_runtime",
        "eval_samples",
        "eval_steps",
        "total_flos",
    )
    return [{key: value for key, value in row.items() if not key.startswith(slow)} for row in rows]


@KINDS
def test_a_run_leaves_a_log_evaluations_and_texts(kind, whole):
    log = read(whole / kind, "log")
    steps = {row["step"] for row in log}
    assert LAST[kind] in steps and max(steps) == LAST[kind]
    evaluations = read(whole / kind, "evaluations")
    assert {0, LAST[kind]} <= {row["step"] for row in evaluations}
    assert len({row["step"] for row in evaluations}) == len(evaluations)
    assert all(MEASURED[kind] in row for row in evaluations)
    texts = read(whole / kind, "texts")
    shown = {}
    for row in texts:
        shown.setdefault(row["step"], []).append(row["prompt"])
    assert {0, LAST[kind]} <= shown.keys()
    prompts = shown[0]
    assert 1 <= len(prompts) <= 4 and all(prompts == other for other in shown.values())
    answer = "chosen_score" if kind == "the reward model" else "answer"
    assert all(answer in row for row in texts)


def test_ppo_measures_kl_from_zero_on_prompts_that_it_does_not_train_on(whole):
    rows = read(whole / "PPO", "evaluations")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4) and abs(rows[-1]["kl"]) > 1e-3
    assert rows[0]["prompts"] == 5  # a tenth of 56, because there is no test split


@KINDS
def test_a_resumed_run_continues_its_files_without_duplicates(kind, world, whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole / kind, out)
    shutil.rmtree(out / ("policy" if kind == "PPO" else "model"))
    inner = out if kind == "PPO" else out / "checkpoints"
    if kind != "PPO":
        shutil.rmtree(inner / "checkpoint-4")  # resumes at 2
    for name in ("log", "evaluations", "texts"):
        with (out / f"{name}.jsonl").open("a") as stream:
            stream.write('{"step": 99, "half')  # killed while it wrote
    assert resume(kind, world, out) == 0
    for name in ("log", "evaluations", "texts"):
        resumed, expected = read(out, name), read(whole / kind, name)
        assert [row["step"] for row in resumed] == [row["step"] for row in expected]
        for row, other in zip(resumed, expected, strict=True):
            assert row.keys() == other.keys()
        assert resumed[0] == expected[0]


def test_rows_after_the_checkpoint_and_half_lines_are_dropped(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "a')
    lines = JsonLines(file, last_step=1)
    lines.add({"step": 2, "a": 5})
    lines.add({"step": 2, "a": 6})  # the same measurement again
    assert file.read_text() == '{"step": 1}\n{"step": 2, "a": 5}\n'
    records = Records(tmp_path, last_step=2)
    records.add_log(3, {"x": torch.ones(1).item(), "text": "no", "array": torch.ones(2).numpy()})
    row = read_complete(file)[-1]
    assert row["x"] == 1 and set(row) == {"step", "x", "time/run", "peak_mb"}


@KINDS
def test_read_log_and_the_report_take_the_run_s_folder(kind, whole, tmp_path, capsys):
    page = tmp_path / "log"
    assert read_log.main([str(whole / kind), "--output", str(page)]) in (0, 2)
    columns = {"PPO": "course", "SFT": "trl SFT", "the reward model": "trl Reward"}[kind]
    assert f"columns of {columns}" in capsys.readouterr().out and (page / "log.html").exists()
    assert report.main([str(whole / kind), "--output", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert f"{MEASURED[kind]} " in text and "<svg" in text and "answers" in text


def test_the_report_names_a_run_that_did_not_finish(whole, tmp_path):
    shutil.copytree(whole / "PPO", tmp_path / "runs/a")
    shutil.rmtree(tmp_path / "runs/a/policy")
    (entry,) = run_report.write([tmp_path / "runs"], tmp_path / "page.html")
    assert entry["name"] == "a" and entry["failed"] == ["the run finished"]
    assert entry["headline"].startswith("score ")


@KINDS
def test_the_time_is_estimated_once(kind, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "ENOUGH", 0)
    assert run(kind, world, tmp_path / "out") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "tokens per second" in line]
    left, advice = (2, "--max_new_tokens or --steps") if kind == "PPO" else (3, "--max_steps")
    assert f" minutes for {left} more steps; shorten with " in line and f"{advice}." in line


def test_sft_shows_a_row_with_its_mask_and_names_its_limit(world, tmp_path, capsys):
    assert run("SFT", world, tmp_path / "out", max_length=20) == 0
    said = capsys.readouterr().out
    assert " too long (more than 20 tokens; raise --max_length)." in said
    shown = said[said.index("here in ⟦ ⟧:") + len("here in ⟦ ⟧:") :]
    shown = shown[: shown.index("⟧")]
    assert "Human: What is" in shown and shown.count("⟦") == 1
    assert shown.index("Assistant:") < shown.index("⟦") and shown.endswith("<|endoftext|>")


def test_a_subfolder_of_the_data_is_an_option_of_all_commands(world, tmp_path):
    for name in ("pairs", "answers"):
        shutil.copytree(world / name, tmp_path / "data" / name)
    for kind, name in (("PPO", "pairs"), ("SFT", "answers"), ("the reward model", "pairs")):
        given = {"dataset": tmp_path / "data", "data_dir": name}
        assert run(kind, world, tmp_path / kind, **given) == 0
    script = train_sft.parse_arguments(["--dataset=me/answers", "--data_dir=a"])[0]
    with pytest.raises(ValueError, match="--data_dir of me/answers needs --data_files"):
        train_sft.place_data(script, "me/answers")


def test_without_an_sft_adapter_the_policy_is_a_new_one_on_the_base(world, tmp_path):
    given = [
        option for option in options_of("PPO", world, tmp_path) if "--sft_adapter" not in option
    ]
    assert train_ppo.main([*given, "--lora_r=2", "--lora_target_modules", "q_proj"]) == 0
    config = json.loads((tmp_path / "policy/adapter_config.json").read_text())
    assert config["r"] == 2 and config["target_modules"] == ["q_proj"]
    assert config["base_model_name_or_path"] == str(world / "base")
    rows = read(tmp_path, "evaluations")
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)


def test_preset_small_fits_a_chat_model(world):
    options = as_options({"preset": "small", "reward_adapter": world / "reward", "steps": 7})
    chosen, settings = train_ppo.parse_arguments([*options, "--dataset=me/pairs"])
    assert (settings.learning_rate, settings.max_new_tokens, settings.steps) == (1e-4, 48, 7)
    assert (settings.lora_r, settings.lora_alpha, settings.dtype) == (16, 32, "float32")
    assert settings.batch_size * command_presets.load_settings(CHAT, "small").steps <= 2000
    assert chosen.save_every == 4
    _, config, model_args, _ = train_sft.parse_arguments(["--preset=small", "--dataset=me/data"])
    assert config.learning_rate == 1e-4 and model_args.lora_r == 16 and config.logging_steps == 5


def test_the_real_model_is_found_or_a_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_presets, "ROOT", tmp_path)
    real = command_presets.REAL_MODEL
    assert command_presets.find_real_model("me/model") == "me/model"
    with pytest.raises(FileNotFoundError, match="Run python scripts/get_real_model.py --temp"):
        command_presets.find_real_model(real)
    (tmp_path / real).mkdir(parents=True)
    assert command_presets.find_real_model(real) == str(tmp_path / real)


def test_data_of_another_language_or_template_is_told(world, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "base")
    base_checks.warn_about_texts(tokenizer, ["\n\nHuman: What is rain?\n\nAssistant:"] * 5)
    assert capsys.readouterr().out == ""
    base_checks.warn_about_texts(tokenizer, ["怎么让咖啡更顺口？"])
    assert "tokens per character" in capsys.readouterr().out
    base_checks.warn_about_texts(tokenizer, ["[INST] What is rain? [/INST]", "What is fog?"])
    said = capsys.readouterr().out
    assert "1 of 2 texts contain [INST]" in said and said.count("\n") == 1


def test_a_small_model_s_step_size_is_told_for_a_large_base(monkeypatch, capsys, world, tmp_path):
    monkeypatch.setattr(base_checks, "LARGE", 1000)
    assert run("SFT", world, tmp_path / "out", learning_rate=5e-3) == 0
    said = capsys.readouterr().out
    assert "Warning: --learning_rate 0.005 (preset tiny)" in said and "--preset small" in said
    base_checks.warn_about_step_size(torch.nn.Linear(100, 100), "small", 1e-4)
    assert capsys.readouterr().out == ""
