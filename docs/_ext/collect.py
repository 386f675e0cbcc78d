"""Collect the site's pages and sources into one folder, from which Sphinx reads them.

The repository's own pages (README, notebooks, sources) and the links between them stay unchanged.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from docs._ext.catalog import say
from docs._ext.home import home_page

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
SOURCES = {  # a title on the page about sources → its files
    "The package": "rlhf_course/**/*.py",
    "Scripts": "scripts/**/*.py",
    "What makes the course": "dev/**/*.py",
    "Settings": "rlhf_course/course/configs/*.yaml",
}
SOURCE_FOLDERS = ("rlhf_course", "scripts", "dev")  # their pages are English only
SOURCE_PAGES = f"({'|'.join(SOURCE_FOLDERS)})/"  # a pattern that matches their pages' names
PAGES = (
    "CONTRIBUTING.md",
    "RESULTS.md",
    "LICENSE",
    "notebooks/*.ipynb",
    "notebooks/classic/*.ipynb",
    "notebooks/deeper/*.ipynb",
    "notebooks/exercises/*[!d].ipynb",  # not those that are solved
    "notebooks/practice/*.ipynb",
    "notebooks/practice/README.md",
    "notebooks/scratch/*.ipynb",
    "notebooks/small/*.ipynb",
    "figs/*.svg",
    "figs/results/*.svg",
    "figs/README.md",
    "models/README.md",
    "slides/slides.pdf",
)
RUN = ROOT / "figs/measured/04_gpt2_imdb_ppo.json"


def copy(source: Path, target: Path) -> None:
    """Copy a file, and create the target's folder if needed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def at_root(text: str) -> str:
    """Return a page with links relative to the site's root, and ``<a id>`` as Sphinx targets.

    GitHub supports only ``<a id>``.
    """
    return re.sub(r'<a id="([\w-]+)"></a>\n', r"(\1)=", text.replace("](../", "]("))


def for_site(text: str) -> str:
    """Return a page's text with links for the site, whose root contains the pages of docs/.

    Recorded notebooks call that folder site/, as it was called on the day of the run.
    """
    text = re.sub(r"\]\(((?:\.\./)*)(?:docs|site)/", r"](\1", text)
    text = re.sub(r"\[(`test_\w+`)\]\([./]+(tests/\w+\.py)\)", r"\1 in `\2`", text)
    return re.sub(r"\[([\w ]+)\]\((\w+_solved\.ipynb)\)", r"<a href='\2' download>\1</a>", text)


def fold(notebook: dict) -> None:
    """Tag, in place, the cells for imports and setup, so that Sphinx folds them."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        tags = cell["metadata"].setdefault("tags", [])
        if source.startswith(("import ", "from ")):
            title = say("Imports")
        elif "parameters" in tags or source.endswith("settings.table()"):
            title = say("Settings")
        else:
            continue
        cell["metadata"]["mystnb"] = {"code_prompt_show": title}
        tags.append("hide-cell")


def collect(folder: Path) -> None:
    """Copy all pages into one folder, at the paths that their links expect."""
    for pattern in (*PAGES, *SOURCES.values()):
        for path in ROOT.glob(pattern):
            copy(path, folder / path.relative_to(ROOT))
    for path in folder.glob("**/*.md"):
        path.write_text(for_site(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in folder.glob("notebooks/**/*.ipynb"):
        notebook = json.loads(for_site(path.read_text(encoding="utf-8")))
        fold(notebook)
        path.write_text(json.dumps(notebook), encoding="utf-8")
    for card in ROOT.glob("models/*/README.md"):
        target = folder / card.relative_to(ROOT)
        target.parent.mkdir()
        text = card.read_text(encoding="utf-8").replace("---\n", "---\norphan: true\n", 1)
        target.write_text(text, encoding="utf-8")
    fixtures = (ROOT / "tests/fixtures/README.md").read_text(encoding="utf-8")
    (folder / "tests/fixtures").mkdir(parents=True)
    (folder / "tests/fixtures/README.md").write_text(
        f"---\norphan: true\n---\n# The recorded numbers\n\n{fixtures}", encoding="utf-8"
    )
    write_pages(folder)


def write_pages(folder: Path) -> None:
    """Write this folder's pages, some with measurements or content from the package."""
    # These imports load torch, which takes seconds, so they come after checks for missing tools.
    from docs._ext.api import api_page
    from docs._ext.live import live_page
    from docs._ext.metrics import metrics_page
    from docs._ext.play import play_page

    (folder / "cards").mkdir()
    pages = {path.name: path.read_text(encoding="utf-8") for path in HERE.glob("*.md")}
    pages["index.md"] = home_page(folder / "cards")
    pages["metrics.md"] = metrics_page(measured_curves())
    pages["api.md"] = api_page()
    pages["play.md"] = play_page()
    pages["live.md"] = live_page()
    pages["sources.md"] += sources_list()
    if not (ROOT / "slides/slides.html").exists():
        del pages["slides.md"]
        pages["index.md"] = pages["index.md"].replace("\nslides\n", "\n")
    for name, text in pages.items():
        (folder / name).write_text(at_root(text), encoding="utf-8")


def measured_curves() -> dict[str, list[float]]:
    """Return the stats of notebook 04's run by step, or {} without its run card."""
    if not RUN.exists():
        return {}
    curves = {}
    for curve in json.loads(RUN.read_text(encoding="utf-8"))["curves"].values():
        curves |= curve
    return curves


def sources_list() -> str:
    """Return Markdown that lists all source files, for the page about sources."""
    sections = []
    for title, pattern in SOURCES.items():
        names = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob(pattern))
        toctree = "\n".join(["```{toctree}", ":titlesonly:", "", *names, "```"])
        sections.append(f"## {title}\n\n{toctree}\n")
    return "\n" + "\n".join(sections)
