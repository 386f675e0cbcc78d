"""The notebooks' runner: what it refuses, several at a time, kernels that end, the table."""

import os
import signal
import threading
import time

import nbformat
import psutil
import pytest
from bs4 import BeautifulSoup

from rlhf_course.command_line import exits
from rlhf_course.runtime.files import hold
from scripts import run_notebooks

FIRST, SECOND, THIRD = "03_ppo_step_by_step", "06_reward_hacking", "07_after_ppo"
KERNEL = {"name": "python3", "language": "python", "display_name": "Python 3"}
PASS = """
import json, os
os.makedirs(f"{output_dir}/run_cards", exist_ok=True)
card = {"wall_s": 1, "peak_rss_mb": 1, "peak_cuda_mb": 0, "checks": {"runs": {"passed": True}}}
with open(f"{output_dir}/run_cards/NAME.json", "w") as file:
    json.dump(card, file)
"""
TWO = """
import time
os.makedirs(f"{output_dir}/begun", exist_ok=True)
open(f"{output_dir}/begun/NAME-{os.environ['OMP_NUM_THREADS']}", "w").close()
while len(os.listdir(f"{output_dir}/begun")) < 2:  # another one runs at the same time
    time.sleep(0.01)
"""
SLEEP = """
import os, time
with open(f"{output_dir}/kernel-{os.getpid()}", "w"):
    time.sleep(60)
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A folder with notebooks of two small cells in place of the course's."""
    (tmp_path / "course" / "notebooks").mkdir(parents=True)
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path / "course" / "notebooks")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in (FIRST, SECOND):
        write(name, PASS)
    return tmp_path / "course"


def write(name: str, code: str, tags=("parameters",), more=()) -> None:
    parameters = nbformat.v4.new_code_cell("output_dir = ''", metadata={"tags": [*tags]})
    cells = [parameters, *map(nbformat.v4.new_code_cell, [code.replace("NAME", name), *more])]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    nbformat.write(notebook, run_notebooks.NOTEBOOKS / f"{name}.ipynb")


def run(*arguments) -> int:
    return exits.run("run_notebooks.py", run_notebooks.main, [*map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--output mine", "mine/notebooks/03_ppo_step_by_step.ipynb is not a run's result"),
        ("--output pages", "pages/html/03_ppo_step_by_step.html is not a run's result"),
        ("--output cards", "cards/run_cards/03_ppo_step_by_step.json is not a run's result"),
        ("--output site", "is not a run report"),
        ("--output file", "is a file"),
        ("--override stepps=1", "Unknown setting 'stepps'"),
        ("--override model=[a", "expected KEY=VALUE"),
        ("--seed -1", "--seed -1 must be from 0"),
        ("--jobs 0", "--jobs 0 must be at least 1"),
        ("--only 77", f"no notebook starts with 77; there are {FIRST}"),
    ],
)
def test_the_runner_refuses_before_anything_runs(arguments, message, course, monkeypatch, capsys):
    monkeypatch.chdir(course)
    names = {"mine/notebooks": "ipynb", "pages/html": "html", "cards/run_cards": "json"}
    for folder, ending in (names | {"site": "txt"}).items():
        (course / folder).mkdir(parents=True)
        (course / folder / f"{FIRST}.{ending}").write_text("my own")
    (course / "site" / "index.html").write_text("<title>My page</title>")
    (course / "file").touch()
    before = {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}
    monkeypatch.setattr(run_notebooks, "execute", lambda *given: pytest.fail("it ran"))
    try:
        code = run("--only", "03", *arguments.split())
    except SystemExit as error:
        code = error.code
    assert code in (1, 2) and message in capsys.readouterr().err.splitlines()[-1]
    assert before == {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}


def test_a_notebook_without_its_parameters_and_python_without_assert(course, monkeypatch, capsys):
    write(FIRST, PASS, tags=())
    assert run("--output", course / "out") == 1
    assert f"{FIRST}.ipynb has no cell tagged parameters" in capsys.readouterr().err
    monkeypatch.setattr(exits.sys, "flags", type("flags", (), {"optimize": 2}))
    assert run("--output", course / "out") == 1
    assert "Python runs without assert" in capsys.readouterr().err


