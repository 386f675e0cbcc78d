"""Writing so that a crash, a full disk, Ctrl-C or another process never costs what was there, nor leaves half of it.

Everything is written aside and renamed. A folder that exists keeps what is not replaced; what is saved can be read by
whom the umask lets read; one lock per output and per cached item keeps two processes apart.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from filelock import FileLock, Timeout

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What torch and safetensors, which do not raise OSError, say when a disk takes no more.
FULL_TEXTS = ("inline_container", "iostream error", *(f"os error {number}" for number in FULL))


@contextmanager
def atomic_folder(target: str | os.PathLike, stale: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; on success its files take their places there, on failure it is removed.

    A new target appears at once. In one that exists, each file replaces the one of its name; files that match a pattern
    of ``stale`` and were not replaced go, because they would be loaded in place of the new ones; all others stay.
    Raises ``OSError`` with a sentence where target is a file, or the disk takes no more.
    """
    target = check_folder(target)
    with _aside(target) as aside:
        content = aside / "new"
        content.mkdir()
        yield content
        obey_umask(content)
        if not target.exists():
            os.rename(content, target)
            return
        new = [path.relative_to(content) for path in content.rglob("*") if path.is_file()]
        for name in new:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(content / name, target / name)
        for path in {path for pattern in stale for path in target.glob(pattern)}:
            if path.is_file() and path.relative_to(target) not in new:
                path.unlink()


@contextmanager
def atomic_file(target: str | os.PathLike) -> Iterator[Path]:
    """Yield a path beside ``target`` to write to; on success it is renamed to target, on failure removed."""
    target = Path(os.path.realpath(os.path.expanduser(target)))
    with _aside(target) as aside:
        yield aside / target.name
        obey_umask(aside)
        os.replace(aside / target.name, target)


def check_folder(path: str | os.PathLike) -> Path:
    """Where a folder is or can be made, ~ and links followed. Raises ``OSError`` for a file, or where forbidden."""
    path = Path(os.path.realpath(os.path.expanduser(path)))
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{above} is a file, where a folder is needed. Name another place.")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"Nothing can be written to {above}: it belongs to somebody else. Name another place.")
    return path


def check_room(folder: Path, needed: int) -> None:
    """Raise ``OSError`` unless the disk of ``folder`` has room for so many bytes."""
    above = next(place for place in (folder, *folder.parents) if place.exists())
    if (free := shutil.disk_usage(above).free) < needed:
        raise OSError(f"{folder} needs {needed / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB left. Free some.")


@contextmanager
def hold(folder: str | os.PathLike, name: str = "") -> Iterator[Path]:
    """Keep other processes from writing to an output folder, made if there is none, for as long as the body runs.

    With a name, from writing what is called so there. What a killed process left half-written is removed. Raises
    ``OSError`` where another process holds it.
    """
    folder = check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{name and '.' + name}.lock", timeout=0) as lock:
            remove_leftovers(folder)
            try:
                yield folder
            finally:
                Path(lock.lock_file).unlink(missing_ok=True)  # who waits for it notices, and takes a new one
    except Timeout:
        busy = f"Another run is writing to {folder / name}. Wait for its end, or name another place."
        raise BlockingIOError(busy) from None


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that are no more were writing aside in ``folder``."""
    for aside in folder.glob(".*.part"):
        try:
            with FileLock(aside / ".lock", timeout=0):  # its writer, if it lives, holds it
                shutil.rmtree(aside, ignore_errors=True)
        except (Timeout, OSError):  # alive, or somebody else's
            continue


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` for what is being written; its lock says that the writer lives."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".part", dir=target.parent))
    try:
        with FileLock(aside / ".lock"), say_when_full(target):
            yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def say_when_full(target: Path) -> Iterator[None]:
    """Turn what is raised when the disk takes no more into an ``OSError`` with a sentence."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) in FULL or any(text in str(error) for text in FULL_TEXTS):
            raise OSError(
                f"The disk took no more while {target} was written ({shutil.disk_usage(target.parent).free / 1e6:,.0f} "
                "MB left). What stood there before is whole. Free some, or write elsewhere."
            ) from error
        raise


def obey_umask(folder: Path) -> None:
    """Give all in ``folder`` the permissions of files that were made in the usual way; safetensors' are 0600."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        with suppress(PermissionError):  # somebody else's
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def read_json(file: Path) -> dict:
    """The object in a file of JSON. Raises ``ValueError``, which names it, where that is damaged, or not an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content
    except ValueError as error:
        raise ValueError(f"{file} is damaged, or not in JSON: {error}.") from None


def is_damaged(file: Path) -> bool:
    """Whether a file of JSON, safetensors or torch's cannot be read; of safetensors, by its header and its length."""
    import torch  # here, because whoever only writes files need not wait for it
    from safetensors import safe_open

    try:
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            with safe_open(file, "pt"):
                pass
        elif file.suffix in (".pt", ".pth", ".bin"):
            if is_zipfile(file):
                return ZipFile(file).testzip() is not None
            torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # whatever a reader stumbles over
        return True
    return False
