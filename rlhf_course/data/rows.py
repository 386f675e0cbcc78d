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
DAMAGE = (
    DatasetGenerationError,
    pyarrow.ArrowInvalid,
    EOFError,
    gzip.BadGzipFile,
    UnicodeDecodeError,
)


def load_split(source: str | Path, split: str, data_file: str | None = None, **options) -> Dataset:
    """Return one split, or a slice of it, from a folder or hub dataset, or from its ``data_file``.

    Raises ``OSError`` if there is no dataset, and ``ValueError`` for damaged files, a split in two
    files or with missing parts, and a missing or empty split.
    """
    check_source(source, "dataset")
    try:
        with hub_errors(str(source), "dataset"):
            if data_file is not None:
                return _load_file(source, split, data_file)
            _check_names(Path(source, options.get("data_dir") or ""))
            return datasets.load_dataset(str(source), split=split, **options)
    except DAMAGE as error:
        cause = " ".join(str(error.__cause__ or error).split())  # in one line
        raise ValueError(
            f"A file of {source} cannot be read: {cause:.200}. Restore the file; save text as"
            " UTF-8."
        ) from error
    except StopIteration:
        raise ValueError(f"Split {split!r} of {source} has no rows. Name another split.") from None
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise ValueError(
            f"{source} comes with a loading script, which is not run here: name a data file."
        ) from None


def _load_file(source: str | Path, split: str, name: str) -> Dataset:
    """Return a split of one file, without the dataset's loading script."""
    if Path(source).is_dir():
        path = Path(source, name)
    else:
        path = hf_hub_download(source, name, repo_type="dataset")
    extension = Path(name.removesuffix(".gz")).suffix.removeprefix(".")
    loader = "json" if extension == "jsonl" else extension
    return datasets.load_dataset(loader, data_files=str(path), split=split)


def _check_names(folder: Path) -> None:
    """Raise ``ValueError`` if a split is in two files or incomplete; warn about identical files."""
    visible = sorted([*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")])
    files = []
    for path in visible:
        name = re.sub(r"(\.gz|\.bak)+$", "", path.name)
        if name.endswith(FORMATS):
            files.append(path)
    _check_shards(files)
    for one, other in combinations(files, 2):
        # Files in two subfolders may be two configurations of a dataset.
        share_folder = one.parent == other.parent
        is_in_root = folder in (one.parent, other.parent)
        if not share_folder and not is_in_root:
            continue
        if _is_same_split(one.name, other.name, share_folder):
            raise ValueError(
                f"{one} and {other.relative_to(folder)} are the same split. Move one file away."
            )
        if filecmp.cmp(one, other, shallow=False):
            warnings.warn(
                f"{one} and {other.name} are identical: rows would repeat. Remove one file.",
                stacklevel=2,
            )


def _check_shards(files: Sequence[Path]) -> None:
    """Raise ``ValueError`` if a shard of …-00000-of-00002.parquet is missing."""
    shards = Counter()
    for path in files:
        match = re.search(r"^(.*)-\d+-of-(\d+)\.", str(path))
        if match:
            shards[match[1], int(match[2])] += 1
    for (stem, expected), present in shards.items():
        if present != expected:
            raise ValueError(f"{stem} has {present} files, not {expected}. Download it again.")


def _is_same_split(one: str, other: str, share_folder: bool) -> bool:
    """Return whether one file name is the other's stem with an addition, as in "train (1).csv"."""
    short, long = sorted((one, other), key=len)
    stem = re.escape(short.partition(".")[0])
    dash = r"-(?!\d)" if share_folder else "-"  # numbered shards of one split share a folder
    return re.match(rf"{stem}(\.|_| \(|{dash})", long) is not None


def check_columns(rows: Dataset, needed: Sequence[str], where: str) -> None:
    """Raise ``ValueError`` for missing columns, and for CSV rows longer than their header."""
    if rows.info.builder_name == "csv" and "__index_level_0__" in rows.column_names:
        raise ValueError(f"Rows of {where} have more fields than the header. Correct the CSV file.")
    missing = sorted(set(needed) - set(rows.column_names))
    if missing:
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
    kept = []
    report = dict.fromkeys(reasons, 0)
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
