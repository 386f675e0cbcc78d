"""Checks that say which argument is wrong."""

from collections.abc import Iterable
from numbers import Integral


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
