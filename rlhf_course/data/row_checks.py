"""Rows of a dataset: which of them are of use, and rows as batches of lists."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from datasets import Dataset


def check_columns(rows: Dataset, needed: Sequence[str], where: str) -> None:
    """Raise ``ValueError`` unless the rows have all needed columns."""
    if missing := sorted({*needed} - {*rows.column_names}):
        raise ValueError(
            f"No column {' or '.join(missing)} in {where}; it has {', '.join(rows.column_names)}."
            " Rename it."
        )


def keep_usable(
    rows: Dataset, parse: Callable, reasons: Iterable[str], where: str
) -> tuple[Dataset, dict[str, int]]:
    """Return what ``parse`` makes of each row, and how many it dropped for which reason (or None).

    Raises ``ValueError`` where ``parse`` does, and if no row is left.
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
    return Dataset.from_list(kept), report


def describe(report: dict[str, int]) -> str:
    """Return a report of dropped rows as a phrase."""
    counts = [f"{count} {reason}" for reason, count in report.items() if count]
    return ", ".join(counts) or "nothing was dropped"


def keep_short(rows: Dataset, lengths: Sequence[int], max_length: int) -> tuple[Dataset, int]:
    """Return the rows of at most ``max_length`` tokens, and how many are longer."""
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if not kept:
        raise ValueError(
            f"All {len(rows)} rows are longer than max_length={max_length} tokens; the shortest has"
            f" {min(lengths)}. Raise max_length."
        )
    return rows.select(kept), len(rows) - len(kept)


def collate(rows: list[dict]) -> dict[str, list]:
    """Return rows as one dictionary of lists, so that queries may differ in length."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def endless(loader: Iterable) -> Iterator:
    """Yield a loader's batches, epoch after epoch, each in a new order."""
    while True:
        yield from loader
