"""Collect a notebook's results at several seeds, from run cards, in figs/measured/seeds.json.

    for seed in 0 1 2; do
        python scripts/run_notebooks.py --only 04 --seed $seed --output build/seeds/$seed
    done
    python dev/records/measure_seeds.py build/seeds/*

A notebook's intervals cover variation across prompts; these results add variation across seeds.
"""

import json
import sys
from pathlib import Path

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import atomic_file, read_json

KEPT = ROOT / "figs" / "measured" / "seeds.json"


def collect(folders: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by notebook and seed, initial and final metrics, and counts of checks passed and run.

    Raises ``ValueError`` for a folder without run cards, or two cards of the same run.
    """
    notebooks: dict = {}
    for folder in folders:
        if not (cards := sorted(Path(folder).rglob("run_cards/*.json"))):
            raise ValueError(f"{folder} has no run cards. Run run_notebooks.py --output {folder}.")
        for path in cards:
            card = read_json(path)
            seeds = notebooks.setdefault(card["notebook"], {})
            seed = str(card["seed"])
            if seed in seeds:
                twice = f"a second card of {card['notebook']} at seed {seed}"
                raise ValueError(f"{path} is {twice}. Pass only one of them.")
            moved = {k: v for k, v in card["metrics"].items() if k.endswith(("_before", "_after"))}
            passed = [check["passed"] for check in card["checks"].values()]
            seeds[seed] = moved | {"passed": sum(passed), "checks": len(passed)}
    return notebooks


def main(folders: list[str]) -> None:
    """Update each notebook's entry in seeds.json; print the number of seeds."""
    notebooks = collect(folders)
    kept = (read_json(KEPT) if KEPT.exists() else {}) | notebooks
    with atomic_file(KEPT) as part:
        part.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    for name, seeds in notebooks.items():
        print(f"{name}: {len(seeds)} seeds")


if __name__ == "__main__":
    main(sys.argv[1:])
