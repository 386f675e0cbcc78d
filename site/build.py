"""`make site`: the rendered notebooks and the pages of this folder as static HTML. Nothing is executed.

Pages come from the repository as they are (README, notebooks, sources); the links between them work unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    from sphinx.cmd.build import main as sphinx
except ImportError:
    sys.exit("The site needs Sphinx: run `make site`, or pip install -r site/requirements.txt")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MATHJAX = "3.2.2"  # sets formulas in the browser; version 3 is the last whose glyphs come in the same file
SOURCES = {"The package": "rlhf_course/**/*.py", "Scripts": "scripts/*.py", "Figures": "figs/*.py"}
SOURCES |= {"Settings": "rlhf_course/course/configs/*.yaml"}
RUN = "figs/measured/04_gpt2_imdb_ppo.json"


def mathjax() -> Path:
    """MathJax as one JavaScript file, from the npm registry the first time."""
    folder = ROOT / "build" / f"mathjax-{MATHJAX}"
    if not folder.exists():
        if shutil.which("npm") is None:
            sys.exit("The site's formulas need MathJax, which npm installs: apt install npm")
        folder.parent.mkdir(exist_ok=True)
        # A folder of its own: two builds may run at once.
        part = Path(tempfile.mkdtemp(prefix=folder.name, suffix=".part", dir=folder.parent))
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error"]
        done = subprocess.run(["npm", "install", *quiet, "--prefix", part, f"mathjax@{MATHJAX}"], stdout=sys.stderr)
        if done.returncode:
            shutil.rmtree(part, ignore_errors=True)
            sys.exit(f"npm could not install mathjax@{MATHJAX}; its message is above.")
        with contextlib.suppress(OSError):  # another build was first
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
    return folder / "node_modules" / "mathjax" / "es5" / "tex-svg.js"


def copy(source: Path, target: Path) -> None:
    """A file into a folder that may not exist yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def collect(folder: Path) -> None:
    """Lay out all pages in one folder, at the places that their links expect."""
    patterns = ["README.md", "CONTRIBUTING.md", "LICENSE", "notebooks/*.ipynb", "notebooks/exercises/*[!d].ipynb"]
    patterns += ["figs/*.svg", "figs/README.md", "models/README.md", "slides/slides.pdf", *SOURCES.values()]
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        copy(path, folder / path.relative_to(ROOT))
    for path in HERE.glob("*.md"):
        copy(path, folder / path.name)
    for path in folder.glob("notebooks/**/*.ipynb"):  # tests and solved exercises are no pages
        text = path.read_text().replace("](../site/", "](../")
        text = re.sub(r"\[(`test_\w+`)\]\(\.\./(tests/\w+\.py)\)", r"\1 in `\2`", text)
        path.write_text(re.sub(r"\[here\]\((\w+_solved\.ipynb)\)", r"<a href='\1' download>here</a>", text))
    gpu = folder / "on-a-gpu.md"
    gpu.write_text(gpu.read_text().replace("](../README.md)", "](index.md)"))
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("](site/", "]("))
    for card in ROOT.glob("models/*/README.md"):
        target = folder / card.relative_to(ROOT)
        target.parent.mkdir()
        target.write_text(card.read_text().replace("---\n", "---\norphan: true\n", 1))
    fixtures = (ROOT / "tests/fixtures/README.md").read_text()
    (folder / "tests/fixtures").mkdir(parents=True)
    (folder / "tests/fixtures/README.md").write_text(f"---\norphan: true\n---\n# The frozen numbers\n\n{fixtures}")
    if not (ROOT / "slides/slides.html").exists():
        (folder / "slides.md").unlink()
        index = folder / "index.md"
        index.write_text(index.read_text().replace("\nslides\n", "\n"))
    (folder / "sources.md").write_text(sources_page())
    curves = json.loads((ROOT / RUN).read_text())["curves"].values() if (ROOT / RUN).exists() else ()
    from metrics import metrics_page  # these import torch, which takes seconds: a missing tool is said before that
    from play import play_page
    from quiz import quiz_page

    (folder / "play.md").write_text(play_page(), encoding="utf-8")
    (folder / "quiz.md").write_text(quiz_page())
    (folder / "metrics.md").write_text(metrics_page({key: values for curve in curves for key, values in curve.items()}))


def sources_page() -> str:
    """The page that lists the sources."""
    lines = ["# Sources\n\nThe files behind the notebooks, as they are in the repository.\n"]
    for title, pattern in SOURCES.items():
        names = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob(pattern))
        lines.append(f"## {title}\n\n```{{toctree}}\n:titlesonly:\n\n" + "\n".join(names) + "\n```\n")
    return "\n".join(lines)


def build(output: Path) -> None:
    """Build the site aside, and put it in its place when it is complete; what stands there must be a site."""
    if output.exists() and not (output / ".buildinfo").exists():  # Sphinx leaves it
        sys.exit(f"{output} is there and is no site that was built here. Name another folder with --output.")
    script = mathjax()
    work = output.with_name(f"{output.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        collect(work / "source")
        pages, trees = work / "html", work / "trees"
        if sphinx(["-q", "-W", "--keep-going", "-c", str(HERE), "-d", str(trees), str(work / "source"), str(pages)]):
            sys.exit("The site was not built: Sphinx's warnings are above.")
        copy(script, pages / "_static/mathjax/tex-svg.js")
        extra = [*ROOT.glob("notebooks/**/*.ipynb"), *ROOT.glob("slides/slides.*ml"), *ROOT.glob("slides/slides.pdf")]
        for path in extra:
            copy(path, pages / path.relative_to(ROOT))
        shutil.rmtree(output, ignore_errors=True)
        pages.rename(output)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site", help="a folder, replaced")
    arguments = parser.parse_args()
    build(arguments.output.resolve())
    print(f"{arguments.output / 'index.html'}")
