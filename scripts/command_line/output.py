"""A training command's output folder: one run at a time, resumed only with the same inputs."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from accelerate import PartialState

from rlhf_course.runtime.files import atomic_file, check_folder, hold, is_damaged, read_json

STATE = "run.json"


class Output(NamedTuple):
    """An output folder that is held for this run."""

    folder: Path
    result: Path  # the folder in it that the model is saved to
    checkpoint: Path | None  # to resume from
    state: dict

    def begin(self) -> None:
        """Write, right before the first step, what a resumed run must agree with."""
        if PartialState().is_main_process:
            with atomic_file(self.folder / STATE) as path:
                path.write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")


@contextmanager
def open_output(
    folder: Path, result: str, settings: dict, inputs: dict, resume: bool | str, inner: str = ""
) -> Iterator[Output]:
    """Hold a run's output folder on the first process while the body runs.

    The model goes to ``result`` in it, checkpoints to ``inner``. A resumed run (from the last whole
    checkpoint, or the one named) must agree in ``settings``, and in the contents of ``inputs``,
    which are models and datasets by option. Raises ``OSError`` if nothing can be written there or
    another run is writing; ``ValueError`` if this run would write over an input or other results,
    cannot resume, or was given a folder of other files.
    """
    folder, state = check_folder(folder), PartialState()
    targets = {check_folder(folder / result), folder / (inner or result)}
    for name, place in inputs.items():
        place = Path(os.path.realpath(place or "/"))
        if targets & {place, *place.parents}:
            raise ValueError(f"{name} {place} is where this run would write. Name another output.")
    now = json.loads(json.dumps({"settings": settings}, default=str))
    with ExitStack() as stack:
        with state.main_process_first():  # the others see what it finds
            if state.is_main_process:
                stack.enter_context(hold(folder))
            now["inputs"] = {name: fingerprint(place) for name, place in inputs.items()}
            checkpoint = find_checkpoint(folder / inner, resume)
            if checkpoint:
                _compare(now, checkpoint, inner)
            elif any((folder / result).glob("*")):
                raise ValueError(f"{folder / result} is there already. Name another output.")
            if state.is_main_process:  # which may write before the others look
                _check_own(folder, settings["command"])
        yield Output(folder, folder / result, checkpoint, now)


def _check_own(folder: Path, command: str) -> None:
    """Raise ``ValueError`` for a folder that holds files, but no run of this command."""
    state = folder / STATE
    if state.exists() and f'"command": "{command}"' in state.read_text("utf-8", "replace"):
        return
    if file := next((path for path in folder.rglob("[!.]*") if path.is_file()), None):
        raise ValueError(f"{file} is no file of a {command} run. Name a new or empty output.")


def find_checkpoint(folder: Path, resume: bool | str) -> Path | None:
    """Return the checkpoint to resume from, None for a new run; say which ones are skipped.

    Raises ``ValueError`` if there is none to resume from, or one where a new run would write.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    if not resume:
        if found:
            raise ValueError(f"{found[-1]} is there already: resume, or name another output.")
        return None
    for path in [Path(resume)] if isinstance(resume, str) else reversed(found):
        if (why := damage(path)) is None:
            return path
        print(f"{path} is skipped: {why}.")
    raise ValueError(f"There is no whole checkpoint in {folder} to resume from.")


def fingerprint(place: str | None) -> str | None:
    """Return a hash of a file's, or of all files' names and contents in a folder; else the name."""
    if place is None or not os.path.exists(place):
        return place
    path, digest = Path(place), hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(file.relative_to(path).as_posix().encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256 {digest.hexdigest()}"


def _compare(now: dict, checkpoint: Path, inner: str) -> None:
    """Raise ``ValueError`` where a checkpoint's run had other settings or inputs."""
    file = checkpoint.parents[1 if inner else 0] / STATE
    if not file.exists():
        raise ValueError(f"{file}, which has the settings of {checkpoint}, is missing.")
    before, cure = read_json(file), "Go on with those, or name another output."
    for kind, values in now.items():
        for name, value in values.items():
            old = before[kind].get(name)
            if value != old and kind == "inputs":
                raise ValueError(
                    f"{name} holds other files than in the run of {checkpoint}. {cure}"
                )
            if value != old:
                raise ValueError(f"{name} is {value}, and {old} in the run of {checkpoint}. {cure}")


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files; None if all of them can be read."""
    if not any(checkpoint.glob("trainer_state.*")):  # which is written last
        return "it holds no trainer_state"
    files = sorted(checkpoint.rglob("*"))
    return next((f"{file.name} is damaged" for file in files if is_damaged(file)), None)
