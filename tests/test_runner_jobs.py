"""Several notebooks at a time: processes of their own, one table, and nothing that outlives the
command.
"""

import json
import os
import signal
import threading
import time

import psutil
import pytest
import run_notebooks

from rlhf_course.runtime import command

NAMES = "00_hello_rlhf", "02_why_ppo", "03_ppo_step_by_step"
RUNNER = """
import json, os, sys, time
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name, output = given["--only"], Path(given["--output"])
(output / "started").mkdir(parents=True, exist_ok=True)
(output / "started" / name).write_text(json.dumps([os.getpid(), os.environ["OMP_NUM_THREADS"], sys.argv]))
DO
"""
PASS = """
while len({*(output / "started").iterdir()}) < 2:  # another one runs at the same time
    time.sleep(0.01)
(output / "run_cards").mkdir(exist_ok=True)
card = {"wall_s": 1, "peak_rss_mb": 1, "peak_cuda_mb": 0, "checks": {"runs": {"passed": True}}}
(output / "run_cards" / f"{name}.json").write_text(json.dumps(card))
"""
FAIL = """
if name.startswith("02"):
    print("a warning\\n02_why_ppo did not pass. cell 3: ValueError: too much", file=sys.stderr)
    sys.exit(1)
"""
SLOW_TO_END = """
import signal
signal.signal(signal.SIGTERM, lambda number, frame: (time.sleep(1), sys.exit(143)))
(output / "ready").mkdir(exist_ok=True)
(output / "ready" / name).touch()
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command, with a small program in place of what it starts per notebook; returns the exit
    code.
    """

    def started(program: str, *arguments: str) -> int:
        script = tmp_path / "run_notebooks.py"
        script.write_text(RUNNER.replace("DO", program))
        monkeypatch.setattr(run_notebooks, "__file__", str(script))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        monkeypatch.setattr(
            run_notebooks, "check", lambda chosen: None
        )  # whether the notebooks have these settings
        line = ["--output", str(tmp_path / "out"), "--only", "00", "02", "03", *arguments]
        return command.run("run_notebooks.py", run_notebooks.main, line)

    return started


def test_two_run_at_a_time_with_half_of_the_cores_each(run, tmp_path, capsys):
    assert run(PASS, "--override", "seed=1") == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("3 notebooks, 2 at a time, at preset tiny")
        and said.count("1/1 passed") == 3
    )
    assert [said.rindex(name) for name in NAMES] == sorted(said.rindex(name) for name in NAMES)
    for name in NAMES:
        _, threads, line = json.loads((tmp_path / "out" / "started" / name).read_text())
        assert (
            threads == "2" and line[line.index("--jobs") + 1] == "1" and "--override=seed=1" in line
        )
    assert "[1/3] 03_ppo_step_by_step" in said  # the longest


def test_what_one_says_is_the_reason_in_the_table(run, capsys):
    assert run(FAIL + PASS) == 1
    said = capsys.readouterr()
    assert (
        said.err == "02_why_ppo did not pass. cell 3: ValueError: too much\n"
        and said.out.count("1/1 passed") == 2
    )


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_all_of_them(run, tmp_path, signum, code, capsys):
    folder, ready = tmp_path / "out" / "started", tmp_path / "out" / "ready"

    def stop() -> None:
        while not ready.exists() or len([*ready.iterdir()]) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signum)

    threading.Thread(target=stop).start()
    assert run(SLOW_TO_END) == code
    said = capsys.readouterr()
    assert (
        said.err == "\nrun_notebooks.py: stopped.\n" and "did not pass" not in said.err + said.out
    )
    assert len([*folder.iterdir()]) == 2  # the third never began
    assert not any(psutil.pid_exists(json.loads(path.read_text())[0]) for path in folder.iterdir())


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_jobs_are_at_least_one(jobs, refuses):
    refuses(
        run_notebooks.parse_arguments, ["--jobs", jobs], "--jobs takes a whole number from 1 on"
    )
