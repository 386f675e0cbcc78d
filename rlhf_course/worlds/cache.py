"""Built things are kept: an item is built once for all that decides what it will hold."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from rlhf_course.course.presets import ROOT, Settings
from rlhf_course.runtime.files import atomic_folder, check_folder

SEED = 0  # the world is one and the same, whatever the seed of a run


MANIFEST = ".manifest.json"


PACKAGE = Path(__file__).resolve().parents[1]


def cache_root() -> Path:
    """Where built things are kept: $RLHF_COURSE_CACHE, or build/cache.

    Relative paths start at the project's root (an installed copy: at the working directory).
    """
    return ROOT / Path(os.environ.get("RLHF_COURSE_CACHE") or "build/cache").expanduser()


def cached(name: str, build: Callable, settings: Settings | None = None, **inputs) -> Path:
    """The folder that ``build(folder, …)`` fills, made once for all that decides what it will hold.

    A builder sees its arguments, ``inputs`` or else settings of the same names, and nothing besides; the key is made of
    these (of a folder, which is given as a Path, its files) and of :func:`code`. One process builds and others wait.
    What is damaged is built again; its manifest holds every file's hash.
    """
    if build.__closure__:
        raise TypeError(f"{build.__qualname__} takes what it needs as arguments, so that the cache's key holds it.")
    inputs |= {n: getattr(settings, n) for n in [*inspect.signature(build).parameters][1:] if n not in inputs}
    key = json.dumps([SEED, build.__name__, {n: fingerprint(v) for n, v in inputs.items()}, code()], sort_keys=True)
    folder = cache_root() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if is_whole(folder):
        return folder
    check_folder(folder).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock"), mode=0o666):
        if is_whole(folder):
            return folder
        if folder.exists():
            print(f"{folder} is damaged and is built again.")
        with atomic_folder(folder, stale=("**/[!.]*",)) as aside, torch.random.fork_rng():
            torch.manual_seed(SEED)
            build(aside, **inputs)
            (aside / MANIFEST).write_text(json.dumps(hashes(aside)), encoding="utf-8")
    return folder


def fingerprint(value):
    """What an input is known by in a key: a folder by its files' names and hashes, all else (and a hub id) by itself.

    Hidden files do not count: no builder reads them, and downloads keep their times there.
    """
    if not isinstance(value, Path):
        return value
    found = {}
    for path in sorted(value.rglob("[!.]*")):
        name = path.relative_to(value)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[str(name)] = _known(path, path.stat().st_size, path.stat().st_mtime_ns)
    return found or str(value)


@cache
def code() -> str:
    """SHA-256 of the sources that builders use: these folders, whose imports tests/test_layout.py watches."""
    files = sorted(path for folder in ("worlds", "data", "baichuan") for path in PACKAGE.glob(f"{folder}/*.py"))
    return hashlib.sha256("".join(path.read_text(encoding="utf-8") for path in files).encode()).hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether every file is there as it was built."""
    try:
        return hashes(folder) == json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder but hidden ones, which nobody loads: the manifest, a file browser's."""
    files = (path for path in sorted(folder.rglob("[!.]*")) if path.is_file())
    return {str(path.relative_to(folder)): digest(path) for path in files}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _known(path: Path, size: int, changed: int) -> str:
    """A file's hash, found once in a process for each size and time of change."""
    return digest(path)
