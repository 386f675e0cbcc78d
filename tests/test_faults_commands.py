"""Faults around commands and machines: files of options, odd paths and leftovers, the environment,
signals, pipes.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import benchmark_ppo
import datasets
import memory_table
import pytest
import run_notebooks
import torch
import train_ppo
from huggingface_hub import constants
from test_faults_runner import FIRST, PASS, course, write  # noqa: F401
from test_faults_runner import run as run_runner
from test_figs import draw
from test_slides import build as slides
from test_tracking import run_one_step
from training_runs import arguments, resume, run, weights

from rlhf_course.course.presets import ROOT
from rlhf_course.data.files import load_split
from rlhf_course.runtime import command, hub

KIND = "More: commands and machines"
pytestmark = pytest.mark.usefixtures("signals")
fault = pytest.mark.fault


def ended(code: int, text: str, word: str) -> str:
    """The sentence of a command that ended well: it holds a word, and not an error's number or name
    alone.
    """
    assert code in (1, 2) and re.search(word, text), text
    assert not re.search(r"Traceback|\[Errno|--debug shows", text), text
    return text


def attempt(action, capsys) -> tuple[int, str]:
    """An exit code, and what was said in the end."""
    try:
        code = action()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            return 1, code
    return code or 0, (capsys.readouterr().err.strip().splitlines() or [""])[-1]


def copy(kind: str, whole, out, again: bool = True):
    """A finished run's output, without its result."""
    shutil.copytree(whole / kind, out)
    if again:
        shutil.rmtree(out / ("policy" if kind == "PPO" else "model"))
    return out


# --- files of options
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "word"),
    [
        pytest.param(
            "steps: 3\n".encode("utf-16"),
            r"my\.yaml",
            marks=fault("a file of options that an editor saved as UTF-16"),
        ),
        pytest.param(
            b"steps: 2\nbatch_size: 64\nsteps: 3\n",
            "steps",
            marks=fault("the same option twice in a file of options"),
        ),
    ],
)
def test_a_file_of_options_that_cannot_be_meant(content, word, tmp_path, capsys, outcome):
    (tmp_path / "my.yaml").write_bytes(content)
    code, text = attempt(
        lambda: train_ppo.main([f"--config={tmp_path}/my.yaml", "--save_every=x"]), capsys
    )
    assert "save_every" not in text  # what comes after
    outcome(ended(code, text, word))


@fault("`log_with: none` in a file of options for `train_ppo.py`")
def test_no_tracker_by_name(world, tmp_path, said, outcome):
    (tmp_path / "my.yaml").write_text("log_with: none\n")
    assert run("PPO", world, tmp_path / "out", f"--config={tmp_path}/my.yaml", steps=1) == 0, said()
    outcome("Nothing is tracked.")


@fault("`output: ~/runs/a` in a file of options for `train_ppo.py`")
def test_a_home_in_a_file_of_options(world, tmp_path, monkeypatch, capsys, outcome):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "my.yaml").write_text("output: ~/runs/a\n")
    monkeypatch.chdir(tmp_path)
    given = [
        text
        for text in arguments(world, "x", "--config=my.yaml", steps=1)
        if not text.startswith("--output")
    ]
    code, text = attempt(lambda: train_ppo.main(given), capsys)
    assert not (tmp_path / "~").exists()
    if code:
        return outcome(ended(code, text, "~"))
    assert (tmp_path / "home/runs/a/policy").is_dir()
    outcome("The run goes to the home folder.")


# --- paths and leftovers
# ----------------------------------------------------------------------------------------------


@fault("PPO: --output 'Läufe [1] 测试 #2', then --resume")
def test_an_output_with_odd_letters(world, whole, tmp_path, outcome):
    out = tmp_path / "Läufe [1] 测试 #2"
    assert run("PPO", world, out, steps=2) == 0
    assert resume("PPO", world, out) == 0 and weights("PPO", out) == weights("PPO", whole / "PPO")
    outcome("The run goes on there, and ends with the weights of one that never stopped.")


@fault("PPO: --output with a name of 300 letters")
def test_an_output_with_a_long_name(world, tmp_path, capsys, outcome):
    code, text = attempt(lambda: run("PPO", world, tmp_path / ("a" * 300)), capsys)
    outcome(ended(code, text, "long").replace("a" * 300, "aaa…"))


