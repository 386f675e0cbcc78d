"""Faults around the notebooks' runner, tracking, and how a command begins and ends."""

import io
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import nbformat
import pytest
import run_notebooks
import trl_cli
from fault_page import case
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers
from test_tracking import run_one_step

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime import command, tracking
from rlhf_course.runtime.files import hold

KIND = "Commands, the notebooks' runner, tracking"
FIRST, SECOND = "03_ppo_step_by_step", "06_reward_hacking"
KERNEL = {"name": "python3", "language": "python", "display_name": "Python 3"}
PASS = """
import json, os
os.makedirs(f"{output_dir}/run_cards", exist_ok=True)
card = {"wall_s": 1, "peak_rss_mb": 1, "peak_cuda_mb": 0, "checks": {"runs": {"passed": True}}}
with open(f"{output_dir}/run_cards/NAME.json", "w") as file:
    json.dump(card, file)
"""
DIE = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
SLEEP = """
import os, time
with open(f"{output_dir}/kernel.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{output_dir}/kernel.part", f"{output_dir}/kernel")
time.sleep(60)
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A folder with notebooks of two small cells in place of the course's."""
    (tmp_path / "course" / "notebooks").mkdir(parents=True)
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path / "course" / "notebooks")
    for name in (FIRST, SECOND):
        write(name, PASS)
    return tmp_path / "course"


def write(name: str, code: str) -> None:
    parameters = nbformat.v4.new_code_cell("output_dir = ''", metadata={"tags": ["parameters"]})
    cells = [parameters, nbformat.v4.new_code_cell(code.replace("NAME", name))]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    nbformat.write(notebook, run_notebooks.NOTEBOOKS / f"{name}.ipynb")


def run(*arguments) -> int:
    return command.run(
        "run_notebooks.py", run_notebooks.main, ["--jobs", "1", *map(str, arguments)]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        case(["--output", "."], "is not the result", done="run_notebooks.py --output ."),
        case(
            ["--output", "mine"],
            "is not the result",
            done="run_notebooks.py --output FOLDER, with a notebook of yours in it",
        ),
        case(["--output", "file"], "is a file", done="run_notebooks.py --output FILE"),
        case(
            ["--override", "stepps=1"],
            "Unknown setting 'stepps'",
            done="a mistyped setting in --override of run_notebooks.py",
        ),
        case(
            ["--override", "model=[a"],
            "takes KEY=VALUE",
            done="run_notebooks.py --override 'model=[a'",
        ),
    ],
)
def test_the_runner_refuses_before_anything_runs(
    arguments, message, course, monkeypatch, capsys, outcome
):
    monkeypatch.chdir(course)
    (course / "mine" / "notebooks").mkdir(parents=True)
    (course / "mine" / "notebooks" / f"{FIRST}.ipynb").write_text("my own")
    (course / "file").touch()
    before = {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}
    monkeypatch.setattr(run_notebooks, "execute", lambda *given: pytest.fail("it ran"))
    try:
        code = run("--only", "03", *arguments)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr().err.splitlines()[-1]
    assert code in (1, 2) and message in said
    assert before == {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}
    outcome(said.split("; it has ")[0])


@pytest.mark.fault("run_notebooks.py --override log_with=wandb beside a folder wandb/")
def test_only_sources_are_folders(tmp_path, monkeypatch, outcome):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("wandb", "imdb", "scratch"):
        (tmp_path / name).mkdir()
    given = [
        "log_with=wandb",
        "dataset=imdb",
        "reward_model=scratch",
        "model=~/imdb",
        "sft_dataset=owner/name",
    ]
    found = run_notebooks.parse_arguments([f"--override={text}" for text in given]).overrides
    assert (
        found["log_with"] == "wandb"
        and found["reward_model"] == "scratch"
        and found["sft_dataset"] == "owner/name"
    )
    assert found["dataset"] == found["model"] == str(tmp_path / "imdb")
    outcome(
        "wandb stays a word: only dataset, model, reward_model, sft_dataset and checkpoint name"
        " folders."
    )


@pytest.mark.fault("a notebook's process is killed, as where memory runs out")
def test_a_killed_kernel_is_a_row_of_the_table(course, capsys, outcome):
    write(FIRST, DIE)
    assert run("--output", course / "out") == 1
    said = capsys.readouterr()
    assert "1/1 passed" in said.out and (course / "out" / "run_cards" / f"{SECOND}.json").exists()
    executed = nbformat.read(course / "out" / "notebooks" / f"{FIRST}.ipynb", as_version=4)
    assert executed.cells[0].execution_count and "Traceback" not in said.err
    assert ".part" not in str(executed.metadata)
    page = (course / "out" / "index.html").read_text(encoding="utf-8")
    assert "It wrote no run card" in page and f"html/{FIRST}.html" in page and "all 1" in page
    assert f"[1/2] {FIRST} · " in said.out and said.out.endswith(
        f"Open next: {course / 'out' / 'index.html'}\n"
    )
    outcome(f"{said.err.splitlines()[-1]} The other notebooks run; exit code 1.")


