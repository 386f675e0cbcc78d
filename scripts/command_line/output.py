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


class Output(NamedTuple):
    """An output folder that is held for this run."""

    folder: Path
    result: Path  # the folder in it that the model is saved to
    checkpoint: Path | None  # to resume from
    state: dict

    def begin(self) -> None:
        """Write what a resumed run must match, right before the first step."""
        self.write("run.json", self.state)

    def write(self, name: str, content: dict) -> None:
        """Write a JSON file into the folder, on the first process."""
        if PartialState().is_main_process:
            with atomic_file(self.folder / name) as path:
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def open_output(
    folder: Path, result: str, settings: dict, inputs: dict, resume: bool, inner: str = ""
) -> Iterator[Output]:
    """Hold a run's output folder on the first process while the body runs.

    The model goes to ``result`` in it, checkpoints to ``inner``. A new run needs a folder without
    files. A resumed one continues from the last whole checkpoint, and must agree in ``settings``,
    and in the contents of ``inputs``, which are models and datasets by option. Raises
    ``ValueError`` for a run that must not begin, ``OSError`` if another run is writing there.
    """
    folder, state = check_folder(folder), PartialState()
    now = {"settings": json.loads(json.dumps(settings, default=str))}
    with ExitStack() as stack:
        with state.main_process_first():  # it writes before the others look
            if state.is_main_process:
                stack.enter_context(hold(folder))
                files = (path for path in folder.rglob("[!.]*") if path.is_file())
                if not resume and (file := next(files, None)):
                    raise ValueError(f"{file} exists already: resume, or choose another output.")
            now["inputs"] = {name: fingerprint(place) for name, place in inputs.items()}
            checkpoint = find_checkpoint(folder / inner) if resume else None
            if checkpoint:
                _compare(now, folder / "run.json")
        yield Output(folder, folder / result, checkpoint, now)


def find_checkpoint(folder: Path) -> Path:
    """Return the last whole checkpoint; say which ones are skipped."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    for path in reversed(found):
        if (why := damage(path)) is None:
            return path
        print(f"{path} is skipped: {why}.")
    raise ValueError(f"There is no whole checkpoint in {folder} to resume from.")


def damage(checkpoint: Path) -> str | None:
    """Return the problem of a checkpoint's files; None if all of them can be read."""
    if not any(checkpoint.glob("trainer_state.*")):  # which is written last
        return "it holds no trainer_state"
    files = sorted(checkpoint.rglob("*"))
    return next((f"{file.name} is damaged" for file in files if is_damaged(file)), None)


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


def _compare(now: dict, file: Path) -> None:
    """Raise ``ValueError`` where the run in a folder had other settings or inputs."""
    if not file.exists():
        raise ValueError(f"{file}, which has the settings of the run, is missing.")
    before = read_json(file)
    for kind, values in now.items():
        for name, value in values.items():
            old = before[kind].get(name)
            words = f"is {value}, and {old}" if kind == "settings" else "holds other files than"
            if value != old:
                cure = "Go on with those, or name another output."
                raise ValueError(f"{name} {words} in the run of {file.parent}. {cure}")
