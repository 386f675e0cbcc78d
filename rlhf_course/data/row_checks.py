"""Rows of a dataset: which of them are of use, and rows as batches of lists."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import datasets

Parse = Callable[
    [dict], Iterable[tuple[dict, str | None]]
]  # row → new rows, each with the reason to drop it or None


def check_columns(rows: datasets.Dataset, wanted: Sequence[str], where: str, advice: str) -> None:
    """Raise ``ValueError``, with the advice, unless the rows have all wanted columns."""
    if missing := sorted({*wanted} - {*rows.column_names}):
        has = ", ".join(rows.column_names)
        raise ValueError(f"No column {' or '.join(missing)} in {where}; it has {has}. {advice}")


def keep_usable(
    rows: datasets.Dataset, parse: Parse, reasons: Iterable[str], where: str
) -> tuple[datasets.Dataset, dict[str, int]]:
    """What ``parse`` makes of the rows, and how many new rows it dropped for which of the reasons.

    Raises ``ValueError`` where no row is left, and with the row's number where parse does.
    """
    kept, report = [], dict.fromkeys(reasons, 0)
    for index, row in enumerate(rows):
        try:
            for new, reason in parse(row):
                if reason is None:
                    kept.append(new)
                else:
                    report[reason] += 1
        except ValueError as error:
            raise ValueError(f"Row {index} of {where}: {error}") from None
    if not kept:
        raise ValueError(
            f"Nothing usable is left of the {len(rows)} rows in {where}: {describe(report)}."
        )
    return datasets.Dataset.from_list(kept), report


def describe(report: dict[str, int]) -> str:
    """A report of dropped rows as a phrase."""
    return (
        ", ".join(f"{count} {reason}" for reason, count in report.items() if count)
        or "nothing was dropped"
    )


def keep_short(
    rows: datasets.Dataset, lengths: Sequence[int], max_length: int
) -> tuple[datasets.Dataset, int]:
    """The rows of at most ``max_length`` tokens, and how many are longer; ``ValueError`` where all
    are.
    """
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if not kept:
        shortest = f"the shortest has {min(lengths)}. Raise max_length."
        raise ValueError(
            f"All {len(rows)} rows are longer than max_length={max_length} tokens; {shortest}"
        )
    return rows.select(kept), len(rows) - len(kept)


def collate(rows: list[dict]) -> dict[str, list]:
    """Rows as one dictionary of lists: queries stay ragged."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def endless(loader: Iterable) -> Iterator:
    """A loader's batches, epoch after epoch, each in a new order."""
    while True:
        yield from loader
