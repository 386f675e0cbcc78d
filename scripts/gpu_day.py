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
from rlhf_course.course.presets import has_bf16
from rlhf_course.runtime.files import atomic_file, hold, read_json

CARD, GIB = torch.cuda.is_available(), 2**30
# An older tutorial trained GPT-2 small on an A800: 194 steps took 35 min 19 s.
PUBLISHED = {"seconds_per_step": 10.92, "peak_gib": 10_097 / 1024}
SLACK = 1.3  # allowed ratio of measured to computed memory, as in tests/test_memory.py
SHORT = {"00": {"steps": 2, "batch_size": 8, "eval_queries": 16}}  # settings of a rehearsal
SHORT["03"] = {"toy_steps": 2, "toy_betas": [0.5], "toy_batch": 32}
# Preset full: minutes, GB to download, GiB on the card; guesses, except notebook 04's memory.
FULL = {"04": (120, 1, 10), "01": (240, 1, 40), "05": (900, 16, 40)}


class Gate(NamedTuple):
    """Hold a step of the protocol and its budget."""

    name: str
    run: Callable  # gate, output folder → measurements, and predicted upper bounds
    minutes: float = 30  # a gate that takes longer is killed
    download: float = 0  # GB
    memory: float = 0  # GiB that must be free


def gates() -> list[Gate]:
    """Return the gates; without a GPU, only the rehearsal's gates."""
    names = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
    found = [Gate("1 environment", environment), Gate("2 tests", tests)]
    tiny = [name for name in names if CARD or name[:2] in SHORT]
    found += [Gate(f"3 {name} at tiny", partial(notebook, name, "tiny")) for name in tiny]
    found += [Gate("4 GPT-2 small", gpt2), Gate("5 LoRA on the shape of a 7B", lora)]
    full = {name: FULL.get(name[:2], (60, 1, 10)) for name in names if CARD}
    for name in sorted(full, key=full.get):
        found.append(Gate(f"6 {name} at full", partial(notebook, name, "full"), *full[name]))
    return found


def call(gate: Gate, folder: Path, *command) -> str:
    """Run a command in this Python; return its output, or raise an error with its last lines."""
    offline = {} if gate.download else {"HF_HUB_OFFLINE": "1"}
    with open(log := folder / "gate.log", "w") as file:
        how = {"cwd": ROOT, "stdout": file, "stderr": file, "timeout": 60 * gate.minutes}
        command = [sys.executable, *map(str, command)]
        code = subprocess.run(command, env=os.environ | offline, **how).returncode
    text = log.read_text("utf-8", "replace")
    if code:
        raise RuntimeError(" / ".join([*text.splitlines()[-3:], f"read {log}"]))
    return text


def environment(*_) -> tuple[dict, dict]:
    """Return the versions and the device, which must not change between gates."""
    found = {name: version(name) for name in ("torch", "transformers", "trl", "papermill")}
    found["device"] = torch.cuda.get_device_name() if CARD else "CPU"
    return found | {"bf16": has_bf16()}, {}


def tests(gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Run the tests that need a GPU; a rehearsal only collects them."""
    options = "-m pytest -q -p no:cacheprovider -o python_files=check_*.py tests/on_gpu".split()
    text = call(gate, folder, *options, *["--co"] * (not CARD))
    return {"summary": text.splitlines()[-1]}, {}


def notebook(name: str, preset: str, gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Run a notebook; raise an error if a check fails, but not in a two-step rehearsal."""
    card, short = folder / preset / f"run_cards/{name}.json", {} if CARD else SHORT[name[:2]]
    command = ["scripts/run_notebooks.py", "--only", name, "--preset", preset, "--jobs=1"]
    command += [f"--override={key}={value}" for key, value in short.items()]
    command += [f"--output={folder / preset}"]
    try:
        call(gate, folder, *command)
    except RuntimeError:
        if not short or not card.exists():
            raise
    measured = {key: read_json(card)[key] for key in ("wall_s", "peak_cuda_mb", "peak_rss_mb")}
    return measured, {"peak_cuda_mb": 1024 * gate.memory} if gate.memory else {}


def gpt2(gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Take PPO steps with random weights and the published run's batch size and lengths."""
    options = ["--shape=gpt2"] if CARD else ["--shape=tiny", "--rounds=1", "--threads=1"]
    options += ["--bf16"] * (CARD and has_bf16()) + [f"--output={folder / 'gpt2.json'}"]
    call(gate, folder, "dev/benchmark/benchmark_ppo.py", *options)
    median = read_json(folder / "gpt2.json")["variants"]["ours"]["median"]
    peak = max(value for name, value in median.items() if name.endswith("_mb")) * 1e6 / GIB
    return {"seconds_per_step": median["total"], "peak_gib": peak}, PUBLISHED if CARD else {}


def lora(gate: Gate, folder: Path) -> tuple[dict, dict]:
    """Take a PPO step on as many layers of a 7B model as fit; predict the peak memory."""
    text = call(gate, folder, "dev/memory_table.py", "--measure")
    measured = json.loads(text.splitlines()[-1])
    return measured, {"peak_gib": SLACK * measured["computed_gib"]}


def walk(gates: list[Gate], file: Path) -> str:
    """Run the gates that have not passed; return the first failing gate's problem, or ""."""
    day = read_card(file) or {"environment": environment()[0], "gates": {}}
    if day["environment"] != environment()[0]:
        raise ValueError(f"{file} comes from {day['environment']}. Choose another --output.")
    for gate in gates:
        if day["gates"].get(gate.name, {}).get("passed"):
            continue
        budget = f"at most {gate.minutes} min, {gate.download} GB to download"
        print(f"{gate.name}: {budget}", flush=True)
        measured, predicted, problem, started = {}, {}, "", time.perf_counter()
        try:
            if CARD and torch.cuda.mem_get_info()[0] / GIB < gate.memory:
                raise MemoryError(f"less than {gate.memory} GiB is free on the GPU; free some")
            measured, predicted = gate.run(gate, file.parent)
            over = ", ".join(name for name in predicted if not measured[name] <= predicted[name])
            problem = over and f"above the prediction: {over}"
        except Exception as error:
            problem = exits.sentence(error)
        result = {"problem": problem, "measured": measured, "predicted": predicted}
        seconds = time.perf_counter() - started
        day["gates"][gate.name] = result | {"passed": not problem, "seconds": seconds}
        with atomic_file(file) as path:
            path.write_text(json.dumps(day, indent=1) + "\n", encoding="utf-8")
        print(f"  measured {measured}; predicted at most {predicted or '–'}")
        if problem:
            return f"{gate.name}: {problem}"
    return ""


def main(arguments: list[str]) -> int:
    """Run the gates, or update the README; return 1 if a gate fails, else 0."""
    parser = argparse.ArgumentParser("gpu_day.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu_day")
    parser.add_argument("--readme", action="store_true")
    chosen = parser.parse_args(arguments)
    file = chosen.output.expanduser().resolve() / "gpu_day.json"
    if chosen.readme:
        return keep_day(file)
    print("" if CARD else "torch found no CUDA device; rehearsing without measurements.")
    with hold(file.parent):
        problem = walk(gates(), file)
    read = f"Gate 7: read the answers in {file.parent}/full/html/05*.html, section 9." * CARD
    print(f"Stopped at gate {problem}" if problem else f"All passed: {file}. {read}")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(exits.run("gpu_day.py", main))
