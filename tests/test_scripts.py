"""train_ppo.py: options, stopping and resuming. benchmark_ppo.py: runs and writes."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from builders import SCRIPTS, final_state

from dev.benchmark import benchmark_ppo
from rlhf_course.command_line import exits
from rlhf_course.course.presets import ROOT
from rlhf_course.policy.save_load import check_vocabulary
from scripts import train_ppo

SHORT = ["--batch_size=16", "--mini_batch_size=8", "--steps=6"]


def test_ctrl_c_leaves_a_checkpoint_and_resuming_equals_never_having_stopped(tmp_path, capsys):
    assert train_ppo.main([*SHORT, f"--output={tmp_path / 'whole'}"]) == 0
    # nice: on busy cores the run must not end before this process reads its first step
    command = ["nice", sys.executable, train_ppo.__file__, *SHORT, "--output", tmp_path / "cut"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    seen = ""
    while not re.search(r"[1-3]/6 \[", seen):  # after the first step, before the last
        seen += (found := process.stderr.read(1))
        assert found, seen
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume continues from there" in out
    assert 1 <= final_state(tmp_path / "cut")["step"] < 6

    assert train_ppo.main([*SHORT, f"--output={tmp_path / 'cut'}"]) == 1
    assert "already exists. Resume the run, or choose" in capsys.readouterr().err
    assert train_ppo.main([*SHORT, f"--output={tmp_path / 'cut'}", "--resume"]) == 0
    assert_equal(final_state(tmp_path / "whole"), final_state(tmp_path / "cut"))
    assert (tmp_path / "cut" / "policy" / "v_head.safetensors").exists()


def assert_equal(a, b, where="state"):
    """Bit by bit: weights, optimizer, KL coefficient, moments, and every random generator."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_equal(*pair, f"{where}[{i}]")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, where


def test_the_first_ctrl_c_waits_for_the_step_and_the_second_does_not():
    with exits.watch_for_stop() as asked:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)
        assert asked.code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_scripts_never_import_tests():
    names = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"tests", "simulated_hub"}
    for path in SCRIPTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"^\s*(?:from|import) (\w+)", text, re.M)
        assert not {*found} & names and 'ROOT / "tests"' not in text, path


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("no such thing"), 1, "x.py: no such thing"),
        (KeyError("text"), 1, "x.py: KeyError: 'text' (--debug shows where.)"),
        (KeyboardInterrupt(), 130, "\nx.py: stopped."),
    ],
)
def test_a_command_ends_with_a_sentence_or_on_demand_a_traceback(error, code, words, capsys):
    def main(arguments: list[str]) -> None:
        assert arguments == ["--steps"]
        raise error

    assert exits.run("x.py", main, ["--steps"]) == code
    assert capsys.readouterr().err == words + "\n"
    if code == 1:
        with pytest.raises(type(error)):
            exits.run("x.py", main, ["--debug", "--steps"])


def test_sigterm_ends_a_command_with_its_code(capsys):
    assert exits.run("x.py", lambda given: signal.raise_signal(signal.SIGTERM), []) == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_trainer_accepts_the_benchmark_s_tokenizer_with_gpt2():
    policy, _, tokenizer, _ = benchmark_ppo.models("gpt2")
    check_vocabulary(tokenizer, policy)
    assert len(tokenizer) == 50257 and tokenizer.vocab_size == 16_000


@pytest.mark.parametrize("before", [{}, {"shape": "tiny", "variants": {"batched": 1}}])
def test_the_benchmark_adds_what_it_measures(before, tmp_path, monkeypatch):
    monkeypatch.setitem(benchmark_ppo.BATCH, "tiny", 4)
    (target := tmp_path / "ppo.json").write_text(json.dumps(before))
    benchmark_ppo.main(["--rounds=1", "--threads=1", f"--output={target}"])
    variants = json.loads(target.read_text())["variants"]
    assert variants.keys() == before.get("variants", {}).keys() | {"ours"}
    median = variants["ours"]["median"]
    phases = [median[phase] for phase in ("generate", "score", "forward", "update")]
    assert sum(phases) == pytest.approx(median["total"]) and median["step_mb"] > 100
