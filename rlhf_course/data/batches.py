"""Rows as batches of lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def collate(rows: list[dict]) -> dict[str, list]:
    """Rows as one dictionary of lists: queries stay ragged."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def endless(loader: Iterable) -> Iterator:
    """A loader's batches, epoch after epoch, each in a new order."""
    while True:
        yield from loader
