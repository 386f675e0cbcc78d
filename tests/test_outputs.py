"""A training command's output folder: what is refused, skipped, kept, and how a run is resumed."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from builders import edit_json
from training_runs import COMMANDS, checkpoints, options_of, resume, run, weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_course.command_line.output import damage, find_checkpoint, open_output
from rlhf_course.policy.save_load import load_model
from rlhf_course.runtime.files import hold
from scripts import train_ppo

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("signals")]
KINDS = pytest.mark.parametrize("kind", COMMANDS)


def copy(kind: str, whole, out):
    """Copy a finished run's output, without its model."""
    shutil.copytree(whole / kind, out)
    shutil.rmtree(out / ("policy" if kind == "PPO" else "model"))
    return out


@KINDS
def test_what_this_run_did_not_write_stays(kind, world, tmp_path, said):
    """A folder that is called like a checkpoint, with a model in it; a file of that name."""
    inner = "" if kind == "PPO" else "checkpoints"
    for name in (f"{inner}/checkpoint-500/model.safetensors", "run.json"):
        (out := tmp_path / name[-8:]).mkdir()
        file = out / name.strip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        assert run(kind, world, out) == 1 and f"{file} already exists" in said()
        assert resume(kind, world, out) == 1 and "no complete checkpoint" in said()
        assert [path for path in out.rglob("*.*")] == [file] and file.read_text() == "{}"


def test_a_copy_of_a_checkpoint_is_not_resumed_from(tmp_path):
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-99-backup", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
        for file in ("optimizer.pt", "rng_state.pth"):
            torch.save({}, tmp_path / name / file)
    assert find_checkpoint(tmp_path).name == "checkpoint-10"
    (tmp_path / "checkpoint-10" / "optimizer.pt").unlink()  # Adam would start again
    assert find_checkpoint(tmp_path).name == "checkpoint-2"


def test_trl_removes_no_checkpoint_but_its_own(world, whole, tmp_path, capsys):
    """Of the two that it may keep, none is one that lay there before."""
    out = copy("SFT", whole, tmp_path / "out")
    shutil.rmtree(out / "checkpoints/checkpoint-4")
    mine = out / "checkpoints/checkpoint-1"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    assert resume("SFT", world, out, "--save_total_limit=1") == 0, capsys.readouterr().err
    assert checkpoints(out) == ["checkpoint-1", "checkpoint-4"]
    assert weights("SFT", out) == weights("SFT", whole / "SFT")


def cut(file) -> None:
    os.truncate(file, file.stat().st_size // 2)


def garble(file) -> None:
    data = file.read_bytes()
    middle = len(data) // 2
    file.write_bytes(data[:middle] + b"x" * 200 + data[middle + 200 :])


@pytest.mark.parametrize(
    ("kind", "file", "do"),
    [
        ("PPO", "trainer_state.pt", garble),
        ("PPO", "trainer_state.pt", cut),
        ("SFT", "trainer_state.json", os.unlink),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_stays(kind, file, do, whole, tmp_path, capsys):
    out = copy(kind, whole, tmp_path / "out")
    newest = max(out.rglob("checkpoint-*"), key=lambda path: path.name)
    older = newest.with_name("checkpoint-1")
    if not older.exists():
        shutil.copytree(newest, older)
    do(newest / file)
    inner, found = "" if kind == "PPO" else "checkpoints", {"inputs": {}}
    found["settings"] = {"command": COMMANDS[kind].NAME}
    with open_output(out, "model", inner=inner, resume=True, **found) as output:
        assert output.checkpoint < newest and damage(newest)
    assert f"Skipping {newest}: " in capsys.readouterr().out and newest.exists()


@KINDS
def test_a_second_run_does_not_touch_the_first(kind, world, whole, tmp_path, said):
    shutil.copytree(whole / kind, tmp_path / "out")
    assert run(kind, world, tmp_path / "out") == 1 and "already exists" in said()
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("PPO", "learning_rate", 0.5),
        ("PPO", "seed", 1),
        ("SFT", "max_steps", 6),
        ("the reward model", "use_peft", "false"),
    ],
)
def test_resuming_with_other_settings_is_refused(kind, name, value, world, whole, tmp_path, said):
    shutil.copytree(whole / kind, tmp_path / "out")
    assert resume(kind, world, tmp_path / "out", f"--{name}={value}") == 1
    assert f"{name} is {value if value != 'false' else False}, and " in said()
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)


