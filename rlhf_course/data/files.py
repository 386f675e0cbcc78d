"""Datasets from a folder or the hub, one split at a time, and what is wrong with their files."""

import filecmp
import gzip
import re
import warnings
from collections import Counter
from itertools import combinations
from pathlib import Path

import datasets
import pyarrow
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import hf_hub_download

from rlhf_course.runtime.hub import check_source, hub_errors

FORMATS = (".json", ".jsonl", ".csv", ".parquet")
DAMAGE = (pyarrow.ArrowInvalid, EOFError, gzip.BadGzipFile, UnicodeDecodeError)


def load_split(
    source: str | Path, split: str, data_file: str | None = None, **options
) -> datasets.Dataset:
    """Return one split, or a slice of it, of a folder or hub dataset, or of a file in it.

    Raises ``OSError`` where nothing is there, and ``ValueError`` for damaged files, a split in two
    formats, and a missing or empty split.
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
            f"A file of {source} cannot be read: {why:.200} Get it again; text must be in UTF-8."
        ) from error
    except StopIteration:
        raise ValueError(f"There is no row in split {split!r} of {source}.") from None
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        what = f"{source} comes with a loading script, which is not run here: name files."
        raise ValueError(what) from None


def _named(source: str | Path, name: str) -> dict:
    """Return what loads one file without the dataset's loading script."""
    is_local = Path(source).is_dir()
    path = Path(source, name) if is_local else hf_hub_download(source, name, repo_type="dataset")
    kind = Path(name.removesuffix(".gz")).suffix[1:].removesuffix("l")  # jsonl is json
    return {"path": kind, "data_files": str(path)}


def _check_names(folder: Path) -> None:
    """Raise ``ValueError`` for a split in two copies or lacking a part; warn of equal files."""
    files = sorted([*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")])
    data = [path for path in files if path.name.removesuffix(".gz").endswith(FORMATS)]
    names = [re.search(r"^(.*)-\d+-of-(\d+)\.", str(path)) for path in data]
    for (stem, parts), there in Counter(name.groups() for name in names if name).items():
        if there != int(parts):
            raise ValueError(f"{stem} has {there} of {int(parts)} parts.")
    for one, other in combinations(data, 2):
        if one.parent != other.parent:
            continue
        if re.match(rf"{re.escape(one.name.partition('.')[0])}(\.|_|-(?!\d))", other.name):
            raise ValueError(f"Which is meant, {one} or {other.name}? Move the other one away.")
        if filecmp.cmp(one, other, shallow=False):
            warnings.warn(
                f"{one} and {other.name} are identical: rows count twice, or are held out too.",
                stacklevel=2,
            )
