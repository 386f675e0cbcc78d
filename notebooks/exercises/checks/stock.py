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
PARTS = {"standard deviation": (0.5, -0.5), "variance": (1.0, -1.0)}

ARGUMENTS = {  # name: (kind of argument, change, message)
    "mask forgotten": (
        "mask",
        torch.ones_like,
        "Your result counts padding: `{}` has no effect, as if it were 1 everywhere.",
    ),
    "mask inverted": (
        "mask",
        lambda x: ~x if x.dtype == torch.bool else 1 - x,
        "You keep the padding and drop the real tokens: check what 1 means in `{}`.",
    ),
    "probabilities": (
        "log",
        torch.exp,
        "You treat `{}` as probabilities, but they are logarithms (or you apply exp "
        "once too often).",
    ),
    "softmax first": (
        "float",
        lambda x: x.softmax(-1),
        "You apply a softmax to `{}` before using it.",
    ),
    "log-softmax first": (
        "float",
        lambda x: x.log_softmax(-1),
        "You normalize `{}`; use it unchanged.",
    ),
    "sigmoid first": (
        "float",
        torch.sigmoid,
        "You apply an extra sigmoid to `{}` before using it.",
    ),
    "logarithm first": (
        "float",
        torch.log,
        "You take the logarithm of `{}`; no step needs it.",
    ),
    "sign of an argument": ("float", lambda x: -x, "The sign of `{}` is reversed."),
    "absolute argument": (
        "float",
        torch.abs,
        "You use the absolute value of `{}`; its sign is lost.",
    ),
    "missing": (
        "float",
        torch.zeros_like,
        "`{}` has no effect: your result is the same as if all elements were 0.",
    ),
    "all ones": (
        "float",
        torch.ones_like,
        "`{}` has no effect: your result is the same as if all elements were 1.",
    ),
    "reversed argument": (
        "tensor",
        lambda x: x.flip(-1),
        "You read `{}` backward, from its last column to its first.",
    ),
    "first only": (
        "float",
        lambda x: x[:1].expand_as(x),
        "You use the first element of `{}` in place of all other elements.",
    ),
    "as if 1": (
        "number",
        lambda x: type(x)(1),
        "`{}` has no effect: your result is the same as with 1 in its place.",
    ),
    "as if 0": (
        "number",
        lambda x: type(x)(0),
        "`{}` has no effect: your result is the same as with 0 in its place.",
    ),
    "upside down": (
        "number",
        lambda x: 1 / x,
        "You multiply by `{}` where you should divide, or the reverse.",
    ),
    "negative": ("number", lambda x: -x, "`{}` has the wrong sign in your code."),
    "squared": ("number", lambda x: x * x, "`{}` is applied twice."),
    "rooted": ("number", lambda x: x**0.5, "You take a square root of `{}`."),
    "one too large": (
        "count",
        lambda x: x + 1,
        "You are off by one: an index, a range or an exponent is too large.",
    ),
    "one too small": (
        "count",
        lambda x: x - 1,
        "You are off by one: an index, a range or an exponent is too small.",
    ),
    "inverted": ("bool", lambda x: not x, "`{}` has the opposite effect."),
    "always": ("bool", lambda x: True, "Your code works as if `{}` were always True."),
    "never": ("bool", lambda x: False, "Your code works as if `{}` were always False."),
}
RESULTS = {  # name: (change, message)
    "sign": (lambda y: -y, "The sign is wrong: your result is minus the expected one."),
    "no absolute": (torch.abs, "The sign is lost: your result is never negative."),
    "clamped": (lambda y: y.clamp(min=0), "You set everything below 0 to 0."),
    "probabilities": (
        torch.exp,
        "You return probabilities instead of logarithms, or apply exp too often.",
    ),
    "logarithms": (
        torch.log,
        "You return logarithms: the final exp is missing.",
    ),
    "normalized": (
        lambda y: y.softmax(-1),
        "You apply one softmax too many at the end.",
    ),
    "log-normalized": (
        lambda y: y.log_softmax(-1),
        "You apply one log-softmax too many at the end.",
    ),
    "complement": (lambda y: 1 - y, "Your result is 1 minus the expected one."),
    "reciprocal": (lambda y: 1 / y, "The fraction is inverted."),
    "doubled": (lambda y: 2 * y, "Your result is twice the expected one."),
    "halved": (lambda y: y / 2, "Your result is half of the expected one."),
    "bits": (
        lambda y: y / math.log(2),
        "Your result is in bits (units of log 2), not in nats.",
    ),
    "percent": (
        lambda y: 100 * y,
        "Your result is in percent; return a share.",
    ),
    "squared": (lambda y: y * y, "A square root is missing."),
    "rooted": (lambda y: y.abs().sqrt(), "There is one square root too many."),
    "one more": (lambda y: y + 1, "Your result is too large by 1."),
    "one less": (lambda y: y - 1, "Your result is too small by 1."),
    "rounded": (torch.round, "Your result is rounded, or computed with integers."),
    "floored": (
        torch.floor,
        "Your result is rounded down: // or int() drops the fraction.",
    ),
    "time reversed": (
        lambda y: y.flip(-1),
        "The order is reversed: your result runs from the last to the first.",
    ),
    "transposed": (
        lambda y: y.transpose(0, 1),
        "Rows and columns are swapped.",
    ),
    "late": (
        lambda y: y.roll(1, -1),
        "You are off by one: everything is one position late.",
    ),
    "early": (
        lambda y: y.roll(-1, -1),
        "You are off by one: everything is one position early.",
    ),
    "summed up": (lambda y: y.cumsum(-1), "You return a running sum."),
    "averaged": (
        lambda y: y.mean(),
        "You return one number, the mean of the expected elements: keep the elements.",
    ),
    "added up": (
        lambda y: y.sum(),
        "You return one number, the sum of the expected elements: keep the elements.",
    ),
    "averaged rows": (lambda y: y.mean(-1), "You average over the last dimension."),
    "added up rows": (lambda y: y.sum(-1), "You sum over the last dimension."),
    "centered": (lambda y: y - y.mean(), "You subtract one mean too many."),
    "batch of one": (
        lambda y: y.unsqueeze(0),
        "Your result has one dimension too many.",
    ),
    "kept dimension": (
        lambda y: y.unsqueeze(-1),
        "Your result has one dimension too many.",
    ),
}
SIZES = {  # divisors of a mean
    "sum for a mean": (
        1,
        "You sum where a mean is expected, or divide by too small a number.",
    ),
    "mean for a sum": (-1, "You average where a sum is expected, or divide twice."),
}
BIASED = (
    "Check where you divide by n and where you divide by n − 1, for example in a {}."
)
SWAPPED = "`{}` and `{}` are swapped."
FLIPPED = "Time runs the wrong way: you read the tokens from the last to the first."
ACROSS = "You work along the wrong axis: along columns instead of rows, or the reverse."


def stock(solution: Callable, names: list[str], case: tuple) -> Iterator[Named]:
    """Yield common mistakes (name, message, function) for arguments like ``case``."""
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
    """Yield mistakes in sums, means and variances, for each possible number n of
    elements.
    """

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
    """Return an argument's kinds; ARGUMENTS uses the same names."""
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
    """Return the solution followed by ``change(result, arguments)``."""

    def changed(*arguments: Any) -> Any:
        output = solution(*arguments)
        if isinstance(output, tuple):
            return tuple(change(torch.as_tensor(y), arguments) for y in output)
        return change(torch.as_tensor(output), arguments)

    return changed
