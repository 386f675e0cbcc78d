"""Record the methods' runs on film reviews, a card per method and seed; skip existing cards.

    python dev/records/record_methods.py --search   # try step sizes, with separate seeds
    python dev/records/record_methods.py            # the config's step sizes, five seeds

The script runs the cells of deeper/methods_on_real_text with the tag ``methods`` at preset tiny;
at other presets, the notebook itself writes the cards. To use two processes, pass each of them
different methods with --only.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import nbformat
from transformers import set_seed

from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.course.run_card import quiet_libraries

NOTEBOOK = "methods_on_real_text"
SEARCH_SEEDS = (100, 101)
SEARCH_STEPS = 40
RATES = dict.fromkeys(("PPO", "RLOO", "GRPO", "Dr. GRPO"), (4.4e-5, 8.75e-5, 1.75e-4, 3.5e-4))
RATES = {"DPO": (2.5e-5, 5e-5, 1e-4, 2e-4)} | RATES


def methods(overrides: dict) -> dict:
    """Run the tagged cells with the tiny preset; return their global names."""
    names = {"settings": load_preset(NOTEBOOK, "tiny", overrides)}
    set_seed(0)  # all processes truncate the openings alike
    notebook = ROOT / "notebooks" / "deeper" / f"{NOTEBOOK}.ipynb"
    for cell in nbformat.read(notebook, as_version=4).cells:
        if "methods" in cell.metadata.get("tags", []):
            exec(compile(cell.source, NOTEBOOK, "exec"), names)
    return names


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--search", action="store_true", help="try step sizes")
    parser.add_argument("--only", nargs="+", help="methods, by name (default: all)")
    parser.add_argument("--output", type=Path, default=ROOT / "figs" / "measured" / "methods")
    chosen = parser.parse_args(arguments)
    quiet_libraries()
    names = methods({"text_steps": SEARCH_STEPS} if chosen.search else {})
    settings = names["settings"]
    record = names["record"]
    runs = names["RUNS"]
    if chosen.search:
        todo = [(n, s, rate) for n, rates in RATES.items() for rate in rates for s in SEARCH_SEEDS]
    else:
        seeds = range(settings.text_seeds)
        todo = [(name, seed, names["rate_of"](name)) for seed, name in product(seeds, runs)]
    folder = chosen.output / "search" if chosen.search else chosen.output
    for name, seed, rate in todo:
        if name in (chosen.only or [name]):
            print(record(folder, name, seed, rate), flush=True)


if __name__ == "__main__":
    sys.exit(main())
