"""Typeset formulas with KaTeX during the build: pages need no script, and errors stop the build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from docs._ext import node

VERSION = "0.19.1"
# Nearly every formula uses these fonts; loading them with the page prevents layout shifts.
FONTS = ("Main-Regular", "Math-Italic")
SCRIPT = """
const katex = require("katex");
require("readline").createInterface({input: process.stdin}).on("line", line => {
    const [formula, displayMode] = JSON.parse(line);
    let answer;
    try { answer = {html: katex.renderToString(formula, {displayMode, strict: "error"})}; }
    catch (error) { answer = {error: error.message}; }
    console.log(JSON.stringify(answer));
});
"""


def install() -> Path:
    """Install KaTeX; return a folder with its style sheet and fonts for ``html_static_path``."""
    package = node.package("katex", VERSION) / "dist"
    static = node.BUILD / f"katex-{VERSION}" / "static"
    shutil.copytree(
        package / "fonts",
        static / "katex/fonts",
        ignore=shutil.ignore_patterns("*.[tw]*f"),
        dirs_exist_ok=True,
    )
    shutil.copy(package / "katex.min.css", static / "katex")
    return static


class Katex:
    """Typeset formulas in a node process, which the first formula starts."""

    process: subprocess.Popen | None = None

    def __call__(self, formula: str, display: bool) -> dict[str, str]:
        """Return a dict with ``html`` or ``error``."""
        if self.process is None:
            environment = os.environ | {"NODE_PATH": str(node.package("katex", VERSION).parent)}
            self.process = subprocess.Popen(
                ["node", "-e", SCRIPT],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        self.process.stdin.write(json.dumps([formula, display]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self, *arguments) -> None:
        """End the node process."""
        if self.process:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def has_formulas(doctree: nodes.document) -> bool:
    """Return whether a page has formulas."""
    return any(isinstance(element, nodes.math | nodes.math_block) for element in doctree.findall())


def setup(app: Sphinx) -> dict:
    """Register the renderer, and its style sheet for pages with formulas."""
    katex = Katex()

    def visit(translator, element) -> None:
        display = isinstance(element, nodes.math_block)
        answer = katex(element.astext(), display)
        if "error" in answer:
            logging.getLogger(__name__).warning(
                "%s\n%s", answer["error"], element.astext(), location=element
            )
        tag = "div" if display else "span"
        translator.body.append(f'<{tag} class="math">{answer.get("html", "")}</{tag}>')
        raise nodes.SkipNode

    def style(app, pagename, templatename, context, doctree) -> None:
        if doctree is None or not has_formulas(doctree):
            return
        app.add_css_file("katex/katex.min.css")
        folder = context["pathto"]("_static/katex/fonts", 1)
        for font in FONTS:
            context["metatags"] += (
                '<link rel="preload" as="font" type="font/woff2" crossorigin'
                f' href="{folder}/KaTeX_{font}.woff2">'
            )

    app.add_html_math_renderer("katex", (visit, None), (visit, None))
    app.connect("html-page-context", style)
    app.connect("build-finished", katex.close)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
