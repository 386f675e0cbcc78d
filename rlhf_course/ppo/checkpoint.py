"""Stopping and going on: checkpoints of a PPO run that continue with the numbers of an
uninterrupted one.
"""

import random
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object

from rlhf_course.ppo.input_checks import check_weights
from rlhf_course.runtime.distributed import gather_full, shard
from rlhf_course.runtime.files import atomic_folder, check_folder

STATE_FILE = "trainer_state.pt"


def save_checkpoint(trainer, output_dir: str | Path) -> Path:
    """Write ``checkpoint-STEP`` under output_dir and remove older ones; returns its folder.

    It holds trainable weights, optimizer, schedule, float16's loss scale, KL coefficient, running
    moments, what the detectors have seen, and the random generators of every process; the first
    process writes. The older checkpoint goes only after the new one is whole. Raises
    ``FloatingPointError`` for weights of NaN or Inf.
    """
    output_dir = check_folder(output_dir)
    target = output_dir / f"checkpoint-{trainer.current_step}"
    model, random_states = (
        trainer.accelerator.unwrap_model(trainer.model),
        gather_object([_random_state()]),
    )
    weights = gather_full({name: p for name, p in model.named_parameters() if p.requires_grad})
    optimizer = gather_full(trainer.optimizer.state_dict())
    if not trainer.accelerator.is_main_process:
        return target
    check_weights(weights, trainer.current_step)
    state = {
        "step": trainer.current_step,
        "weights": weights,
        "optimizer": optimizer,
        "kl_coef": trainer.kl_ctl.value,
        "moments": vars(trainer.running),
        "random": random_states,
        "setup": _setup(trainer),
        **{name: part.state_dict() if part else {} for name, part in _parts(trainer).items()},
    }
    with atomic_folder(target) as folder:
        torch.save(state, folder / STATE_FILE)
    for other in checkpoints(output_dir):
        if other != target:
            remove(other)
    return target


def load_checkpoint(trainer, folder: str | Path) -> None:
    """Put a freshly made trainer into the state that :func:`save_checkpoint` saw.

    Raises ``FileNotFoundError`` for a folder that is no checkpoint, and ``ValueError`` when it
    belongs to a policy of another shape, to more or fewer processes, or to another kind of
    optimizer or schedule.
    """
    folder = Path(folder).expanduser()
    if not (folder / STATE_FILE).exists():
        here = ", ".join(sorted(path.name for path in checkpoints(folder))) or "none"
        raise FileNotFoundError(
            f"{folder} is no checkpoint, it holds no {STATE_FILE}. Checkpoints in it: {here}."
        )
    state = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
    model = trainer.accelerator.unwrap_model(trainer.model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = state["weights"]
    if {n: p.shape for n, p in parameters.items()} != {n: w.shape for n, w in saved.items()}:
        raise ValueError(
            f"The checkpoint {folder} is of another policy: names or shapes of trainable weights"
            " differ."
        )
    now = _setup(trainer)
    before = state.get("setup", now)
    for what in (what for what in now if before[what] != now[what]):
        raise ValueError(
            f"The checkpoint {folder} is of a run with {what} {before[what]}; this one has"
            f" {now[what]}."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard(saved[name], parameter))
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    for number, moments in state["optimizer"]["state"].items():
        moments |= {name: shard(value, trained[number]) for name, value in moments.items()}
    trainer.optimizer.load_state_dict(state["optimizer"])
    for name, part in _parts(trainer).items():
        if part and state[name]:
            part.load_state_dict(state[name])
    trainer.kl_ctl.value, trainer.current_step = state["kl_coef"], state["step"]
    vars(trainer.running).update(state["moments"])
    _set_random_state(state["random"][trainer.accelerator.process_index])


def checkpoints(folder: str | Path) -> list[Path]:
    """The folders ``checkpoint-STEP`` with a state or weights, or nothing yet, and links to none;
    in any order.
    """

    def ours(path: Path) -> bool:
        if not path.is_dir():
            return path.is_symlink() and not path.exists()
        return not any(path.iterdir()) or any(
            any(path.glob(name)) for name in ("trainer_state.*", "*.safetensors")
        )

    found = Path(folder).glob("checkpoint-*")
    return [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name) and ours(path)]


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; of a link, not what it leads to."""
    checkpoint.unlink() if checkpoint.is_symlink() else shutil.rmtree(checkpoint)


def _parts(trainer) -> dict:
    """What has a state of its own beside the optimizer, or is None."""
    return {
        "schedule": trainer.lr_scheduler,
        "scaler": trainer.accelerator.scaler,
        "detectors": trainer.detectors,
    }


def _setup(trainer) -> dict:
    """What a run must have in common with the one that it continues."""
    parts = {"optimizer": trainer.optimizer, "schedule": trainer.lr_scheduler}
    names = {
        name: type(getattr(part, name, part)).__name__ if part else "none"
        for name, part in parts.items()
    }
    return {"processes": trainer.accelerator.num_processes} | names


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
    if (
        state["cuda"] is not None and torch.cuda.is_available()
    ):  # a GPU's run may go on on a CPU, with other numbers
        torch.cuda.set_rng_state(state["cuda"].cpu())
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
