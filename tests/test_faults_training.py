"""Faults around the training commands: killed, stopped, resumed with something else, short of disk,
side by side.
"""

import importlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import convert_baichuan
import pytest
import torch
from builders import SCRIPTS, latest_checkpoint, make_policy, python
from outputs import damage
from peft import LoraConfig
from training_runs import COMMANDS, checkpoints, resume, run, weights

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.runtime import command, distributed, files
from rlhf_course.runtime.files import hold

KIND = "Training"
pytestmark = pytest.mark.usefixtures("signals")
fault = pytest.mark.fault


def each(done: str, kinds=COMMANDS):
    """The same fault for several commands."""
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=fault(done.format(kind))) for kind in kinds]
    )


# --- before the first step
# --------------------------------------------------------------------------------------------


@each("{}: --output is a file")
def test_an_output_that_is_a_file(kind, world, tmp_path, said, outcome):
    (tmp_path / "notes").write_text("mine")
    assert run(kind, world, tmp_path / "notes") == 1 and (tmp_path / "notes").read_text() == "mine"
    outcome(said())


@fault("PPO: OUTPUT/policy is a link to a place where no folder can be")
def test_a_result_that_links_to_where_nothing_can_be(world, tmp_path, said, outcome):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "policy").symlink_to(tmp_path / "notes" / "policy")
    assert run("PPO", world, tmp_path / "out") == 1 and checkpoints(tmp_path) == []
    outcome(said())


@fault("PPO: OUTPUT/policy is a link to a folder that is not there yet")
def test_a_result_that_links_to_what_is_not_there_yet(world, tmp_path, outcome):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "policy").symlink_to(tmp_path / "disk" / "policy")
    assert (
        run("PPO", world, tmp_path / "out", steps=1) == 0
        and (tmp_path / "out" / "policy").is_symlink()
    )
    assert (tmp_path / "disk" / "policy" / "adapter_model.safetensors").exists()
    outcome("The folder is made, and the policy saved there.")


@pytest.mark.parametrize(
    ("kind", "option", "place"),
    [
        pytest.param(
            "SFT", "model_name_or_path", "model", marks=fault("SFT of W/model with --output_dir W")
        ),
        pytest.param(
            "the reward model",
            "dataset",
            "checkpoints/data",
            marks=fault("pairs in OUTPUT/checkpoints"),
        ),
        pytest.param(
            "PPO", "sft_adapter", "policy", marks=fault("PPO from --sft_adapter OUTPUT/policy")
        ),
    ],
)
def test_inputs_where_the_result_would_be(kind, option, place, world, tmp_path, said, outcome):
    mine = {"model_name_or_path": "base", "dataset": "pairs", "sft_adapter": "sft"}[option]
    shutil.copytree(world / mine, tmp_path / place)
    before = {path.name: path.read_bytes() for path in (tmp_path / place).iterdir()}
    assert run(kind, world, tmp_path, **{option: tmp_path / place}) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / place).iterdir()} == before
    outcome(said())


@each("{}: another run is writing to the same output")
def test_two_runs_with_one_output(kind, world, tmp_path, said, outcome):
    with hold(tmp_path / "out"):
        assert run(kind, world, tmp_path / "out") == 1
    assert checkpoints(tmp_path) == []
    outcome(said())


@each("{}: the disk has no room for the model and two checkpoints")
def test_a_disk_without_room(kind, world, tmp_path, monkeypatch, said, outcome):
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: used._replace(free=1000))
    assert run(kind, world, tmp_path / "out") == 1 and checkpoints(tmp_path) == []
    outcome(said())


@each("{}: the same command once more, without --resume")
def test_a_second_run_in_the_same_output(kind, world, whole, tmp_path, said, outcome):
    shutil.copytree(whole / kind, tmp_path / "out")
    assert run(kind, world, tmp_path / "out") == 1
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)
    outcome(said())


@fault("SFT: once more over a model that was trained with --save_strategy no")
def test_a_second_run_over_a_model_without_checkpoints(world, whole, tmp_path, said, outcome):
    shutil.copytree(whole / "SFT" / "model", tmp_path / "out" / "model")
    assert run("SFT", world, tmp_path / "out") == 1 and resume("SFT", world, tmp_path / "out") == 1
    outcome(said())


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        pytest.param(kind, name, value, marks=fault(f"{kind}: --resume with --{name} {value}"))
        for kind, name, value in [
            ("PPO", "learning_rate", 0.5),
            ("PPO", "init_kl_coef", 7.0),
            ("PPO", "mini_batch_size", 8),
            ("PPO", "seed", 1),
            ("SFT", "learning_rate", 0.5),
            ("SFT", "per_device_train_batch_size", 4),
            ("SFT", "max_steps", 6),
            ("SFT", "lora_alpha", 3),
            ("the reward model", "seed", 1),
            ("the reward model", "use_peft", "false"),
        ]
    ],
)
def test_resuming_with_other_settings(kind, name, value, world, whole, tmp_path, said, outcome):
    shutil.copytree(whole / kind, tmp_path / "out")
    assert resume(kind, world, tmp_path / "out", f"--{name}={value}") == 1
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)
    outcome(said())