@fault("PPO: the output was renamed, then --resume")
def test_a_renamed_output(world, whole, tmp_path, outcome):
    out = copy("PPO", whole, tmp_path / "renamed")
    assert resume("PPO", world, out) == 0 and weights("PPO", out) == weights("PPO", whole / "PPO")
    outcome("The run goes on.")


@fault("PPO: a file of yours called checkpoint-9 in the output, then --resume")
def test_a_file_called_like_a_checkpoint(world, whole, tmp_path, said, outcome):
    out = copy("PPO", whole, tmp_path / "out")
    (out / "checkpoint-9").write_text("mine")
    assert resume("PPO", world, out, steps=4) == 0, said()
    assert (out / "checkpoint-9").read_text() == "mine"
    outcome("The run goes on, and the file stays.")


@fault("SFT: the newest checkpoint is a link whose target is gone, then --resume")
def test_a_checkpoint_that_links_to_nothing(world, whole, tmp_path, said, outcome):
    out = copy("SFT", whole, tmp_path / "out")
    shutil.rmtree(out / "checkpoints/checkpoint-4")
    (out / "checkpoints/checkpoint-4").symlink_to(tmp_path / "gone")
    assert resume("SFT", world, out) == 0, said()
    assert weights("SFT", out) == weights("SFT", whole / "SFT")
    outcome("The run goes on from the checkpoint before it.")


@fault("PPO: a checkpoint copied to another output alone, then --resume --learning_rate 0.5")
def test_a_checkpoint_without_its_settings(world, whole, tmp_path, capsys, outcome):
    shutil.copytree(whole / "PPO/checkpoint-3", tmp_path / "out/checkpoint-3")
    code, text = attempt(
        lambda: resume("PPO", world, tmp_path / "out", "--learning_rate=0.5", steps=4), capsys
    )
    outcome(ended(code, text, "learning_rate|settings"))


@fault("PPO into the output of an SFT run, which is then resumed with another learning rate")
def test_two_kinds_of_run_in_one_output(world, whole, tmp_path, capsys, outcome):
    out = copy("SFT", whole, tmp_path / "out")
    code, text = attempt(lambda: run("PPO", world, out, steps=1), capsys)
    if code:
        return outcome(ended(code, text, "Name another output"))
    code, text = attempt(lambda: resume("SFT", world, out, "--learning_rate=0.5"), capsys)
    outcome(ended(code, text, r"learning_rate is 0\.5 now, and 0\.005 "))


@fault("PPO: --log_with tensorboard, and OUTPUT/tensorboard is a file")
def test_a_file_where_events_go(world, tmp_path, capsys, outcome):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tensorboard").write_text("mine")
    code, text = attempt(
        lambda: run("PPO", world, tmp_path / "out", "--log_with=tensorboard", steps=1), capsys
    )
    outcome(ended(code, text, "tensorboard"))


# --- the environment
# --------------------------------------------------------------------------------------------------


@fault("WANDB_MODE=ofline")
def test_a_mistyped_mode_of_wandb(tmp_path, monkeypatch, outcome):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match="WANDB_MODE") as raised:
        run_one_step("wandb")
    outcome(command.sentence(raised.value))


@fault("WORLD_SIZE= with nothing behind it")
def test_an_empty_world_size(world, tmp_path, monkeypatch, said, outcome):
    monkeypatch.setenv("WORLD_SIZE", "")
    assert run("PPO", world, tmp_path / "out", steps=1) == 0, said()
    outcome("It is one process.")


@fault("the folder where datasets keeps its cache cannot be made (HF_HOME below a file)")
def test_no_place_for_the_cache_of_datasets(world, tmp_path, monkeypatch, outcome):
    (tmp_path / "home").write_text("mine")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home/datasets")
    with pytest.raises((ValueError, OSError), match=f"{tmp_path}/home") as raised:
        load_split(world / "pairs", "train")
    outcome(
        ended(1, command.sentence(raised.value), "HF_HOME|HF_DATASETS_CACHE|cache|another place")
    )


@fault("HF_ENDPOINT=hf-mirror.com, without https://")
def test_an_endpoint_without_a_scheme(tmp_path, monkeypatch, outcome):
    monkeypatch.setattr(constants, "ENDPOINT", "hf-mirror.com")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises((ValueError, OSError), match="https?://|HF_ENDPOINT") as raised:
        hub.download("owner/name")
    assert "cannot be reached" not in str(raised.value) or "https://" in str(raised.value)
    outcome(command.sentence(raised.value))


