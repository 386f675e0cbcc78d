"""Save and resume PPO runs; a resumed run gives the same numbers as an uninterrupted run."""

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object

from rlhf_course.policy.save_load import base_fingerprint
from rlhf_course.policy.saving import check_weights
from rlhf_course.runtime.files import atomic_folder, check_folder

STATE_FILE = "trainer_state.pt"


def save_checkpoint(trainer, output_dir: str | Path, keep: int = 1) -> Path:
    """On the first process, write the folder ``checkpoint-STEP`` in output_dir; return its path.

    The folder contains the trainable weights, each process's random state, and everything else that
    a step changes. This trainer's checkpoints in output_dir (written or resumed from) are removed,
    oldest first, until ``keep`` (at least 1) remain; no other file is removed. Raises
    ``FloatingPointError`` if a weight is NaN or Inf, ``RuntimeError`` after an interrupted step,
    and ``FileExistsError`` if the folder has files that this trainer did not write.
    """
    trainer.check_whole()
    target = check_folder(output_dir) / f"checkpoint-{trainer.current_step}"
    random_states = gather_object([_random_state()])
    if not trainer.accelerator.is_main_process:
        return target
    if target not in trainer.checkpoints and any(target.glob("*")):
        raise FileExistsError(f"{target} has files from another run. Choose another folder.")
    weights = _trainable(trainer)
    check_weights(weights)
    state = {
        "step": trainer.current_step,
        "weights": weights,
        "optimizer": trainer.optimizer.state_dict(),
        "kl_coef": trainer.kl_ctl.value,
        "moments": vars(trainer.running),
        "random": random_states,
        "setup": _setup(trainer),
        **{name: part.state_dict() if part else {} for name, part in _parts(trainer).items()},
    }
    with atomic_folder(target) as folder:
        torch.save(state, folder / STATE_FILE)
    pattern = str(target.with_name("checkpoint-*"))
    found = [path for path in trainer.checkpoints if path != target and path.match(pattern)]
    trainer.checkpoints = [*found, target]
    while len(trainer.checkpoints) > max(keep, 1):
        oldest = trainer.checkpoints.pop(0)
        (oldest / STATE_FILE).unlink(missing_ok=True)
        with suppress(OSError):
            oldest.rmdir()
    return target


def load_checkpoint(trainer, folder: str | Path) -> None:
    """Restore into a new trainer the state that :func:`save_checkpoint` wrote.

    A fixed KL coefficient is not restored, nor is the learning rate if there is no schedule. Raises
    ``FileNotFoundError`` if there is no checkpoint, and ``ValueError`` if the saved policy,
    reference, number of processes, optimizer or schedule is not the trainer's.
    """
    folder = Path(folder).expanduser()
    state = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
    parameters, saved = _trainable(trainer), state["weights"]
    if {n: p.shape for n, p in parameters.items()} != {n: w.shape for n, w in saved.items()}:
        raise ValueError(f"{folder} belongs to another policy: load the policy that was saved.")
    for what, now in _setup(trainer).items():
        if (before := state["setup"].get(what)) != now:
            raise ValueError(
                f"{folder} was saved with {what} {before}; this run has {now}. Use the same {what}."
            )
    groups = zip(trainer.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
    for now, before in () if trainer.lr_scheduler else groups:  # keep the new trainer's rate
        before["lr"] = now["lr"]
    trainer.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    for name, part in _parts(trainer).items():
        if part and state[name]:
            part.load_state_dict(state[name])
    trainer.current_step = state["step"]
    if trainer.config.adap_kl_ctrl:
        trainer.kl_ctl.value = state["kl_coef"]
    vars(trainer.running).update(state["moments"])
    _set_random_state(state["random"][trainer.accelerator.process_index])
    trainer.checkpoints, trainer.is_whole = [folder.resolve()], True


def _trainable(trainer) -> dict[str, torch.Tensor]:
    return {name: p for name, p in trainer.policy.named_parameters() if p.requires_grad}


def _parts(trainer) -> dict:
    """Return the trainer's stateful components except the optimizer; None for an absent one."""
    scaler = trainer.accelerator.scaler
    return {"schedule": trainer.lr_scheduler, "scaler": scaler, "detectors": trainer.detectors}


def _setup(trainer) -> dict:
    """Return the properties that a resumed run must share with its checkpoint."""
    schedule = trainer.lr_scheduler
    return {
        "processes": trainer.accelerator.num_processes,
        "reference": base_fingerprint(trainer.ref_model or trainer.policy),
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "schedule": type(schedule).__name__ if schedule else "none",
    }


def _random_state() -> dict:
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def _set_random_state(state: dict) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
