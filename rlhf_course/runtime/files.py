"""Write and rename temporary files, so a crash or Ctrl-C leaves no partial file; lock outputs."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zipfile import ZipFile

from filelock import FileLock, Timeout
from safetensors import safe_open


@contextmanager
def atomic_folder(target: str | os.PathLike, stale: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield an empty folder; on success, move its files to ``target``; on failure, remove it.

    In an existing target, each new file replaces the file of the same name. Other files that match
    a ``stale`` pattern are removed, because they would load instead of the new files; the rest
    stay.
    """
    target = check_folder(target)
    with _aside(target) as aside:
        new = aside / "new"
        new.mkdir()
        yield new
        if not target.exists():
            os.rename(new, target)
            return
        old = set()
        for pattern in stale:
            old.update(path for path in target.glob(pattern) if path.is_file())
        new_files = [path for path in new.rglob("*") if path.is_file()]
        for path in new_files:
            place = target / path.relative_to(new)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
            old.discard(place)
        for path in old:
            path.unlink()


@contextmanager
def atomic_file(target: str | os.PathLike) -> Iterator[Path]:
    """Yield a path to write; on success, rename the file to ``target``; on failure, remove it."""
    target = Path(os.path.realpath(os.path.expanduser(target)))
    with _aside(target) as aside:
        yield aside / target.name
        os.replace(aside / target.name, target)


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target``, on the same disk; remove it at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}-", suffix=".part", dir=target.parent
    ) as aside:
        yield Path(aside)


@contextmanager
def hold(folder: str | os.PathLike, name: str = "") -> Iterator[None]:
    """Make a folder; lock it, or only ``name`` in it; finally, remove a new folder if it is empty.

    Raises ``BlockingIOError`` if another process holds the lock.
    """
    folder = check_folder(folder)
    is_new = not folder.exists()
    lock = FileLock(folder / f".{name or 'run'}.lock", timeout=0)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"Another run is writing to {folder / name}. Wait, or choose another folder."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # the folder is gone, or not empty
            os.unlink(lock.lock_file)
            if is_new:
                folder.rmdir()
        lock.release()


def check_folder(path: str | os.PathLike) -> Path:
    """Resolve ~ and links; raise ``NotADirectoryError`` if the path or a parent is a file."""
    path = Path(os.path.realpath(os.path.expanduser(path)))
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{above} is a file. Choose a folder.")
    return path


def read_json(file: Path) -> dict:
    """Return the object in a JSON file; raise ``ValueError`` if the file is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged or not JSON: {error}. Restore it.") from None


def is_damaged(file: Path) -> bool:
    """Return whether a JSON, safetensors or torch (1.6 or later) file cannot be read."""
    try:
        if file.suffix == ".json":
            read_json(file)
        elif file.suffix == ".safetensors":
            safe_open(file, "np")
        elif file.suffix in (".pt", ".pth", ".bin"):
            return ZipFile(file).testzip() is not None
    except Exception:
        return True
    return False
