"""Describe an unnamed mistake by an ignored argument, or by where the errors are."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from checks.compare import (
    ATOL,
    NOTHING,
    RTOL,
    Result,
    alike,
    close,
    is_nan,
    number,
    same_values,
)


def ignored(
    solution: Callable, answer: Callable, names: list[str], cases: list
) -> str | None:
    """Return a message about an argument that the answer wrongly ignores, or None."""
    for i, name in enumerate(names):
        matters = False
        for case in cases:
            changes = [
                (*case[:i], value, *case[i + 1 :])
                for value in _others(case[i], name, [other[i] for other in cases])
            ]
            if any(_moves(answer, case, changed) for changed in changes):
                break
            matters = matters or any(_moves(solution, case, x) for x in changes)
        else:
            if matters:
                return f"Changing `{name}` does not change your result."
    return None


def _moves(function: Callable, before: tuple, after: tuple) -> bool:
    """Return whether two inputs give different results, or one raises an error."""
    with contextlib.suppress(Exception):
        results = [function(*copy.deepcopy(arguments)) for arguments in (before, after)]
        return is_nan(results[0]) or not same_values(results[1], results[0])
    return True


def unvaried(actual: list[Result], expected: list[Result]) -> str | None:
    """Return a message if results are constant or lack a final mean or sum."""
    own, right = (
        [number(result.values) for result in group] for group in (actual, expected)
    )
    if all(result.values is None for result in actual):
        return NOTHING
    if is_nan(actual[0].values):
        return None
    shaped = own[0] is None or right[0] is None or own[0].shape == right[0].shape
    if shaped and all(same_values(x.values, actual[0].values) for x in actual):
        return "Your result is the same for all inputs that were tried."
    if any(x is None or y is None or y.ndim or not x.ndim for x, y in zip(own, right)):
        return None
    for name, reduce in (("mean", torch.mean), ("sum", torch.sum)):
        if all(close(reduce(x), y) for x, y in zip(own, right)):
            return (
                f"The last step is missing: reduce the result to one number, a {name}."
            )
    return None


def _others(x: Any, name: str, values: list) -> list:
    """Return values to replace an argument: made up, or taken from other cases."""
    if not isinstance(x, Tensor):
        optional = [y for y in values if (x is None) != (y is None)]
        return optional + [y for y in values if type(y) is type(x) and not alike(x, y)]
    if "mask" in name:
        made = torch.ones_like(x)
    else:
        made = 0.7 * x.flip(0) + 0.3 if x.is_floating_point() else x.flip(-1)
    drawn = [y for y in values if isinstance(y, Tensor) and y.shape == x.shape]
    return [y for y in (made, *drawn) if not alike(x, y)]


def where(
    names: list[str], cases: list, wrong: list[bool], actual: list, expected: list
) -> str | None:
    """Return a message about the cases or positions that are wrong, or None."""
    if not all(wrong):
        for condition, holds in _conditions(names, cases):
            if not 2 <= sum(holds) <= len(holds) - 2:
                continue  # a single case may be chance
            if holds == wrong:
                return f"Your result is wrong only where {condition}."
            if holds == [not bad for bad in wrong]:
                return f"Your result is right only where {condition}."
    if isinstance(expected[0].values, tuple):
        return _value(actual, expected)
    places = [_off(*pair) for pair, bad in zip(zip(actual, expected), wrong) if bad]
    if any(off is None for off in places):
        return None
    shown = [case for case, bad in zip(cases, wrong) if bad]
    for i, name in enumerate(names):
        if "mask" in name and all(
            _only_padding(c[i], o) for c, o in zip(shown, places)
        ):
            return "Your result is right on real tokens and wrong on padding."
    for position, at in (("first", 0), ("last", -1)):
        if all(_only_at(off, at) for off in places):
            return f"Only the {position} position is wrong."
    return None


def _value(actual: list[Result], expected: list[Result]) -> str | None:
    """Return a message if exactly one of several values is wrong, else None."""
    count = len(expected[0].values)
    bad = set()
    for mine, right in zip(actual, expected):
        if not isinstance(mine.values, (tuple, list)) or len(mine.values) != count:
            return None
        bad |= {
            i for i in range(count) if not same_values(mine.values[i], right.values[i])
        }
    if len(bad) == 1:
        return f"Only value {1 + bad.pop()} of the {count} values is wrong."
    return None


def _conditions(names: list[str], cases: list) -> Iterator[tuple[str, list[bool]]]:
    """Yield each condition on the arguments, with a bool per case."""
    columns = dict(zip(names, zip(*cases)))
    for name, values in columns.items():
        if all(isinstance(x, Tensor) for x in values):
            if "mask" in name:
                yield "there is no padding", [bool((x == 1).all()) for x in values]
        elif not any(isinstance(x, (list, dict)) for x in values):
            for value in dict.fromkeys(values):
                yield f"`{name}` is {value!r}", [x == value for x in values]
    numbers = [n for n in names if all(type(x) in (int, float) for x in columns[n])]
    for first, second in itertools.combinations(numbers, 2):
        pairs = list(zip(columns[first], columns[second]))
        yield f"`{first}` is below `{second}`", [a < b for a, b in pairs]
        yield f"`{first}` is equal to `{second}`", [a == b for a, b in pairs]
        yield f"`{first}` is above `{second}`", [a > b for a, b in pairs]


def _off(actual: Result, expected: Result) -> Tensor | None:
    """Return a mask of differing elements, or None if shapes or types differ."""
    own, right = number(actual.values), number(expected.values)
    if own is None or right is None or own.shape != right.shape or not right.ndim:
        return None
    return ~torch.isclose(own, right, RTOL, ATOL, equal_nan=True)


def _only_padding(mask: Any, off: Tensor) -> bool:
    return mask.shape == off.shape and not (off & (mask != 0)).any()


def _only_at(off: Tensor, at: int) -> bool:
    rest = off.clone()
    rest[..., at] = False
    return off.shape[-1] > 1 and not rest.any()
