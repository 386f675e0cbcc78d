"""Built things are kept: an item is built once for all that decides what it will hold."""

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
SOURCES = (
    "worlds/*.py",
    "worlds/grammars/*.yaml",
    "data/*.py",
    "baichuan/*.py",
)  # all that builders use


def cache_root() -> Path:
    """Where built things are kept: $RLHF_COURSE_CACHE, or build/cache.

    Relative paths start at the project's root (an installed copy: at the working directory).
    """
    return ROOT / Path(os.environ.get("RLHF_COURSE_CACHE") or "build/cache").expanduser()


def cached(name: str, build: Callable, settings: Settings | None = None, **inputs) -> Path:
    """The folder that ``build(folder, …)`` fills, made once for all that decides what it will hold.

    A builder sees its arguments, ``inputs`` or else settings of the same names, and nothing
    besides; the key is made of these (of a folder, which is given as a Path, its files) and of
    :func:`code`. One process builds and others wait. What is damaged is built again; its manifest
    holds every file's hash.
    """
    if build.__closure__:
        raise TypeError(
            f"{build.__qualname__} takes what it needs as arguments, so that the cache's key"
            " holds it."
        )
    inputs |= {
        n: getattr(settings, n)
        for n in [*inspect.signature(build).parameters][1:]
        if n not in inputs
    }
    known_by = {n: (hashes(v) or str(v)) if isinstance(v, Path) else v for n, v in inputs.items()}
    key = json.dumps([SEED, build.__name__, known_by, code()], sort_keys=True)
    folder = cache_root() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if is_intact(folder):
        return folder
    check_folder(folder).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(
        folder.with_name(f".{folder.name}.lock"), mode=0o666
    ):  # other users may take it, too
        if is_intact(folder):
            return folder
        if folder.exists():
            print(f"{folder} is damaged and is built again.")
        with atomic_folder(folder, stale=("**/[!.]*",)) as new, torch.random.fork_rng():
            torch.manual_seed(SEED)
            build(new, **inputs)
            (new / MANIFEST).write_text(json.dumps(hashes(new)), encoding="utf-8")
    return folder


@cache
def code() -> str:
    """SHA-256 of what builders are made of: tests/test_layout.py watches that they import nothing
    else.
    """
    files = (path for pattern in SOURCES for path in sorted(PACKAGE.glob(pattern)))
    return hashlib.sha256(
        "".join(path.read_text(encoding="utf-8") for path in files).encode()
    ).hexdigest()


def is_intact(folder: Path) -> bool:
    """Whether every file is there as it was built."""
    try:
        return hashes(folder) == json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder but hidden ones, which nobody loads: a download's times, a
    file browser's.
    """
    found = {
        path.relative_to(folder): path for path in sorted(folder.rglob("[!.]*")) if path.is_file()
    }
    seen = {
        name: path
        for name, path in found.items()
        if not any(part.startswith(".") for part in name.parts)
    }
    return {
        name.as_posix(): _digest(path, path.stat().st_size, path.stat().st_mtime_ns)
        for name, path in seen.items()
    }


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, found once in a process for each size and time of change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
