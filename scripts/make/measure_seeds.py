"""The headline of a notebook at several seeds: what the run cards of those runs say, kept in
figs/measured/seeds.json.

    for seed in 0 1 2; do
        python scripts/run_notebooks.py --only 04 --seed $seed --output build/seeds/$seed
    done
    python scripts/make/measure_seeds.py build/seeds/*

An interval in a notebook covers prompts; this is what a second and third run of the same notebook
gave.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import atomic_file, read_json

KEPT = ROOT / "figs" / "measured" / "seeds.json"


def collect(folders: list[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """Of every run card in the folders: notebook → seed → the metrics measured before and after,
    and passed checks.

    Raises ``ValueError`` for a folder without cards, and for two cards of one notebook and seed.
    """
    found: dict = {}
    for folder in folders:
        cards = sorted(folder.rglob("run_cards/*.json"))
        if not cards:
            raise ValueError(
                f"{folder} holds no run cards; run scripts/run_notebooks.py --output {folder}"
                " first."
            )
        for path in cards:
            card = read_json(path)
            seeds, seed = found.setdefault(card["notebook"], {}), str(card["seed"])
            if seed in seeds:
                raise ValueError(
                    f"{path}: a second card of {card['notebook']} at seed {seed}; give one folder"
                    " per seed."
                )
            moved = {k: v for k, v in card["metrics"].items() if k.endswith(("_before", "_after"))}
            checks = card["checks"].values()
            seeds[seed] = moved | {
                "passed": sum(c["passed"] for c in checks),
                "checks": len(checks),
            }
    return found


def main(arguments: list[str]) -> int:
    """Adds to what is kept, notebook by notebook; says what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "folders", nargs="+", type=Path, help="outputs of run_notebooks.py, one per seed"
    )
    found = collect(parser.parse_args(arguments).folders)
    kept = read_json(KEPT) if KEPT.exists() else {}
    with atomic_file(KEPT) as part:
        part.write_text(
            json.dumps(dict(sorted((kept | found).items())), indent=1) + "\n", encoding="utf-8"
        )
    print(
        f"{KEPT.relative_to(ROOT)}: "
        + ", ".join(f"{name}, {len(seeds)} seeds" for name, seeds in found.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
