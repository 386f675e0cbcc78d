"""An executed notebook as one HTML page without scripts: formulas as MathML, light and dark.

Texts of a dataset stand in a notebook's outputs, and may hold markup of anybody's. Scripts and what
else acts is dropped, and the page's policy lets a browser run and load nothing.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import urlsplit

from bs4 import BeautifulSoup
from bs4.element import PreformattedString
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

# The lab template without what it loads from elsewhere: RequireJS, MathJax, Mermaid and the
# widgets' manager.
TEMPLATE = """{%- extends 'index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_css -%}
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="POLICY">
<style>@media screen and (prefers-color-scheme: dark) { DARK
  .jp-OutputArea-output img { background: #fff; } }
main { max-width: 60em; margin: auto; }
math[display="block"] { overflow-x: auto; overflow-y: hidden; padding: 0.3em 0; }
.jp-RenderedHTMLCommon table { display: block; overflow-x: auto; max-width: 100%; margin-left: 0; }
.highlight pre { overflow-x: auto; }
.jp-RenderedHTMLCommon a { overflow-wrap: anywhere; }
@media (max-width: 46em) {
  .jp-InputPrompt, .jp-OutputPrompt { display: none; } body.jp-Notebook { padding: 8px; }
}
</style>
{%- endblock -%}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:"
POLICY += "; base-uri 'none'; form-action 'none'"
ACTS = (
    "script, iframe, frame, object, embed, applet, base, form, link, portal, [http-equiv=refresh i]"
)
URLS = ("href", "src", "action", "formaction", "xlink:href", "data", "poster", "background")
# Names of functions, which browsers set too close as identifiers.
WORD = re.compile(r"<mi>(log|exp|max|min)</mi>")


class Renderer(IPythonRenderer):
    """Markdown as nbconvert renders it, with formulas set here."""

    def inline_math(self, body: str) -> str:
        return mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return mathml(body, "block")


class Page(HTMLExporter):
    """nbconvert's, with that renderer."""

    def default_filters(self):
        yield from super().default_filters()
        yield (
            "markdown2html",
            lambda source: MarkdownWithMath(renderer=Renderer(escape=False)).render(source),
        )


def mathml(formula: str, display: str) -> str:
    """A formula of LaTeX as MathML; its source as code where the converter cannot read it."""
    try:
        return WORD.sub(
            r'<mo lspace="0.17em" rspace="0.17em">\1</mo>',
            convert(formula.strip(), display=display),
        )
    except Exception:  # whatever the converter stumbles over: the source is better than no page
        return f"<code>{html.escape(formula)}</code>"


def drop_what_acts(soup: BeautifulSoup) -> None:
    """Remove scripts, frames, forms, event handlers, comments and addresses that run code.

    Browsers end comments, declarations and styles elsewhere than the parser does, so that they may
    hold tags which only a browser sees.
    """
    for text in soup.find_all(string=True):
        if isinstance(text, PreformattedString):
            text.extract()
        elif text.parent.name == "style":
            text.replace_with(type(text)(text.replace("<", "\\3c ")))
    for tag in soup.select(ACTS):
        tag.decompose()
    for tag in soup.find_all(True):
        for name, value in [*tag.attrs.items()]:
            address = re.sub(r"[\s\0-\x1f]", "", str(value)).lower()
            runs = address.startswith(("javascript:", "vbscript:", "data:text", "data:application"))
            if name.lower().startswith("on") or name == "srcdoc" or (name in URLS and runs):
                del tag[name]


def page(notebook: NotebookNode, folder: Path) -> str:
    """The page; its title is the notebook's heading, and its links to files are those of a notebook
    in ``folder``.
    """
    heading = next(
        (found[1] for cell in notebook.cells if (found := re.match(r"# (.+)", cell.source))),
        "Notebook",
    )
    maker = Page(raw_template=TEMPLATE)
    dark, _, _ = maker.environment.loader.get_source(maker.environment, "static/theme-dark.css")
    dark = re.sub(r"/\*.*?\*/", "", dark, flags=re.S)
    maker.raw_template = TEMPLATE.replace("DARK", dark).replace("POLICY", POLICY)
    text, _ = maker.from_notebook_node(notebook, {"metadata": {"name": heading.replace("`", "")}})
    soup = BeautifulSoup(text, "html.parser")
    drop_what_acts(soup)
    for link in soup.select("a[href]"):
        target = urlsplit(link["href"])
        if target.path and not target.scheme and not target.netloc:
            link["href"] = (
                folder.joinpath(target.path).resolve().as_uri() + target._replace(path="").geturl()
            )
    for image in soup.select(".jp-OutputArea-output img"):
        caption = image.find_next("em")
        if caption and caption.text.startswith("Figure: "):
            image["alt"] = caption.text.removeprefix("Figure: ")
    return f"<!DOCTYPE html>\n{soup}"
