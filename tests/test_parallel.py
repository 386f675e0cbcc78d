"""Two processes over gloo: the numbers of one, one writer, and an end when one of them dies."""

import importlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from builders import (
    SCRIPTS,
    difference,
    final_state,
    latest_checkpoint,
    launch,
    launched,
    make_policy,
)
from parallel_worker import CASES, run_cases
from safetensors.torch import load_file
from training_runs import COMMANDS, options_of

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig
from rlhf_course.ppo.trainer import prepare_models
from scripts import train_ppo

WORKER = Path(__file__).with_name("parallel_worker.py")
PPO = ("--batch_size=8", "--mini_batch_size=8", "--save_every=2")
RUNS = {  # commands whose two processes are compared with one that has twice the batch
    "LoRA": ("SFT", {"lora_dropout": 0, "eval_share": 0.12, "max_steps": 3}, 6),
    "SFT": ("SFT", {"use_peft": "false", "eval_share": 0.12, "max_steps": 3}, 6),
    "reward": ("the reward model", {"use_peft": "false"}, 8),
}


def options(run: str, world, folder, processes: int) -> tuple[str, list[str]]:
    """A command's script, and its options in one of so many processes."""
    kind, given, size = RUNS[run]
    given = given | {"train_sampling_strategy": "sequential"}
    for part in ("train", "eval"):
        given |= {f"per_device_{part}_batch_size": size // processes}
    return COMMANDS[kind].__name__, options_of(kind, world, folder / run, **given)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run's folder, and what it printed, after one of its two processes was killed."""
    folder = tmp_path_factory.mktemp("killed")
    process = launch(SCRIPTS / "train_ppo.py", *PPO, "--steps=500", f"--output={folder}")
    while latest_checkpoint(folder) is None:  # it trains
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    return folder, out


@pytest.fixture(scope="module")
def found(tmp_path_factory, world, killed):
    """The folder with what one process found and what two did, and all that the two printed.

    Starting processes takes the longest, so one pair does everything in turn.
    """
    folder = tmp_path_factory.mktemp("found")
    run_cases(folder, "one")
    for run in RUNS:
        script, given = options(run, world, folder / "one", 1)
        assert importlib.import_module(script).main(given) == 0
    shutil.copytree(killed[0], folder / "resumed")
    steps = final_state(killed[0])["step"] + 1
    resume = [*PPO, f"--steps={steps}", f"--output={folder / 'resumed'}", "--resume"]
    commands = [options(run, world, folder / "two", 2) for run in RUNS] + [
        ("scripts.train_ppo", resume)
    ]
    return folder, launched(WORKER, folder, json.dumps(commands))


def read(folder: Path, case: str, name: str) -> dict:
    return json.loads((folder / f"{case} {name}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(found, case):
    """16 samples in one process, or eight in each: the same statistics, weights, β and answers."""
    folder, _ = found
    one, two = (read(folder, case, which) for which in ("one", "two"))
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert mine.keys() == theirs.keys() and len(mine) > 25
        for key in mine:
            assert theirs[key] == pytest.approx(mine[key], abs=1e-5), key
    files = [folder / f"{case} {which}.pt" for which in ("one", "two")]
    assert difference(*(torch.load(file, weights_only=True) for file in files)) < 1e-5
    assert one["samples"] == two["samples"]


def test_the_cases_do_what_they_are_for(found):
    folder, _ = found
    cases = {case: read(folder, case, "two") for case in CASES}
    history = {case: entry["history"] for case, entry in cases.items()}
    kl = [abs(step["objective/kl"]) for step in history["adapters"]]
    assert history["stopping"][1]["epochs"] < 4 == history["plain"][1]["epochs"]
    assert history["skipping"][0]["ppo/loss/value"] < history["plain"][0]["ppo/loss/value"]
    assert kl[0] < 1e-6 < kl[2]
    ends = (
        torch.load(folder / f"{case} two.pt", weights_only=True) for case in ("plain", "scores")
    )
    assert difference(*ends) > 1e-4


@pytest.mark.parametrize("name", ["ddp", "two_cpus"])
def test_launch_files_hold_options_that_accelerate_knows(name):
    config = load_config_from_file(str(SCRIPTS / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == (2 if name == "two_cpus" else 8)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_sharded_weights_are_an_engines_business(kind):
    accelerator = SimpleNamespace(distributed_type=kind)
    with pytest.raises(ValueError, match=f"one copy of the model per GPU .DDP., not {kind.value}"):
        prepare_models(accelerator, PPOConfig(), make_policy(), None, None, None)


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_train_as_one_with_twice_the_batch(found, run):
    folders = [found[0] / name / run for name in ("one", "two")]
    if run == "reward":
        one, two = (json.loads((folder / "audit.json").read_text()) for folder in folders)
        assert one["accuracy"] == two["accuracy"]
        margins = [[probe["margin"] for probe in each["probes"].values()] for each in (one, two)]
        assert margins[0] == pytest.approx(margins[1], abs=1e-3)
    else:
        one, two = (json.loads((folder / "metrics.json").read_text()) for folder in folders)
        assert one["loss"] < one["loss_before"] - 1e-3
        for name in ("loss_before", "loss", "held_out_tokens"):
            assert two[name] == pytest.approx(one[name], abs=1e-5)
    (one, two) = (load_file(*(folder / "model").glob("*model.safetensors")) for folder in folders)
    assert one.keys() == two.keys() and difference(one, two) < 1e-4


def test_a_killed_process_ends_the_others_and_the_run_goes_on_with_as_many(killed, found, fails):
    folder, out = killed
    assert "Signal 9 (SIGKILL) received" in out
    generators = [torch.as_tensor(random["torch"]) for random in final_state(folder)["random"]]
    assert len(generators) == 2 and not torch.equal(*generators)  # each samples its own answers
    resume = [*PPO, "--steps=600", f"--output={folder}", "--resume"]
    fails(train_ppo, resume, "was saved with processes 2; this run has 1")
    resumed = found[0] / "resumed"
    assert final_state(resumed)["step"] == final_state(folder)["step"] + 1
    saved = AutoModelForCausalLMWithValueHead.from_pretrained(resumed / "policy").state_dict()
    state = final_state(resumed)["weights"]
    assert difference(state, saved) == 0


def test_only_the_first_process_speaks(found):
    _, out = found
    for said in ("The adapter is in", "The model is in", "The reward model is in", "policy is in"):
        assert out.count(said) == 1, out
    assert "Warning" not in out, out
