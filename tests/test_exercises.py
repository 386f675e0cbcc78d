"""The exercises: right answers pass, wrong ones are told why, and the notebooks are those of their
sources.
"""

import contextlib
import importlib
import io
import json
import os
import time
from pathlib import Path

import nbformat
import numpy
import pytest
import torch

from dev.exercises.make_exercises import SETS, notebook, solution_source
from rlhf_course.course.presets import ROOT

pytestmark = pytest.mark.quick

LOADED = {name: importlib.import_module(name).SET for name in SETS}
EXERCISES = {
    f"{name[2:4]} {key}": made
    for name, found in LOADED.items()
    for key, made in found.exercises.items()
}
MISTAKES = [(exercise, name) for exercise in EXERCISES for name in EXERCISES[exercise].mistakes]
ARGUMENTS = [(exercise, name) for exercise in EXERCISES for name in EXERCISES[exercise].names]
SOLUTIONS = sorted((Path(__file__).parent / "fixtures" / "solutions").rglob("*.jsonl"))
UNUSED = {("03 response_mask", "pad")}  # the mask comes from lengths: that is the point


def single(x):
    """An argument with all of its float64 tensors in float32."""
    if isinstance(x, dict):
        return {name: single(value) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(map(single, x))
    return x.float() if getattr(x, "dtype", None) == torch.float64 else x


@pytest.mark.parametrize("name", EXERCISES)
def test_right_answers_pass_in_any_precision_on_fresh_inputs(name):
    exercise = EXERCISES[name]
    assert exercise.alternatives, "a right answer that is written differently"

    def in_float32(*arguments):
        return exercise.solution(*map(single, arguments))

    for seed, answer in enumerate((exercise.solution, *exercise.alternatives, in_float32)):
        assert exercise.verdict(answer, 100 * seed + 6) is None, answer.__name__


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_mistake_is_rejected_with_its_own_message(name, mistake):
    exercise = EXERCISES[name]
    message, *codes = exercise.mistakes[mistake]
    for code in codes:
        wrong = exercise.judge(code)
        assert wrong is not None and (wrong.name, str(wrong)) == (mistake, message)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_an_answer_that_ignores_an_argument_is_rejected(name, argument):
    """Every argument matters in some input: neither another draw nor a constant passes for it."""
    exercise = EXERCISES[name]
    i = exercise.names.index(argument)
    others = [case[i] for case in exercise.cases(50)[6:9]]
    if isinstance(others[0], torch.Tensor) and others[0].is_floating_point():
        others += [torch.zeros_like, torch.ones_like]
    elif isinstance(others[0], (int, float)):
        others += [0, 1]

    for other in others:

        def ignores(*given, other=other):
            value = other(given[i]) if callable(other) else other
            return exercise.solution(*given[:i], value, *given[i + 1 :])

        assert exercise.passes(ignores) == ((name, argument) in UNUSED), other


@pytest.mark.parametrize("name", EXERCISES)
def test_two_hints_and_nothing_gives_the_answer_away(name):
    exercise = EXERCISES[name]
    assert len(exercise.hints) == 2 and 2 <= len(exercise.mistakes) <= 5
    code = solution_source(exercise).partition('"""\n')[2].splitlines()
    said = "".join(
        [*exercise.hints, *(message for message, *_ in exercise.mistakes.values())]
    ).split()
    for line in ("".join(line.removeprefix("    return ").split()) for line in code):
        assert len(line) < 12 or line not in "".join(said), line
    called = [word for word in exercise.solution.__code__.co_names if len(word) > 3]
    assert not [word for word in called if f"{word}(" in exercise.hints[0]]


@pytest.mark.parametrize("name", EXERCISES)
def test_an_unfinished_or_broken_answer_is_told_so(name):
    exercise = EXERCISES[name]

    def unfinished(*arguments):
        raise NotImplementedError

    def broken(*arguments):
        return arguments[0].no_such_thing

    assert exercise.verdict(unfinished).startswith("Not written yet")
    assert "Your code stops with AttributeError" in exercise.verdict(broken)
    assert "`return arguments[0].no_such_thing`" in exercise.verdict(broken)
    assert "Is there a `return`?" in exercise.verdict(lambda *arguments: None)


def test_a_wrong_number_shape_or_gradient_is_named():
    exercise = EXERCISES["03 policy_loss"]
    constant = exercise.verdict(lambda *arguments: torch.tensor(0.1234))
    assert constant == "Your result is the same for all inputs that were tried."
    assert "; expected ()" in exercise.verdict(lambda a, *rest: a)
    no_gradient = exercise.verdict(lambda *arguments: exercise.solution(*arguments).detach())
    assert "The value is right, but it has no gradient" in no_gradient

    def in_place(rewards):
        rewards -= rewards.mean()
        return rewards

    def emptied(longer_won):
        while longer_won:
            longer_won.pop()

    assert "change the argument `rewards`" in EXERCISES["02 leave_one_out"].verdict(in_place)
    assert "change the argument `longer_won`" in EXERCISES["06 balance"].verdict(emptied)


def test_numbers_arrays_and_lists_are_right_where_no_tensor_is_asked_for():
    loss, gae = EXERCISES["01 pairwise_loss"], EXERCISES["02 gae"]
    assert loss.verdict(lambda *given: loss.solution(*given).item()) is None
    assert loss.verdict(lambda a, b: numpy.logaddexp(0, (b - a).numpy()).mean()) is None
    assert gae.verdict(lambda *given: gae.solution(*given).tolist()) is None
    assert gae.verdict(lambda *given: gae.solution(*given).float().numpy()) is None


def test_the_common_stock_names_a_mistake_that_an_exercise_does_not_know():
    gae, optimum = EXERCISES["02 gae"], EXERCISES["02 optimum"]
    assert gae.judge(lambda *given: -gae.solution(*given)).name == "stock:sign"
    assert gae.judge(lambda r, v, *rest: gae.solution(v, r, *rest)).name == "stock:swapped"
    times_beta = optimum.judge(lambda ref, r, beta: optimum.solution(ref, r, 1 / beta))
    assert times_beta.name == "times_beta"  # the exercise's own, before the stock's
    lazy = EXERCISES["07 group_advantages"]
    where = lazy.verdict(lambda r, divide: lazy.solution(r, divide) if divide else r * 3)
    assert where.startswith("Your result is wrong only where `divide` is False.")


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_by_others_are_judged_as_they_should_be(path):
    """Wrong ones are rejected and right ones accepted; score_checks.py counts what is said."""
    imports = "import math, re, torch, numpy as np; from torch.nn.functional import logsigmoid"
    for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        names = {}
        exec(f"{imports}\n{entry['code']}", names)
        right = (entry["kind"] == "right") != ("dropped" in entry)
        exercise = EXERCISES[f"{path.stem} {entry['exercise']}"]
        assert exercise.passes(names[entry["exercise"]]) == right, entry


def test_the_published_tables_keep_the_bounds():
    """Of each corpus, today's checks reject 99 %, name 60 % and accept 98 % of right solutions."""
    page = (ROOT / "docs/exercise-checks.md").read_text("utf-8")
    tables = [table for table in page.split("\n### ") if "oday" in table.splitlines()[0]]
    assert len(tables) == 3
    for table in tables:
        cells = table.strip().splitlines()[-1].split("|")  # the row "all"
        shares = [float(cells[i].split(":")[1].split("(")[0]) for i in (2, 3, 6)]
        assert all(share >= least for share, least in zip(shares, (99, 60, 98), strict=True))


def check(answer, name, **settings):
    """What a student reads."""
    answer.__name__ = EXERCISES[name].solution.__name__
    with contextlib.redirect_stdout(io.StringIO()) as said:
        LOADED["ex00_hello_rlhf"].check(answer, **settings)  # also for exercises of other sets
    return said.getvalue()


def test_a_loop_for_ever_a_crash_and_an_error_of_torch_cost_one_check(monkeypatch):
    def for_ever(logprobs, ref_logprobs):
        while True:
            pass

    def torch_error(logprobs, ref_logprobs):
        return torch.ones(2, 2, dtype=torch.long).softmax(0)

    monkeypatch.setattr("engine.LIMIT", 0.5)
    name = "00 mean_kl"
    assert "not finished after" in check(for_ever, name)
    assert "Your function ended Python (exit status 7)" in check(lambda *given: os._exit(7), name)
    said = check(torch_error, name)
    assert "Not written yet" not in said and "NotImplementedError" in said
    monkeypatch.delattr("os.fork")  # as on other systems: a timer
    assert "not finished after" in check(for_ever, name)


def test_a_check_is_quick_and_says_how_to_repeat_it():
    start = time.monotonic()
    said = check(lambda *given: print("seen") or 1.25, "07 dpo_loss", seed=77)
    assert time.monotonic() - start < 10  # a second alone on a quiet machine
    assert "seen" in said and "`check(dpo_loss, 77)` tries the same inputs again." in said


@pytest.mark.parametrize("name", SETS)
def test_the_notebooks_are_those_of_their_source(name):
    for solved in (False, True):
        path, made = notebook(name, solved)
        assert nbformat.read(path, as_version=4) == made, f"{path.name}: run `make exercises`"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("solved", [False, True], ids=["stubs", "solved"])
def test_every_cell_runs_in_any_folder(name, solved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
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
