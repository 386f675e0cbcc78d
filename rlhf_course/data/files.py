"""Datasets from a folder or the hub, one split at a time, and what is wrong with their files in one
sentence.
"""

import gzip
import os
from collections.abc import Sequence
from pathlib import Path

import datasets
import pyarrow
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import hf_hub_download, list_repo_files

from rlhf_course.runtime.hub import check_source, hub_errors

FORMATS = (".json", ".jsonl", ".csv", ".parquet")
UNREADABLE = (
    DatasetGenerationError,
    pyarrow.ArrowInvalid,
    EOFError,
    gzip.BadGzipFile,
    UnicodeDecodeError,
)


def load_split(
    source: str | Path, split: str, data_files: str | Sequence[str] | None = None, **options
) -> datasets.Dataset:
    """One split, or a slice of it, of a local folder or a hub dataset, or of some of its files.

    Raises ``OSError`` where nothing is found, ``ValueError`` for damaged files and for a missing or
    empty split.
    """
    check_source(source, "dataset")
    try:
        if (
            Path(source, "state.json").is_file() and data_files is None
        ):  # of save_to_disk, which wrote one split
            return datasets.load_dataset(
                "arrow", data_files=str(Path(source, "*.arrow")), split=split
            )
        with hub_errors(str(source), "dataset"):
            try:
                return datasets.load_dataset(
                    str(source), split=split, data_files=data_files, **options
                )
            except RuntimeError as error:
                if "scripts are no longer supported" not in str(error):
                    raise
                return datasets.load_dataset(
                    **_files_beside_a_script(str(source), data_files), split=split
                )
    except UNREADABLE as error:
        raise _damage(Path(source), error) from error
    except (ValueError, StopIteration) as error:
        sentence = f"No split {split!r} in {source}: {error}"
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            sentence = (
                f"There is no row in split {split!r} of {source}. Check the slice and the files."
            )
        elif "split" not in str(error):
            raise
        raise ValueError(sentence) from None


def _damage(source: Path, error: Exception) -> Exception:
    """What to raise for a dataset that cannot be read: it names the first file that cannot be read
    alone.
    """
    place = f"A file of {source}"
    for path in sorted(source.rglob("*")):
        if path.name.removesuffix(".gz").endswith(FORMATS):
            try:
                datasets.load_dataset(_reader(path.name), data_files=str(path))
            except StopIteration:  # an empty one
                continue
            except UNREADABLE as found:
                place, error = path, found
                break
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and not isinstance(cause, gzip.BadGzipFile):
        return cause
    why = " ".join(str(cause).split()).rstrip(".")
    return ValueError(
        f"{place} cannot be read: {why:.200}. It is cut off, damaged or not what its name says "
        "(text must be in UTF-8); get it anew."
    )


def _reader(name: str) -> str:
    """What datasets calls the format of a file."""
    return Path(name.removesuffix(".gz")).suffix[1:].replace("jsonl", "json")


def _files_beside_a_script(source: str, data_files: str | Sequence[str] | None) -> dict:
    """How to load files of a dataset without its loading script, which datasets no longer runs."""
    names = [data_files] if isinstance(data_files, str) else list(data_files or ())
    local = Path(source).is_dir()
    if not names:
        found = os.listdir(source) if local else list_repo_files(source, repo_type="dataset")
        found = ", ".join(sorted(name for name in found if name.endswith(FORMATS)))
        sentence = (
            f"{source} comes with a loading script, which is not run here. Name files of it to read"
            " instead: "
        )
        raise ValueError(f"{sentence}{found}.")
    paths = [
        str(Path(source, name)) if local else hf_hub_download(source, name, repo_type="dataset")
        for name in names
    ]
    return {"path": _reader(names[0]), "data_files": paths}