@fault("PPO: --resume with more steps, another --save_every and a tracker")
def test_resuming_with_what_may_change(world, whole, tmp_path, outcome):
    assert run("PPO", world, tmp_path / "out", steps=2) == 0
    assert resume("PPO", world, tmp_path / "out", "--save_every=2", "--report_to=tensorboard") == 0
    assert weights("PPO", tmp_path / "out") == weights("PPO", whole / "PPO")
    outcome("The run goes on, and ends with the weights of one that never stopped.")


# --- stopped
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        pytest.param(kind, which, marks=fault(f"{kind}: {name} in a step"))
        for which, name, kinds in (
            (signal.SIGINT, "Ctrl-C", COMMANDS),
            (signal.SIGTERM, "SIGTERM", ("PPO", "SFT")),
        )
        for kind in kinds
    ],
)
def test_stopped_in_a_step(kind, which, world, whole, tmp_path, at_step, capsys, outcome):
    at_step(kind, 1, lambda: signal.raise_signal(which))
    assert run(kind, world, tmp_path / "out") == 128 + which
    text = capsys.readouterr().out.strip().splitlines()[-1]
    assert checkpoints(tmp_path) == ["checkpoint-1"] and resume(kind, world, tmp_path / "out") == 0
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)
    outcome(text)


@each("{}: Ctrl-C in the last step, then --resume", ("PPO", "SFT"))
def test_stopped_in_the_last_step(kind, world, whole, tmp_path, at_step, outcome):
    at_step(kind, 3 if kind == "PPO" else 4, lambda: signal.raise_signal(signal.SIGINT))
    assert run(kind, world, tmp_path / "out") == 130 and resume(kind, world, tmp_path / "out") == 0
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)
    outcome("The model of the last checkpoint is saved, with exit code 0.")


@each("{}: Ctrl-C in the first second")
def test_stopped_in_the_first_second(kind, tmp_path, outcome):
    """While it imports torch, within its work: see the next test."""
    output = f"--output{'' if kind == 'PPO' else '_dir'}={tmp_path / 'out'}"
    line = [sys.executable, "-X", "importtime", COMMANDS[kind].__file__, output]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        next(said for said in process.stderr if "torch." in said)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()  # or a failure here would leave it training
    assert (
        process.returncode == -signal.SIGINT
        and "Traceback" not in text
        and not (tmp_path / "out").exists()
    )
    outcome("It ends at once; nothing is written.")


@fault("Ctrl-C within a command, while it loads a library")
def test_stopped_while_a_module_loads(tmp_path, outcome):
    """An exception in the midst would abort torch's C++; in a callback of importlib it would be
    lost.
    """
    (tmp_path / "library.py").write_text(
        "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept: pass\n"
    )
    code = (
        "from rlhf_course.runtime import command; command.run('x.py', lambda given:"
        " __import__('library'), [])"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == -signal.SIGINT and done.stdout == done.stderr == ""
    outcome("It ends at once.")


# --- damaged
# ----------------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def garble(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)


DAMAGES = [
    ("PPO", "an empty trainer_state.pt", "trainer_state.pt", lambda file: os.truncate(file, 0)),
    ("PPO", "a bit of trainer_state.pt turned over", "trainer_state.pt", garble),
    ("SFT", "killed within a save, before its last file", "trainer_state.json", Path.unlink),
    ("SFT", "an empty trainer_state.json", "trainer_state.json", lambda file: os.truncate(file, 0)),
    ("SFT", "half an optimizer", "optimizer.pt", cut),
    ("the reward model", "half an adapter", "adapter_model.safetensors", cut),
]
damages = [
    pytest.param(kind, file, do, marks=fault(f"{kind}: {done} in the newest checkpoint"))
    for kind, done, file, do in DAMAGES
]


@pytest.mark.parametrize(("kind", "file", "do"), damages)
def test_a_damaged_checkpoint(kind, file, do, world, whole, tmp_path, capsys, outcome):
    """The one before is used."""
    out, model = tmp_path / "out", "policy" if kind == "PPO" else "model"
    if kind == "PPO":  # which keeps one
        assert run(kind, world, out, steps=2) == 0
    shutil.copytree(whole / kind, out, dirs_exist_ok=True)
    shutil.rmtree(out / model)
    do(next(out.rglob(checkpoints(out)[-1])) / file)
    capsys.readouterr()
    assert resume(kind, world, out) == 0 and weights(kind, out) == weights(kind, whole / kind)
    outcome(next(line for line in capsys.readouterr().out.splitlines() if "was not whole" in line))


@each("{}: the only checkpoint is damaged; --resume, then without", ("PPO", "SFT"))
def test_a_damaged_checkpoint_alone(kind, world, whole, tmp_path, said, outcome):
    """One of the two goes on: a run may begin anew."""
    shutil.copytree(whole / kind, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / ("policy" if kind == "PPO" else "model"))
    *older, newest = sorted(tmp_path.rglob("checkpoint-*"))
    cut(newest / ("trainer_state.pt" if kind == "PPO" else "trainer_state.json"))
    for path in older:
        shutil.rmtree(path)
    assert resume(kind, world, tmp_path / "out") == 1
    text = said()
    assert run(kind, world, tmp_path / "out") == 0
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)
    outcome(text)


