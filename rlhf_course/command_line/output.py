"""Manage a training command's output folder: one run at a time; resume only with equal inputs."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from accelerate import PartialState

from rlhf_course.runtime.files import atomic_file, check_folder, hold, is_damaged, read_json


class Output(NamedTuple):
    """Hold the paths and state of an output folder, which is locked for this run."""

    folder: Path
    result: Path  # the model's subfolder
    checkpoint: Path | None  # to resume from
    state: dict

    def begin(self) -> None:
        """Write run.json, which a resumed run must match; call this before the first step."""
        self.write("run.json", self.state)

    def write(self, name: str, content: dict) -> None:
        """Write a JSON file into the folder, in the first process."""
        if PartialState().is_main_process:
            with atomic_file(self.folder / name) as path:
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def open_output(
    folder: Path, result: str, settings: dict, inputs: dict, resume: bool, inner: str = ""
) -> Iterator[Output]:
    """Yield a run's output folder, which the first process locks while the with block runs.

    Subfolder ``result`` is for the model; ``inner`` is for checkpoints. A new run needs a folder
    without files. A resumed run continues from the last complete checkpoint; its ``settings``, and
    the contents of its ``inputs`` (option → model or dataset), must be unchanged. Raises
    ``ValueError`` if these rules are broken, and ``OSError`` if another run uses the folder.
    """
    folder, state = check_folder(folder), PartialState()
    now = {"settings": json.loads(json.dumps(settings, default=str))}
    with ExitStack() as stack:
        with state.main_process_first():  # the first process writes before others read
            if state.is_main_process:
                stack.enter_context(hold(folder))
                files = (path for path in folder.rglob("[!.]*") if path.is_file())
                if not resume and (file := next(files, None)):
                    raise ValueError(
                        f"{file} already exists. Resume the run, or choose another output."
                    )
            now["inputs"] = {name: fingerprint(place) for name, place in inputs.items()}
            checkpoint = find_checkpoint(folder / inner) if resume else None
            if checkpoint:
                _compare(now, folder / "run.json")
        yield Output(folder, folder / result, checkpoint, now)


def find_checkpoint(folder: Path) -> Path:
    """Return the last complete checkpoint, or raise ``ValueError``; print skipped checkpoints."""
    found = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    for step in sorted(filter(str.isdecimal, found), key=int, reverse=True):  # no copies
        path = found[step]
        if (why := damage(path)) is None:
            return path
        print(f"Skipping {path}: {why}.")
    raise ValueError(f"{folder} has no complete checkpoint. Start a new run instead.")


def damage(checkpoint: Path) -> str | None:
    """Return the problem with a checkpoint's files, or None if all files are readable."""
    if not any(checkpoint.glob("trainer_state.*")):  # written last
        return "it has no trainer_state"
    needed = (
        ("optimizer.pt", "rng_state*.pth") if (checkpoint / "trainer_state.json").exists() else ()
    )
    if missing := [name for name in needed if not any(checkpoint.glob(name))]:
        return f"it has no {missing[0]}"
    files = sorted(checkpoint.rglob("*"))
    return next((f"{file.name} is damaged" for file in files if is_damaged(file)), None)


def fingerprint(place: str | None) -> str | None:
    """Return a hash of a file, or of a folder's names and contents; ``place`` if neither exists."""
    if place is None or not os.path.exists(place):
        return place
    path, digest = Path(place), hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(file.relative_to(path).as_posix().encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256 {digest.hexdigest()}"


def _compare(now: dict, file: Path) -> None:
    """Raise ``ValueError`` if settings or inputs differ from run.json's."""
    if not file.exists():
        raise ValueError(f"{file} with the run's settings is missing. Choose another output.")
    before = read_json(file)
    for kind, values in now.items():
        for name, value in values.items():
            old = before[kind].get(name)
            words = f"is {value}, and {old}" if kind == "settings" else "has different files than"
            if value != old:
                cure = "Use the run's value or files, or choose another output."
                raise ValueError(f"{name} {words} in the run of {file.parent}. {cure}")
