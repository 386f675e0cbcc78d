"""Experiment tracking through accelerate: wandb, tensorboard or, by default, none."""

import os

import numpy as np
from accelerate import Accelerator

from rlhf_course.runtime import distributed
from rlhf_course.runtime.files import check_folder

WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


def start(config) -> Accelerator:
    """An Accelerator for this run, with the tracker that ``config.log_with`` names.

    Without a key or a network wandb writes offline; tensorboard writes to ``runs/``, or to the
    ``logging_dir`` in ``config.project_kwargs``. Raises ``ValueError`` for an unknown tracker,
    ``OSError`` where that is no folder.
    """
    tracker, places, kwargs = config.log_with, config.project_kwargs, config.tracker_kwargs
    if tracker not in (
        None,
        "wandb",
        "tensorboard",
    ):  # accelerate knows more trackers, log() below does not
        raise ValueError(f"log_with={tracker!r} is unknown; choose None, 'wandb' or 'tensorboard'.")
    folder = places.get("logging_dir", places.get("project_dir", "runs"))
    if tracker == "wandb":
        prepare_wandb()
    elif tracker == "tensorboard":
        check_folder(folder)
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
    """Let wandb write offline, and say so, where it has no API key or its server is out of reach.

    It would ask for the key, and wait minutes for the server. A WANDB_MODE that is set stays;
    raises ``ValueError`` for one that wandb does not know.
    """
    import requests

    mode, server = (
        os.environ.get("WANDB_MODE"),
        os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai",
    )
    if mode and mode not in WANDB_MODES:
        raise ValueError(f"WANDB_MODE is {mode!r}; wandb knows {', '.join(WANDB_MODES)}.")
    if mode:
        return
    why = f"No API key for {server} (WANDB_API_KEY, or wandb login)"
    if os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(server):
        try:
            requests.head(server, timeout=5)
            return
        except requests.RequestException:
            why = f"{server} cannot be reached"
    os.environ["WANDB_MODE"] = "offline"
    runs = os.path.join(os.environ.get("WANDB_DIR") or "", "wandb", "offline-run-*")
    print(f"{why}: wandb writes offline. Later, `wandb sync {runs}` uploads it.")


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
