"""Two processes over gloo: the numbers of one, one writer, and an end when one of them dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_ppo
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
from parallel_worker import CASES

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig
from rlhf_course.ppo.parts import prepare_models

WORKER = Path(__file__).with_name("parallel_worker.py")
PPO = (SCRIPTS / "train_ppo.py", "--batch_size=8", "--mini_batch_size=8", "--save_every=2")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder with what one process found, and what two did."""
    folder = tmp_path_factory.mktemp("found")
    subprocess.run([sys.executable, WORKER, folder, "one"], check=True)
    launched(WORKER, folder, "two")
    return folder


def read(folder: Path, case: str, name: str) -> dict:
    return json.loads((folder / f"{case} {name}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(found, case):
    """16 samples in one process, or eight in each: the same statistics, weights, β and answers."""
    one, two = (read(found, case, which) for which in ("one", "two"))
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert mine.keys() == theirs.keys() and len(mine) > 25
        for key in mine:
            assert theirs[key] == pytest.approx(mine[key], abs=1e-5), key
    files = [found / f"{case} {which}.pt" for which in ("one", "two")]
    assert difference(*(torch.load(file, weights_only=True) for file in files)) < 1e-5
    assert one["samples"] == two["samples"]


def test_the_cases_do_what_they_are_for(found):
    cases = {case: read(found, case, "two") for case in CASES}
    history = {case: entry["history"] for case, entry in cases.items()}
    kl = [abs(step["objective/kl"]) for step in history["adapters"]]
    assert history["stopping"][1]["epochs"] < 4 == history["plain"][1]["epochs"]
    assert history["skipping"][0]["ppo/loss/value"] < history["plain"][0]["ppo/loss/value"]
    assert kl[0] < 1e-6 < kl[2]
    ends = (torch.load(found / f"{case} two.pt", weights_only=True) for case in ("plain", "scores"))
    assert difference(*ends) > 1e-4


@pytest.mark.parametrize("name", ["ddp", "two_cpus"])
def test_launch_files_hold_options_that_accelerate_knows(name):
    config = load_config_from_file(str(SCRIPTS / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == (2 if name == "two_cpus" else 8)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_sharded_weights_are_an_engines_business(kind):
    accelerator = SimpleNamespace(distributed_type=kind)
    with pytest.raises(ValueError, match=f"a copy per GPU .DDP., not {kind.value}"):
        prepare_models(accelerator, PPOConfig(), make_policy(), None, None, None)


def test_a_killed_process_ends_the_others_and_the_run_goes_on_with_as_many(tmp_path, fails):
    process = launch(*PPO, "--steps=500", f"--output={tmp_path}")
    while latest_checkpoint(tmp_path) is None:  # it trains
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "Signal 9 (SIGKILL) received" in out
    last = latest_checkpoint(tmp_path).name
    generators = [torch.as_tensor(random["torch"]) for random in final_state(tmp_path)["random"]]
    assert len(generators) == 2 and not torch.equal(*generators)  # each samples its own answers

    steps = int(last.removeprefix("checkpoint-")) + 1
    resume = (*PPO[1:], f"--steps={steps}", f"--output={tmp_path}", "--resume")
    fails(train_ppo, [*resume], "is of a run with processes 2; this one has 1")
    out = launched(PPO[0], *resume)
    assert out.count("The policy is in") == 1 and "Warning" not in out, out
    saved = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "policy").state_dict()
    state = final_state(tmp_path)["weights"]
    assert difference(state, saved) == 0
