"""Load one split from a folder or the hub; filter and batch its rows."""

import csv
import filecmp
import gzip
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path

import datasets
import pyarrow
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.csv.csv import Csv
from huggingface_hub import hf_hub_download

from rlhf_course.runtime.hub import check_source, hub_errors

# The suffixes of data files → the loaders of datasets.
LOADERS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# In a table of texts, "NA", "None" and "null" are texts; only an empty field is a missing value.
CSV_OPTIONS = {"keep_default_na": False, "na_values": [""]}
SEPARATORS = (",", ";", "\t")  # of columns in CSV files
FORMATS = (".json", ".jsonl", ".csv", ".parquet")
OTHER_FORMATS = (".arrow", ".tsv", ".txt", ".xlsx", ".zip")
ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
DAMAGE = (
    DatasetGenerationError,
    pyarrow.ArrowInvalid,
    EOFError,
    gzip.BadGzipFile,
    UnicodeDecodeError,
)


class UnknownSplitError(ValueError):
    """The dataset has no split of this name."""


def load_split(source: str | Path, split: str, data_file: str | None = None, **options) -> Dataset:
    """Return one split, or a slice of it, from a folder or hub dataset, or from its ``data_file``.

    A folder may have been written by ``save_to_disk``. Prints the data files in a folder that are
    not read. Raises ``OSError`` if there is no dataset, and ``ValueError`` for damaged files, a
    split in two files or with missing parts, and a missing or empty split.
    """
    check_source(source, "dataset")
    folder = Path(source, options.get("data_dir") or "")
    try:
        with hub_errors(str(source), "dataset"):
            if data_file is not None:
                rows = _load_file(source, split, data_file)
            elif is_saved(folder):
                rows = _load_saved(folder, split)
            else:
                _check_names(folder)
                if folder.is_dir():
                    builder = datasets.load_dataset_builder(str(source), **options)
                    _name_files(folder, split, builder)
                    if isinstance(builder, Csv):
                        options |= _csv_options(builder)
                rows = datasets.load_dataset(str(source), split=split, **options)
            rows.data.validate(full=True)  # such as JSON that is not UTF-8
            return rows
    except DAMAGE as error:
        file = _find_damaged(folder, data_file) or f"A file of {source}"
        raise ValueError(f"{file} cannot be read: {_explain(error)}") from error
    except StopIteration:
        raise ValueError(f"Split {split!r} of {source} has no rows. Name another split.") from None
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise ValueError(
            f"{source} comes with a loading script, which is not run here: name a data file."
        ) from None
    except ValueError as error:
        if not str(error).startswith("Unknown split"):  # the datasets library has no own type
            raise
        raise UnknownSplitError(
            f"{error} Name one of these splits of {source}; commands have --split."
        ) from None


