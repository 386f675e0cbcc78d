"""Writing so that a crash, a full disk, Ctrl-C or another process never destroys what was there,
nor leaves half of it.

Everything is written aside and renamed; permissions follow the umask; one lock per output keeps two
processes apart.
"""

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
# What torch and safetensors, which do not raise OSError, say of a full disk.
FULL_TEXTS = ("inline_container", "iostream error", *(f"os error {number}" for number in FULL))


@contextmanager
def atomic_folder(target: str | os.PathLike, stale: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; on success its files take their places there, on
    failure it is removed.

    A new target appears at once. In one that exists each file replaces its namesake; others that
    match a pattern of ``stale`` go, because they would be loaded in place of the new ones; the rest
    stays. Raises ``OSError`` where target is a file, or the disk is full.
    """
    target = check_folder(target)
    with _aside(target) as aside:
        new = aside / "new"
        new.mkdir()
        yield new
        obey_umask(new)
        if not target.exists():
            os.rename(new, target)
            return
        written = {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
        for name in written:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, target / name)
        old = {
            path.relative_to(target)
            for pattern in stale
            for path in target.glob(pattern)
            if path.is_file()
        }
        for name in old - written:
            (target / name).unlink()


@contextmanager
def atomic_file(target: str | os.PathLike) -> Iterator[Path]:
    """Yield a path beside ``target`` to write to; on success it is renamed to target, on failure
    removed.
    """
    target = Path(os.path.realpath(os.path.expanduser(target)))
    with _aside(target) as aside:
        yield aside / target.name
        obey_umask(aside)
        os.replace(aside / target.name, target)


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` to write to, locked while its writer lives; those of killed
    writers are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".*.part"):
        with (
            suppress(Timeout, OSError),
            FileLock(left / ".lock", timeout=0),
        ):  # alive, or another user's
            shutil.rmtree(left, ignore_errors=True)
    where = {"prefix": f".{target.name}-", "suffix": ".part", "dir": target.parent}
    with tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True) as aside:
        with FileLock(Path(aside, ".lock")), say_when_full(target):
            yield Path(aside)


def check_room(folder: Path, needed: int) -> None:
    """Raise ``OSError`` unless the disk that ``folder`` is on, or will be, has room for so many
    bytes.
    """
    above = next(place for place in (folder, *folder.parents) if place.exists())
    if (free := shutil.disk_usage(above).free) < needed:
        raise OSError(
            f"{folder} needs {needed / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB left."
            " Free some."
        )


@contextmanager
def hold(folder: str | os.PathLike, name: str = "") -> Iterator[None]:
    """Lock an output folder, or one name in it, against other processes; a folder that is new and
    stays empty goes.

    Raises ``OSError`` where another process holds it.
    """
    folder = check_folder(folder)
    is_new, lock = not folder.exists(), FileLock(folder / f"{name and '.' + name}.lock", timeout=0)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        busy = (
            f"Another run is writing to {folder / name}. Wait for its end, or name another place."
        )
        raise BlockingIOError(busy) from None
    try:
        yield
    finally:
        with suppress(OSError):  # the folder is gone, or not empty
            os.unlink(
                lock.lock_file
            )  # before its release: filelock sees that a file was unlinked, and makes another
            is_new and folder.rmdir()
        lock.release()


def check_folder(path: str | os.PathLike) -> Path:
    """Where a folder is or can be made, ~ and links followed. Raises ``OSError`` for a file, or
    where forbidden.
    """
    path = Path(os.path.realpath(os.path.expanduser(path)))
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(
            f"{above} is a file, where a folder is needed. Name another place."
        )
    if not os.access(above, os.W_OK):
        raise PermissionError(
            f"Nothing can be written to {above}: it belongs to somebody else. Name another place."
        )
    return path


@contextmanager
def say_when_full(target: Path) -> Iterator[None]:
    """Turn whatever a full disk raises into an ``OSError`` with a sentence."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) not in FULL and not any(
            text in str(error) for text in FULL_TEXTS
        ):
            raise
        free = shutil.disk_usage(target.parent).free / 1e6
        raise OSError(
            f"The disk took no more while {target} was written ({free:,.0f} MB left). What stood"
            " there before is whole. Free some, or write elsewhere."
        ) from error


def obey_umask(folder: Path) -> None:
    """Give all in ``folder`` the usual permissions of new files; safetensors' are 0600."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        with suppress(PermissionError):  # another user's
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def read_json(file: Path) -> dict:
    """The object in a file of JSON. Raises ``ValueError``, which names it, where that is damaged,
    or not an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content
    except ValueError as error:
        raise ValueError(f"{file} is damaged, or not in JSON: {error}.") from None


def is_damaged(file: Path) -> bool:
    """Whether a file of JSON, safetensors or torch's cannot be read; of safetensors, by its header
    and its length.
    """
    import torch  # here, because whoever only writes files need not wait for it
    from safetensors import safe_open

    try:
        if file.suffix == ".json":
            read_json(file)
        elif file.suffix == ".safetensors":
            safe_open(file, "pt")
        elif file.suffix in (".pt", ".pth", ".bin"):
            if is_zipfile(file):
                return ZipFile(file).testzip() is not None
            torch.load(file, map_location="cpu", weights_only=True)  # older than torch 1.6
    except Exception:  # whatever a reader stumbles over
        return True
    return False
