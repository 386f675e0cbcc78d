"""Experiment tracking through accelerate: wandb, tensorboard or, by default, none."""

import os
from contextlib import suppress
from netrc import NetrcParseError, netrc
from urllib.parse import urlsplit

import numpy as np
from accelerate import Accelerator

from rlhf_course.runtime import distributed


def start(config) -> Accelerator:
    """An Accelerator for this run, with the tracker that ``config.log_with`` names.

    Without a key wandb writes offline; tensorboard writes to ``runs/``, or to the ``logging_dir``
    in ``config.project_kwargs``. Raises ``ValueError`` for an unknown tracker.
    """
    tracker, places, kwargs = config.log_with, config.project_kwargs, config.tracker_kwargs
    if tracker not in (None, "wandb", "tensorboard"):  # log() below has no other
        raise ValueError(f"log_with={tracker!r} is unknown; choose None, 'wandb' or 'tensorboard'.")
    folder = places.get("logging_dir", places.get("project_dir", "runs"))
    if tracker == "wandb":
        prepare_wandb()
    distributed.init(cpu=config.accelerator_kwargs.get("cpu", False))
    accelerator = Accelerator(log_with=tracker, project_dir=folder, **config.accelerator_kwargs)
    if tracker:
        settings = {
            k: v for k, v in config.to_dict().items() if isinstance(v, bool | int | float | str)
        }
        kwargs = kwargs if tracker in kwargs else {tracker: kwargs}
        accelerator.init_trackers(config.tracker_project_name, settings, kwargs)
    return accelerator


def prepare_wandb() -> None:
    """Let wandb write offline, and say so, where it has no API key: it would ask for one.

    A WANDB_MODE that is set stays.
    """
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or _in_netrc(server):
        return
    os.environ["WANDB_MODE"] = "offline"
    print(
        f"No API key for {server} (WANDB_API_KEY, or wandb login): wandb writes offline. Later,"
        " `wandb sync wandb/offline-run-*` uploads it."
    )


def _in_netrc(server: str) -> bool:
    """Return whether ``wandb login`` has kept a key for this server."""
    with suppress(OSError, NetrcParseError):
        return netrc(os.environ.get("NETRC")).authenticators(urlsplit(server).hostname) is not None
    return False


def log_step(accelerator: Accelerator, stats: dict, columns: dict, scores, step: int) -> None:
    """Log statistics, the scores (B,) of all processes, and this one's table of samples."""
    mine, scores = scores.tolist(), accelerator.gather(scores).cpu()
    if accelerator.is_main_process:
        spread = scores.std(correction=min(1, len(scores) - 1))
        extra = {"env/reward_mean": scores.mean().item(), "env/reward_std": spread.item()}
        stats = stats | extra | {"env/reward_dist": scores.numpy()}
        log(accelerator, stats, columns | {"reward": mine}, step)


def log(accelerator: Accelerator, stats: dict, table: dict[str, list], step: int) -> None:
    """Send one step's numbers, distributions (numpy arrays) and a table of samples to the tracker,
    if there is one.
    """
    if not accelerator.trackers:
        return
    tracker, rows = accelerator.trackers[0], [*zip(*table.values(), strict=True)]
    values = {
        key: value for key, value in stats.items() if isinstance(value, int | float | np.number)
    }
    arrays = {key: value.ravel() for key, value in stats.items() if isinstance(value, np.ndarray)}
    if tracker.name == "wandb":
        import wandb

        values |= {key: wandb.Histogram(array) for key, array in arrays.items()}
        values["game_log"] = wandb.Table(columns=[*table], data=[*map(list, rows)])
    else:
        for key, array in arrays.items():
            tracker.writer.add_histogram(key, array, step)
        lines = (
            " | ".join(map(str, row)).replace("\n", " ")
            for row in (table, ["---"] * len(table), *rows)
        )
        values["game_log"] = "\n".join(lines)
    accelerator.log(values, step=step)


def finish(accelerator: Accelerator) -> None:
    """Write what a tracker still holds back; no step can be logged afterwards."""
    for tracker in accelerator.trackers:
        tracker.finish()
