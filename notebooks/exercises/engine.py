"""Exercises that say what is wrong: a solution, named mistakes, and random inputs.

A set is a Python file. Each exercise in it is its solution; the first paragraph of the
docstring is that of the stub, the rest the statement. A mistake is a function that is
wrong on purpose, and its docstring is what a student reads who made it; checks/ has
the mistakes that every exercise inherits. ``scripts/make/make_exercises.py`` writes the
notebooks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import linecache
import secrets
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks.compare import (
    NO_GRADIENT,
    Result,
    alike,
    difference,
    gradients,
    is_nan,
    same,
    weighted_sum,
)
from checks.guard import guarded
from checks.stock import stock
from checks.symptoms import ignored, unvaried, where

CASES = 6  # fixed inputs of a check, and as many fresh ones
LIMIT = 10.0  # seconds
UNWRITTEN = (
    "Not written yet: replace the line `raise NotImplementedError` by your code."
)


class Wrong(Exception):
    """What a student is told; ``name`` says how it is known."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class Exercise:
    """One function to write.

    ``hint`` is one hint or several, from vague to plain. ``gradient`` names the
    arguments whose gradient is compared; True stands for all floats except masks. A
    value without a gradient passes unless the docstring asks for a tensor.
    """

    def __init__(self, solution, title, difficulty, minutes, hint, gradient) -> None:
        self.solution, self.title = solution, title
        self.difficulty, self.minutes = difficulty, minutes
        self.hints = (hint,) if isinstance(hint, str) else tuple(hint)
        document = inspect.getdoc(solution)
        self.stub_doc, _, self.statement = document.partition("\n\n")
        self.asks_for_tensor = "tensor" in document
        self.names = list(inspect.signature(solution).parameters)
        if gradient is True:
            gradient = [name for name in self.names if "mask" not in name]
        self.learns = [self.names.index(name) for name in gradient or ()]
        self.mistakes: dict[str, Callable] = {}
        self.alternatives: list[Callable] = []
        self.reply = ""  # to a question in the statement
        self._kept: tuple[int, list, list] = -1, [], []

    def inputs(self, make: Callable) -> Callable:
        """Register how a torch.Generator becomes a tuple of arguments."""
        self.draw = make
        return make

    def mistake(self, function: Callable) -> Callable:
        """Register a wrong solution; its docstring is the message."""
        self.mistakes[function.__name__] = function
        return function

    def alternative(self, function: Callable) -> Callable:
        """Register a right solution that is written differently."""
        self.alternatives.append(function)
        return function

    def cases(self, seed: int) -> list[tuple]:
        """The fixed arguments, and fresh ones of a seed."""
        seeds = (*range(CASES), *range(seed, seed + CASES))
        return [self.draw(torch.Generator().manual_seed(number)) for number in seeds]

    def wanted(self, seed: int) -> tuple[list[tuple], list[Result]]:
        """Arguments, and what the solution makes of them; the last seed's are kept."""
        if self._kept[0] != seed:
            cases = self.cases(seed)
            self._kept = seed, cases, [self.run(self.solution, case) for case in cases]
        return self._kept[1:]

    def verdict(self, answer: Callable, seed: int = CASES) -> str | None:
        """What is wrong with an answer, or None."""
        wrong = self.judge(answer, seed)
        return wrong and str(wrong)

    def passes(self, answer: Callable, seed: int = CASES) -> bool:
        """Whether an answer is right; the first wrong result decides."""
        with contextlib.suppress(Exception, SystemExit):
            pairs = zip(*self.wanted(seed))
            return all(self._passes(self.run(answer, c), right) for c, right in pairs)
        return False

    def judge(self, answer: Callable, seed: int = CASES) -> Wrong | None:
        """The same with the name of the mistake, where there is one."""
        cases, wanted = self.wanted(seed)
        found = []
        for case in cases:
            try:
                found.append(self.run(answer, case))
            except Wrong as error:
                return error
            except (Exception, SystemExit) as error:
                return Wrong(self._stopped(answer, error, case), "error")
        if all(map(self._passes, found, wanted)):
            return None
        if (message := gradients(found, wanted)) == NO_GRADIENT:
            return Wrong(message, "stock:seen")
        for name, mistake in self.mistakes.items():
            if self._fits(mistake, cases, found):
                return Wrong(inspect.cleandoc(mistake.__doc__), name)
        if message := message or unvaried(found, wanted):
            return Wrong(message, "stock:seen")
        for name, message, mistake in stock(self.solution, self.names, cases[0]):
            if self._fits(mistake, cases, found):
                return Wrong(message, f"stock:{name}")
        return self._symptom(answer, cases, found, wanted)

    def _symptom(
        self, answer: Callable, cases: list, found: list, wanted: list
    ) -> Wrong:
        """What is seen of a mistake without a name: the first number that differs."""
        wrong = [not self._passes(*pair) for pair in zip(found, wanted)]
        first = wrong.index(True)
        said = difference(found[first], wanted[first])
        said += f"\nThe arguments were {self._describe(cases[first])}."
        if message := ignored(self.solution, answer, self.names, cases):
            return Wrong(f"{message} {said}", "stock:ignored")
        if message := where(self.names, cases, wrong, found, wanted):
            return Wrong(f"{message} {said}", "where")
        return Wrong(said)

    def _fits(self, mistake: Callable, cases: list, found: list[Result]) -> bool:
        """Whether a mistake explains all results; nan alone may come from anything."""
        if all(is_nan(own.values, everywhere=True) for own in found):
            return False
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            its = (self.run(mistake, case) for case in cases)
            return all(same(own, result, True) for own, result in zip(found, its))
        return False

    def _passes(self, found: Result, wanted: Result) -> bool:
        unlearned = wanted.slopes is not None and found.slopes is None
        if unlearned and (self.asks_for_tensor or isinstance(found.values, Tensor)):
            return False  # a number may pass where no tensor is asked for
        return same(found, wanted)

    def run(self, function: Callable, arguments: tuple) -> Result:
        """What a function returns for copies of arguments, which it must not change."""
        given = copy.deepcopy(arguments)
        values = function(*given)
        for name, before, after in zip(self.names, arguments, given):
            if not alike(before, after):
                raise Wrong(
                    f"It changes its argument `{name}` in place. Make a new one.",
                    "place",
                )
        if not self.learns:
            return Result(values)
        given = list(copy.deepcopy(arguments))
        learns = [i for i in self.learns if isinstance(given[i], Tensor)]
        leaves = {self.names[i]: given[i].requires_grad_() for i in learns}
        with warnings.catch_warnings(action="ignore"):
            try:
                total = weighted_sum(function(*given))
                if total is None or not total.requires_grad:
                    return Result(values)
                slopes = torch.autograd.grad(
                    total, leaves.values(), materialize_grads=True
                )
            except RuntimeError:  # NumPy, or a change in place: no gradient
                return Result(values)
        return Result(values, dict(zip(leaves, slopes)))

    def _stopped(self, answer: Callable, error: BaseException, case: tuple) -> str:
        """An error of the student's code in words, with the line."""
        code = getattr(inspect.unwrap(answer), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code and frame.filename == code.co_filename]
        stub = own and own[-1] is frames[-1] and not error.args
        if isinstance(error, NotImplementedError) and stub:
            return UNWRITTEN
        said = f"It stops with {type(error).__name__}: {error}"
        if own:
            line = linecache.getline(own[-1].filename, own[-1].lineno).strip()
            said += f"\nin line {own[-1].lineno}" + (f": `{line}`" if line else "")
        return f"{said}\nThe arguments were {self._describe(case)}."

    def _describe(self, arguments: tuple) -> str:
        """Arguments as they can be typed, long tensors by their shape."""
        said = []
        for name, x in zip(self.names, arguments):
            if isinstance(x, Tensor):
                shape = f"a tensor {tuple(x.shape)}"
                said.append(f"{name} = {x.tolist() if x.numel() <= 8 else shape}")
            else:
                short = repr(x) if len(repr(x)) < 200 else f"a {type(x).__name__}"
                said.append(f"{name} = {short}")
        return ", ".join(said)


