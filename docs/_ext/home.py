"""Build the home page from notebooks, run cards and the README's table."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import nbformat
from bs4 import BeautifulSoup

from docs._ext.address import ROOT, addresses

ARCHIVE = "hands-on-rlhf.zip"
ROW = re.compile(
    r"^\| \[(?P<title>[^]]+)\]\(notebooks/(?P<name>\w+)\.ipynb\) \| (?P<cells>.+) \|$", re.M
)
# The columns of a policy's answers before and after a training.
BEFORE = re.compile(r"^((response )?before|SFT)$")
AFTER = re.compile(r"^((response )?after|PPO \d+)$")


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
    figures = [
        (output.data["image/png"], after.source)
        for cell, after in zip(notebook.cells, notebook.cells[1:], strict=False)
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    image, text = figures[-1]
    caption = re.search(r"\*\*Figure \d+\.\d+\.\*\* (.+?)\.(?:\s|$)", text, re.S)[1]
    return base64.b64decode(image), " ".join(re.sub("[$`]", "", caption).split())


def sample(notebook: nbformat.NotebookNode) -> list[str]:
    """Return [query, answer before, answer after] from the last table with these columns, or []."""
    texts = []
    for row in first_rows(notebook):
        before = [name for name in row if BEFORE.match(name)]
        after = [name for name in row if AFTER.match(name)]
        if before and after and len(row[before[0]]) > 20:
            query = row.get("query", row.get("question", row.get("")))
            texts = [query, row[before[0]], row[after[-1]]]
    return texts


def first_rows(notebook: nbformat.NotebookNode) -> Iterator[dict[str, str]]:
    """Yield the first row of each table in a notebook's outputs, as column → text."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            html = output.get("data", {}).get("text/html", "")
            lines = []
            for line in BeautifulSoup(html, "html.parser").find_all("tr", limit=2):
                lines.append([cell.get_text(strip=True) for cell in line.find_all(["th", "td"])])
            if len(lines) == 2:
                yield dict(zip(*lines, strict=False))


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
    texts = []
    for name, row in table().items():
        notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        image, caption = picture(notebook)
        (folder / f"{name}.png").write_bytes(image)
        texts.append(card(name, row, caption, sample(notebook)))
    if (ROOT / "docs/play.md").exists():
        words = "Move the sliders of a PPO step, and see how its formulas respond."
        texts.append(f":::{{container}} card\n**[Play](play.md)**\n\n{words}\n:::\n")
    return "::::{container} cards\n" + "\n".join(texts) + "::::\n"


def card(name: str, row: dict[str, str], caption: str, answers: list[str]) -> str:
    """Return a notebook's card in Markdown: picture, title, goal, answers and measurements."""
    lines = [
        f"![{caption}](cards/{name}.png)\n",
        f"**[{row['title']}](notebooks/{name}.ipynb)**\n",
        f"{row['learn'][0].upper()}{row['learn'][1:]}.\n",
    ]
    if answers:
        query, before, after = map(literal, answers)
        asked = f"{query} … " if query else ""
        lines.append(f"> {asked}*before:* {before}\n>\n> {asked}*after:* {after}\n")
    measured = [cost(name), change(name)]
    lines.append(f"{' · '.join(filter(None, measured))}\n")
    return ":::{container} card\n" + "\n".join(lines) + ":::\n"


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
    run_cards = [run_card(name) for name in table()]
    values = {
        "minutes": math.ceil(sum(card["wall_s"] for card in run_cards) / 60),
        "memory": f"{max(card['peak_rss_mb'] for card in run_cards) / 1024:.1f}",
        "notebooks": len(run_cards),
        "start": start(),
        "cards": cards(folder),
    }
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    return re.sub(
        r"\{(minutes|memory|notebooks|start|cards)\}", lambda name: str(values[name[1]]), text
    )
