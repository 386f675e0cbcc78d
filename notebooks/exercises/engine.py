"""Exercises that say what is wrong: a solution, named mistakes, and random inputs.

A set is a Python file. Each exercise in it is its solution; the first paragraph of the
docstring is that of the stub, the rest the statement. A mistake is a function that is
wrong on purpose, and its docstring is what a student reads who made it.
``scripts/make/make_exercises.py`` writes the notebooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CASES = 6  # random inputs per check
UNWRITTEN = (
    "Not written yet: replace the line `raise NotImplementedError` by your code."
)


class Exercise:
    """One function to write; with ``gradient``, its gradient is checked as well."""

    def __init__(self, solution, title, difficulty, minutes, hint, gradient) -> None:
        self.solution, self.title = solution, title
        self.difficulty, self.minutes = difficulty, minutes
        self.hint, self.gradient = hint, gradient
        self.stub_doc, _, self.statement = inspect.getdoc(solution).partition("\n\n")
        self.mistakes: dict[str, Callable] = {}
        self.alternatives: list[Callable] = []

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

    def verdict(self, answer: Callable) -> str | None:
        """What is wrong with an answer, or None."""
        dice = (torch.Generator().manual_seed(seed) for seed in range(CASES))
        cases = [self.draw(generator) for generator in dice]
        wanted = [run(self.solution, case, self.gradient) for case in cases]
        found = []
        for case in cases:
            try:
                found.append(run(answer, case, self.gradient))
            except NotImplementedError:
                return UNWRITTEN
            except InPlace as error:
                return f"It changes its argument {error} in place. Make a new one."
            except Exception as error:
                said = f"It stops with {type(error).__name__}: {error}"
                return f"{said}\nThe arguments were {describe(case)}."
        wrong = [i for i in range(CASES) if not same(found[i], wanted[i])]
        if not wrong:
            return None
        for mistake in self.mistakes.values():
            its = (run(mistake, case, self.gradient) for case in cases)
            if all(map(same, found, its)):
                return inspect.cleandoc(mistake.__doc__)
        said = difference(found[wrong[0]], wanted[wrong[0]])
        return f"{said}\nThe arguments were {describe(cases[wrong[0]])}."


class Set:
    """The exercises of one notebook; ``imports`` is what their solutions need."""

    def __init__(self, notebook: str, title: str, imports: str = "import torch"):
        self.notebook, self.title, self.imports = notebook, title, imports
        self.exercises: dict[str, Exercise] = {}

    def exercise(
        self, title: str, difficulty: int, minutes: int, hint: str, gradient=False
    ) -> Callable[[Callable], Exercise]:
        """Make an exercise of the function below, which is its solution."""

        def register(solution: Callable) -> Exercise:
            made = Exercise(solution, title, difficulty, minutes, hint, gradient)
            self.exercises[solution.__name__] = made
            return made

        return register

    def check(self, answer: Callable) -> None:
        """Print what is wrong with an answer, or that it is right."""
        name = getattr(answer, "__name__", None)
        if name not in self.exercises:
            known = ", ".join(self.exercises)
            print(f"✘ check() takes one of {known}, without brackets; got {answer!r}.")
        elif wrong := self.exercises[name].verdict(answer):
            print(f"✘ {name}: {wrong}")
        else:
            print(f"✔ {name} is right, on {CASES} random inputs.")


class InPlace(Exception):
    """An argument was changed."""


def run(function: Callable, arguments: tuple, gradient: bool) -> list[tuple[str, Any]]:
    """What a function returns and, if asked for, its gradients: named values."""
    given = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    floats = [isinstance(x, Tensor) and x.is_floating_point() for x in given]
    leaves = {i: given[i].requires_grad_() for i in range(len(given)) if floats[i]}
    output = function(*given) if gradient else torch.no_grad()(function)(*given)
    for number, (before, after) in enumerate(zip(arguments, given), start=1):
        if isinstance(before, Tensor) and not torch.equal(before, after.detach()):
            raise InPlace(f"number {number}")
    values = list(output) if isinstance(output, tuple) else [output]
    named = [("It", x.detach() if isinstance(x, Tensor) else x) for x in values]
    if gradient and all(isinstance(x, Tensor) for x in values):
        # Weighted, so that elements cannot stand in for one another.
        weights = [torch.arange(1, x.numel() + 1).view(x.shape) for x in values]
        total = sum((x * w).sum() for x, w in zip(values, weights))
        slopes = [None] * len(leaves)
        if total.requires_grad:
            slopes = torch.autograd.grad(total, leaves.values(), allow_unused=True)
        for (i, leaf), slope in zip(leaves.items(), slopes):
            slope = torch.zeros_like(leaf) if slope is None else slope
            named.append((f"Its gradient by argument {i + 1}", slope))
    return named


def same(found: list[tuple], wanted: list[tuple]) -> bool:
    """Whether two outputs agree: numbers to 1e-8, all else exactly."""
    pairs = zip(found, wanted)
    return len(found) == len(wanted) and all(_same(a, b) for (_, a), (_, b) in pairs)


def _same(found: Any, wanted: Any) -> bool:
    numbers = (Tensor, int, float, bool)
    if not (isinstance(found, numbers) and isinstance(wanted, numbers)):
        return type(found) is type(wanted) and found == wanted
    a, b = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    return a.shape == b.shape and torch.allclose(a, b, 1e-8, 1e-8, equal_nan=True)


def difference(found: list[tuple], wanted: list[tuple]) -> str:
    """The first difference between two outputs, in words."""
    if any(value is None for _, value in found):
        return "It returns None. Is there a `return`?"
    if len(found) != len(wanted):
        return f"It returns {len(found)} value(s), and {len(wanted)} are wanted."
    pairs = ((name, own, right) for (name, own), (_, right) in zip(found, wanted))
    name, own, right = next(pair for pair in pairs if not _same(*pair[1:]))
    if not isinstance(own, Tensor) or not isinstance(right, Tensor):
        return f"It returns {own!r}, and {right!r} is wanted."
    if own.shape != right.shape:
        shapes = tuple(own.shape), tuple(right.shape)
        return "It returns shape {}, and {} is wanted.".format(*shapes)
    off = ~torch.isclose(own.double(), right.double(), 1e-8, 1e-8)
    index = tuple(off.nonzero()[0].tolist())
    numbers = f"yours is {own[index]:.4f}, and {right[index]:.4f} is wanted"
    return f"{name} differs{f' at {list(index)}' if index else ''}: {numbers}."


def describe(arguments: tuple) -> str:
    """Arguments as they can be typed, long tensors by their shape."""
    said = []
    for x in arguments:
        if isinstance(x, Tensor):
            short = x.numel() <= 8
            said.append(f"{x.tolist()}" if short else f"a tensor {tuple(x.shape)}")
        else:
            said.append(repr(x) if len(repr(x)) < 200 else f"a {type(x).__name__}")
    return ", ".join(said)


def normal(dice: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=dice, dtype=torch.float64)


def ragged(dice: torch.Generator, rows: int, columns: int) -> Tensor:
    """A mask (rows, columns) with rows of different lengths, one of them full."""
    lengths = torch.randint(2, columns, (rows,), generator=dice)
    lengths[int(torch.randint(rows, (), generator=dice))] = columns
    return (torch.arange(columns) < lengths.unsqueeze(1)).double()
