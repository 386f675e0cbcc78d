"""Build each item once per set of inputs, and cache it."""

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import atomic_folder

SEED = 0  # the world does not depend on the seed of a run
CHECKSUM = ".sha256"
PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = ("synthetic/*.py", "synthetic/grammars/*.yaml", "data/*.py", "baichuan/*.py")


def cache_root() -> Path:
    """Return the folder for built items: $RLHF_COURSE_CACHE, or build/cache, under ``ROOT``."""
    return ROOT / Path(os.environ.get("RLHF_COURSE_CACHE") or "build/cache").expanduser()


def cached(name: str, build: Callable, **inputs) -> Path:
    """Return the folder that ``build(folder, **inputs)`` fills, once per set of inputs.

    The key consists of the inputs (for a Path, the folder's checksum) and of :func:`code`. One
    process builds while others wait. An item whose files have changed is rebuilt.
    """
    identities = {}
    for argument, value in inputs.items():
        identities[argument] = checksum(value) if isinstance(value, Path) else value
    key = json.dumps([SEED, build.__name__, identities, code()], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()
    folder = cache_root() / f"{name}-{digest[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if is_intact(folder):
            return folder
        with atomic_folder(folder, stale=("**/[!.]*",)) as new, torch.random.fork_rng():
            torch.manual_seed(SEED)
            build(new, **inputs)
            (new / CHECKSUM).write_text(checksum(new), encoding="utf-8")
    return folder


@cache
def code() -> str:
    """Return the SHA-256 of the files in SOURCES, on which a builder's result depends."""
    text = ""
    for pattern in SOURCES:
        for path in sorted(PACKAGE.glob(pattern)):
            text += path.read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def is_intact(folder: Path) -> bool:
    """Return whether no file has changed since the item was built."""
    file = folder / CHECKSUM
    return file.exists() and file.read_text(encoding="utf-8") == checksum(folder)


def checksum(folder: Path) -> str:
    """Return the SHA-256 of a folder's visible files and their names, or a hub id unchanged."""
    if not folder.is_dir():
        return str(folder)
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not is_hidden:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name.as_posix()} {content}\n".encode())
    return digest.hexdigest()
