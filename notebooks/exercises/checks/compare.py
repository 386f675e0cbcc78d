"""Whether two results agree, and what differs."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

RTOL, ATOL = 1e-5, 1e-6  # a solution in float32 passes
NO_GRADIENT = (
    "Its value is right, but it has no gradient: compute with torch from what learns "
    "to the result, without .item(), .numpy(), .detach(), a new tensor, or a change in "
    "place on the way."
)


NOTHING = "It returns None. Is there a `return`?"
LEAK = "The value is right, but a gradient flows into `{}`, which does not learn."
CUT = "The value is right, but no gradient reaches `{}`: something is detached."
PARTLY = (
    "The value is right, but the gradient by `{}` is not: it comes through more terms "
    "than it should, or something on the way is detached."
)


class Result(NamedTuple):
    """What a function returns, and its gradients by name where they are compared."""

    values: Any
    slopes: dict[str, Tensor] | None = None


def weighted_sum(output: Any) -> Tensor | None:
    """One number of an output, in which elements cannot stand in for one another."""
    values = list(output) if isinstance(output, (tuple, list)) else [output]
    if not values or not all(isinstance(x, Tensor) for x in values):
        return None
    flat = torch.cat([x.flatten() for x in values])
    flat = flat.where(flat.isfinite(), 0.0)  # −∞ is a constant, however it is reached
    return (flat * torch.arange(1, len(flat) + 1)).sum()


def alike(before: Any, after: Any) -> bool:
    """Whether an argument is what it was."""
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
    """Numbers of any kind as a tensor in float64; None for everything else."""
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


def same(found: Result, wanted: Result, exact: bool = False) -> bool:
    """Whether two results agree, and their gradients where both have them.

    If ``exact``, a gradient needs one to agree with.
    """
    if not same_values(found.values, wanted.values):
        return False
    if exact and found.slopes is not None and wanted.slopes is None:
        return False
    pairs = zip((found.slopes or {}).values(), (wanted.slopes or {}).values())
    return all(close(a, b) for a, b in pairs)


def same_values(found: Any, wanted: Any) -> bool:
    """Whether numbers agree to RTOL, and everything else exactly."""
    if isinstance(wanted, tuple):
        with contextlib.suppress(TypeError):
            return len(found) == len(wanted) and all(map(same_values, found, wanted))
        return False
    a, b = number(found), number(wanted)
    if a is not None and b is not None:
        return close(a, b)
    return isinstance(found, type(wanted)) and found == wanted


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape and the same numbers to RTOL."""
    return a.shape == b.shape and torch.allclose(a, b, RTOL, ATOL, equal_nan=True)


def difference(found: Result, wanted: Result) -> str:
    """The first difference between two results, in words."""
    own, right = found.values, wanted.values
    if own is None or isinstance(own, (tuple, list)) and any(x is None for x in own):
        return NOTHING
    if isinstance(right, tuple):
        count = len(own) if hasattr(own, "__len__") else 1
        if count != len(right):
            return f"It returns {count} value(s), and {len(right)} are wanted."
        pairs = zip(own, right)
        own, right = next((p for p in pairs if not same_values(*p)), (own[0], right[0]))
    if is_nan(own) and not is_nan(right):
        return "It is nan somewhere: log or √ of a negative number, 0 / 0, or ∞ − ∞."
    if not same_values(own, right):
        return _values_differ("It", own, right)
    if found.slopes is None or wanted.slopes is None:
        return NO_GRADIENT
    name = next(n for n, x in wanted.slopes.items() if not close(found.slopes[n], x))
    return _values_differ(
        f"Its gradient by `{name}`", found.slopes[name], wanted.slopes[name]
    )


def gradients(found: list[Result], wanted: list[Result]) -> str | None:
    """Where values are right and gradients are not: which one, and perhaps why."""
    if not all(
        same_values(own.values, right.values) for own, right in zip(found, wanted)
    ):
        return None
    if any(own.slopes is None for own in found):
        return NO_GRADIENT
    for name in wanted[0].slopes:
        pairs = [(a.slopes[name], b.slopes[name]) for a, b in zip(found, wanted)]
        if all(close(*pair) for pair in pairs):
            continue
        if not any(right.any() for _, right in pairs):
            return LEAK.format(name)
        return (CUT if not any(own.any() for own, _ in pairs) else PARTLY).format(name)
    return None


def is_nan(values: Any, everywhere: bool = False) -> bool:
    """Whether a result is not a number somewhere (or everywhere)."""
    if (own := number(values)) is None:
        return False
    return bool(own.isnan().all() if everywhere else own.isnan().any())


def _values_differ(what: str, found: Any, wanted: Any) -> str:
    own, right = number(found), number(wanted)
    if own is None or right is None or not isinstance(wanted, Tensor):
        return f"It returns {found!r}, and {wanted!r} is wanted."
    if own.shape != right.shape:
        return f"It returns shape {tuple(own.shape)}; {tuple(right.shape)} is wanted."
    index = tuple((~torch.isclose(own, right, RTOL, ATOL)).nonzero()[0].tolist())
    numbers = f"yours is {own[index]:.4f}, and {right[index]:.4f} is wanted"
    return f"{what} differs{f' at {list(index)}' if index else ''}: {numbers}."
