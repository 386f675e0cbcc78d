"""Build the home page from notebooks, run cards and the README's table."""

from __future__ import annotations

import base64
import json
import math
import re
from html import unescape
from pathlib import Path

import nbformat
from bs4 import BeautifulSoup

from docs._ext.address import ROOT, addresses

ARCHIVE = "hands-on-rlhf.zip"
ROW = re.compile(
    r"^\| \[(?P<title>[^]]+)\]\(notebooks/(?P<name>\w+)\.ipynb\) \| (?P<cells>.+) \|$", re.M
)
BEFORE_AFTER = (
    re.compile(r"^(?P<what>(response )?before|SFT)$"),
    re.compile(r"^((response )?after|PPO \d+)$"),
)


def table() -> dict[str, dict[str, str]]:
    """Return each notebook's title, learn and inspect columns from the README's table."""
    rows = {}
    for row in ROW.finditer((ROOT / "README.md").read_text(encoding="utf-8")):
        learn, _, _, inspect = row["cells"].split(" | ")
        rows[row["name"]] = {"title": row["title"], "learn": learn, "inspect": inspect}
    return rows


def run_card(name: str) -> dict:
    """Return the run card that `make render` saved."""
    return json.loads((ROOT / f"figs/measured/{name}.json").read_text(encoding="utf-8"))


def duration(seconds: float) -> str:
    """Return a duration as text in s or min, rounded up."""
    return f"{math.ceil(seconds)} s" if seconds < 90 else f"{math.ceil(seconds / 60)} min"


def cost(name: str) -> str:
    """Return a notebook's measured time and memory with the tiny preset, as text."""
    card = run_card(name)
    return f"{duration(card['wall_s'])}, {card['peak_rss_mb'] / 1024:.1f} GB on two CPU cores"


def picture(notebook: nbformat.NotebookNode) -> tuple[bytes, str]:
    """Return a notebook's last figure as PNG, and the start of its caption."""
    found = [
        (output.data["image/png"], after.source)
        for cell, after in zip(notebook.cells, notebook.cells[1:], strict=False)
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    image, text = found[-1]
    caption = re.search(r"\*\*Figure \d+\.\d+\.\*\* (.+?)\.(?:\s|$)", text, re.S)[1]
    return base64.b64decode(image), " ".join(re.sub("[$`]", "", caption).split())


def sample(notebook: nbformat.NotebookNode) -> list[str]:
    """Return [query, answer before, answer after] from the last table with these columns, or []."""
    found = []
    outputs = [
        output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    for html in (data["text/html"] for data in outputs if "text/html" in data):
        rows = BeautifulSoup(html, "html.parser").find_all("tr")
        head, first, *_ = [
            [cell.get_text(strip=True) for cell in row.find_all(["th", "td"])] for row in rows
        ] + [
            [],
            [],
        ]
        columns = {name: text for name, text in zip(head, first, strict=False)}
        before, after = (
            [name for name in columns if pattern.match(name)] for pattern in BEFORE_AFTER
        )
        if before and after and len(columns[before[0]]) > 20:
            query = next(columns[name] for name in ("query", "question", "") if name in columns)
            found = [query, columns[before[0]], columns[after[-1]]]
    return found


def change(name: str) -> str:
    """Return a run card's first metric with a before and an after value, as text."""
    metrics = run_card(name)["metrics"]
    for what in (key.removesuffix("_before") for key in metrics if key.endswith("_before")):
        if f"{what}_after" in metrics:
            return (
                f"{what.replace('_', ' ')} {metrics[f'{what}_before']:.2f} →"
                f" {metrics[f'{what}_after']:.2f}"
            )
    return ""


def literal(text: str) -> str:
    """Return a model's text with its Markdown escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#$|!])", r"\\\1", " ".join(unescape(text).split()))


def cards(folder: Path) -> str:
    """Return a card per notebook in Markdown; write the cards' pictures to ``folder``."""
    parts = []
    for name, row in table().items():
        notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        image, caption = picture(notebook)
        (folder / f"{name}.png").write_bytes(image)
        lines = [
            f"![{caption}](cards/{name}.png)\n",
            f"**[{row['title']}](notebooks/{name}.ipynb)**\n",
        ]
        lines += [f"{row['learn'][0].upper()}{row['learn'][1:]}.\n"]
        query, before, after = sample(notebook) or ("", "", "")
        if before:
            asked = f"{literal(query)} … " if query else ""
            lines += [
                f"> {asked}*before:* {literal(before)}\n>\n> {asked}*after:* {literal(after)}\n"
            ]
        measured = [cost(name), change(name)]
        lines += [f"{' · '.join(filter(None, measured))}\n"]
        parts.append(":::{container} card\n" + "\n".join(lines) + ":::\n")
    if (ROOT / "docs/play.md").exists():
        words = "Move the sliders of a PPO step, and see how its formulas respond."
        parts.append(f":::{{container}} card\n**[Play](play.md)**\n\n{words}\n:::\n")
    return "::::{container} cards\n" + "\n".join(parts) + "::::\n"


def start() -> str:
    """Return Markdown with the commands that start the course, from a clone or the site's zip."""
    repository = addresses().get("repository")
    lines = f"""```bash
{f"git clone {repository} hands-on-rlhf" if repository else f"unzip {ARCHIVE}"}
cd hands-on-rlhf && make course    # sets up .venv, runs the notebooks, prints their measurements
.venv/bin/jupyter lab notebooks    # step through the cells yourself
```"""
    archive = f'<a href="{ARCHIVE}" download>the course as a zip</a>'
    return (
        f"Clone the repository, or download {archive}:\n\n{lines}"
        if repository
        else f"Download {archive}. Then run:\n\n{lines}"
    )


def home_page(folder: Path) -> str:
    """Return index.md with values inserted; write the cards' pictures to ``folder``."""
    found = [run_card(name) for name in table()]
    values = {
        "minutes": math.ceil(sum(card["wall_s"] for card in found) / 60),
        "memory": f"{max(card['peak_rss_mb'] for card in found) / 1024:.1f}",
        "notebooks": len(found),
        "start": start(),
        "cards": cards(folder),
    }
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    return re.sub(
        r"\{(minutes|memory|notebooks|start|cards)\}", lambda name: str(values[name[1]]), text
    )