class Set:
    """The exercises of one notebook; ``imports`` is what their solutions need."""

    loaded: dict[str, Exercise] = {}  # of all sets, so that one kernel may hold several

    def __init__(self, notebook: str, title: str, imports: str = "import torch"):
        self.notebook, self.title, self.imports = notebook, title, imports
        self.exercises: dict[str, Exercise] = {}

    def exercise(
        self, title: str, difficulty: int, minutes: int, hint, gradient=False
    ) -> Callable[[Callable], Exercise]:
        """Make an exercise of the function below, which is its solution."""

        def register(solution: Callable) -> Exercise:
            made = Exercise(solution, title, difficulty, minutes, hint, gradient)
            self.exercises[solution.__name__] = made
            return self.loaded.setdefault(solution.__name__, made)

        return register

    def check(self, answer: Callable, seed: int | None = None) -> None:
        """Print what is wrong with an answer, or that it is right."""
        name = getattr(answer, "__name__", None)
        exercise = self.exercises.get(name) or self.loaded.get(name)
        if exercise is None:
            known = ", ".join(self.exercises)
            print(f"✘ check() takes one of {known}, without brackets; got {answer!r}.")
            return
        seed = secrets.randbelow(10**6) if seed is None else seed
        wrong, printed = guarded(
            functools.partial(_heard, exercise, answer, seed), LIMIT
        )
        print(printed, end="")
        if wrong is None:
            print(f"✔ {name} is right, on {2 * CASES} random inputs.")
        else:
            again = f"`check({name}, {seed})` tries the same inputs again."
            print(f"✘ {name}: {wrong}" + f"\n{again}" * (wrong != UNWRITTEN))


def _heard(exercise: Exercise, answer: Callable, seed: int) -> tuple[str | None, str]:
    """The verdict, and the beginning of what the answer printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        wrong = exercise.verdict(answer, seed)
    return wrong, printed.getvalue()[:2000]


def normal(dice: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=dice, dtype=torch.float64)


def ragged(dice: torch.Generator, rows: int, columns: int) -> Tensor:
    """A mask (rows, columns) with rows of different lengths, one of them full."""
    lengths = torch.randint(1, columns, (rows,), generator=dice)
    lengths[int(torch.randint(rows, (), generator=dice))] = columns
    return (torch.arange(columns) < lengths.unsqueeze(1)).double()


def pick(dice: torch.Generator, options: Any) -> Any:
    """One of several options."""
    return options[int(torch.randint(len(options), (), generator=dice))]
