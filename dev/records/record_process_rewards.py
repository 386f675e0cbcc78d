"""Train notebook 08's policy with three rewards for steps, and record all runs in one card.

    python dev/records/record_process_rewards.py   # skips recorded runs; about ten minutes

The script runs the cells of deeper/process_rewards with the tag ``record``. After each run it
writes figs/measured/process_rewards_seeds.json, so the same command resumes an interrupted
recording.
"""

import argparse
import copy
import json
import sys
import time
from itertools import product
from pathlib import Path

import nbformat
import torch

from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.runtime.files import atomic_file

NOTEBOOK = "process_rewards"
CARD = ROOT / "figs" / "measured" / "process_rewards_seeds.json"
AS_SHIPPED = "sum of right steps, no warm start"
SHOWN = 6  # held-out answers whose texts are kept


def tagged_cells(notebook: str, settings) -> dict:
    """Run the cells with the tag ``record``; return their global names."""
    names = {"settings": settings}
    path = ROOT / "notebooks" / "deeper" / f"{notebook}.ipynb"
    for cell in nbformat.read(path, as_version=4).cells:
        if "record" in cell.metadata.get("tags", []):
            exec(compile(cell.source, notebook, "exec"), names)
    return names


def load_card(path: Path, settings: dict) -> dict:
    """Return the card, new if there is no file; raise ``ValueError`` for other settings."""
    if not path.exists():
        return {"settings": settings, "threads": torch.get_num_threads(), "runs": []}
    card = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name, value in settings.items() if card["settings"].get(name) != value]
    if changed:
        raise ValueError(
            f"{path.name} has runs with another {', '.join(changed)}: restore the settings, or"
            " remove the file."
        )
    return card


def write_card(path: Path, card: dict) -> None:
    """Write the card; an interrupted write keeps the previous one."""
    with atomic_file(path) as part:
        part.write_text(json.dumps(card, ensure_ascii=False) + "\n", encoding="utf-8")


def rounded(table) -> dict:
    """Return a table's columns with four significant digits."""
    return {name: [float(f"{x:.4g}") for x in table[name]] for name in table}


def record(names: dict, start, reward_name: str, seed: int) -> dict:
    """Train one policy; return its curves, its held-out means and some texts."""
    began = time.process_time()
    policy = names["load_policy"]() if reward_name == AS_SHIPPED else copy.deepcopy(start)
    reward = names["REWARDS"][reward_name.removesuffix(", no warm start")]
    history = names["train"](policy, reward, seed)
    table, texts = names["evaluate"](policy)
    return {
        "reward": reward_name,
        "seed": seed,
        "held_out": {name: round(value, 4) for name, value in table.mean().items()},
        "curve": rounded(history),
        "texts": texts[:SHOWN],
        "cpu_s": round(time.process_time() - began, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the notebook's)")
    parser.add_argument("--rewards", nargs="+", help="rewards, by name (default: all)")
    parser.add_argument("--output", type=Path, default=CARD)
    chosen = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(1)
    settings = load_preset(NOTEBOOK, "tiny")
    kept = {name: value for name, value in vars(settings).items() if not name.startswith("_")}
    card = load_card(chosen.output, kept)
    names = tagged_cells(NOTEBOOK, settings)
    torch.manual_seed(0)
    start = names["load_policy"]()
    names["warm_start"](start)
    if "before" not in card:
        table, texts = names["evaluate"](start)
        means = {name: round(value, 4) for name, value in table.mean().items()}
        card["before"] = {"held_out": means, "texts": texts[:SHOWN]}
    rewards = chosen.rewards or [*names["REWARDS"], AS_SHIPPED]
    done = {(run["reward"], run["seed"]) for run in card["runs"]}
    for seed, reward_name in product(range(chosen.seeds or settings.seeds), rewards):
        if (reward_name, seed) not in done:
            run = record(names, start, reward_name, seed)
            card["runs"].append(run)
            write_card(chosen.output, card)
            print(reward_name, seed, run["held_out"], run["cpu_s"], run["texts"][:2], flush=True)


if __name__ == "__main__":
    sys.exit(main())