def _explain(error: Exception) -> str:
    """Return in one line why a file cannot be read, and what to do."""
    cause = " ".join(str(error.__cause__ or error).split())
    if re.search(r"Expected \d+ fields", cause):  # pandas, of a row in a CSV file
        return f"{cause:.200}. Put texts that contain the separator in quotes."
    return f"{cause:.200}. Restore the file; save text as UTF-8."


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` wrote a folder: a Dataset's, or a DatasetDict's."""
    is_dataset = (folder / "dataset_info.json").exists() and (folder / "state.json").exists()
    return is_dataset or (folder / "dataset_dict.json").exists()


def _load_saved(folder: Path, split: str) -> Dataset:
    """Return a split, or a slice of it, of a folder that ``save_to_disk`` wrote.

    Files cache-*.arrow in the folder are not data. The only split of a Dataset is "train".
    """
    splits = datasets.load_from_disk(str(folder))
    if isinstance(splits, Dataset):
        splits = {"train": splits}
    sizes = {name: len(rows) for name, rows in splits.items()}
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    first = part.from_ or 0
    last = sizes[part.splitname] if part.to is None else part.to
    if last <= first:
        raise ValueError(f"Split {split!r} of {folder} corresponds to no data. Name another split.")
    return splits[part.splitname].select(range(first, last))


def _load_file(source: str | Path, split: str, name: str) -> Dataset:
    """Return a split of one file, without the dataset's loading script."""
    if Path(source).is_dir():
        path = Path(source, name)
    else:
        path = hf_hub_download(source, name, repo_type="dataset")
    loader, options = _loader_of(Path(name))
    if loader == "csv":
        options |= _read_as_text([Path(path)], options.get("sep", ","))
    return datasets.load_dataset(loader, data_files=str(path), split=split, **options)


def _loader_of(file: Path) -> tuple[str, dict]:
    """Return datasets' loader for a file, and its options."""
    suffix = Path(file.name.removesuffix(".gz")).suffix
    if suffix not in LOADERS:
        raise ValueError(f"{file} is not one of {', '.join(LOADERS)}. Convert it.")
    options = dict(CSV_OPTIONS) if LOADERS[suffix] == "csv" else {}
    if suffix == ".tsv":
        options["sep"] = "\t"
    return LOADERS[suffix], options


def _csv_options(builder: Csv) -> dict:
    """Return the options with which a folder's CSV files are read."""
    files = [Path(file) for part in (builder.config.data_files or {}).values() for file in part]
    has_names = all(re.search(r"\.[ct]sv(\.gz)?$", file.name) for file in files)
    if builder.info.features or not has_names:
        return CSV_OPTIONS
    return CSV_OPTIONS | _read_as_text(files, builder.config.sep)


def _read_as_text(files: Sequence[Path], separator: str) -> dict:
    """Return the options that read all cells of CSV files as texts, such as "007".

    Prints a separator that was recognized in the headers. Raises ``ValueError`` if the files have
    several separators, or a row has more fields than the header.
    """
    found = {file: _read_header(file, separator) for file in files}
    separators = {separator for separator, _ in found.values()}
    if len(separators) > 1:
        raise ValueError(
            f"{' and '.join(file.name for file in files)} have different separators,"
            f" {' and '.join(map(repr, sorted(separators)))}. Save them with one separator."
        )
    recognized = separators.pop() if separators else separator
    options = {"sep": recognized}
    if recognized != separator:
        print(f"Reading {files[0].name} with {recognized!r} between columns.")
    headers = {tuple(header) for _, header in found.values()}
    if len(headers) == 1:  # the loader refuses others
        (header,) = headers
        names = [name or f"Unnamed: {index}" for index, name in enumerate(header)]  # as pandas
        if names and len(set(names)) == len(names):
            options["features"] = Features({name: Value("string") for name in names})
    return options


def _read_header(file: Path, separator: str) -> tuple[str, list[str]]:
    """Return a CSV file's separator, and the names of its columns.

    Raises ``ValueError`` if the first row has more fields than the header.
    """
    for candidate in (separator, *SEPARATORS):
        header, _ = _first_rows(file, candidate)
        if len(header) > 1:
            separator = candidate
            break
    header, first = _first_rows(file, separator)
    if len(first) > len(header) > 0:
        raise ValueError(
            f"Rows of {file} have more fields than the header: {len(first)} and {len(header)},"
            f" separated by {separator!r}. Put texts that contain {separator!r} in quotes, and name"
            " each column."
        )
    return separator, header


def _first_rows(file: Path, separator: str) -> tuple[list[str], list[str]]:
    """Return the header of a CSV file, and its first row; [] where there is none."""
    open_text = gzip.open if file.suffix == ".gz" else open
    rows = []
    with open_text(file, "rt", encoding="utf-8-sig", newline="") as lines:
        try:
            for row in islice(filter(None, csv.reader(lines, delimiter=separator)), 2):
                rows.append(row)
        except csv.Error:  # a very long field
            pass
    header, first = [*rows, [], []][:2]
    return header, first


def as_numbers(rows: Dataset, names: Iterable[str]) -> Dataset:
    """Return rows of a CSV file with numbers and truth values in these columns, where all fit."""
    for name in names:
        if rows.info.builder_name != "csv" or rows.features[name] != Value("string"):
            continue
        for kind in ("int64", "float64", "bool"):
            try:
                rows.data.column(name).cast(kind)
            except pyarrow.ArrowInvalid:
                continue
            rows = rows.cast_column(name, Value(kind))
            break
    return rows


def _data_files(folder: Path, formats: Sequence[str]) -> list[Path]:
    """Return the visible files of these formats in a folder and its subfolders."""
    files = []
    for path in sorted([*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")]):
        name = re.sub(r"(\.gz|\.bak)+$", "", path.name)
        if name.endswith(tuple(formats)):
            files.append(path)
    return files


def _name_files(folder: Path, split: str, builder: datasets.DatasetBuilder) -> None:
    """Print which files a split joins, and which data files of a folder are not read.

    Raises ``ValueError`` for a cache of datasets.
    """
    present = _data_files(folder, FORMATS + OTHER_FORMATS)
    for file in present:
        if re.fullmatch(r"cache-.*\.arrow", file.name):
            raise ValueError(
                f"{file} is a cache of datasets, whose rows would repeat. Move it away; save data"
                " with save_to_disk, which writes state.json."
            )
    by_split = builder.config.data_files or {}
    read = {Path(file).resolve() for files in by_split.values() for file in files}
    unread = [
        str(file.relative_to(folder))
        for file in present
        if file.resolve() not in read and file.name not in ABOUT_DATA
    ]
    if unread:
        print(f"Not read in {folder}: {', '.join(unread)}.")
    stems = {}
    for file in by_split.get(split.partition("[")[0], ()):
        stem = re.sub(r"-\d+-of-\d+", "", Path(file).name)  # shards of one file
        stems.setdefault(stem, Path(file).name)
    if len(stems) > 1:
        print(f"Split {split!r} of {folder} joins {', '.join(sorted(stems.values()))}.")


def _find_damaged(folder: Path, data_file: str | None) -> Path | None:
    """Return the first local data file that cannot be read."""
    files = [folder / data_file] if data_file else _data_files(folder, tuple(LOADERS))
    for file in files:
        try:
            loader, options = _loader_of(file)
            rows = datasets.load_dataset(loader, data_files=str(file), split="train", **options)
            rows.data.validate(full=True)
        except DAMAGE:
            return file
        except (ValueError, StopIteration):  # not a format, or no rows
            continue
    return None


def _check_names(folder: Path) -> None:
    """Raise ``ValueError`` if a split is in two files or incomplete; warn about identical files."""
    files = _data_files(folder, FORMATS)
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
    rows: Dataset,
    parse: Callable,
    reasons: Iterable[str],
    where: str,
    advice: dict[str, str] | None = None,
) -> tuple[Dataset, dict[str, int]]:
    """Return the rows that ``parse`` keeps, and how many rows it drops for each reason.

    ``parse(row)`` yields pairs (new row, reason); a reason of None keeps the row. Raises
    ``ValueError`` if ``parse`` does, or, with the advice for the most frequent reason, if no row
    remains.
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
        most_frequent = max(report, key=report.get)
        action = (advice or {}).get(most_frequent, "Fix these rows.")
        raise ValueError(
            f"No usable row remains of the {len(rows)} rows in {where}: {describe(report)}."
            f" {action}"
        )
    return Dataset.from_list(kept), report


def describe(report: dict[str, int]) -> str:
    """Return the counts of dropped rows as a text such as "2 empty answer, 1 repeated row"."""
    counts = [f"{count} {reason}" for reason, count in report.items() if count]
    return ", ".join(counts) or "no row was dropped"


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
