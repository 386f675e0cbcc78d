"""Train on sums with samplers whose weights are some updates old; record all runs in one card.

    python dev/records/record_stale_samplers.py              # all losses, lags and seeds
    python dev/records/record_stale_samplers.py --seeds 1    # one seed of each

The script runs the cells of deeper/stale_samplers with the tag ``record``. It records one seed of
all losses and lags before the next seed. After each run it writes
figs/measured/stale_samplers_seeds.json, so the same command resumes an interrupted recording.
"""

import argparse
import sys
import time
from itertools import product
from pathlib import Path

import torch

from dev.records.record_process_rewards import load_card, rounded, tagged_cells, write_card
from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.course.run_card import quiet_libraries

NOTEBOOK = "stale_samplers"
CARD = ROOT / "figs" / "measured" / "stale_samplers_seeds.json"
NOT_OF_A_RUN = ("seeds", "lags", "live_loss", "live_lag")  # settings that change no recorded run


def record(names: dict, loss: str, lag: int, seed: int) -> dict:
    """Train one policy; return its evaluations and its batches' statistics."""
    began = time.process_time()
    batches, looks = names["train"](loss, lag, seed)
    return {
        "loss": loss,
        "lag": lag,
        "seed": seed,
        "looks": [round(look, 4) for look in looks],
        "batches": rounded(batches),
        "cpu_s": round(time.process_time() - began, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the notebook's)")
    parser.add_argument("--losses", nargs="+", help="losses, by name (default: all)")
    parser.add_argument("--lags", nargs="+", type=int, help="lags (default: the notebook's)")
    parser.add_argument("--output", type=Path, default=CARD)
    chosen = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(1)
    settings = load_preset(NOTEBOOK, "tiny")
    kept = {}
    for name, value in vars(settings).items():
        if not name.startswith("_") and name not in NOT_OF_A_RUN:
            kept[name] = value
    card = load_card(chosen.output, kept)
    names = tagged_cells(NOTEBOOK, settings)
    losses = chosen.losses or names["LOSSES"]
    lags = chosen.lags or settings.lags
    done = {(run["loss"], run["lag"], run["seed"]) for run in card["runs"]}
    for seed, lag, loss in product(range(chosen.seeds or settings.seeds), lags, losses):
        if (loss, lag, seed) not in done:
            run = record(names, loss, lag, seed)
            card["runs"].append(run)
            write_card(chosen.output, card)
            distance = sum(run["batches"]["distance"][-8:]) / 8
            print(seed, lag, loss, run["looks"], f"{distance:.3f}", run["cpu_s"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
