"""A training command's output folder: one run at a time, with one set of settings, going on from whole checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState

from rlhf_course.ppo.checkpoint import checkpoints, remove
from rlhf_course.runtime.files import atomic_file, check_folder, check_room, hold, is_damaged, read_json

SETTINGS = "settings.json"
# How the names of settings begin that leave a run's numbers as they are, but for rounding.
MAY_CHANGE = ("config", "dataloader_n", "dataloader_p", "disable_tqdm", "eval_s", "gradient_checkpointing", "hub")
MAY_CHANGE += ("log", "output", "per_device_eval", "push", "report_to", "resume", "run_name", "save", "steps")


@dataclass
class Output:
    """An output folder that is held for this run."""

    folder: Path
    result: Path  # the folder in it that the model is saved to
    settings: dict
    checkpoint: Path | None  # to go on from
    damaged: dict[Path, str]  # later checkpoints that are not whole, and why

    def begin(self, model) -> None:
        """Right before the first step: remove what is damaged, look for room, and write the run's settings down.

        Raises ``OSError`` where the disk has no room for the model's trained weights and two checkpoints.
        """
        if not PartialState().is_main_process:
            return
        for path, why in self.damaged.items():
            print(f"{path} was not whole ({why}) and is removed; {self.checkpoint or 'the start'} takes its place.")
            remove(path)
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        held = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        check_room(self.folder, 7 * trained - held)  # the weights three times, Adam's two moments twice
        with atomic_file(self.folder / SETTINGS) as path:
            path.write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")


@contextmanager
def open_output(
    folder, result: str, settings: dict, inputs: Sequence, option: str, resume, inner=""
) -> Iterator[Output]:
    """Hold a run's output folder, by the first of several processes, for as long as the body runs.

    Args:
        folder: made if there is none.
        result: the folder in it that the model will be saved to.
        settings: by name; a resumed run must have the same, save those of ``MAY_CHANGE``. ``command`` says whose they
            are: outputs of other commands are refused.
        inputs: names of settings that may be folders, of models and data.
        option: what resumes a run on the command line.
        resume: whether to go on from the last whole checkpoint; or the folder of one.
        inner: the folder in it that checkpoints are in.

    Raises ``OSError`` where nothing can be written there, or another run does; ``ValueError`` where this run would
    write over its inputs or another run's result, or finds no whole checkpoint to go on from, or other settings in it.
    """
    folder, state = check_folder(folder), PartialState()
    ours = {check_folder(folder / result), folder / (inner or result)}
    settings = json.loads(json.dumps(settings | {name: _absolute(settings[name]) for name in inputs}, default=str))
    for name in inputs:
        if (place := Path(str(settings[name]))) and ours & {place, *place.parents}:
            raise ValueError(f"{name} {place} is where this run would write. Name another output.")
    with ExitStack() as stack:
        with state.main_process_first():  # the others find what it leaves
            if state.is_main_process:
                if not folder.exists():
                    stack.callback(lambda: any(folder.iterdir()) or folder.rmdir())  # where nothing came of it
                stack.enter_context(hold(folder))
            other = _read(folder)
            if other and other.get("command") != settings["command"]:
                owner = other.get("command", "another program")
                raise ValueError(f"{folder / SETTINGS} is of {owner}. Name another output.")
            if isinstance(resume, str):
                found, damaged = (None, {Path(resume): why}) if (why := damage(Path(resume))) else (Path(resume), {})
            else:
                found, damaged = find_checkpoints(folder / inner)
        if found is None and any((folder / result).glob("*")):
            raise ValueError(f"{folder / result} is there, but no checkpoint. Name another output, or remove it.")
        if resume and found is None:
            why = "".join(f" ({path.name}: {why})" for path, why in damaged.items())
            raise ValueError(f"{option}: there is no whole checkpoint in {folder}{why}. Run without it to begin.")
        if found and not resume:
            raise ValueError(f"{found} is there already: go on with {option}, or name another output.")
        if found:
            compare(settings, found)
        yield Output(folder, folder / result, settings, found, damaged)


def compare(settings: dict, checkpoint: Path) -> None:
    """Raise ``ValueError`` where a run has other settings than the one that a checkpoint is of."""
    before = next((found for found in map(_read, checkpoint.parents[:2]) if found is not None), None)
    if before is None:
        raise ValueError(
            f"The {SETTINGS} of the run of {checkpoint} is missing or damaged. Copy it to {checkpoint.parent}, or "
            "write {} to it, to go on with the settings of this command."
        )
    for name in (name for name in settings if name in before and not name.startswith(MAY_CHANGE)):
        if settings[name] != before[name]:
            raise ValueError(
                f"{name} is {settings[name]} now, and {before[name]} in the run of {checkpoint}. Go on with "
                f"{before[name]}, or name another output."
            )


def _read(folder: Path) -> dict | None:
    """The settings in a folder, None where there are none that can be read."""
    try:
        return read_json(folder / SETTINGS)
    except (OSError, ValueError):
        return None


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The whole checkpoint of the highest step, or None."""
    return find_checkpoints(folder)[0]


def find_checkpoints(folder: str | Path) -> tuple[Path | None, dict[Path, str]]:
    """The whole checkpoint of the highest step, or None, and later ones with what they suffer from."""
    damaged = {}
    for path in sorted(checkpoints(folder), key=lambda path: int(path.name.split("-")[1]), reverse=True):
        if (why := damage(path)) is None:
            return path, damaged
        damaged[path] = why
    return None, damaged


def damage(checkpoint: Path) -> str | None:
    """What a checkpoint suffers from; None where all its files were written to their ends and are as they were."""
    if not any(checkpoint.glob("trainer_state.*")):  # which is written last
        return "trainer_state is missing"
    return next((f"{file.name} is damaged" for file in sorted(checkpoint.rglob("*")) if is_damaged(file)), None)


def _absolute(value):
    """A setting, as an absolute path where it is one of a folder."""
    return os.path.realpath(value) if value is not None and os.path.exists(value) else value
