"""The exercises: right answers pass, wrong ones are told why, and the notebooks are those of their
sources.
"""

import contextlib
import importlib
import io
import sys

import nbformat
import pytest
import torch
from make.make_exercises import FOLDER, SETS, notebook

sys.path.insert(0, str(FOLDER))
LOADED = {name: importlib.import_module(name).SET for name in SETS}
EXERCISES = {
    f"{name[2:4]} {key}": made
    for name, found in LOADED.items()
    for key, made in found.exercises.items()
}
MISTAKES = [(exercise, name) for exercise in EXERCISES for name in EXERCISES[exercise].mistakes]


def message(function) -> str:
    return " ".join(function.__doc__.split())


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_and_another_right_answer_pass(name):
    exercise = EXERCISES[name]
    assert exercise.alternatives, "a right answer that is written differently"
    for answer in (exercise.solution, *exercise.alternatives):
        assert exercise.verdict(answer) is None, answer.__name__


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_mistake_is_rejected_with_its_own_message(name, mistake):
    exercise = EXERCISES[name]
    said = exercise.verdict(exercise.mistakes[mistake])
    assert said is not None and " ".join(said.split()) == message(exercise.mistakes[mistake])


@pytest.mark.parametrize("name", EXERCISES)
def test_an_unfinished_or_broken_answer_is_told_so(name):
    exercise = EXERCISES[name]
    assert len(exercise.mistakes) >= 2

    def unfinished(*arguments):
        raise NotImplementedError

    def broken(*arguments):
        return arguments[0].no_such_thing

    assert exercise.verdict(unfinished).startswith("Not written yet")
    assert "It stops with AttributeError" in exercise.verdict(broken)
    assert "Is there a `return`?" in exercise.verdict(lambda *arguments: None)


def test_a_wrong_number_shape_or_gradient_is_named():
    exercise = EXERCISES["03 policy_loss"]
    assert "It differs: yours is 0.1234" in exercise.verdict(
        lambda *arguments: torch.tensor(0.1234)
    )
    assert "It returns shape (4, 6), and () is wanted" in exercise.verdict(lambda a, *rest: a)

    def no_gradient(*arguments):
        return exercise.solution(*arguments).detach()

    assert "Its gradient by argument 1 differs" in exercise.verdict(no_gradient)

    def in_place(rewards):
        rewards -= rewards.mean()
        return rewards

    assert "changes its argument" in EXERCISES["02 leave_one_out"].verdict(in_place)


@pytest.mark.parametrize("name", SETS)
def test_the_notebooks_are_those_of_their_source(name):
    for solved in (False, True):
        path, made = notebook(name, solved)
        assert nbformat.read(path, as_version=4) == made, f"{path.name}: run `make exercises`"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("solved", [False, True], ids=["stubs", "solved"])
def test_every_cell_runs(name, solved, monkeypatch):
    monkeypatch.chdir(FOLDER)
    _, made = notebook(name, solved)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        names = {}
        for cell in made.cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, path := f"{name} {cell.id}", "exec"), names)  # noqa: F841
    lines = [line for line in said.getvalue().splitlines() if line[0] in "✔✘"]
    assert len(lines) == len(LOADED[name].exercises)
    assert all(line.startswith("✔" if solved else "✘") for line in lines)
    assert solved or all("Not written yet" in line for line in lines)
