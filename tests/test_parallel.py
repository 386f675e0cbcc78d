"""Two processes over gloo: the same numbers as one, one writer, and an end when one of them dies."""

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
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from conftest import SCRIPTS, difference, launch, make_trainer
from parallel_worker import CASES

from rlhf_course.offline.world import prepare
from rlhf_course.ppo.checkpoint import latest_checkpoint
from rlhf_course.presets import load_preset

WORKER = Path(__file__).with_name("parallel_worker.py")
PPO = (SCRIPTS / "train_ppo.py", "--batch_size=8", "--mini_batch_size=8", "--save_every=2")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folder with what one process and what two of them found."""
    folder = tmp_path_factory.mktemp("both")
    subprocess.run([sys.executable, WORKER, folder], check=True)
    process = launch(WORKER, folder)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(both, case):
    """The same 16 samples, all in one process or eight in each: the same statistics, weights and β."""
    one, two = (json.loads((both / f"{case} {n}.json").read_text()) for n in (1, 2))
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys() and len(mine) > 25
        for name in mine:
            assert theirs[name] == pytest.approx(mine[name], abs=1e-5), name
    weights = [torch.load(both / f"{case} {n}.pt", weights_only=True) for n in (1, 2)]
    assert difference(*weights) < 1e-5


def test_the_cases_do_what_they_are_for(both):
    history = {case: json.loads((both / f"{case} 2.json").read_text()) for case in CASES}
    assert history["stopping"][1]["epochs"] < 4 == history["plain"][1]["epochs"]
    assert history["skipping"][0]["ppo/loss/value"] < history["plain"][0]["ppo/loss/value"]
    assert abs(history["adapters"][0]["objective/kl"]) < 1e-6 < abs(history["adapters"][2]["objective/kl"])
    start, end = (torch.load(both / f"{case} 2.pt", weights_only=True) for case in ("plain", "skipping"))
    assert difference(start, end) > 1e-4


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "zero3", "two_cpus"])
def test_launch_files_hold_options_that_accelerate_knows(name):
    config = load_config_from_file(str(SCRIPTS / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == (2 if name == "two_cpus" else 8)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_ppo_says_that_it_does_not_share_out_weights(kind, monkeypatch):
    monkeypatch.setattr("rlhf_course.tracking.start", lambda config: SimpleNamespace(distributed_type=kind))
    with pytest.raises(ValueError, match="ddp.yaml, a copy on each GPU"):
        make_trainer()


def test_one_process_writes_and_a_run_goes_on_with_as_many_as_before(tmp_path):
    prepare(load_preset("03_gpt2_imdb_ppo", "tiny"))
    first = launch(*PPO, "--steps=2", f"--output={tmp_path}")
    out, _ = first.communicate(timeout=300)
    assert first.returncode == 0 and out.count("The policy is in") == 1, out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "policy"]
    state = torch.load(latest_checkpoint(tmp_path) / "trainer_state.pt", weights_only=True)
    generators = [torch.as_tensor(random["torch"]) for random in state["random"]]
    assert len(generators) == 2 and not torch.equal(*generators)  # each samples answers of its own

    alone = [sys.executable, *PPO, "--steps=3", f"--output={tmp_path}", "--resume"]
    refused = subprocess.run([*map(str, alone)], capture_output=True, text=True)
    assert refused.returncode == 1 and "is of a run with 2 process(es); this one has 1" in refused.stderr
    again = launch(*PPO, "--steps=3", f"--output={tmp_path}", "--resume")
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and latest_checkpoint(tmp_path).name == "checkpoint-3", out


def test_a_process_that_is_killed_ends_the_others(tmp_path):
    prepare(load_preset("03_gpt2_imdb_ppo", "tiny"))
    process = launch(*PPO, "--steps=500", f"--output={tmp_path}")
    while latest_checkpoint(tmp_path) is None:  # it trains
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "Signal 9 (SIGKILL) received" in out
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert [path.name for path in tmp_path.iterdir()] == [latest_checkpoint(tmp_path).name]  # nothing half-written
