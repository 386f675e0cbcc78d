"""Formulas, set by KaTeX while the site is built: pages need no script, and one that fails stops the build."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

VERSION = "0.19.1"
FOLDER = Path(__file__).resolve().parents[1] / "build" / f"katex-{VERSION}"
STATIC = FOLDER / "static"  # KaTeX's style sheet and fonts, as pages load them
FONTS = ("Main-Regular", "Math-Italic")  # in nearly every formula: loaded with the page, so that nothing moves
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


def install() -> None:
    """KaTeX into ``FOLDER``, from the npm registry the first time."""
    if FOLDER.exists():
        return
    if shutil.which("npm") is None:
        sys.exit("The site's formulas need KaTeX, which npm installs: apt install npm")
    FOLDER.parent.mkdir(exist_ok=True)
    # A folder of its own: two builds may run at once.
    part = Path(tempfile.mkdtemp(prefix=FOLDER.name, suffix=".part", dir=FOLDER.parent))
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error"]
    done = subprocess.run(["npm", "install", *quiet, "--prefix", part, f"katex@{VERSION}"], stdout=sys.stderr)
    if done.returncode:
        shutil.rmtree(part, ignore_errors=True)
        sys.exit(f"npm could not install katex@{VERSION}; its message is above.")
    made, fonts = part / "node_modules/katex/dist", part / "static/katex/fonts"
    fonts.mkdir(parents=True)
    shutil.copy(made / "katex.min.css", fonts.parent)
    for font in made.glob("fonts/*.woff2"):
        shutil.copy(font, fonts)
    with contextlib.suppress(OSError):  # another build was first
        part.rename(FOLDER)
    shutil.rmtree(part, ignore_errors=True)


class Katex:
    """A node process that sets a formula per line; started by the first."""

    process: subprocess.Popen | None = None

    def __call__(self, formula: str, display: bool) -> dict[str, str]:
        """``html``, or ``error``."""
        if self.process is None:
            environment = os.environ | {"NODE_PATH": str(FOLDER / "node_modules")}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
            self.process = subprocess.Popen(["node", "-e", SCRIPT], env=environment, **pipes)
        self.process.stdin.write(json.dumps([formula, display]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self, *arguments) -> None:
        """End the process."""
        if self.process:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def setup(app: Sphinx) -> dict:
    """Register the renderer, and its style sheet on the pages that have formulas."""
    katex = Katex()

    def visit(translator, node) -> None:
        display = isinstance(node, nodes.math_block)
        answer = katex(node.astext(), display)
        if "error" in answer:
            logging.getLogger(__name__).warning("%s\n%s", answer["error"], node.astext(), location=node)
        tag = "div" if display else "span"
        translator.body.append(f'<{tag} class="math">{answer.get("html", "")}</{tag}>')
        raise nodes.SkipNode

    def style(app, pagename, templatename, context, doctree) -> None:
        if doctree and any(doctree.findall(lambda node: isinstance(node, nodes.math | nodes.math_block))):
            app.add_css_file("katex/katex.min.css")
            where = context["pathto"]("_static/katex/fonts", 1)
            context["metatags"] += "".join(
                f'<link rel="preload" as="font" type="font/woff2" crossorigin href="{where}/KaTeX_{font}.woff2">'
                for font in FONTS
            )

    app.add_html_math_renderer("katex", (visit, None), (visit, None))
    app.connect("html-page-context", style)
    app.connect("build-finished", katex.close)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