@fault("PPO: settings.json cut in half, then --resume")
def test_damaged_settings(world, whole, tmp_path, said, outcome):
    shutil.copytree(whole / "PPO", tmp_path / "out")
    cut(tmp_path / "out" / "settings.json")
    assert resume("PPO", world, tmp_path / "out") == 1
    outcome(said())


# --- short of disk
# ----------------------------------------------------------------------------------------------------


@each("{}: the disk is full when a checkpoint is written", ("PPO", "SFT"))
def test_a_disk_that_fills(kind, world, whole, tmp_path, at_step, small_disk, said, outcome):
    at_step(kind, 2 if kind == "PPO" else 3, lambda: small_disk(9000))
    code, text = run(kind, world, tmp_path / "out"), said()
    small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert code == 1
    assert checkpoints(tmp_path)[0] == ("checkpoint-1" if kind == "PPO" else "checkpoint-2")
    assert resume(kind, world, tmp_path / "out") == 0
    assert weights(kind, tmp_path / "out") == weights(kind, whole / kind)
    outcome(re.sub(r" \([\d,]+ MB left\)", "", text))


@fault("convert_baichuan.py: the disk is full when a shard is written")
def test_a_disk_that_fills_in_a_conversion(source, tmp_path, small_disk, capsys, outcome):
    convert = partial(
        command.run,
        "convert_baichuan.py",
        convert_baichuan.main,
        [str(source), str(tmp_path / "llama")],
    )
    small_disk(20_000)
    code, text = convert(), capsys.readouterr().err.strip().splitlines()[-1]
    small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert code == 1 and not (tmp_path / "llama").exists() and convert() == 0
    outcome(re.sub(r" \([\d,]+ MB left\)", "", text))


# --- killed
# -----------------------------------------------------------------------------------------------------------


@fault("PPO: killed within a save, which leaves .checkpoint-9-….part behind")
def test_what_a_killed_run_leaves_goes(world, tmp_path, outcome):
    (tmp_path / ".checkpoint-9-abc.part" / "new").mkdir(parents=True)
    (tmp_path / ".checkpoint-9-abc.part" / "new" / "trainer_state.pt").write_bytes(b"half")
    assert run("PPO", world, tmp_path, steps=1) == 0
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "policy", "settings.json"]
    outcome("The next run with this output removes it.")


