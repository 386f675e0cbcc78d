"""Checks that say which argument is wrong."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Integral


def read_number(kind: type, value, fits: Callable[[float], bool]) -> int | float | None:
    """``value``, of text too (YAML reads 1e-5 as text), as a number of this kind that fits; None
    for what is none.
    """
    with suppress(TypeError, ValueError, OverflowError):
        number = kind(float(value))
        if number == float(value) and fits(number) and not isinstance(value, bool):
            return number


def check_positive(name: str, value) -> None:
    """Raise ``ValueError`` unless a size is a whole number from 1 on."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")


def check_texts(name: str, texts: Iterable[str]) -> list[str]:
    """Any column of texts as a list. Raises ``TypeError`` for a single text: it would be scored by
    letters.
    """
    found = [*texts] if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
    if not all(isinstance(text, str) for text in found):
        raise TypeError(f"{name} must be a list of texts; got {texts!r:.60}.")
    return found
