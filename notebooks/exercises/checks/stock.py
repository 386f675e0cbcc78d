"""Derive from a solution the common mistakes that its exercise inherits.

Each mistake changes the solution's result, or one argument before the solution sees it.
A change is skipped if its argument is missing or if it raises an error. A change
without effect gives the right result, so it never matches a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Named = tuple[str, str, Callable]
LOGS = ("logprob", "chosen", "rejected", "engine")
DOUBLE_SOFTMAX = "You apply a softmax to `{}`; use it unchanged."
NO_EFFECT = "`{}` has no effect: your result is the same as with {} in its place."
OFF_BY_ONE = "You are off by one: check each index, range and exponent."
EXTRA_DIMENSION = "Your result has one dimension too many."

ARGUMENTS = [  # (name, kind of argument, change, message)
    (
        "mask forgotten",
        "mask",
        torch.ones_like,
        "Your result counts padding: `{}` has no effect, as if it were 1 everywhere.",
    ),
    (
        "mask inverted",
        "mask",
        lambda x: ~x if x.dtype == torch.bool else 1 - x,
        "You keep the padding and drop the real tokens: check what 1 means in `{}`.",
    ),
    (
        "probabilities",
        "log",
        torch.exp,
        "You treat `{}` as probabilities, but they are logarithms (or you apply exp "
        "once too often).",
    ),
    ("softmax first", "float", lambda x: x.softmax(-1), DOUBLE_SOFTMAX),
    ("log-softmax first", "float", lambda x: x.log_softmax(-1), DOUBLE_SOFTMAX),
    (
        "sigmoid first",
        "float",
        torch.sigmoid,
        "You apply an extra sigmoid to `{}` before using it.",
    ),
    (
        "sign of an argument",
        "float",
        torch.neg,
        "The sign of `{}` is reversed.",
    ),
    (
        "absolute argument",
        "float",
        torch.abs,
        "You use the absolute value of `{}`; its sign is lost.",
    ),
    ("missing", "float", torch.zeros_like, NO_EFFECT.format("{}", 0)),
    ("all ones", "float", torch.ones_like, NO_EFFECT.format("{}", 1)),
    (
        "reversed argument",
        "tensor",
        lambda x: x.flip(-1),
        "You read `{}` backward, from its last column to its first.",
    ),
    ("as if 1", "number", lambda x: type(x)(1), NO_EFFECT.format("{}", 1)),
    ("as if 0", "number", lambda x: type(x)(0), NO_EFFECT.format("{}", 0)),
    (
        "upside down",
        "number",
        lambda x: 1 / x,
        "You multiply by `{}` where you should divide, or the reverse.",
    ),
    ("negative", "number", lambda x: -x, "`{}` has the wrong sign in your code."),
    ("one too large", "count", lambda x: x + 1, OFF_BY_ONE),
    ("one too small", "count", lambda x: x - 1, OFF_BY_ONE),
    ("inverted", "bool", lambda x: not x, "`{}` has the opposite effect."),
    ("always", "bool", lambda x: True, NO_EFFECT.format("{}", True)),
    ("never", "bool", lambda x: False, NO_EFFECT.format("{}", False)),
]
RESULTS = [  # (name, change, message)
    ("sign", torch.neg, "The sign is wrong: your result is minus the expected one."),
    ("no absolute", torch.abs, "The sign is lost: your result is never negative."),
    ("clamped", lambda y: y.clamp(min=0), "You set everything below 0 to 0."),
    (
        "probabilities",
        torch.exp,
        "You return probabilities instead of logarithms, or apply exp too often.",
    ),
    ("logarithms", torch.log, "You return logarithms: the final exp is missing."),
    ("complement", lambda y: 1 - y, "Your result is 1 minus the expected one."),
    ("doubled", lambda y: 2 * y, "Your result is twice the expected one."),
    ("halved", lambda y: y / 2, "Your result is half of the expected one."),
    (
        "bits",
        lambda y: y / math.log(2),
        "Your result is in bits (units of log 2), not in nats.",
    ),
    ("percent", lambda y: 100 * y, "Your result is in percent; return a share."),
    ("squared", torch.square, "A square root is missing."),
    ("one more", lambda y: y + 1, "Your result is too large by 1."),
    ("rounded", torch.round, "Your result is rounded, or computed with integers."),
    (
        "time reversed",
        lambda y: y.flip(-1),
        "The order is reversed: your result runs from the last to the first.",
    ),
    ("transposed", lambda y: y.transpose(0, 1), "Rows and columns are swapped."),
    (
        "averaged",
        torch.mean,
        "You return one number, the mean of the expected elements: keep the elements.",
    ),
    (
        "added up",
        torch.sum,
        "You return one number, the sum of the expected elements: keep the elements.",
    ),
    ("batch of one", lambda y: y.unsqueeze(0), EXTRA_DIMENSION),
    ("kept dimension", lambda y: y.unsqueeze(-1), EXTRA_DIMENSION),
]
SIZES = [  # (name, power of a mean's divisor, message)
    (
        "sum for a mean",
        1,
        "You sum where a mean is expected, or divide by too small a number.",
    ),
    ("mean for a sum", -1, "You average where a sum is expected, or divide twice."),
]
BIASED = (
    "Check where you divide by n and where you divide by n − 1, for example in a "
    "variance or a standard deviation."
)
SWAPPED = "`{}` and `{}` are swapped."
ORDER = "Your values are right, but their order is wrong."
ONE_VALUE = "Only value {} of the {} values is wrong."
FLIPPED = "Time runs the wrong way: you read the tokens from the last to the first."
ACROSS = "You work along the wrong axis: along columns instead of rows, or the reverse."


def stock(solution: Callable, names: list[str], case: tuple) -> Iterator[Named]:
    """Yield common mistakes (name, message, function) for arguments like ``case``."""
    for name, kind, change, message in ARGUMENTS:
        for i, argument in enumerate(names):
            if kind in _kinds(argument, case[i]):
                yield name, message.format(argument), _before(solution, {i: change})
    for i in range(len(names)):
        for j in range(i):
            if _kinds("", case[i]) == _kinds("", case[j]):
                message = SWAPPED.format(names[j], names[i])
                yield "swapped", message, _swap(solution, j, i)
    for name, change, message in RESULTS:
        yield name, message, _after(solution, lambda y, _, change=change: change(y))
    output = solution(*case)
    if isinstance(output, tuple):
        yield from _one_value(solution, len(output))
    yield from _scaled(solution)
    tensors = [i for i, x in enumerate(case) if isinstance(x, Tensor) and x.ndim]
    flip = _before(solution, dict.fromkeys(tensors, lambda x: x.flip(-1)))
    yield "time reversed", FLIPPED, _after(flip, lambda y, _: y.flip(-1))
    across = _before(solution, dict.fromkeys(tensors, lambda x: x.transpose(0, 1)))
    yield "axis transposed", ACROSS, _after(across, lambda y, _: y.transpose(0, 1))
    yield "axis transposed", ACROSS, across


def _one_value(solution: Callable, count: int) -> Iterator[Named]:
    """Yield mistakes in one of a solution's values, and in the values' order."""
    for i in range(count):
        for j in range(i):
            yield "order", ORDER, lambda *x, i=i, j=j: _exchanged(solution(*x), i, j)
        for name, change, message in RESULTS:

            def changed(*arguments, i=i, change=change):
                values = list(solution(*arguments))
                values[i] = change(torch.as_tensor(values[i]))
                return tuple(values)

            yield name, f"{ONE_VALUE.format(i + 1, count)} {message}", changed


def _scaled(solution: Callable) -> Iterator[Named]:
    """Yield mistakes in sums, means and variances, for each possible number n of
    elements.
    """

    def sizes(arguments: tuple) -> list:
        x = next(x for x in arguments if isinstance(x, Tensor) and x.ndim)
        masks = [a.sum() for a in arguments if isinstance(a, Tensor) and _is_mask(a)]
        return [x.numel(), len(x), x.shape[-1], *masks]

    for number in range(4):
        for name, power, message in SIZES:

            def change(y, arguments, number=number, power=power):
                return y * sizes(arguments)[number] ** power

            yield name, message, _after(solution, change)
        for power in (-1.0, -0.5, 0.5, 1.0):  # a standard deviation has half powers

            def change(y, arguments, number=number, power=power):
                n = sizes(arguments)[number]
                return y * (n / (n - 1)) ** power

            yield "biased", BIASED, _after(solution, change)


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())


def _kinds(name: str, x: Any) -> set[str]:
    """Return an argument's kinds; ARGUMENTS uses the same names."""
    if isinstance(x, bool):
        return {"bool"}
    if isinstance(x, int):
        return {"number", "count"}
    if isinstance(x, float):
        return {"number"}
    if not isinstance(x, Tensor):
        return {type(x).__name__}
    if "mask" in name:
        return {"mask", "tensor"}
    if not x.is_floating_point():
        return {"tensor"}
    is_log = any(part in name for part in LOGS)
    return {"tensor", "float", "log"} if is_log else {"tensor", "float"}


def _exchanged(values: Any, i: int, j: int) -> tuple:
    values = list(values)
    values[i], values[j] = values[j], values[i]
    return tuple(values)


def _before(solution: Callable, changes: dict[int, Callable]) -> Callable:
    """Return the solution, preceded by changes of some arguments."""

    def changed(*arguments: Any) -> Any:
        arguments = list(arguments)
        for i, change in changes.items():
            arguments[i] = change(arguments[i])
        return solution(*arguments)

    return changed


def _swap(solution: Callable, i: int, j: int) -> Callable:
    return lambda *arguments: solution(*_exchanged(arguments, i, j))


def _after(solution: Callable, change: Callable) -> Callable:
    """Return the solution, followed by ``change(result, arguments)``."""

    def changed(*arguments: Any) -> Any:
        output = solution(*arguments)
        if isinstance(output, tuple):
            return tuple(change(torch.as_tensor(y), arguments) for y in output)
        return change(torch.as_tensor(output), arguments)

    return changed
