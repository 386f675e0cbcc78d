"""Progress in a log: a line at each tenth of the steps, which no notebook's outputs contain."""

import sys
from types import SimpleNamespace

import nbformat
import pytest
from builders import python
from tqdm.auto import tqdm

from rlhf_course.course import progress as module
from rlhf_course.course.progress import TrainingBar, progress

TENTHS = [f"PPO: {done} of 40 steps, " for done in range(4, 41, 4)]


def starts(text: str, known: list[str]) -> list[str]:
    """Return the beginnings of the lines, without the seconds left."""
    lines = text.splitlines()
    assert all(line.endswith(" s left") for line in lines), lines
    assert len(lines) == len(known), lines
    return [line[: len(begin)] for line, begin in zip(lines, known, strict=True)]


def test_a_loop_writes_a_line_at_each_tenth_to_a_log(capfd):
    assert list(progress(range(40), "PPO")) == [*range(40)]
    assert starts(capfd.readouterr().err, TENTHS) == TENTHS


@pytest.mark.parametrize("steps", [1, 3, 10, 25])
def test_a_loop_of_any_length_ends_with_its_last_step(steps, capfd):
    assert len(list(progress(range(steps), "short"))) == steps
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == min(steps, 10)
    assert lines[-1] == f"short: {steps} of {steps} steps, 0 s left"


def test_a_trainer_writes_the_same_lines(capfd):
    bar, state = TrainingBar(), SimpleNamespace(max_steps=40)
    bar.on_train_begin(None, state, None)
    for _ in range(40):
        bar.on_step_end(None, state, None)
    bar.on_train_end(None, state, None)
    expected = [line.replace("PPO", "training") for line in TENTHS]
    assert starts(capfd.readouterr().err, expected) == expected


def test_a_screen_shows_a_bar_and_no_lines(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bars = []
    monkeypatch.setattr(
        module, "tqdm", lambda *args, **kw: bars.append(tqdm(*args, **kw)) or bars[0]
    )
    assert len(list(progress(range(40), "PPO"))) == 40
    assert " of 40 steps" not in capfd.readouterr().err
    assert not bars[0].leave and bars[0].total == 40


def test_a_notebooks_outputs_have_no_lines_but_papermills_log_has_them(tmp_path):
    code = "from rlhf_course.course.progress import progress\nsum(progress(range(40), 'PPO'))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(notebook, tmp_path / "source.ipynb")
    options = "--no-progress-bar --log-level ERROR -k python3".split()
    done = python("-m", "papermill", "source.ipynb", "executed.ipynb", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("PPO: ")]
    assert starts("\n".join(lines), TENTHS) == TENTHS
    [cell] = nbformat.read(tmp_path / "executed.ipynb", as_version=4).cells
    assert not [output for output in cell.outputs if output.output_type == "stream"]
    assert cell.outputs[-1].data["text/plain"] == "780"
