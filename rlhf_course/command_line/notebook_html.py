"""Render an executed notebook as one HTML page: MathML, a light and a dark theme, no scripts.

Notebook outputs contain dataset texts, which may include untrusted markup. The page's policy stops
browsers from running or loading anything. Meta refresh, which the policy does not cover, is
disabled separately.
"""

import html
import re
from pathlib import Path
from urllib.parse import urlsplit

from bs4 import BeautifulSoup
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

# Parts of the lab template that load files: RequireJS, MathJax, Mermaid and the widget manager.
BLOCKS = ("html_head_js", "jupyter_widgets", "html_head_js_mathjax", "html_head_js_mermaidjs")
HEAD = """
<meta name="color-scheme" content="light dark">
<meta name="policy">
<style>@media screen and (prefers-color-scheme: dark) { DARK
  .jp-OutputArea-output img, .jp-OutputArea-output svg { background: #fff; } }
main { max-width: 60em; margin: auto; }
.jp-OutputArea-output svg, .jp-OutputArea-output img { max-width: 100%; height: auto; }
math[display="block"] { overflow-x: auto; overflow-y: hidden; padding: 0.3em 0; }
.jp-RenderedHTMLCommon table { display: block; overflow-x: auto; max-width: 100%; margin-left: 0; }
.highlight pre { overflow-x: auto; }
.jp-RenderedHTMLCommon a { overflow-wrap: anywhere; }
@media (max-width: 46em) {
  .jp-InputPrompt, .jp-OutputPrompt { display: none; } body.jp-Notebook { padding: 8px; }
}
</style>
"""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; base-uri 'none';"
    " form-action 'none'"
)
# Browsers put too little space after function names in <mi>.
WORD = re.compile(r"<mi>(log|exp|max|min)</mi>")


class Renderer(IPythonRenderer):
    """Render Markdown as nbconvert does, except for formulas, which become MathML."""

    def inline_math(self, body: str) -> str:
        return mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return mathml(body, "block")


class Page(HTMLExporter):
    """Export HTML as nbconvert does, with :class:`Renderer`."""

    def default_filters(self):
        yield from super().default_filters()
        renderer = Renderer(escape=False)
        yield "markdown2html", lambda source: MarkdownWithMath(renderer=renderer).render(source)


def mathml(formula: str, display: str) -> str:
    """Return a LaTeX formula as MathML, or its source as code if the converter fails."""
    try:
        text = convert(formula.strip(), display=display)
        return WORD.sub(r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', text)
    except Exception:  # of any type; showing the source is better than no page
        return f"<code>{html.escape(formula)}</code>"


def page(notebook: NotebookNode, folder: Path) -> str:
    """Return a notebook's HTML, titled by its first heading; resolve links from ``folder``."""
    exporter = Page(raw_template=template())
    resources = {"metadata": {"name": title_of(notebook)}}
    text, _ = exporter.from_notebook_node(notebook, resources)
    soup = BeautifulSoup(text, "html.parser")
    for tag in soup.select("script"):
        tag.decompose()
    for link in soup.select("a[href]"):
        target = urlsplit(link["href"])
        if target.path and not target.scheme and not target.netloc:
            address = folder.joinpath(target.path).resolve().as_uri()
            link["href"] = address + target._replace(path="").geturl()
    for image in soup.select(".jp-OutputArea-output img"):
        caption = image.find_next("strong")
        if caption and caption.text.startswith("Figure "):
            image["alt"] = " ".join(caption.parent.text.removeprefix(caption.text).split())
    text = re.sub("http-equiv", "disarmed", str(soup), flags=re.I)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    text = re.sub("<meta name=.policy./?>", policy, text, count=1)
    return f"<!DOCTYPE html>\n{text}"


def title_of(notebook: NotebookNode) -> str:
    """Return the first heading without code marks."""
    for cell in notebook.cells:
        heading = re.match(r"# (.+)", cell.source)
        if heading:
            return heading[1].replace("`", "")
    return "Notebook"


def template() -> str:
    """Return nbconvert's lab template without parts that load files, and with ``HEAD``."""
    templates = Page().environment
    dark, _, _ = templates.loader.get_source(templates, "static/theme-dark.css")
    blocks = [f"{{%- block {name} -%}}{{%- endblock -%}}" for name in BLOCKS]
    head = HEAD.replace("DARK", dark)
    blocks.append("{%- block html_head_css -%}" + head + "{%- endblock -%}")
    return "{% extends 'index.html.j2' %}" + "".join(blocks)
