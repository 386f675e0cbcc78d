"""Write tables of the tutorials' results and settings into from-tutorials.md and the README.

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
SETTINGS = re.compile(r"(<!-- settings of (\w+): .*? -->\n).*?(\n<!-- end of settings -->)", re.S)
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


def settings(notebook: str) -> str:
    """Return a table in Markdown of a tutorial's settings and those of our preset full."""
    published = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))[notebook]
    rows = ["| setting | as published | preset `full` | why |", "|---|---|---|---|"]
    for name, cells in published.items():
        texts = [", ".join(map(str, x)) if isinstance(x, list) else str(x) for x in cells]
        rows.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """Return the page with new tables between the marks."""
    page = BLOCK.sub(lambda marks: marks[1] + yardsticks() + marks[2], page)
    return SETTINGS.sub(lambda marks: marks[1] + settings(marks[2]) + marks[3], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