def test_only_sources_are_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("wandb", "imdb", "scratch"):
        (tmp_path / name).mkdir()
    given = "log_with=wandb dataset=imdb reward_model=scratch model=~/imdb sft_dataset=a/b".split()
    found = run_notebooks.parse_arguments([f"--override={text}" for text in given]).overrides
    assert (found["log_with"], found["reward_model"]) == ("wandb", "scratch")
    assert found["sft_dataset"] == "a/b"
    assert found["dataset"] == found["model"] == str(tmp_path / "imdb")


def test_two_run_at_a_time_with_half_of_the_cores_each(course, monkeypatch, capsys):
    for name in (FIRST, SECOND, THIRD):
        write(name, PASS + TWO)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert run("--output", course / "out") == 0
    said = capsys.readouterr().out
    assert said.count("1/1 passed") == 3 and "[1/3] " in said and "[3/3] " in said
    assert {path.name[-2:] for path in (course / "out/begun").iterdir()} == {"-2"}
    page = (course / "out/index.html").read_text(encoding="utf-8")
    assert page.count(">all 1</span>") == 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "Memory probably ran out"),
        ("exit()\nimport time\ntime.sleep(5)", "A cell ended the notebook's process."),
        (PASS + "1 / 0", "cell 3: ZeroDivisionError: division by zero"),
        ("", "No run card was written."),
        (PASS.replace("True}", "False}"), "runs"),
        (PASS.replace('"runs": {"passed": True}', ""), "The run card has no checks."),
    ],
)
def test_what_ended_a_notebook_is_its_row(code, message, course, capsys):
    """A green card that was written before the end does not make the row green."""
    write(FIRST, code, more=["1"])
    assert run("--output", course / "out", "--jobs", "1") == 1
    said = capsys.readouterr()
    assert f"{FIRST} did not pass. " in said.err and message in said.err
    assert "Traceback" not in said.err and "1/1 passed" in said.out
    assert (course / "out/html" / f"{FIRST}.html").exists()
    soup = BeautifulSoup((course / "out/index.html").read_text(encoding="utf-8"), "html.parser")
    rows = {row.td.text: row.select("td")[1].text.strip() for row in soup.table.select("tr")[1:]}
    row = "0 of 1" if message == "runs" else "failed"
    names = [name.replace("_", " ") for name in (FIRST, SECOND)]
    assert rows == dict(zip(names, [row, "all 1"], strict=True))
    assert message[:20] in soup.section.text


def test_two_runners_share_an_output_but_no_notebook(course, capsys):
    with hold(course / "out" / "notebooks", FIRST):
        assert run("--output", course / "out", "--only", "03") == 1
        assert "Another run is writing to" in capsys.readouterr().err
        assert run("--output", course / "out", "--only", "06") == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_all_kernels_and_says_what_is_done(signum, code, course, capfd):
    write(SECOND, SLEEP)
    write(THIRD, SLEEP)
    (course / "out").mkdir()

    def stop() -> None:
        while len([*(course / "out").glob("kernel-*")]) < 2 or not done.exists():
            time.sleep(0.05)
        time.sleep(0.5)
        capfd.readouterr()  # the first kernel has ended, and ipykernel may have said something
        os.kill(os.getpid(), signum)

    done = course / "out" / "html" / f"{FIRST}.html"
    threading.Thread(target=stop).start()
    assert run("--output", course / "out", "--jobs", "3") == code
    said = capfd.readouterr()
    assert said.err.endswith("run_notebooks.py: stopped.\n") and "Traceback" not in said.err
    assert "1/1 passed" in said.out and "did not pass" not in said.err
    kernels = [int(path.name[7:]) for path in (course / "out").glob("kernel-*")]
    assert not any(psutil.pid_exists(kernel) for kernel in kernels)
    assert not list(course.rglob("*.part"))
