"""A training command's output folder: one run at a time, one set of settings, resumed from
undamaged checkpoints.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState

from rlhf_course.ppo.checkpoint import checkpoints, remove
from rlhf_course.runtime.files import (
    atomic_file,
    check_folder,
    check_room,
    hold,
    is_damaged,
    read_json,
)

SETTINGS = "settings.json"
# Settings that begin so leave a run's numbers as they are, but for rounding.
MAY_CHANGE = (
    "config",
    "dataloader_n",
    "dataloader_p",
    "disable_tqdm",
    "eval_s",
    "gradient_checkpointing",
    "hub",
)
MAY_CHANGE += (
    "log",
    "output",
    "per_device_eval",
    "push",
    "report_to",
    "resume",
    "run_name",
    "save",
    "steps",
)


@dataclass
class Output:
    """An output folder that is held for this run."""

    folder: Path
    result: Path  # the folder in it that the model is saved to
    settings: dict
    checkpoint: Path | None  # to resume from
    damaged: dict[Path, str]  # later checkpoints, and what is wrong with them

    def begin(self, model) -> None:
        """Right before the first step: remove damaged checkpoints, check the disk's room, and write
        the settings.
        """
        if not PartialState().is_main_process:
            return
        for path, why in self.damaged.items():
            print(
                f"{path} was not whole ({why}) and is removed; {self.checkpoint or 'the start'}"
                " takes its place."
            )
            remove(path)
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        held = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        check_room(
            self.folder, 7 * trained - held
        )  # for the model, and two checkpoints with Adam's two moments
        with atomic_file(self.folder / SETTINGS) as path:
            path.write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")


@contextmanager
def open_output(
    folder,
    result: str,
    settings: dict,
    inputs: Sequence[str],
    option: str,
    resume: bool | str,
    inner: str = "",
) -> Iterator[Output]:
    """Hold a run's output folder, made if there is none, on rank 0 for as long as the body runs.

    The model goes to ``result`` in it, checkpoints to ``inner``. ``inputs`` are settings that may
    name folders, and ``option`` is what resumes a run on the command line: from the last undamaged
    checkpoint, or from the folder ``resume``. Raises ``OSError`` where nothing can be written
    there, or another run does; ``ValueError`` where this run would overwrite its inputs or other
    results, or finds no undamaged checkpoint to resume, or other settings.
    """
    folder, state = check_folder(folder), PartialState()
    targets = {check_folder(folder / result), folder / (inner or result)}
    folders = {
        name: os.path.realpath(settings[name])
        for name in inputs
        if os.path.exists(settings[name] or "")
    }
    settings = json.loads(json.dumps(settings | folders, default=str))
    for name, place in folders.items():
        if targets & {Path(place), *Path(place).parents}:
            raise ValueError(f"{name} {place} is where this run would write. Name another output.")
    with ExitStack() as stack:
        with state.main_process_first():  # the others see what it finds
            if state.is_main_process:
                stack.enter_context(hold(folder))
            other = _read_settings(folder)
            if other and other.get("command") != settings["command"]:
                owner = other.get("command", "another program")
                raise ValueError(f"{folder / SETTINGS} is of {owner}. Name another output.")
            found, damaged = newest(
                [Path(resume)] if isinstance(resume, str) else checkpoints(folder / inner)
            )
        if found and not resume:
            raise ValueError(
                f"{found} is there already: go on with {option}, or name another output."
            )
        if found:
            _compare(settings, found)
        elif any((folder / result).glob("*")):
            raise ValueError(
                f"{folder / result} is there, but no checkpoint. Name another output, or remove it."
            )
        elif resume:
            why = "".join(f" ({path.name}: {why})" for path, why in damaged.items())
            raise ValueError(
                f"{option}: there is no whole checkpoint in {folder}{why}. Run without it to begin."
            )
        yield Output(folder, folder / result, settings, found, damaged)


def _compare(settings: dict, checkpoint: Path) -> None:
    """Raise ``ValueError`` where the run of a checkpoint had other settings."""
    before = next(
        (found for found in map(_read_settings, checkpoint.parents[:2]) if found is not None), None
    )
    if before is None:
        cure = (
            f"Copy it to {checkpoint.parent}, or write {{}} to it, to go on with the settings of"
            " this command."
        )
        raise ValueError(f"The {SETTINGS} of the run of {checkpoint} is missing or damaged. {cure}")
    for name in settings:
        if not name.startswith(MAY_CHANGE) and settings[name] != (
            old := before.get(name, settings[name])
        ):
            change = f"{name} is {settings[name]} now, and {old} in the run of {checkpoint}."
            raise ValueError(f"{change} Go on with {old}, or name another output.")


def _read_settings(folder: Path) -> dict | None:
    """The settings in a folder, None where there are none that can be read."""
    return None if is_damaged(folder / SETTINGS) else read_json(folder / SETTINGS)


def newest(folders: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The undamaged checkpoint of the highest step, or None, and later ones with what is wrong with
    them.
    """
    damaged = {}
    for path in sorted(folders, key=lambda path: (len(path.name), path.name), reverse=True):
        if (why := damage(path)) is None:
            return path, damaged
        damaged[path] = why
    return None, damaged


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files; None where all of them were written to their ends
    and can be read.
    """
    if not any(checkpoint.glob("trainer_state.*")):  # which is written last
        return "trainer_state is missing"
    return next(
        (f"{file.name} is damaged" for file in sorted(checkpoint.rglob("*")) if is_damaged(file)),
        None,
    )
