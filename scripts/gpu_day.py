"""Test a GPU, gate by gate: measure, compare with predictions, and stop at the first failure.

    python scripts/gpu_day.py            # repeat the command to continue
    python scripts/gpu_day.py --readme   # write the measurements into the README

Writes results to OUTPUT/gpu_day.json. Without CUDA, gates 1 to 5 are rehearsed with small shapes.
docs/on-a-gpu.md explains the gates.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from rlhf_course.command_line import exits
from rlhf_course.command_line.notebook_files import NOTEBOOKS, ROOT, keep_day, read_card
from rlhf_course.course.memory import notebook_05_needs
from rlhf_course.course.presets import SMALL, has_bf16
from rlhf_course.runtime.files import atomic_file, hold, read_json

HAS_GPU = torch.cuda.is_available()
GIB = 2**30
# An older tutorial trained GPT-2 small on an A800: 194 steps took 35 min 19 s.
PUBLISHED = {"seconds_per_step": 10.92, "peak_gib": 10_097 / 1024}
SLACK = 1.3  # allowed ratio of measured to computed memory, as in tests/test_memory.py
REHEARSAL = {  # notebook, and its preset if not tiny → settings
    "00": {"steps": 2, "batch_size": 8, "eval_queries": 16},
    "03": {"toy_steps": 2, "toy_betas": [0.5], "toy_batch": 32},
    "04 small": {
        "model": "models/gpt2-imdb-mini",
        "steps": 2,
        "batch_size": 8,
        "mini_batch_size": 8,
        "eval_queries": 16,
        "probe_queries": 8,
    },
}
REAL_MODEL = ("04_gpt2_imdb_ppo", "08_verifiable_rewards")  # they have the preset small
# Preset full: minutes, GB to download, GiB on the GPU; guesses, except the memory of notebooks 04
# (published) and 05 (computed).
FULL = {
    "01": {"minutes": 240, "download": 1, "memory": 40},
    "04": {"minutes": 120, "download": 1, "memory": 10},
    "05": {"minutes": 900, "download": 16, "memory": notebook_05_needs()},
}
FULL_OTHERS = {"minutes": 60, "download": 1, "memory": 10}


class Gate(NamedTuple):
    """Hold a step of the protocol and its budget."""

    name: str
    run: Callable  # gate, output folder → measurements, and predicted upper bounds
    minutes: float = 30  # a gate that takes longer is killed
    download: float = 0  # GB
    memory: float = 0  # GiB that must be free on the GPU


def gates() -> list[Gate]:
    """Return the gates; without a GPU, only the rehearsal's gates."""
    names = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
    rehearsed = [name for name in names if name[:2] in REHEARSAL]
    protocol = [Gate("1 environment", environment), Gate("2 tests", tests)]
    for name in names if HAS_GPU else rehearsed:
        protocol.append(Gate(f"3 {name} at tiny", partial(notebook, name, "tiny")))
    protocol.append(Gate("4 GPT-2 small", gpt2))
    protocol.append(Gate("5 LoRA on the shape of a 7B", lora))
    for name in REAL_MODEL if HAS_GPU else REAL_MODEL[:1]:
        protocol.append(Gate(f"5 {name} at small", partial(notebook, name, SMALL), download=0.1))
    if not HAS_GPU:
        return protocol
    budgets = {name: FULL.get(name[:2], FULL_OTHERS) for name in names}
    for name in sorted(names, key=lambda name: budgets[name]["minutes"]):
        run = partial(notebook, name, "full")
        protocol.append(Gate(f"6 {name} at full", run, **budgets[name]))
    return protocol


def call(gate: Gate, folder: Path, *arguments) -> str:
    """Run Python with arguments; return its output, or raise an error with its last lines."""
    environment = dict(os.environ)
    if not gate.download:
        environment["HF_HUB_OFFLINE"] = "1"
    log = folder / "gate.log"
    with open(log, "w") as file:
        process = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
            timeout=60 * gate.minutes,
        )
    text = log.read_text("utf-8", "replace")
    if process.returncode:
        raise RuntimeError(" / ".join([*text.splitlines()[-3:], f"read {log}"]))
    return text


