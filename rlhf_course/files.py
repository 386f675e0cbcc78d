"""Writing folders so that a crash, a full disk or Ctrl-C never leaves a half-written one behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; on success it takes target's place, on failure it is removed.

    Until the body has ended without an error, what stood at ``target`` stays whole.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        content = aside / "new"
        content.mkdir()
        yield content
        if target.exists():
            os.rename(target, aside / "previous")
        os.rename(content, target)
    finally:
        if not target.exists() and (aside / "previous").exists():
            os.rename(aside / "previous", target)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def atomic_file(target: str | os.PathLike) -> Iterator[Path]:
    """Yield a path beside ``target`` to write to; on success it is renamed to target, on failure removed."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        yield aside
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
