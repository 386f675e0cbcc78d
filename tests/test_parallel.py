"""Two processes over gloo: the same numbers as one, one writer, and an end when one of them dies."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
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
    make_trainer,
)
from parallel_worker import CASES
from peft import LoraConfig
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from rlhf_course import AutoModelForCausalLMWithValueHead

WORKER = Path(__file__).with_name("parallel_worker.py")
PPO = (SCRIPTS / "train_ppo.py", "--batch_size=8", "--mini_batch_size=8", "--save_every=2")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder with what one process found, two with a copy of the weights each, and two that
    shard them.
    """
    folder = tmp_path_factory.mktemp("found")
    subprocess.run([sys.executable, WORKER, folder, "one"], check=True)
    for file in ("two_cpus", "fsdp"):
        launched(WORKER, folder, file, file=file)
    return folder


def read(folder: Path, case: str, name: str) -> dict:
    return json.loads((folder / f"{case} {name}.json").read_text())


@pytest.mark.parametrize(
    ("case", "name"),
    [*product(CASES, ["two_cpus"]), *product([c for c in CASES if c != "adapters"], ["fsdp"])],
)
def test_two_processes_equal_one(found, case, name):
    """The same 16 samples, all in one process or eight in each: the same statistics, weights, β and
    answers.
    """
    one, two = (read(found, case, which) for which in ("one", name))
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert mine.keys() == theirs.keys() and len(mine) > 25
        for key in mine:
            assert theirs[key] == pytest.approx(mine[key], abs=1e-5), key
    weights = [
        torch.load(found / f"{case} {which}.pt", weights_only=True) for which in ("one", name)
    ]
    assert difference(*weights) < 1e-5
    assert one["samples"] == two["samples"]
    assert two["held"] == (pytest.approx(0.5, abs=0.05) if name == "fsdp" else 1.0)


def test_the_cases_do_what_they_are_for(found):
    cases = {case: read(found, case, "two_cpus") for case in CASES}
    history = {case: entry["history"] for case, entry in cases.items()}
    assert history["stopping"][1]["epochs"] < 4 == history["plain"][1]["epochs"]
    assert history["skipping"][0]["ppo/loss/value"] < history["plain"][0]["ppo/loss/value"]
    assert (
        abs(history["adapters"][0]["objective/kl"])
        < 1e-6
        < abs(history["adapters"][2]["objective/kl"])
    )
    start, end = (
        torch.load(found / f"{case} two_cpus.pt", weights_only=True)
        for case in ("plain", "skipping")
    )
    assert difference(start, end) > 1e-4
    lengths = [
        {len(tokens) - 1 for tokens in cases["plain"]["samples"] if tokens[0] == part}
        for part in (0, 1)
    ]
    assert max(lengths[0]) == 4 and max(lengths[1]) == 12


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "two_cpus"])
def test_launch_files_hold_options_that_accelerate_knows(name):
    config = load_config_from_file(str(SCRIPTS / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == (2 if name == "two_cpus" else 8)


def fake_accelerator(kind: DistributedType, version: int = 1, **options) -> SimpleNamespace:
    plugin = {"cpu_ram_efficient_loading": False, "cpu_offload": OffloadPolicy()} | options
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin))
    two = kind == DistributedType.FSDP and version == 2
    return SimpleNamespace(distributed_type=kind, is_fsdp2=two, state=state)


ADAPTERS = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
REFUSED = {
    "FSDP of the first version": (
        fake_accelerator(DistributedType.FSDP),
        {},
        "FSDP, but shards weights by FSDP2 alone.*fsdp.yaml",
    ),
    "DeepSpeed": (
        fake_accelerator(DistributedType.DEEPSPEED),
        {},
        "DEEPSPEED, but shards weights by FSDP2 alone.*fsdp.yaml",
    ),
    "adapters": (
        fake_accelerator(DistributedType.FSDP, 2),
        {},
        "adapters, but under DDP.*8 or 4 bits.*ddp.yaml",
    ),
    "weights in the first process alone": (
        fake_accelerator(DistributedType.FSDP, 2, cpu_ram_efficient_loading=True),
        {},
        "fsdp_cpu_ram_efficient_loading: true. Change that.*fsdp.yaml",
    ),
    "an optimizer in the machine's memory": (
        fake_accelerator(DistributedType.FSDP, 2, cpu_offload=CPUOffloadPolicy()),
        {},
        "fsdp_offload_params: true. Change that.*fsdp.yaml",
    ),
    "shared layers": (
        fake_accelerator(DistributedType.FSDP, 2),
        {"num_shared_layers": 1},
        "num_shared_layers. Change that",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sharded_is_refused_with_a_cure(case, monkeypatch):
    accelerator, options, message = REFUSED[case]
    monkeypatch.setattr("rlhf_course.runtime.tracking.start", lambda config: accelerator)
    policy = make_policy()
    if case == "adapters":
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(
            policy.pretrained_model, peft_config=ADAPTERS
        )
    with pytest.raises(ValueError, match=message):
        make_trainer(policy, **options)


@pytest.mark.parametrize("file", ["two_cpus", "fsdp"])
def test_a_killed_process_ends_the_others_and_the_run_goes_on_with_as_many_as_before(
    tmp_path, file, fails
):
    process = launch(*PPO, "--steps=500", f"--output={tmp_path}", file=file)
    while latest_checkpoint(tmp_path) is None:  # it trains
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "Signal 9 (SIGKILL) received" in out
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    last = latest_checkpoint(tmp_path).name
    left = [path.name for path in tmp_path.iterdir() if path.name not in (".lock", "settings.json")]
    assert left == [last]  # nothing half-written
    generators = [torch.as_tensor(random["torch"]) for random in final_state(tmp_path)["random"]]
    assert len(generators) == 2 and not torch.equal(*generators)  # each samples answers of its own

    steps = int(last.removeprefix("checkpoint-")) + 1
    resume = (*PPO[1:], f"--steps={steps}", f"--output={tmp_path}", "--resume")
    fails(train_ppo, [*resume], "is of a run with processes 2; this one has 1")
    out = launched(PPO[0], *resume, file=file)
    assert out.count("The policy is in") == 1 and "Warning" not in out, out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"checkpoint-{steps}",
        "policy",
        "settings.json",
    ]
    saved = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "policy").state_dict()
    checkpoint = {
        k.removeprefix("pretrained_model."): w for k, w in final_state(tmp_path)["weights"].items()
    }
    assert difference(checkpoint, saved) == 0
