"""Write the Chinese editions of the README, the slides and the notebooks from the po files."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser

from docs._ext.catalog import catalog, finished, in_html, po_path
from docs._ext.collect import ROOT, for_site

CHECK_MESSAGES = "notebooks/exercises/messages.json"
DOCSTRING = re.compile(r'(?<=""").+?(?=""")', re.S)
TITLE = re.compile(r"<title>(.*?)</title>")


@cache
def parser() -> MarkdownIt:
    """Return the Markdown parser with which Sphinx reads the notebooks."""
    config = MdParserConfig(enable_extensions={"colon_fence", "dollarmath", "deflist"})
    return create_md_parser(config, RendererHTML)


def translated(text: str, translations: dict[str, str]) -> str:
    """Return Markdown with its paragraphs, headings and table cells translated, one line each.

    Text without a translation stays in English.
    """
    lines: list[str | None] = text.split("\n")
    column = dict.fromkeys(range(len(lines)), 0)  # a line's table cells are read from left to right
    for token in parser().parse(text):
        if token.type != "inline" or not token.content:
            continue
        first, end = token.map
        line = lines[first]
        source = token.content.split("\n")[0]
        message = " ".join(token.content.split())
        new = translations.get(message)
        if source not in line:  # a table's cell escapes a bar
            source = source.replace("|", r"\|")
            new = new and new.replace("|", r"\|")
        start = line.index(source, column[first])
        if new is None:
            column[first] = start + len(source)
            continue
        rest = line[start + len(source) :] if end == first + 1 else ""
        lines[first] = line[:start] + new + rest
        column[first] = start + len(new)
        for row in range(first + 1, end):
            lines[row] = None
    return in_html("\n".join(line for line in lines if line is not None), translations)


@cache
def translated_figures() -> dict[str, str]:
    """Return the Chinese SVG of each figure, by the English figure's title."""
    figures = {}
    for path in ROOT.glob("figs/*.svg"):
        chinese = path.parent / "zh" / path.name
        if chinese.exists():
            title = TITLE.search(path.read_text(encoding="utf-8"))[1]
            figures[title] = chinese.read_text(encoding="utf-8")
    return figures


def translate_code(cell: dict) -> None:
    """Translate, in place, a stub's docstring, and replace the course's figures in outputs."""
    if cell["metadata"].get("exercise", {}).get("part") == "answer":
        stubs = catalog("exercises")

        def docstring(match: re.Match) -> str:
            return stubs.get(" ".join(match[0].split()), match[0])

        source = DOCSTRING.sub(docstring, "".join(cell["source"]), count=1)
        cell["source"] = source.splitlines(keepends=True)
    for output in cell["outputs"]:
        title = TITLE.search("".join(output.get("data", {}).get("image/svg+xml", "")))
        chinese = translated_figures().get(title[1]) if title else None
        if chinese:
            output["data"]["image/svg+xml"] = chinese.splitlines(keepends=True)


def notebook_in_chinese(path: Path, up: str = "") -> dict:
    """Return a notebook with its Markdown, its stubs' docstrings and its figures translated.

    Links out of the notebooks' folder start with ``up``.
    """
    name = str(path.relative_to(ROOT).with_suffix("")).removesuffix("_solved")
    translations = catalog(name)

    def link(match: re.Match) -> str:
        target = match[1]
        if not (path.parent / target).exists():  # a page of the site, which has no folder docs/
            target = re.sub(r"^((?:\.\./)+)", r"\1docs/", target)
        inside = (path.parent / target).resolve().is_relative_to(ROOT / "notebooks")
        return f"]({'' if inside else up}{target}"

    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = translated(for_site("".join(cell["source"])), translations)
            text = re.sub(r"\]\((\.\./[^)#\s]*)", link, with_figures(text))
            cell["source"] = text.splitlines(keepends=True)
        elif cell["cell_type"] == "code":
            translate_code(cell)
    return notebook


def with_figures(text: str) -> str:
    """Return Markdown that shows the Chinese figures."""
    return re.sub(r"\bfigs/(?=\w+\.svg)", "figs/zh/", text)


def readme_in_chinese() -> str:
    """Return the text of README.zh.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("[中文](README.zh.md)", "[English](README.md)")
    chinese = with_figures(translated(text, catalog("README")))
    return chinese.replace("slides/slides.pdf", "slides/slides.zh.pdf")


def slides_in_chinese() -> str:
    """Return the Markdown of the Chinese slides; speaker notes stay in English."""
    text = (ROOT / "slides" / "slides.md").read_text(encoding="utf-8")
    text = text.replace("\nlang: en\n", "\nlang: zh-CN\n", 1)
    return with_figures(translated(text, catalog("slides/slides")))


def write_notebooks(folder: Path, up: str = "") -> None:
    """Write the Chinese notebooks, and the messages of `check`, with the course's layout.

    Links out of the notebooks' folder start with ``up``.
    """
    for path in ROOT.glob("notebooks/**/*.ipynb"):
        if ".ipynb_checkpoints" in path.parts:
            continue
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(notebook_in_chinese(path, up), ensure_ascii=False, indent=1)
        target.write_text(text + "\n", encoding="utf-8")
    text = json.dumps(finished(po_path("exercises")), ensure_ascii=False, indent=0)
    (folder / CHECK_MESSAGES).write_text(text + "\n", encoding="utf-8")