def environment(gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Return the versions and the device."""
    return read_environment(), {}


def read_environment() -> dict:
    """Return the versions and the device, which must not change between gates."""
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "papermill")}
    device = torch.cuda.get_device_name() if HAS_GPU else "CPU"
    return versions | {"device": device, "bf16": has_bf16()}


def tests(gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Run the tests that need a GPU; a rehearsal only collects them."""
    arguments = "-m pytest -q -p no:cacheprovider -o python_files=check_*.py tests/on_gpu".split()
    if not HAS_GPU:
        arguments.append("--co")
    text = call(gate, folder, *arguments)
    return {"summary": text.splitlines()[-1]}, {}


def notebook(name: str, preset: str, gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Run a notebook; raise an error if a check fails, but not in a two-step rehearsal."""
    output = folder / preset
    card = output / f"run_cards/{name}.json"
    command = ["scripts/run_notebooks.py", "--only", name, "--preset", preset]
    command += ["--jobs=1", f"--output={output}"]
    if not HAS_GPU:
        key = name[:2] if preset == "tiny" else f"{name[:2]} {preset}"
        command += [f"--override={key}={value}" for key, value in REHEARSAL[key].items()]
    try:
        call(gate, folder, *command)
    except RuntimeError:
        if HAS_GPU or not card.exists():
            raise
    measured = {key: read_json(card)[key] for key in ("wall_s", "peak_cuda_mb", "peak_rss_mb")}
    predicted = {"peak_cuda_mb": 1024 * gate.memory} if gate.memory else {}
    return measured, predicted


def gpt2(gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Take PPO steps with random weights and the published run's batch size and lengths."""
    file = folder / "gpt2.json"
    options = ["--shape=gpt2"] if HAS_GPU else ["--shape=tiny", "--rounds=1", "--threads=1"]
    if HAS_GPU and has_bf16():
        options.append("--bf16")
    call(gate, folder, "dev/benchmark/benchmark_ppo.py", *options, f"--output={file}")
    median = read_json(file)["variants"]["ours"]["median"]
    peak_mb = max(value for name, value in median.items() if name.endswith("_mb"))
    measured = {"seconds_per_step": median["total"], "peak_gib": peak_mb * 1e6 / GIB}
    return measured, PUBLISHED if HAS_GPU else {}


def lora(gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Take a PPO step on as many layers of a 7B model as fit; predict the peak memory."""
    text = call(gate, folder, "dev/memory_table.py", "--measure")
    measured = json.loads(text.splitlines()[-1])
    return measured, {"peak_gib": SLACK * measured["computed_gib"]}


def walk(gates: list[Gate], file: Path) -> str:
    """Run the gates that have not passed; return the first failing gate's problem, or ""."""
    day = read_card(file) or {"environment": read_environment(), "gates": {}}
    if day["environment"] != read_environment():
        raise ValueError(f"{file} comes from {day['environment']}. Choose another --output.")
    for gate in gates:
        if day["gates"].get(gate.name, {}).get("passed"):
            continue
        budget = f"at most {gate.minutes} min, {gate.download} GB to download"
        print(f"{gate.name}: {budget}", flush=True)
        result = measure(gate, file.parent)
        day["gates"][gate.name] = result
        with atomic_file(file) as path:
            path.write_text(json.dumps(day, indent=1) + "\n", encoding="utf-8")
        print(f"  measured {result['measured']}; predicted at most {result['predicted'] or '–'}")
        if not result["passed"]:
            return f"{gate.name}: {result['problem']}"
    return ""


def measure(gate: Gate, folder: Path) -> dict:
    """Run one gate; return its measurements, predictions, time, and problem ("" if it passed)."""
    problem = ""
    measured = {}
    predicted = {}
    started = time.perf_counter()
    try:
        if HAS_GPU and torch.cuda.mem_get_info()[0] / GIB < gate.memory:
            raise MemoryError(f"less than {gate.memory} GiB is free on the GPU; free some")
        measured, predicted = gate.run(gate, folder)
        # A NaN is not below its bound.
        above = [name for name, bound in predicted.items() if not measured[name] <= bound]
        if above:
            problem = f"above the prediction: {', '.join(above)}"
    except Exception as error:
        problem = exits.sentence(error)
    return {
        "problem": problem,
        "measured": measured,
        "predicted": predicted,
        "passed": not problem,
        "seconds": time.perf_counter() - started,
    }


def main(arguments: list[str]) -> int:
    """Run the gates, or update the README; return 1 if a gate fails, else 0."""
    parser = argparse.ArgumentParser("gpu_day.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu_day")
    parser.add_argument("--readme", action="store_true")
    chosen = parser.parse_args(arguments)
    file = chosen.output.expanduser().resolve() / "gpu_day.json"
    if chosen.readme:
        keep_day(file)
        return 0
    if not HAS_GPU:
        print("torch found no CUDA device; rehearsing without measurements.")
    with hold(file.parent):
        problem = walk(gates(), file)
    if problem:
        print(f"Stopped at gate {problem}")
        return 1
    print(f"All passed: {file}.")
    if HAS_GPU:
        print(f"Gate 7: read the answers in {file.parent}/full/html/05*.html, section 9.")
    return 0


if __name__ == "__main__":
    sys.exit(exits.run("gpu_day.py", main))
