"""Experiment tracking through accelerate: wandb, tensorboard or, by default, none."""

from __future__ import annotations

import netrc
import os

import numpy as np
from accelerate import Accelerator

from rlhf_course.processes import join

TRACKERS = ("wandb", "tensorboard")


def start(config) -> Accelerator:
    """An Accelerator for this run, with the tracker that ``config.log_with`` names.

    wandb without an API key writes offline instead of asking for one; tensorboard writes to ``runs/`` unless
    ``config.project_kwargs`` names another place. Raises ``ValueError`` for an unknown tracker.
    """
    if config.log_with not in (None, *TRACKERS):  # accelerate knows more trackers, log() below does not
        raise ValueError(f"log_with={config.log_with!r} is unknown; choose None, 'wandb' or 'tensorboard'.")
    if config.log_with == "wandb" and not _has_wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")
    places = {"project_dir": "runs", **{_place(k): v for k, v in config.project_kwargs.items()}}
    join(cpu=config.accelerator_kwargs.get("cpu", False))
    accelerator = Accelerator(log_with=config.log_with, project_dir=places["project_dir"], **config.accelerator_kwargs)
    if config.log_with is not None:
        settings = {k: v for k, v in config.to_dict().items() if isinstance(v, bool | int | float | str)}
        tracker_kwargs = config.tracker_kwargs
        if tracker_kwargs and config.log_with not in tracker_kwargs:
            tracker_kwargs = {config.log_with: tracker_kwargs}
        accelerator.init_trackers(config.tracker_project_name, settings, tracker_kwargs)
    return accelerator


def _place(name: str) -> str:
    return "project_dir" if name in ("logging_dir", "project_dir") else name


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def log(accelerator: Accelerator, stats: dict, table: dict[str, list], step: int) -> None:
    """Send one step's numbers, distributions (numpy arrays) and a table of samples to the tracker, if there is one."""
    if not accelerator.trackers:
        return
    scalars = {key: value for key, value in stats.items() if isinstance(value, int | float | np.number)}
    accelerator.log(scalars, step=step)
    tracker = accelerator.trackers[0]
    histograms = {key: np.asarray(value).ravel() for key, value in stats.items() if isinstance(value, np.ndarray)}
    rows = list(zip(*table.values(), strict=True))
    if tracker.name == "wandb":
        import wandb

        logged = {key: wandb.Histogram(value) for key, value in histograms.items()}
        logged["game_log"] = wandb.Table(columns=list(table), data=[list(row) for row in rows])
        tracker.run.log(logged, step=step)
    else:
        for key, value in histograms.items():
            tracker.writer.add_histogram(key, value, step)
        lines = (" | ".join(map(str, row)).replace("\n", " ") for row in (table, ["---"] * len(table), *rows))
        tracker.writer.add_text("game_log", "\n".join(lines), step)


def finish(accelerator: Accelerator) -> None:
    """Write what a tracker still holds back; no step can be logged afterwards."""
    for tracker in accelerator.trackers:
        tracker.finish()
