"""Compare two results, and describe their difference."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

RTOL, ATOL = 1e-5, 1e-6  # float32 is accurate enough to pass
NO_GRADIENT = (
    "The value is right, but it has no gradient. Use only torch operations from the "
    "trained arguments to the result, without .item(), .numpy(), .detach(), new "
    "tensors, or in-place changes."
)


NOTHING = "Your function returns None. Is there a `return`?"
LEAK = "The value is right, but a gradient flows into `{}`, which is not trained."
CUT = "The value is right, but no gradient reaches `{}`: a step is detached."
PARTLY = (
    "The value is right, but the gradient with respect to `{}` is wrong: it flows "
    "through a term that should be detached, or a step is detached by mistake."
)


class Result(NamedTuple):
    """Hold a return value and, if gradients are compared, a dict name → gradient."""

    values: Any
    slopes: dict[str, Tensor] | None = None


def weighted_sum(output: Any) -> Tensor | None:
    """Return a sum with distinct weights, or None unless all values are tensors."""
    values = list(output) if isinstance(output, (tuple, list)) else [output]
    if not values or not all(isinstance(x, Tensor) for x in values):
        return None
    flat = torch.cat([x.flatten() for x in values])
    flat = flat.where(flat.isfinite(), 0.0)  # −∞ has no gradient
    return (flat * torch.arange(1, len(flat) + 1)).sum()


def alike(before: Any, after: Any) -> bool:
    """Return whether an argument is unchanged."""
    if isinstance(before, Tensor):
        return before.shape == after.shape and torch.equal(before, after.detach())
    if isinstance(before, dict):
        return list(before) == list(after) and alike(
            [*before.values()], [*after.values()]
        )
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(alike, before, after))
    return before == after


def number(x: Any) -> Tensor | None:
    """Return numbers of any type as a float64 tensor, or None for anything else."""
    if isinstance(x, (list, tuple)):
        parts = [number(part) for part in x]
        if any(part is None for part in parts) or len({p.shape for p in parts}) > 1:
            return None
        return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64)
    if isinstance(x, Tensor):
        return None if x.is_complex() else x.detach().double()
    if isinstance(x, (bool, int, float)) or type(x).__module__ == "numpy":
        with contextlib.suppress(TypeError, ValueError):
            return torch.as_tensor(numpy.array(x, dtype=numpy.float64))
    return None


def same(actual: Result, expected: Result, exact: bool = False) -> bool:
    """Return whether two results agree, including their gradients if both have them.

    If ``exact``, a result with a gradient never agrees with one that has none.
    """
    if not same_values(actual.values, expected.values):
        return False
    if exact and actual.slopes is not None and expected.slopes is None:
        return False
    pairs = zip((actual.slopes or {}).values(), (expected.slopes or {}).values())
    return all(close_slopes(a, b) for a, b in pairs)


def same_values(actual: Any, expected: Any) -> bool:
    """Return whether numbers agree within RTOL, and other values are equal."""
    if isinstance(expected, tuple):
        with contextlib.suppress(TypeError):
            return len(actual) == len(expected) and all(
                map(same_values, actual, expected)
            )
        return False
    a, b = number(actual), number(expected)
    if a is not None and b is not None:
        return close(a, b)
    return isinstance(actual, type(expected)) and actual == expected


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal shapes and agree within RTOL."""
    return a.shape == b.shape and torch.allclose(a, b, RTOL, ATOL, equal_nan=True)


def close_slopes(a: Tensor, b: Tensor) -> bool:
    """Return whether gradients agree within RTOL × the largest; sums lose precision."""
    atol = max(ATOL, RTOL * float(b.abs().max())) if b.numel() else ATOL
    return a.shape == b.shape and torch.allclose(a, b, RTOL, atol, equal_nan=True)


def difference(actual: Result, expected: Result) -> str:
    """Describe the first difference between two results."""
    own, right = actual.values, expected.values
    if own is None or isinstance(own, (tuple, list)) and any(x is None for x in own):
        return NOTHING
    if isinstance(right, tuple):
        count = len(own) if hasattr(own, "__len__") else 1
        if count != len(right):
            return f"You return {count} value(s); expected {len(right)}."
        pairs = zip(own, right)
        own, right = next((p for p in pairs if not same_values(*p)), (own[0], right[0]))
    if is_nan(own) and not is_nan(right):
        return (
            "Your result contains nan, from log or √ of a negative number, 0 / 0, or "
            "∞ − ∞."
        )
    if not same_values(own, right):
        return _values_differ("Your result", own, right)
    if actual.slopes is None or expected.slopes is None:
        return NO_GRADIENT
    name = next(
        n for n, x in expected.slopes.items() if not close_slopes(actual.slopes[n], x)
    )
    return _values_differ(
        f"The gradient with respect to `{name}`",
        actual.slopes[name],
        expected.slopes[name],
    )


def gradients(actual: list[Result], expected: list[Result]) -> str | None:
    """Return a message about a wrong gradient if all values are right, else None."""
    if not all(
        same_values(own.values, right.values) for own, right in zip(actual, expected)
    ):
        return None
    if any(own.slopes is None for own in actual):
        return NO_GRADIENT
    for name in expected[0].slopes:
        pairs = [(a.slopes[name], b.slopes[name]) for a, b in zip(actual, expected)]
        if all(close(*pair) for pair in pairs):
            continue
        if not any(right.any() for _, right in pairs):
            return LEAK.format(name)
        return (CUT if not any(own.any() for own, _ in pairs) else PARTLY).format(name)
    return None


def is_nan(values: Any, everywhere: bool = False) -> bool:
    """Return whether a result contains nan (or only nan)."""
    if (own := number(values)) is None:
        return False
    return bool(own.isnan().all() if everywhere else own.isnan().any())


def _values_differ(what: str, actual: Any, expected: Any) -> str:
    own, right = number(actual), number(expected)
    if own is None or right is None or not isinstance(expected, Tensor):
        return f"You return {actual!r}; expected {expected!r}."
    if own.shape != right.shape:
        return f"You return shape {tuple(own.shape)}; expected {tuple(right.shape)}."
    index = tuple((~torch.isclose(own, right, RTOL, ATOL)).nonzero()[0].tolist())
    numbers = f"got {own[index]:.4f}; expected {right[index]:.4f}"
    return f"{what} differs{f' at {list(index)}' if index else ''}: {numbers}."