@pytest.mark.parametrize(
    ("kind", "option", "name", "file"),
    [
        ("PPO", "sft_adapter", "sft", "adapter_model.safetensors"),
        ("SFT", "dataset", "answers", "train.jsonl"),
        ("the reward model", "model_name_or_path", "base", "model.safetensors"),
    ],
)
def test_resuming_with_a_replaced_input_is_refused(
    kind, option, name, file, world, whole, tmp_path, said, capsys
):
    """Another path is fine; other contents are not."""
    mine = shutil.copytree(world / name, tmp_path / "mine")
    shutil.copytree(whole / kind, tmp_path / "out")
    assert resume(kind, world, tmp_path / "out", **{option: mine}) == 0
    assert kind == "PPO" or "The run is finished" in capsys.readouterr().out
    with (mine / file).open("ab") as stream:
        stream.write(b"\n")
    assert resume(kind, world, tmp_path / "out", **{option: mine}) == 1
    assert f"{option} has different files than in the run of" in said()


@pytest.mark.parametrize("kind", ["SFT", "the reward model"])
def test_an_adapter_knows_its_base(kind, world, whole, tmp_path):
    """Other weights at the same path are noticed when the adapter is loaded."""
    found = shutil.copytree(whole / kind / "model", tmp_path / "model")
    base = shutil.copytree(world / "base", tmp_path / "base")
    edit_json(found / "adapter_config.json", base_model_name_or_path=str(base))
    auto = AutoModelForCausalLM if kind == "SFT" else AutoModelForSequenceClassification
    load_model(auto, found, num_labels=1)
    garble(base / "model.safetensors")
    with pytest.raises(ValueError, match="was trained on a base whose weights differ"):
        load_model(auto, found, num_labels=1)


def test_a_pipe_whose_reader_is_gone_costs_no_step(world, tmp_path):
    """Ctrl-C ends tee as well."""
    options = options_of("PPO", world, tmp_path / "out", steps=60, save_every=50)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([sys.executable, train_ppo.__file__, *options], **how)
    while b"1/60" not in process.stdout.read1():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    assert process.wait(60) in (1, 130) and len(checkpoints(tmp_path / "out")) == 1


def test_the_base_of_adapters_is_an_input(world, whole, tmp_path, said):
    shutil.copytree(whole / "PPO", tmp_path / "out")
    file = world / "base" / "model.safetensors"
    before = file.read_bytes()
    try:
        garble(file)
        assert resume("PPO", world, tmp_path / "out", steps=4) == 1
    finally:
        file.write_bytes(before)
    assert "base has different files" in said()


def test_one_run_at_a_time_and_no_run_into_a_file(world, tmp_path, said):
    with hold(tmp_path / "out"):
        assert run("PPO", world, tmp_path / "out") == 1 and "Another run is writing" in said()
    (tmp_path / "notes").write_text("mine")
    assert run("SFT", world, tmp_path / "notes") == 1 and "is a file" in said()


@pytest.mark.parametrize(
    ("kind", "which"), [*((kind, signal.SIGINT) for kind in COMMANDS), ("PPO", signal.SIGTERM)]
)
def test_stopped_in_a_step_and_resumed_is_never_stopped(
    kind, which, world, whole, tmp_path, at_step, capsys
):
    at_step(kind, 1, lambda: signal.raise_signal(which))
    assert run(kind, world, tmp_path / "out") == 128 + which
    assert "Stopped after step 1" in capsys.readouterr().out
    assert checkpoints(tmp_path) == ["checkpoint-1"] and resume(kind, world, tmp_path / "out") == 0
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)


def test_more_steps_and_a_tracker_may_come_later(world, whole, tmp_path):
    out = tmp_path / "Läufe [1] 测试 #2"
    assert run("PPO", world, out, steps=2) == 0
    shutil.rmtree(out / "policy")
    out = out.rename(tmp_path / "renamed")
    assert resume("PPO", world, out, "--save_every=2", "--report_to=tensorboard") == 0
    assert weights("PPO", out) == weights("PPO", whole / "PPO")
