"""Start accelerate, and track runs in wandb or tensorboard; by default, in neither."""

import os
import sys
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env


def init_process(cpu: bool = False) -> PartialState:
    """Initialize this process (rank) before accelerate is used; return its state.

    Ranks that ``accelerate launch`` starts become one run. ``cpu`` or ``ACCELERATE_USE_CPU=1``
    leaves GPUs unused, unless this process already uses a GPU.
    """
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    without_gpu = is_distributed and not torch.cuda.is_available()
    asks_for_cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    return PartialState(cpu=asks_for_cpu or without_gpu)


def start(config) -> Accelerator:
    """Return an Accelerator for this run, with the tracker that ``config.log_with`` names.

    tensorboard writes to ``runs/``, or to the ``logging_dir`` in ``config.project_kwargs``. Raises
    ``ValueError`` for an unknown tracker.
    """
    tracker = config.log_with
    if tracker not in (None, "wandb", "tensorboard"):
        raise ValueError(f"log_with={tracker!r} is unknown; choose None, 'wandb' or 'tensorboard'.")
    if tracker == "wandb":
        prepare_wandb()
    options = config.accelerator_kwargs
    init_process(cpu=options.get("cpu", False))
    folders = config.project_kwargs
    folder = folders.get("logging_dir", folders.get("project_dir", "runs"))
    accelerator = Accelerator(log_with=tracker, project_dir=folder, **options)
    default = os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    requested = options.get("mixed_precision") or default
    actual = accelerator.mixed_precision  # all Accelerators of a process share the first one's
    if actual != requested:
        warnings.warn(
            f"An earlier trainer set mixed_precision {actual}; restart Python.", stacklevel=4
        )
    if tracker:
        settings = {k: v for k, v in config.to_dict().items() if isinstance(v, int | float | str)}
        kwargs = config.tracker_kwargs
        if tracker not in kwargs:
            kwargs = {tracker: kwargs}
        accelerator.init_trackers(config.tracker_project_name, settings, kwargs)
    return accelerator


def prepare_wandb() -> None:
    """If wandb has no API key, make it write offline instead of prompting, and print a line."""
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()  # where wandb login stores keys
    if file.exists() and f"machine {urlsplit(server).hostname}" in file.read_text():
        return
    os.environ["WANDB_MODE"] = "offline"
    print(f"No API key for {server}: wandb writes offline. Upload the run later with `wandb sync`.")


def prepare_tracker(tracker: str | None, folder: Path) -> None:
    """Let wandb write to ``folder``; call this before the first trainer of a notebook.

    ``tracker`` is the setting ``log_with`` or ``report_to``. If ``WANDB_DIR`` is set, it is kept.
    """
    if tracker == "wandb":
        folder.mkdir(parents=True, exist_ok=True)  # wandb ignores a folder that does not exist
        os.environ.setdefault("WANDB_DIR", str(folder))
        prepare_wandb()


def end_run() -> None:
    """End wandb's current run, if there is one; otherwise, the next trainer would log to it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def log_step(accelerator: Accelerator, stats: dict, columns: dict, scores, step: int) -> None:
    """Send statistics, all processes' scores (B,), and this process's samples to the tracker."""
    samples = {**columns, "reward": scores.tolist()}
    all_scores = accelerator.gather(scores).cpu()
    if not accelerator.is_main_process or not accelerator.trackers:
        return
    stats = {
        **stats,
        "env/reward_mean": all_scores.mean().item(),
        "env/reward_std": all_scores.std(correction=min(1, len(all_scores) - 1)).item(),
        "env/reward_dist": all_scores.numpy(),
    }
    numbers = {key: x for key, x in stats.items() if isinstance(x, int | float | np.number)}
    arrays = {key: x.ravel() for key, x in stats.items() if isinstance(x, np.ndarray)}
    header = list(samples)
    rows = [list(row) for row in zip(*samples.values(), strict=True)]
    tracker = accelerator.trackers[0]
    if tracker.name == "wandb":
        import wandb

        for key, array in arrays.items():
            numbers[key] = wandb.Histogram(array)  # wandb would log up to 32 numbers as a list
        tracker.log_table("game_log", header, rows, step=step)
    else:
        for key, array in arrays.items():
            tracker.writer.add_histogram(key, array, step)
        numbers["game_log"] = _markdown(header, rows)
    accelerator.log(numbers, step=step)


def _markdown(header: list[str], rows: list[list]) -> str:
    """Return a Markdown table, with a line per row."""
    lines = []
    for row in [header, ["---"] * len(header), *rows]:
        cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def finish(accelerator: Accelerator) -> None:
    """Flush the tracker; no step can be logged after this."""
    for tracker in accelerator.trackers:
        tracker.finish()
