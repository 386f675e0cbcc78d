"""Mistakes that every exercise inherits, made from its solution.

Each changes one argument before the solution sees it, or the result after it. A change
that does not apply (no such argument, an error) is no mistake; a change that makes no
difference can blame nobody, because its result is the right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Named = tuple[str, str, Callable]
LOGS = ("logprob", "chosen", "rejected", "engine")
PARTS = {"standard deviation": (0.5, -0.5), "variance": (1.0, -1.0)}

ARGUMENTS = {  # name: (what it applies to, change, message)
    "mask forgotten": (
        "mask",
        torch.ones_like,
        "Padding counts in yours: `{}` has no effect, as if it were 1 everywhere.",
    ),
    "mask inverted": (
        "mask",
        lambda x: ~x if x.dtype == torch.bool else 1 - x,
        "You keep the padding and drop the real tokens: look at which way `{}` works.",
    ),
    "probabilities": (
        "log",
        torch.exp,
        "Yours takes `{}` for probabilities, and they are logarithms (or you take exp "
        "once too often).",
    ),
    "softmax first": (
        "float",
        lambda x: x.softmax(-1),
        "Yours squeezes `{}` into probabilities before using it.",
    ),
    "log-softmax first": (
        "float",
        lambda x: x.log_softmax(-1),
        "Yours normalizes `{}`, which should be used as it comes.",
    ),
    "sigmoid first": (
        "float",
        torch.sigmoid,
        "Yours squashes `{}` by a sigmoid of its own before using it.",
    ),
    "logarithm first": (
        "float",
        torch.log,
        "Yours takes the logarithm of `{}`, which is none of the steps.",
    ),
    "sign of an argument": ("float", lambda x: -x, "The sign of `{}` is turned."),
    "absolute argument": (
        "float",
        torch.abs,
        "Yours uses the size of `{}` without its sign.",
    ),
    "missing": (
        "float",
        torch.zeros_like,
        "`{}` has no effect: yours gives what one gets if all of it were 0.",
    ),
    "all ones": (
        "float",
        torch.ones_like,
        "`{}` has no effect: yours gives what one gets if all of it were 1.",
    ),
    "reversed argument": (
        "tensor",
        lambda x: x.flip(-1),
        "Yours reads `{}` backwards, from its last column to its first.",
    ),
    "first only": (
        "float",
        lambda x: x[:1].expand_as(x),
        "Yours uses only the first of `{}`, for all the others as well.",
    ),
    "as if 1": (
        "number",
        lambda x: type(x)(1),
        "`{}` has no effect: yours gives what one gets with 1 in its place.",
    ),
    "as if 0": (
        "number",
        lambda x: type(x)(0),
        "`{}` has no effect: yours gives what one gets with 0 in its place.",
    ),
    "upside down": (
        "number",
        lambda x: 1 / x,
        "Yours multiplies where `{}` divides, or the reverse.",
    ),
    "negative": ("number", lambda x: -x, "`{}` has the wrong sign in yours."),
    "squared": ("number", lambda x: x * x, "`{}` comes in twice."),
    "rooted": ("number", lambda x: x**0.5, "Yours takes a root of `{}`."),
    "one more": (
        "count",
        lambda x: x + 1,
        "Off by one: yours starts or ends too late.",
    ),
    "one less": (
        "count",
        lambda x: x - 1,
        "Off by one: yours starts or ends too early.",
    ),
    "inverted": ("bool", lambda x: not x, "`{}` works the wrong way round."),
    "always": ("bool", lambda x: True, "Yours works as if `{}` were always True."),
    "never": ("bool", lambda x: False, "Yours works as if `{}` were always False."),
}
RESULTS = {  # name: (change, message)
    "sign": (lambda y: -y, "The sign is wrong: yours is minus what is wanted."),
    "no absolute": (torch.abs, "The sign is lost: yours is never negative."),
    "clamped": (lambda y: y.clamp(min=0), "Yours cuts off everything below 0."),
    "probabilities": (
        torch.exp,
        "These are probabilities where logarithms are wanted, or one exp too many.",
    ),
    "logarithms": (
        torch.log,
        "These are logarithms: the way back to numbers without log is missing.",
    ),
    "normalized": (lambda y: y.softmax(-1), "Yours ends with a softmax too many."),
    "log-normalized": (
        lambda y: y.log_softmax(-1),
        "Yours ends with a log-softmax too many.",
    ),
    "complement": (lambda y: 1 - y, "This is 1 minus what is wanted."),
    "reciprocal": (lambda y: 1 / y, "The fraction is upside down."),
    "doubled": (lambda y: 2 * y, "Everything is twice what it should be."),
    "halved": (lambda y: y / 2, "Everything is half of what it should be."),
    "bits": (lambda y: y / math.log(2), "This is in units of log 2: bits, not nats."),
    "percent": (lambda y: 100 * y, "This is in percent; a share is wanted."),
    "squared": (lambda y: y * y, "A root is missing."),
    "rooted": (lambda y: y.abs().sqrt(), "There is a root too many."),
    "one more": (lambda y: y + 1, "Everything is too large by 1."),
    "one less": (lambda y: y - 1, "Everything is too small by 1."),
    "rounded": (torch.round, "Yours is rounded, or computed with whole numbers."),
    "floored": (torch.floor, "Yours is rounded down: // or int() lose the fraction."),
    "time reversed": (
        lambda y: y.flip(-1),
        "The order is reversed: yours runs from the last to the first.",
    ),
    "transposed": (
        lambda y: y.transpose(0, 1),
        "Rows and columns have changed places.",
    ),
    "late": (lambda y: y.roll(1, -1), "Off by one: everything stands one place late."),
    "early": (lambda y: y.roll(-1, -1), "Off by one: everything is one place early."),
    "summed up": (lambda y: y.cumsum(-1), "Yours adds up from place to place."),
    "averaged": (
        lambda y: y.mean(),
        "Yours is one number, the mean of what is wanted: keep the elements.",
    ),
    "added up": (
        lambda y: y.sum(),
        "Yours is one number, the sum of what is wanted: keep the elements.",
    ),
    "averaged rows": (lambda y: y.mean(-1), "Yours averages over the last dimension."),
    "added up rows": (lambda y: y.sum(-1), "Yours adds up the last dimension."),
    "centered": (lambda y: y - y.mean(), "Yours subtracts a mean too many."),
    "batch of one": (lambda y: y.unsqueeze(0), "The result has a dimension too many."),
    "kept dimension": (
        lambda y: y.unsqueeze(-1),
        "The result has a dimension too many.",
    ),
}
SIZES = {  # what a mean may be divided by
    "sum for a mean": (
        1,
        "You add up where a mean is wanted, or divide by too little.",
    ),
    "mean for a sum": (-1, "You average where a sum is wanted, or divide twice."),
}
BIASED = "Look at what is divided by n, and what by n − 1 (in a {}, for instance)."
SWAPPED = "`{}` and `{}` have changed places."
FLIPPED = "Time runs the wrong way: yours reads the tokens from the last to the first."
ACROSS = (
    "The wrong axis: yours works along columns where rows are meant, or the reverse."
)


def stock(solution: Callable, names: list[str], case: tuple) -> Iterator[Named]:
    """Common mistakes that apply to arguments like those of a case: name, message,
    code.
    """
    for name, (kind, change, message) in ARGUMENTS.items():
        for i in range(len(names)):
            if kind in _kinds(names[i], case[i]):
                yield name, message.format(names[i]), _before(solution, {i: change})
    for i in range(len(names)):
        for j in range(i):
            if _kinds("", case[i]) == _kinds("", case[j]):
                yield (
                    "swapped",
                    SWAPPED.format(names[j], names[i]),
                    _swap(solution, j, i),
                )
    for name, (change, message) in RESULTS.items():
        yield name, message, _after(solution, lambda y, _, change=change: change(y))
    yield from _scaled(solution)
    tensors = [i for i, x in enumerate(case) if isinstance(x, Tensor) and x.ndim]
    flip = _before(solution, dict.fromkeys(tensors, lambda x: x.flip(-1)))
    yield "time reversed", FLIPPED, _after(flip, lambda y, _: y.flip(-1))
    across = _before(solution, dict.fromkeys(tensors, lambda x: x.transpose(0, 1)))
    yield "axis transposed", ACROSS, _after(across, lambda y, _: y.transpose(0, 1))
    yield "axis transposed", ACROSS, across


def _scaled(solution: Callable) -> Iterator[Named]:
    """Sum for mean, mean for sum, n for n − 1: for each size of the first tensor."""

    def sizes(x: Tensor, arguments: tuple) -> list:
        masks = [a.sum() for a in arguments if isinstance(a, Tensor) and _is_mask(a)]
        return [x.numel(), len(x), x.shape[-1], *masks]

    for number in range(4):
        for name, (power, message) in SIZES.items():

            def change(y, arguments, number=number, power=power):
                return y * sizes(_first(arguments), arguments)[number] ** power

            yield name, message, _after(solution, change)
        for what, powers in PARTS.items():
            for power in powers:

                def change(y, arguments, number=number, power=power):
                    n = sizes(_first(arguments), arguments)[number]
                    return y * (n / (n - 1)) ** power

                yield "biased", BIASED.format(what), _after(solution, change)


def _first(arguments: tuple) -> Tensor:
    return next(x for x in arguments if isinstance(x, Tensor) and x.ndim)


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())


def _kinds(name: str, x: Any) -> set[str]:
    """What an argument is, in the words of ARGUMENTS."""
    if isinstance(x, bool):
        return {"bool"}
    if isinstance(x, (int, float)):
        return {"number", "count"} if isinstance(x, int) else {"number"}
    if not isinstance(x, Tensor):
        return {type(x).__name__}
    if "mask" in name:
        return {"mask", "tensor"}
    kinds = {"tensor"}
    if x.is_floating_point():
        kinds |= {"float"} | ({"log"} if any(part in name for part in LOGS) else set())
    return kinds


def _before(solution: Callable, changes: dict[int, Callable]) -> Callable:
    def changed(*arguments: Any) -> Any:
        given = list(arguments)
        for i, change in changes.items():
            given[i] = change(given[i])
        return solution(*given)

    return changed


def _swap(solution: Callable, i: int, j: int) -> Callable:
    def changed(*arguments: Any) -> Any:
        given = list(arguments)
        given[i], given[j] = given[j], given[i]
        return solution(*given)

    return changed


def _after(solution: Callable, change: Callable) -> Callable:
    """Change what numbers a solution returns; ``change`` sees the arguments as well."""

    def changed(*arguments: Any) -> Any:
        output = solution(*arguments)
        if isinstance(output, tuple):
            return tuple(change(torch.as_tensor(y), arguments) for y in output)
        return change(torch.as_tensor(output), arguments)

    return changed