@fault("run_notebooks.py typed in a folder that was removed")
def test_a_working_folder_that_was_removed(course, monkeypatch, capsys, outcome):  # noqa: F811
    monkeypatch.setattr(run_notebooks, "execute", lambda *given: pytest.fail("it ran"))
    (course / "gone").mkdir()
    monkeypatch.chdir(course / "gone")
    (course / "gone").rmdir()
    code, text = attempt(lambda: run_runner("--only", "03"), capsys)
    outcome(ended(code, text, "folder|directory"))


# --- pipes and signals
# ------------------------------------------------------------------------------------------------


@fault("a command's output is piped into head -1")
def test_a_pipe_that_is_closed(outcome):
    code = "import sys; from rlhf_course.runtime import command\n"
    code += (
        "sys.exit(command.run('x.py', lambda given: [print('row', i) for i in range(99999)] and 0,"
        " []))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
    assert process.stdout.readline() == "row 0\n"
    process.stdout.close()
    text, code = process.stderr.read(), process.wait(20)
    process.stderr.close()
    assert code != 120 and not re.search(r"Traceback|Exception ignored|\[Errno", text), text
    outcome("It ends without a word.")


@fault("PPO: the connection to the machine is lost (SIGHUP) in a step")
def test_a_lost_connection(world, whole, tmp_path, at_step, said, outcome):
    def lose() -> None:
        assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL, (
            "SIGHUP kills it, without a checkpoint"
        )
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        at_step("PPO", 1, lose)
        code = run("PPO", world, tmp_path / "out", "--save_every=50")
        assert code in (0, 129), said()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0 or resume("PPO", world, tmp_path / "out", "--save_every=50") == 0
    assert weights("PPO", tmp_path / "out") == weights("PPO", whole / "PPO")
    outcome("A checkpoint is there, and --resume goes on from it.")


@fault("PPO: Ctrl-C twice while a checkpoint is written")
def test_ctrl_c_twice_in_a_save(world, whole, tmp_path, monkeypatch, outcome):
    save, times = torch.save, []

    def stopped(*given, **options):
        times.append(1)
        if len(times) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return save(*given, **options)

    monkeypatch.setattr(torch, "save", stopped)
    assert run("PPO", world, tmp_path / "out") == 130
    assert [path.name for path in tmp_path.rglob("checkpoint-*")] == ["checkpoint-1"]
    assert not [*tmp_path.rglob("*.part")] and not [*tmp_path.rglob(".lock")]
    assert resume("PPO", world, tmp_path / "out") == 0
    assert weights("PPO", tmp_path / "out") == weights("PPO", whole / "PPO")
    outcome("The one before it is whole, nothing half-written stays, and --resume goes on.")


@fault("PPO: the output folder is removed while it trains")
def test_an_output_that_vanishes(world, whole, tmp_path, at_step, capsys, outcome):
    at_step("PPO", 2, lambda: shutil.rmtree(tmp_path / "out"))
    code, text = attempt(lambda: run("PPO", world, tmp_path / "out"), capsys)
    if code:
        return outcome(ended(code, text, "removed|gone|no longer"))
    assert weights("PPO", tmp_path / "out") == weights("PPO", whole / "PPO")
    outcome("The policy is saved there all the same.")


# --- the notebooks' runner
# --------------------------------------------------------------------------------------------


@fault("Jupyter's kernel python3 belongs to an environment that was removed")
def test_a_kernel_that_is_gone(course, tmp_path, monkeypatch, capsys, outcome):  # noqa: F811
    folder = tmp_path / "jupyter/kernels/python3"
    folder.mkdir(parents=True)
    start = [
        str(tmp_path / "old/bin/python"),
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
    ]
    kernel = {"argv": start, "display_name": "Python 3", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    code, text = attempt(lambda: run_runner("--output", course / "out", "--only", "03"), capsys)
    outcome(
        ended(code, text, "kernel")
        if code
        else "The notebooks run in the environment of the command."
    )


@fault("a copy of a notebook beside it, as Jupyter's Duplicate makes (02…-Copy1.ipynb)")
def test_a_copy_of_a_notebook(course, capsys, outcome):  # noqa: F811
    write(f"{FIRST}-Copy1", PASS)
    code, text = attempt(lambda: run_runner("--output", course / "out", "--only", "03"), capsys)
    outcome(
        ended(code, text, r"Copy1\.ipynb") if code else "The copy is left alone; the notebooks run."
    )


@fault("run_notebooks.py --seed -1")
def test_a_negative_seed_of_the_runner(course, monkeypatch, capsys, outcome):  # noqa: F811
    monkeypatch.setattr(run_notebooks, "execute", lambda *given: pytest.fail("it ran"))
    code, text = attempt(
        lambda: run_runner("--only", "03", "--output", course / "out", "--seed", "-1"), capsys
    )
    outcome(ended(code, text, "seed"))


# --- the other commands
# -----------------------------------------------------------------------------------------------


@fault("memory_table.py --mini_batch 4")
def test_memory_with_an_option(capsys, outcome):
    code, text = attempt(
        lambda: command.run("memory_table.py", memory_table.main, ["--mini_batch", "4"]), capsys
    )
    outcome(ended(code, text, "--mini_batch"))


@fault("benchmark_ppo.py --output FOLDER")
def test_a_benchmark_into_a_folder(tmp_path, monkeypatch, capsys, outcome):
    monkeypatch.setattr(
        benchmark_ppo, "write_plan", lambda *given: pytest.fail("it measures, and cannot write")
    )
    code, text = attempt(
        lambda: command.run("benchmark_ppo.py", benchmark_ppo.main, [f"--output={tmp_path}"]),
        capsys,
    )
    outcome(ended(code, text, "folder|file"))


@fault("benchmark_ppo.py --output result.png")
def test_a_benchmark_into_a_picture(tmp_path, monkeypatch, capsys, outcome):
    from matplotlib.figure import Figure

    monkeypatch.setattr(benchmark_ppo, "write_plan", lambda *given: None)
    monkeypatch.setattr(
        benchmark_ppo, "measure", lambda *given: {"ours": {"title": "ours", "median": {}}}
    )
    monkeypatch.setattr(benchmark_ppo, "summarise", lambda found: None)
    monkeypatch.setattr(benchmark_ppo, "report", lambda *given: "")
    monkeypatch.setattr(sys.modules["benchmark_plots"], "step_phases", lambda found: Figure())
    given = [f"--output={tmp_path}/result.png"]
    code, text = attempt(lambda: command.run("benchmark_ppo.py", benchmark_ppo.main, given), capsys)
    if code:
        return outcome(ended(code, text, "png|json"))
    found = {path.name: path.read_bytes()[:1] for path in tmp_path.iterdir()}
    assert b"{" in found.values(), f"the measurements are gone: {found}"
    outcome("Measurements and picture are two files.")


@fault("site/build.py --output FOLDER, with files of yours in it")
def test_a_site_over_other_files(tmp_path, monkeypatch, outcome):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "site")
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "site/build.py")
    spec.loader.exec_module(site := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(site.formulas, "install", lambda: pytest.fail("it builds"))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="Name another") as raised:
        site.build(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    outcome(raised.value.code)


@pytest.fixture
def cut_cards(tmp_path):
    """The kept run cards, all of them cut in half."""
    (tmp_path / "measured").mkdir()
    for path in (ROOT / "figs/measured").glob("*.json"):
        (tmp_path / "measured" / path.name).write_text(
            path.read_text(encoding="utf-8")[:200], encoding="utf-8"
        )
    return tmp_path


@fault("slides/build.py with a run card that is cut in half")
def test_slides_of_half_a_run_card(cut_cards, outcome):
    (cut_cards / "marp").touch()
    with pytest.raises(
        (SystemExit, ValueError, OSError), match=r"\d\d_\w+\.json|benchmark\.json"
    ) as raised:
        slides.build(cut_cards / "marp", cut_cards)
    outcome(str(raised.value))


@fault("figs/draw.py with a run card that is cut in half")
def test_a_figure_of_half_a_run_card(cut_cards, monkeypatch, capsys, outcome):
    monkeypatch.setattr(sys.modules["curves"], "FOLDER", cut_cards)
    code, text = attempt(lambda: draw.main(["token_rewards", "--output", str(cut_cards)]), capsys)
    outcome(ended(code, text, r"03_ppo_step_by_step\.json"))
