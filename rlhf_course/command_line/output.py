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
    folder = check_folder(folder)
    state = PartialState()
    now = {"settings": json.loads(json.dumps(settings, default=str))}
    with ExitStack() as stack:
        with state.main_process_first():  # the first process writes before others read
            if state.is_main_process:
                stack.enter_context(hold(folder))
                if not resume:
                    check_is_empty(folder)
            now["inputs"] = {name: fingerprint(place) for name, place in inputs.items()}
            checkpoint = find_checkpoint(folder / inner) if resume else None
            if checkpoint:
                _compare(now, folder / "run.json")
        yield Output(folder, folder / result, checkpoint, now)


def check_is_empty(folder: Path) -> None:
    """Raise ``ValueError`` if a folder or a subfolder has a file, except hidden ones."""
    for path in folder.rglob("[!.]*"):
        if path.is_file():
            raise ValueError(f"{path} already exists. Resume the run, or choose another output.")


def find_checkpoint(folder: Path) -> Path:
    """Return the last complete checkpoint, or raise ``ValueError``; print skipped checkpoints."""
    checkpoints = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():  # a copy has another name
            checkpoints[int(step)] = path
    for step in sorted(checkpoints, reverse=True):
        problem = damage(checkpoints[step])
        if problem is None:
            return checkpoints[step]
        print(f"Skipping {checkpoints[step]}: {problem}.")
    raise ValueError(f"{folder} has no complete checkpoint. Start a new run instead.")


def damage(checkpoint: Path) -> str | None:
    """Return the problem with a checkpoint's files, or None if all files are readable."""
    if not any(checkpoint.glob("trainer_state.*")):  # written last
        return "it has no trainer_state"
    if (checkpoint / "trainer_state.json").exists():  # trl's
        for name in ("optimizer.pt", "rng_state*.pth"):
            if not any(checkpoint.glob(name)):
                return f"it has no {name}"
    for file in sorted(checkpoint.rglob("*")):
        if is_damaged(file):
            return f"{file.name} is damaged"
    return None


def fingerprint(place: str | None) -> str | None:
    """Return a hash of a file, or of a folder's names and contents; ``place`` if neither exists."""
    if place is None or not os.path.exists(place):
        return place
    path = Path(place)
    digest = hashlib.sha256()
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
            if value == old:
                continue
            is_setting = kind == "settings"
            difference = f"is {value}, and {old}" if is_setting else "has different files than"
            raise ValueError(
                f"{name} {difference} in the run of {file.parent}. Use the run's value or files,"
                " or choose another output."
            )
