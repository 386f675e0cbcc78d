"""Load one split from a folder or the hub; filter and batch its rows."""

import filecmp
import gzip
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import datasets
import pyarrow
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import hf_hub_download

from rlhf_course.runtime.hub import check_source, hub_errors

FORMATS = (".json", ".jsonl", ".csv", ".parquet")
DAMAGE = (pyarrow.ArrowInvalid, EOFError, gzip.BadGzipFile, UnicodeDecodeError)


def load_split(source: str | Path, split: str, data_file: str | None = None, **options) -> Dataset:
    """Return one split, or a slice of it, from a folder or hub dataset, or from its ``data_file``.

    Raises ``OSError`` if there is no dataset, and ``ValueError`` for damaged files, a split in two
    files or with missing parts, and a missing or empty split.
    """
    check_source(source, "dataset")
    try:
        with hub_errors(str(source), "dataset"):
            if data_file is not None:
                return datasets.load_dataset(**_named(source, data_file), split=split)
            _check_names(Path(source, options.get("data_dir") or ""))
            return datasets.load_dataset(str(source), split=split, **options)
    except (DatasetGenerationError, *DAMAGE) as error:
        why = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"A file of {source} cannot be read: {why:.200}. Restore the file; save text as UTF-8."
        ) from error
    except StopIteration:
        raise ValueError(f"Split {split!r} of {source} has no rows. Name another split.") from None
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise ValueError(
            f"{source} comes with a loading script, which is not run here: name a data file."
        ) from None


def _named(source: str | Path, name: str) -> dict:
    """Return the arguments that load one file without the dataset's loading script."""
    is_local = Path(source).is_dir()
    path = Path(source, name) if is_local else hf_hub_download(source, name, repo_type="dataset")
    kind = Path(name.removesuffix(".gz")).suffix[1:].removesuffix("l")  # jsonl is json
    return {"path": kind, "data_files": str(path)}


def _check_names(folder: Path) -> None:
    """Raise ``ValueError`` if a split is in two files or incomplete; warn about identical files."""
    files = sorted([*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")])
    data = [path for path in files if re.sub(r"(\.gz|\.bak)+$", "", path.name).endswith(FORMATS)]
    names = [re.search(r"^(.*)-\d+-of-(\d+)\.", str(path)) for path in data]
    for (stem, parts), there in Counter(name.groups() for name in names if name).items():
        if there != int(parts):
            raise ValueError(f"{stem} has {there} files, not {int(parts)}. Download it again.")
    for one, other in combinations(data, 2):
        if folder not in (one.parent, other.parent) and one.parent != other.parent:
            continue
        short, long = sorted((one.name, other.name), key=len)
        part = r"-(?!\d)" if one.parent == other.parent else "-"  # parts share a folder
        if re.match(rf"{re.escape(short.partition('.')[0])}(\.|_| \(|{part})", long):
            raise ValueError(
                f"{one} and {other.relative_to(folder)} are the same split. Move one file away."
            )
        if filecmp.cmp(one, other, shallow=False):
            what = f"{one} and {other.name} are identical: rows would repeat. Remove one file."
            warnings.warn(what, stacklevel=2)


def check_columns(rows: Dataset, needed: Sequence[str], where: str) -> None:
    """Raise ``ValueError`` for missing columns, and for CSV rows longer than their header."""
    if rows.info.builder_name == "csv" and "__index_level_0__" in rows.column_names:
        raise ValueError(f"Rows of {where} have more fields than the header. Correct the CSV file.")
    if missing := sorted({*needed} - {*rows.column_names}):
        raise ValueError(
            f"No column {' or '.join(missing)} in {where}; it has {', '.join(rows.column_names)}."
            " Rename a column."
        )


def keep_usable(
    rows: Dataset, parse: Callable, reasons: Iterable[str], where: str
) -> tuple[Dataset, dict[str, int]]:
    """Return the rows that ``parse`` keeps, and how many rows it drops for each reason.

    ``parse(row)`` yields pairs (new row, reason); a reason of None keeps the row. Raises
    ``ValueError`` if ``parse`` does, or if no row remains.
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
            f"No usable row remains of the {len(rows)} rows in {where}: {describe(report)}."
            " Fix these rows."
        )
    return Dataset.from_list(kept), report


def describe(report: dict[str, int]) -> str:
    """Return the counts of dropped rows as a text such as "2 empty answer, 1 repeated row"."""
    counts = [f"{count} {reason}" for reason, count in report.items() if count]
    return ", ".join(counts) or "nothing was dropped"


def keep_short(rows: Dataset, lengths: Sequence[int], max_length: int) -> tuple[Dataset, int]:
    """Return the rows of at most ``max_length`` tokens, and how many longer rows were dropped.

    Raises ``ValueError`` if no row remains.
    """
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if not kept:
        raise ValueError(
            f"All {len(rows)} rows are longer than max_length={max_length} tokens; the shortest has"
            f" {min(lengths)}. Increase max_length."
        )
    return rows.select(kept), len(rows) - len(kept)


def collate(rows: list[dict]) -> dict[str, list]:
    """Return rows as one dictionary of lists, not of tensors, because query lengths may differ."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def endless(loader: Iterable) -> Iterator:
    """Yield a loader's batches indefinitely; a shuffling loader reshuffles each epoch."""
    while True:
        yield from loader
