"""Write a table of the tutorials' results and ours into from-tutorials.md and the README.

The tutorials' numbers come from published.yaml in the presets' folder; ours come from run cards.
Run this after ``make render``: python docs/_ext/tutorials.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "rlhf_course/course/configs/published.yaml"
PAGES = (ROOT / "docs/from-tutorials.md", ROOT / "README.md")
CARD = "04_gpt2_imdb_ppo.json"
BLOCK = re.compile(r"(<!-- yardsticks: .*? -->\n).*?(\n<!-- end of yardsticks -->)", re.S)
KINDS = ("mean", "median")
OURS = (  # mean and median score in a run card
    "{0[score_before]:z.2f} → {0[score_after]:z.2f}",
    "{0[median score: before]:z.2f} → {0[median score: after]:z.2f}",
)
PRESETS = {"tiny: smaller models": CARD, "full: the lab's models": f"full/{CARD}"}


def yardsticks() -> str:
    """Return the table in Markdown, with a row per published run and per preset of our run."""
    published = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))["yardsticks"]
    rows = ["| run | mean score | median score | queries |", "|---|---|---|---|"]
    for run, x in published.items():
        ends = [f"{x[f'{kind} before']:.2f} → {x[f'{kind} after']:.2f}" for kind in KINDS]
        rows.append(f"| {run} | {ends[0]} | {ends[1]} | {x['queries']} |")
    for preset, name in PRESETS.items():
        path = ROOT / "figs/measured" / name
        metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"] if path.exists() else {}
        ends = [form.format(metrics) if metrics else "not measured" for form in OURS]
        rows.append(f"| This course, preset {preset} | {' | '.join(ends)} | all held out |")
    return "\n".join(rows).replace("-0.", "−0.")


def with_yardsticks(page: str) -> str:
    """Return the page with a new table between the two marks."""
    return BLOCK.sub(lambda marks: marks[1] + yardsticks() + marks[2], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_yardsticks(path.read_text(encoding="utf-8")), encoding="utf-8")
