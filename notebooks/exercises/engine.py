"""Explain wrong answers to exercises, using a solution, named mistakes, and random
inputs.

A set is a Python file. Each exercise's solution is a function: the first paragraph of
its docstring goes into the stub, and the rest is the statement. Its ``mistakes`` are a
dict: name → (message, wrong solution, …). An answer that agrees with a wrong solution
on all inputs gets the message. checks/stock.py has mistakes that every exercise
inherits. ``dev/exercises/make_exercises.py`` writes the notebooks.
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
from checks.languages import say
from checks.stock import stock
from checks.symptoms import ignored, unvaried, where

CASES = 6  # fixed inputs per check; as many fresh inputs
LIMIT = 10.0  # seconds per check
UNWRITTEN = (
    "Not written yet: replace the line `raise NotImplementedError` with your code."
)


class Wrong(Exception):
    """Tell a student what is wrong; ``name`` is the mistake or the kind of symptom."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class Exercise:
    """Hold one function that students write, and judge their answers.

    ``gradient`` lists the arguments whose gradients are compared; True means all float
    arguments except masks.
    A result that is not a tensor passes without a gradient unless the docstring asks
    for a tensor.
    """

    def __init__(self, solution, title, difficulty, minutes, gradient) -> None:
        self.solution = solution
        self.title = title
        self.difficulty = difficulty
        self.minutes = minutes
        self.hints: tuple[str, ...] = ()  # from vague to explicit
        document = inspect.getdoc(solution)
        self.stub_doc, _, self.statement = document.partition("\n\n")
        self.asks_for_tensor = "tensor" in document
        self.names = list(inspect.signature(solution).parameters)
        if gradient is True:
            gradient = [name for name in self.names if "mask" not in name]
        self.learns = [self.names.index(name) for name in gradient or ()]
        self.mistakes: dict[str, tuple] = {}  # name: (message, wrong solution, …)
        self.alternatives: list[Callable] = []  # other right solutions
        self.reply = ""  # answers a question in the statement
        self._kept: tuple[int, list, list] = -1, [], []

    def inputs(self, make: Callable) -> Callable:
        """Register a function that maps a torch.Generator to a tuple of arguments."""
        self.draw = make
        return make

    def cases(self, seed: int) -> list[tuple]:
        """Return the fixed arguments, and fresh arguments drawn with a seed."""
        seeds = (*range(CASES), *range(seed, seed + CASES))
        return [self.draw(torch.Generator().manual_seed(number)) for number in seeds]

    def expected(self, seed: int) -> tuple[list[tuple], list[Result]]:
        """Return the arguments and the solution's results; cache both for the last
        seed.
        """
        if self._kept[0] != seed:
            cases = self.cases(seed)
            self._kept = seed, cases, [self.run(self.solution, case) for case in cases]
        return self._kept[1:]

    def verdict(self, answer: Callable, seed: int = CASES) -> str | None:
        """Return a message about a wrong answer, or None for a right answer."""
        wrong = self.judge(answer, seed)
        return wrong and str(wrong)

    def passes(self, answer: Callable, seed: int = CASES) -> bool:
        """Return whether an answer is right; stop at the first wrong result."""
        with contextlib.suppress(Exception, SystemExit):
            cases, expected = self.expected(seed)
            return all(
                self._passes(self.run(answer, case), right)
                for case, right in zip(cases, expected)
            )
        return False

    def judge(self, answer: Callable, seed: int = CASES) -> Wrong | None:
        """Return a Wrong with a message and a name, or None if the answer is right."""
        cases, expected = self.expected(seed)
        actual = []
        for case in cases:
            try:
                actual.append(self.run(answer, case))
            except Wrong as error:
                return error
            except (Exception, SystemExit) as error:
                return Wrong(self._stopped(answer, error, case), "error")
        if all(map(self._passes, actual, expected)):
            return None
        message = gradients(actual, expected)
        if message == NO_GRADIENT:
            return Wrong(message, "stock:seen")
        for name, (text, *codes) in self.mistakes.items():
            if any(self._fits(code, cases, actual) for code in codes):
                return Wrong(text, name)
        message = message or unvaried(actual, expected)
        if message:
            return Wrong(message, "stock:seen")
        for name, message, mistake in stock(self.solution, self.names, cases[0]):
            if self._fits(mistake, cases, actual):
                return Wrong(message, f"stock:{name}")
        return self._symptom(answer, cases, actual, expected)

    def _symptom(
        self, answer: Callable, cases: list, actual: list, expected: list
    ) -> Wrong:
        """Return a Wrong that describes an unnamed mistake's first wrong result."""
        wrong = [not self._passes(mine, right) for mine, right in zip(actual, expected)]
        first = wrong.index(True)
        details = difference(actual[first], expected[first])
        details += f"\nThe arguments were {self._describe(cases[first])}."
        message = ignored(self.solution, answer, self.names, cases)
        if message:
            return Wrong(f"{message} {details}", "stock:ignored")
        message = where(self.names, cases, wrong, actual, expected)
        if message:
            return Wrong(f"{message} {details}", "where")
        return Wrong(details)

    def _fits(self, mistake: Callable, cases: list, actual: list[Result]) -> bool:
        """Return whether a mistake explains all results and not all of them are nan."""
        if all(is_nan(result.values, everywhere=True) for result in actual):
            return False
        fits = 0
        for result, case in zip(actual, cases):  # a mistake need not cover every case
            with (
                contextlib.suppress(Exception),
                warnings.catch_warnings(action="ignore"),
            ):
                if not same(result, self.run(mistake, case), exact=True):
                    return False
                fits += 1
        return fits > len(cases) / 2

    def _passes(self, actual: Result, expected: Result) -> bool:
        unlearned = expected.slopes is not None and actual.slopes is None
        if unlearned and (self.asks_for_tensor or isinstance(actual.values, Tensor)):
            return False  # plain numbers may pass if no tensor is required
        return same(actual, expected)

    def run(self, function: Callable, arguments: tuple) -> Result:
        """Return a function's result on copies; raise Wrong if it changes a copy."""
        copies = copy.deepcopy(arguments)
        values = function(*copies)
        for name, before, after in zip(self.names, arguments, copies):
            if not alike(before, after):
                raise Wrong(
                    f"You change the argument `{name}` in place. Change a copy.",
                    "place",
                )
        if not self.learns:
            return Result(values)
        copies = copy.deepcopy(arguments)
        leaves = {
            self.names[i]: copies[i].requires_grad_()
            for i in self.learns
            if isinstance(copies[i], Tensor)
        }
        with warnings.catch_warnings(action="ignore"):
            try:
                total = weighted_sum(function(*copies))
                if total is None or not total.requires_grad:
                    return Result(values)
                slopes = torch.autograd.grad(
                    total, leaves.values(), materialize_grads=True
                )
            except RuntimeError:  # NumPy or in-place changes: no gradient
                return Result(values)
        return Result(values, dict(zip(leaves, slopes)))

    def _stopped(self, answer: Callable, error: BaseException, case: tuple) -> str:
        """Return a message about an error in the student's code, with the line."""
        code = getattr(inspect.unwrap(answer), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [x for x in frames if code and x.filename == code.co_filename]
        stub = lines and lines[-1] is frames[-1] and not error.args
        if isinstance(error, NotImplementedError) and stub:
            return UNWRITTEN
        message = f"Your code stops with {type(error).__name__}: {error}"
        if lines:
            number = lines[-1].lineno
            message += f"\nin line {number}"
            line = linecache.getline(lines[-1].filename, number).strip()
            message += f": `{line}`" if line else ""
        return f"{message}\nThe arguments were {self._describe(case)}."

    def _describe(self, arguments: tuple) -> str:
        """Return the arguments as Python text; show only the shape of a long tensor."""
        texts = []
        for name, x in zip(self.names, arguments):
            if isinstance(x, Tensor) and x.numel() > 8:
                text = f"a tensor {tuple(x.shape)}"
            elif isinstance(x, Tensor):
                text = str(x.tolist())
            else:
                text = repr(x) if len(repr(x)) < 200 else f"a {type(x).__name__}"
            texts.append(f"{name} = {text}")
        return ", ".join(texts)


class Set:
    """Hold one notebook's exercises, and the ``imports`` for their solutions."""

    loaded: dict[str, Exercise] = {}  # exercises of all sets in this kernel

    def __init__(self, notebook: str, title: str, imports: str = "import torch"):
        self.notebook, self.title, self.imports = notebook, title, imports
        self.exercises: dict[str, Exercise] = {}

    def exercise(
        self, title: str, difficulty: int, minutes: int, gradient=False
    ) -> Callable[[Callable], Exercise]:
        """Return a decorator that turns a solution into an exercise of this set."""

        def register(solution: Callable) -> Exercise:
            made = Exercise(solution, title, difficulty, minutes, gradient)
            self.exercises[solution.__name__] = made
            return self.loaded.setdefault(solution.__name__, made)

        return register

    def check(self, answer: Callable, seed: int | None = None) -> None:
        """Print the verdict on an answer."""
        name = getattr(answer, "__name__", None)
        exercise = self.exercises.get(name) or self.loaded.get(name)
        if exercise is None:
            known = ", ".join(self.exercises)
            print(
                say(
                    f"✘ Pass check() one of {known}, without parentheses; got "
                    f"{answer!r}."
                )
            )
            return
        seed = secrets.randbelow(10**6) if seed is None else seed
        wrong, printed = guarded(
            functools.partial(_verdict_and_output, exercise, answer, seed), LIMIT
        )
        print(printed, end="")
        if wrong is None:
            print(say(f"✔ {name} is right on {2 * CASES} random inputs."))
        else:
            again = say(f"`check({name}, {seed})` tries the same inputs again.")
            print(f"✘ {name}: {say(wrong)}")
            if wrong != UNWRITTEN:
                print(again)


def _verdict_and_output(
    exercise: Exercise, answer: Callable, seed: int
) -> tuple[str | None, str]:
    """Return the verdict, and the first 2,000 characters of the answer's output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        wrong = exercise.verdict(answer, seed)
    return wrong, printed.getvalue()[:2000]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Return standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ragged(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """Return a mask (rows, columns) with random row lengths; one row is full."""
    lengths = torch.randint(1, columns, (rows,), generator=generator)
    lengths[int(torch.randint(rows, (), generator=generator))] = columns
    return (torch.arange(columns) < lengths.unsqueeze(1)).double()


def pick(generator: torch.Generator, options: Any) -> Any:
    """Return one of several options at random."""
    return options[int(torch.randint(len(options), (), generator=generator))]
