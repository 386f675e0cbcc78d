"""The protocol for a real GPU: it resumes, it stops, and the README is made from its JSON."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_course.command_line.notebook_files import ROOT, keep_day
from rlhf_course.course.presets import load_preset
from scripts import gpu_day
from scripts.gpu_day import Gate, walk

IMDB = "04_gpt2_imdb_ppo"
KILLED = """
import os, signal, sys
from pathlib import Path
from scripts.gpu_day import Gate, walk
def passes(gate, folder):
    return {"seconds": 1}, {"seconds": 2}
def dies(gate, folder):
    os.kill(os.getpid(), signal.SIGKILL)
walk([Gate("1 a", passes), Gate("2 b", dies)], Path(sys.argv[1]))
"""


def test_a_killed_day_continues_at_its_gate(tmp_path, capsys):
    file, ran = tmp_path / "gpu_day.json", []
    done = subprocess.run([sys.executable, "-c", KILLED, file])
    assert done.returncode == -signal.SIGKILL
    assert list(json.loads(file.read_text())["gates"]) == ["1 a"]

    def gate(name: str) -> Gate:
        return Gate(name, lambda gate, folder: ran.append(name) or ({}, {}), minutes=7, download=3)

    assert walk([gate("1 a"), gate("2 b"), gate("3 c")], file) == "" and ran == ["2 b", "3 c"]
    assert "2 b: at most 7 min, 3 GB to download" in capsys.readouterr().out
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"environment": {"device": "another"}}))
    with pytest.raises(ValueError, match="Choose another --output"):
        walk([gate("1 a")], file)


@pytest.mark.parametrize("measured", [2.5, float("nan"), None])
def test_a_day_stops_at_the_first_gate_that_fails(measured, tmp_path):
    file = tmp_path / "gpu_day.json"

    def fails(gate, folder):
        if measured is None:
            gpu_day.call(gate, tmp_path, "-c", "raise SystemExit('no such card')")
        return {"seconds": measured}, {"seconds": 2}

    gates = [Gate("1 a", fails), Gate("2 b", lambda *_: pytest.fail("it went on"))]
    problem = walk(gates, file)
    assert problem.startswith("1 a: ") and ("no such card" if measured is None else "more than")
    gate = json.loads(file.read_text())["gates"]["1 a"]
    assert not gate["passed"] and gate["problem"] in problem


def test_the_readme_s_column_comes_from_the_json(tmp_path):
    names, page = (IMDB, "05_lora_rlhf_baichuan"), ROOT / "README.md"
    for name in names:
        shutil.copy(ROOT / f"figs/measured/{name}.json", tmp_path)
    readme, day = Path(shutil.copy(page, tmp_path)), tmp_path / "day.json"
    measured = {"wall_s": 2000.0, "peak_cuda_mb": 9216.0, "peak_rss_mb": 1.0}
    gates = {f"6 {n} at full": {"passed": n == names[0], "measured": measured} for n in names}
    day.write_text(json.dumps({"environment": {"device": "CPU"}, "gates": gates}))
    with pytest.raises(ValueError, match="rehearsal"):
        keep_day(day, readme, tmp_path)
    assert readme.read_bytes() == page.read_bytes()
    day.write_text(json.dumps({"environment": {"device": "Card X"}, "gates": gates}))
    keep_day(day, readme, tmp_path)
    text = readme.read_text(encoding="utf-8")
    assert text.count("/ 2000 s, 9.0 GB |") == 1 and "/ `full` on one GPU |" in text
    assert "on one Card X" in text and "after the slash are from there" in text
    about = (ROOT / "docs/on-a-gpu.md").read_text(encoding="utf-8")
    seconds, gib = gpu_day.PUBLISHED.values()
    assert f"{seconds} s and {gib * 1024:,.0f} MiB" in about and f"{gpu_day.SLACK} times" in about


def test_the_page_quotes_the_measured_day():
    about = (ROOT / "docs/on-a-gpu.md").read_text(encoding="utf-8")
    day = json.loads((ROOT / "figs/measured/gpu_day.json").read_text(encoding="utf-8"))
    gates, device = day["gates"], day["environment"]["device"]
    tiny = [gate["measured"]["wall_s"] for name, gate in gates.items() if name[0] == "3"]
    *_, gpt2, lora = (gate["measured"] for gate in gates.values())
    expected = [f"one {device}", f"{min(tiny):.0f} to {max(tiny):.0f} s", f"{len(tiny)} notebooks"]
    expected += [f"{gpt2['seconds_per_step']:.2f} s, {gpt2['peak_gib']:.1f} GiB"]
    expected += [f"{lora['layers']} layers, {lora['seconds']:.1f} s, {lora['peak_gib']:.1f} GiB"]
    expected += [f"computed {lora['computed_gib']:.1f} GiB"]
    for precision, runs in day["gpt2"].items():
        seconds = " | ".join(f"{run['generate']:.2f} / {run['total']:.2f}" for run in runs.values())
        expected.append(f"| {precision} | {seconds} |")
    assert not [text for text in expected if text not in about]
    assert all(gate["passed"] for gate in gates.values())
    day = json.loads((ROOT / "figs/measured/gpu_day_h100.json").read_text(encoding="utf-8"))
    assert all(gate["passed"] for gate in day["gates"].values())
    *_, gpt2, lora = (gate["measured"] for gate in day["gates"].values())
    text = " ".join(about.split())
    assert f"one {day['environment']['device']}" in text
    assert f"took {gpt2['seconds_per_step']:.2f} s and {gpt2['peak_gib']:.1f} GiB" in text
    step = f"{lora['seconds']:.1f} s and {lora['peak_gib']:.1f} GiB for {lora['layers']} layers"
    assert step in text


def test_full_picks_a_precision_that_the_gpu_has(monkeypatch):
    def chosen(**overrides) -> list:
        reward, imdb = (load_preset(name, "full") for name in ("01_reward_modeling", IMDB))
        chat = load_preset("05_lora_rlhf_baichuan", "full", overrides)
        return [reward.bf16, imdb.mixed_precision, chat.mixed_precision, chat.dtype]

    assert chosen() == [True, "bf16", "bf16", "bfloat16"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    # A T4 emulates bf16, and says that it supports it.
    supported = lambda including_emulation=True: including_emulation  # noqa: E731
    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported)
    assert chosen() == [False, "fp16", "fp16", "float16"]
    assert chosen(mixed_precision="bf16")[2] == "bf16"
    assert load_preset(IMDB, "tiny").mixed_precision == "no"
