"""Save and resume PPO runs; a resumed run gives the same numbers as an uninterrupted run."""

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object

from rlhf_course.policy.save_load import base_fingerprint, check_weights
from rlhf_course.runtime.files import atomic_folder, check_folder

STATE_FILE = "trainer_state.pt"


def save_checkpoint(trainer, output_dir: str | Path, keep: int = 1) -> Path:
    """On the first process, write the folder ``checkpoint-STEP`` in output_dir; return its path.

    The folder contains the trainer's state, with each process's random state. This trainer's
    checkpoints in output_dir (written or resumed from) are removed, oldest first, until ``keep``
    (at least 1) remain; no other file is removed. Raises ``FloatingPointError`` if a weight is NaN
    or Inf, ``RuntimeError`` after an interrupted step, and ``FileExistsError`` if the folder has
    files that this trainer did not write.
    """
    trainer.check_whole()
    target = check_folder(output_dir) / f"checkpoint-{trainer.current_step}"
    random_states = gather_object([random_state()])
    if not trainer.accelerator.is_main_process:
        return target
    if target not in trainer.checkpoints and any(target.glob("*")):
        raise FileExistsError(f"{target} has files from another run. Choose another folder.")
    state = trainer.state_dict()
    check_weights(state["weights"])
    state["random"] = random_states
    state["setup"] = setup_of(trainer)
    with atomic_folder(target) as folder:
        torch.save(state, folder / STATE_FILE)
    earlier = [
        path
        for path in trainer.checkpoints
        if path != target and path.parent == target.parent and path.name.startswith("checkpoint-")
    ]
    trainer.checkpoints = [*earlier, target]
    while len(trainer.checkpoints) > max(keep, 1):
        remove_checkpoint(trainer.checkpoints.pop(0))
    return target


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, and its folder if it has no other files."""
    (folder / STATE_FILE).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def load_checkpoint(trainer, folder: str | Path) -> None:
    """Restore into a new trainer the state that :func:`save_checkpoint` wrote.

    A fixed KL coefficient is not restored, nor is the learning rate if there is no schedule. Raises
    ``FileNotFoundError`` if there is no checkpoint, and ``ValueError`` if the saved policy,
    reference, number of processes, optimizer or schedule is not the trainer's.
    """
    folder = Path(folder).expanduser()
    state = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
    check_fits(trainer, state, folder)
    trainer.load_state_dict(state)
    set_random_state(state["random"][trainer.accelerator.process_index])
    trainer.checkpoints = [folder.resolve()]


def check_fits(trainer, state: dict, folder: Path) -> None:
    """Raise ``ValueError`` if a saved state belongs to a trainer of other parts."""
    shapes = {name: weight.shape for name, weight in trainer.trainable_weights().items()}
    if shapes != {name: weight.shape for name, weight in state["weights"].items()}:
        raise ValueError(f"{folder} belongs to another policy: load the policy that was saved.")
    for name, value in setup_of(trainer).items():
        saved = state["setup"].get(name)
        if saved != value:
            raise ValueError(
                f"{folder} was saved with {name} {saved}; this run has {value}. Use the same"
                f" {name}."
            )


def setup_of(trainer) -> dict:
    """Return the properties that a resumed run must share with its checkpoint."""
    schedule = trainer.lr_scheduler
    reference = trainer.ref_model or trainer.policy  # with LoRA, the policy's frozen base
    return {
        "processes": trainer.accelerator.num_processes,
        "reference": base_fingerprint(reference),
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "schedule": type(schedule).__name__ if schedule else "none",
    }


def random_state() -> dict:
    """Return the states of this process's random generators."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict) -> None:
    """Set the states that :func:`random_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