def kill(kind: str, world: Path, folder: Path, count: int, seed: int) -> list[str]:
    """Runs that are killed at random moments and resumed: what each left when it was killed.

    In a process of one thread, which forks for every run, so that libraries are loaded once.
    """
    draw, more = (
        random.Random(seed),
        ["--save_steps=1", "--max_steps=24"] if kind != "PPO" else ["--steps=12"],
    )

    def start(how, output: Path) -> int:
        if (child := os.fork()) == 0:
            with open(folder / "log", "a") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            code = 99
            try:
                code = how(kind, world, output, *more)
            finally:
                os._exit(code)
        return child

    def wait(child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    folder.mkdir()
    begun = time.monotonic()
    assert wait(start(run, folder / "whole")) == 0
    took, found = time.monotonic() - begun, []
    while len(found) < count:
        output = folder / str(len(found))
        child = start(run, output)
        time.sleep(draw.uniform(0, took))
        os.kill(child, signal.SIGKILL)
        if wait(child) != -signal.SIGKILL:  # it had finished
            shutil.rmtree(output)
            continue
        newest = latest_checkpoint(output) or latest_checkpoint(output / "checkpoints")
        half = {path.name[:12] for path in output.rglob("*") if path.name.endswith(".part")}
        half |= {
            path.name
            for path in output.rglob("checkpoint-*")
            if damage(path) and path.parent.suffix != ".part"
        }
        found.append(f"{newest.name if newest else 'no checkpoint'} {sorted(half) or ''}")
        code = wait(start(resume, output))
        assert (code == 1) == (newest is None), found
        assert code == 0 or wait(start(run, output)) == 0, found
        assert weights(kind, output) == weights(kind, folder / "whole"), found
        assert not [path for path in output.rglob("*") if path.name.endswith((".part", ".lock"))], (
            found
        )
    return found


@fault("each training command is killed at random moments, and resumed")
def test_killed_at_a_random_moment(world, tmp_path, outcome):
    """More of them: python tests/test_faults_training.py WORLD FOLDER COUNT SEED, where WORLD is
    the fixture's.
    """
    paths = os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = python(__file__, world, tmp_path, 1, 0, env=environment)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stderr
    outcome(
        "It goes on from the last whole checkpoint, and ends with the weights of a run that never"
        " stopped."
    )


@fault("accelerate launch is killed, and cannot end its processes")
def test_no_process_outlives_a_killed_launcher(monkeypatch, outcome):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "PartialState", lambda **_: None)
    read, write = os.pipe()
    if (launcher := os.fork()) == 0:
        if (worker := os.fork()) == 0:
            try:
                distributed.init()
            except AttributeError:  # there is no state to look at
                os.write(write, str(os.getpid()).encode())
                time.sleep(60)
            os._exit(0)
        os.waitpid(worker, 0)
        os._exit(0)
    worker = int(os.read(read, 20))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    deadline = time.monotonic() + 5
    while (
        Path(f"/proc/{worker}").exists()
        and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    outcome("They end with it.")


# --- saved
# ------------------------------------------------------------------------------------------------------------


@each("{}: all that is saved, under umask 027", ("PPO", "SFT"))
def test_what_is_saved_obeys_the_umask(kind, world, tmp_path, outcome):
    found = os.umask(0o027)
    try:
        assert (
            run(
                kind,
                world,
                tmp_path / "out",
                "--save_total_limit=9" if kind != "PPO" else "--save_every=2",
            )
            == 0
        )
    finally:
        os.umask(found)
    modes = {
        path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    folders = {
        path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_dir()
    }
    assert (modes, folders) == ({0o640}, {0o750})
    outcome("Files can be read by the group (0640), as other programs' files can.")


def adapted() -> AutoModelForCausalLMWithValueHead:
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        make_policy().pretrained_model, peft_config=lora
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            make_policy,
            adapted,
            marks=fault("an adapter is saved into the folder of a whole model"),
        ),
        pytest.param(
            adapted,
            make_policy,
            marks=fault("a whole model is saved into the folder of an adapter"),
        ),
    ],
)
def test_a_model_does_not_hide_another(first, second, tmp_path, outcome):
    first().save_pretrained(tmp_path / "policy")
    before = sorted(os.listdir(tmp_path / "policy"))
    with pytest.raises(ValueError) as refused:
        second().save_pretrained(tmp_path / "policy")
    assert sorted(os.listdir(tmp_path / "policy")) == before
    outcome(str(refused.value))


@fault("a model is saved over one that has shards, and the other way round")
def test_weights_of_an_earlier_save_go(tmp_path, outcome):
    one, other = make_policy(1), make_policy(2)
    one.pretrained_model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    other.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), other.parameters(), strict=True)
    )
    outcome("The weights of the earlier one go; others' files stay.")


if __name__ == "__main__":
    names = ("worlds.build", "rewards", "policy.adapters", "audit", "course.plots")
    names = [f"rlhf_course.{name}" for name in names]
    for name in [*names, "trl.trainer.sft_trainer", "trl.trainer.reward_trainer"]:
        importlib.import_module(name)  # here, so that no run has to
    for kind in COMMANDS:
        for text in kill(kind, Path(sys.argv[1]), Path(sys.argv[2], kind), *map(int, sys.argv[3:])):
            print(f"{kind}: {text}", flush=True)
