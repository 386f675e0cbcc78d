"""Track experiments through accelerate in wandb or tensorboard; by default, in neither."""

import os
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from accelerate import Accelerator

from rlhf_course.runtime import distributed


def start(config) -> Accelerator:
    """Return an Accelerator for this run, with the tracker that ``config.log_with`` names.

    tensorboard writes to ``runs/``, or to the ``logging_dir`` in ``config.project_kwargs``. Raises
    ``ValueError`` for an unknown tracker.
    """
    tracker, places, kwargs = config.log_with, config.project_kwargs, config.tracker_kwargs
    if tracker not in (None, "wandb", "tensorboard"):
        raise ValueError(f"log_with={tracker!r} is unknown; choose None, 'wandb' or 'tensorboard'.")
    if tracker == "wandb":
        prepare_wandb()
    distributed.init(cpu=config.accelerator_kwargs.get("cpu", False))
    folder = places.get("logging_dir", places.get("project_dir", "runs"))
    accelerator = Accelerator(log_with=tracker, project_dir=folder, **config.accelerator_kwargs)
    default, found = os.environ.get("ACCELERATE_MIXED_PRECISION"), accelerator.mixed_precision
    if found != (config.accelerator_kwargs.get("mixed_precision") or default or "no"):
        warnings.warn(
            f"An earlier trainer set mixed_precision {found}; restart Python.", stacklevel=4
        )
    if tracker:
        settings = {k: v for k, v in config.to_dict().items() if isinstance(v, int | float | str)}
        kwargs = kwargs if tracker in kwargs else {tracker: kwargs}
        accelerator.init_trackers(config.tracker_project_name, settings, kwargs)
    return accelerator


def prepare_wandb() -> None:
    """If wandb has no API key, make it write offline instead of prompting, and print a line."""
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()  # where wandb login stores keys
    is_known = file.exists() and f"machine {urlsplit(server).hostname}" in file.read_text()
    if is_known or os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return
    os.environ["WANDB_MODE"] = "offline"
    print(f"No API key for {server}: wandb writes offline. Upload the run later with `wandb sync`.")


def log_step(accelerator: Accelerator, stats: dict, columns: dict, scores, step: int) -> None:
    """Send statistics, all processes' scores (B,), and this process's samples to the tracker."""
    table, scores = columns | {"reward": scores.tolist()}, accelerator.gather(scores).cpu()
    if not accelerator.is_main_process or not accelerator.trackers:
        return
    stats = stats | {
        "env/reward_mean": scores.mean().item(),
        "env/reward_std": scores.std(correction=min(1, len(scores) - 1)).item(),
        "env/reward_dist": scores.numpy(),
    }
    tracker, rows = accelerator.trackers[0], [*zip(*table.values(), strict=True)]
    values = {key: x for key, x in stats.items() if isinstance(x, int | float | np.number)}
    arrays = {key: x.ravel() for key, x in stats.items() if isinstance(x, np.ndarray)}
    if tracker.name == "wandb":
        import wandb  # wandb would log up to 32 numbers as a list

        values |= {key: wandb.Histogram(array) for key, array in arrays.items()}
        tracker.log_table("game_log", [*table], [*map(list, rows)], step=step)
    else:
        for key, array in arrays.items():
            tracker.writer.add_histogram(key, array, step)
        rows = [table, ["---"] * len(table), *rows]
        lines = (" | ".join(str(x).replace("|", "\\|") for x in row) for row in rows)
        lines = (line.replace("\n", " ") for line in lines)
        values["game_log"] = "\n".join(lines)
    accelerator.log(values, step=step)


def finish(accelerator: Accelerator) -> None:
    """Flush the tracker; no step can be logged after this."""
    for tracker in accelerator.trackers:
        tracker.finish()
