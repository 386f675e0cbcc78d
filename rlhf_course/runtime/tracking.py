"""Experiment tracking through accelerate: wandb, tensorboard or, by default, none."""

from __future__ import annotations

import netrc
import os
import socket
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from accelerate import Accelerator

from rlhf_course.runtime.distributed import join
from rlhf_course.runtime.files import check_folder

TRACKERS = ("wandb", "tensorboard")
WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


def start(config) -> Accelerator:
    """An Accelerator for this run, with the tracker that ``config.log_with`` names.

    For wandb see :func:`prepare_wandb`; tensorboard writes to ``runs/`` unless ``config.project_kwargs`` names another
    place. Raises ``ValueError`` for an unknown tracker, and ``OSError`` where that place is no folder.
    """
    if config.log_with not in (None, *TRACKERS):  # accelerate knows more trackers, log() below does not
        raise ValueError(f"log_with={config.log_with!r} is unknown; choose None, 'wandb' or 'tensorboard'.")
    if config.log_with == "wandb":
        prepare_wandb()
    places = {"project_dir": "runs", **{_place(k): v for k, v in config.project_kwargs.items()}}
    if config.log_with == "tensorboard":
        check_folder(places["project_dir"])
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


def prepare_wandb() -> None:
    """Let wandb write offline, and say so, where it has no API key or its server is out of reach.

    It would ask for the one, and wait for the other for minutes, then raise. A WANDB_MODE that is set stays; raises
    ``ValueError`` for one that wandb does not know.
    """
    if (mode := os.environ.get("WANDB_MODE")) and mode not in WANDB_MODES:
        raise ValueError(f"WANDB_MODE is {mode!r}; wandb knows {', '.join(WANDB_MODES)}.")
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if "WANDB_MODE" not in os.environ and (why := _out_of_reach(server)):
        os.environ["WANDB_MODE"] = "offline"
        runs = os.path.join(os.environ.get("WANDB_DIR") or "", "wandb", "offline-run-*")
        print(f"{why}: wandb writes offline. Later, `wandb sync {runs}` uploads it.")


def _out_of_reach(server: str) -> str | None:
    """Why wandb cannot log to this server; None where it can."""
    key, url = os.environ.get("WANDB_API_KEY"), urlsplit(server)
    with suppress(OSError, netrc.NetrcParseError):
        key = key or netrc.netrc().authenticators(url.hostname)
    if not key:
        return f"No API key for {server} (WANDB_API_KEY, or wandb login)"
    gate = urlsplit(getproxies().get(url.scheme, server))
    try:
        socket.create_connection((gate.hostname, gate.port or {"http": 80}.get(gate.scheme, 443)), timeout=5).close()
    except OSError as error:
        return f"{server} cannot be reached ({error.strerror or error})"
    return None


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