@pytest.mark.fault("two run_notebooks.py with one --output")
def test_two_runners_share_an_output_but_no_notebook(course, capsys, outcome):
    with hold(course / "out" / "notebooks", FIRST):
        assert run("--output", course / "out", "--only", "03") == 1
        said = capsys.readouterr().err
        assert "Another run is writing to" in said
        assert run("--output", course / "out", "--only", "06") == 0
    outcome(f"With different notebooks both run. With the same one: {said}")


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        case(signal.SIGINT, 130, done="Ctrl-C in run_notebooks.py"),
        case(signal.SIGTERM, 143, done="SIGTERM to run_notebooks.py"),
    ],
)
def test_a_stopped_runner_ends_its_kernel_and_says_what_is_done(
    signum, code, course, capfd, outcome
):
    write(SECOND, SLEEP)
    marker, chosen = course / "out" / "kernel", [] if signum == signal.SIGINT else ["--only", "06"]

    def stop() -> None:
        while not marker.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signum)

    (course / "out").mkdir()
    threading.Thread(target=stop).start()
    assert run("--output", course / "out", *chosen) == code
    said = capfd.readouterr()
    assert said.err.endswith("run_notebooks.py: stopped.\n") and "Traceback" not in said.err
    assert ("1/1 passed" in said.out) == (not chosen) and "are in" in said.out
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
    assert (
        not list(course.rglob("*.part"))
        and not (course / "out" / "notebooks" / f"{SECOND}.ipynb").exists()
    )
    outcome(
        "Its kernel ends too, the table shows what is done, nothing half-written stays; exit code"
        f" {code}."
    )


@pytest.mark.fault("the disk is full while a notebook runs")
def test_a_full_disk_is_said_in_the_table(course, capsys, outcome):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))  # the kernel's own files are smaller
    try:
        assert run("--output", course / "out", "--only", "03") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err.splitlines()[-1]
    assert "did not pass" in said and "The disk took no more" in said
    assert not list(course.rglob("*.part")) and not list((course / "out").rglob("*.ipynb"))
    outcome(f"{said.split(' (')[0]} … {said.split('left). ')[1]}")


@pytest.mark.fault("a check fails, and then its page cannot be written")
def test_a_failed_check_and_a_page_that_fails_are_both_said(course, monkeypatch, capsys, outcome):
    def page(notebook, folder):
        raise OSError("No space left on device")

    write(FIRST, PASS + "raise AssertionError('nothing was learnt')")
    monkeypatch.setattr(run_notebooks, "page", page)
    assert run("--output", course / "out", "--only", "03") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "nothing was learnt" in said and "No space left on device" in said
    outcome(said)


@pytest.mark.parametrize(
    ("line", "module"),
    [
        case(
            ["scripts/run_notebooks.py"],
            "papermill",
            done="Ctrl-C in the first second of run_notebooks.py",
        ),
        case(
            ["-m", "rlhf_course.worlds.build"],
            "torch",
            done="Ctrl-C in the first second of python -m rlhf_course.worlds.build",
        ),
    ],
)
def test_ctrl_c_while_libraries_load(line, module, tmp_path, outcome):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RLHF_COURSE_CACHE": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *line], cwd=ROOT, env=environment, **pipes
    )
    try:
        next(said for said in process.stderr if f"{module}." in said)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()  # or a failure here would leave the whole course running
    assert process.returncode == -signal.SIGINT and not out and "Traceback" not in err
    outcome("It ends at once, without a traceback; the shell's exit code is 130.")


@pytest.mark.fault("a terminal that knows ASCII alone")
def test_an_ascii_terminal_shows_question_marks(monkeypatch, outcome):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert command.run("x.py", lambda arguments: print("score 0.10 → 0.90 ± 0.02"), []) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == b"score 0.10 ? 0.90 ? 0.02\n"
    outcome("→ and ± are shown as ?, and nothing is lost.")


@pytest.mark.fault("an error that nobody foresaw, in any command")
def test_an_unforeseen_error_has_its_name_and_a_traceback_on_demand(capsys, outcome):
    def main(arguments: list[str]) -> None:
        assert arguments == ["--steps"]
        raise KeyError("text")

    assert command.run("x.py", main, ["--steps"]) == 1
    with pytest.raises(KeyError):
        command.run("x.py", main, ["--debug", "--steps"])
    outcome(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("key", "begin"),
    [
        case("k" * 40, "ppo", done="wandb with an API key and no network, in PPO"),
        case("k" * 40, "trl", done="wandb with an API key and no network, in SFT"),
        case("", "trl", done="wandb without an API key"),
    ],
)
def test_wandb_goes_on_offline(key, begin, tmp_path, monkeypatch, capsys, outcome):
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for name, value in (
            ("BASE_URL", server),
            ("API_KEY", key),
            ("SILENT", "true"),
            ("MODE", ""),
        ):
            monkeypatch.setenv(f"WANDB_{name}", value)
        monkeypatch.delenv("WANDB_MODE")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        started = time.perf_counter()
        if begin == "ppo":
            tracking.finish(run_one_step("wandb")[0].accelerator)
            assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        else:
            config = {
                "deepspeed_plugin": None,
                "output_dir": str(tmp_path / "out"),
                "resume_from_checkpoint": None,
            }
            trl_cli.begin(SimpleNamespace(**config, report_to=["wandb"]))
        assert time.perf_counter() - started < 30 and os.environ["WANDB_MODE"] == "offline"
    said = next(line for line in capsys.readouterr().out.splitlines() if "wandb sync" in line)
    outcome(said.replace(server, "https://api.wandb.ai"))


@pytest.mark.fault("HF_ENDPOINT names a mirror, and HF_TOKEN is set")
def test_a_token_stays_here_where_that_is_asked_for(monkeypatch, outcome):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" in str(build_hf_headers())
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert "hf_secret" not in str(build_hf_headers())
    assert "HF_HUB_DISABLE_IMPLICIT_TOKEN=1 HF_ENDPOINT=" in (ROOT / "site/running.md").read_text(
        encoding="utf-8"
    )
    outcome(
        "The mirror gets the token, unless HF_HUB_DISABLE_IMPLICIT_TOKEN=1, as on the page about"
        " running."
    )
