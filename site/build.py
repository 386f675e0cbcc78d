"""`make site`: build the rendered notebooks and the pages of this folder as static HTML, without
executing anything.

Pages of the repository (README, notebooks, sources) stay unchanged, and so do the links between
them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

try:
    from sphinx.cmd.build import main as sphinx
except ImportError:
    sys.exit("The site needs Sphinx: run `make site`, or pip install -r site/requirements.txt")

import formulas
from address import addresses
from home import ARCHIVE, home_page
from live import write_files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = {
    "The package": "rlhf_course/**/*.py",
    "Scripts": "scripts/**/*.py",
    "Figures": "figs/*.py",
}
SOURCES |= {"Settings": "rlhf_course/course/configs/*.yaml"}
RUN = "figs/measured/04_gpt2_imdb_ppo.json"


def copy(source: Path, target: Path) -> None:
    """Copy a file into a folder that may not exist yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def at_root(text: str) -> str:
    """Return a page of this folder with links for the parent folder, and with Sphinx's targets.

    GitHub needs an ``<a id>`` where Sphinx needs a target.
    """
    return re.sub(r'<a id="([\w-]+)"></a>\n', r"(\1)=", text.replace("](../", "]("))


def fold(notebook: dict) -> None:
    """Tag the cells that import and set up: Sphinx folds them."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        tags = cell["metadata"].setdefault("tags", [])
        if (
            "parameters" in tags
            or source.endswith("settings.table()")
            or source.startswith(("import ", "from "))
        ):
            imports = source.startswith(("import ", "from "))
            cell["metadata"]["mystnb"] = {"code_prompt_show": "Imports" if imports else "Settings"}
            tags.append("hide-cell")


def collect(folder: Path) -> None:
    """Lay out all pages in one folder, at the places that their links expect."""
    patterns = [
        "CONTRIBUTING.md",
        "LICENSE",
        "notebooks/*.ipynb",
        "notebooks/exercises/*[!d].ipynb",
    ]
    patterns += ["notebooks/scratch/*.ipynb"]
    patterns += [
        "figs/*.svg",
        "figs/README.md",
        "models/README.md",
        "slides/slides.pdf",
        *SOURCES.values(),
    ]
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        copy(path, folder / path.relative_to(ROOT))
    for path in folder.glob("notebooks/**/*.ipynb"):  # tests and solved exercises have no pages
        text = re.sub(r"\]\(((?:\.\./)+)site/", r"](\1", path.read_text())
        text = re.sub(r"\[(`test_\w+`)\]\([./]+(tests/\w+\.py)\)", r"\1 in `\2`", text)
        notebook = json.loads(
            re.sub(r"\[here\]\((\w+_solved\.ipynb)\)", r"<a href='\1' download>here</a>", text)
        )
        fold(notebook)
        path.write_text(json.dumps(notebook))
    for card in ROOT.glob("models/*/README.md"):
        target = folder / card.relative_to(ROOT)
        target.parent.mkdir()
        target.write_text(card.read_text().replace("---\n", "---\norphan: true\n", 1))
    fixtures = (ROOT / "tests/fixtures/README.md").read_text()
    (folder / "tests/fixtures").mkdir(parents=True)
    (folder / "tests/fixtures/README.md").write_text(
        f"---\norphan: true\n---\n# The recorded numbers\n\n{fixtures}"
    )
    write_pages(folder)


def write_pages(folder: Path) -> None:
    """Write the pages of this folder; measurements and the package fill in some of them."""
    # These imports load torch, which takes seconds: errors about missing tools come first.
    from api import api_page
    from live import live_page
    from metrics import metrics_page
    from play import play_page

    (folder / "cards").mkdir()
    curves = (
        json.loads((ROOT / RUN).read_text())["curves"].values() if (ROOT / RUN).exists() else ()
    )
    pages = {path.name: path.read_text() for path in HERE.glob("*.md")}
    pages["index.md"] = home_page(folder / "cards")
    pages["metrics.md"] = metrics_page(
        {key: values for curve in curves for key, values in curve.items()}
    )
    pages |= {"api.md": api_page(), "play.md": play_page(), "live.md": live_page()}
    pages["sources.md"] += sources_list()
    if not (ROOT / "slides/slides.html").exists():
        del pages["slides.md"]
        pages["index.md"] = pages["index.md"].replace("\nslides\n", "\n")
    for name, text in pages.items():
        (folder / name).write_text(at_root(text))


def sources_list() -> str:
    """Return the end of the page about the sources: a list of all sources."""
    lines = []
    for title, pattern in SOURCES.items():
        names = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob(pattern))
        lines.append(
            f"## {title}\n\n```{{toctree}}\n:titlesonly:\n\n" + "\n".join(names) + "\n```\n"
        )
    return "\n".join(["", *lines])


def pack(target: Path) -> None:
    """Write a zip with all files that the course needs to run."""
    patterns = ["*.md", "LICENSE", "Makefile", "*.txt", "*.toml", "site/*.md", "slides/slides.pdf"]
    patterns += ["site/live.py", "site/live/*"]
    patterns += [
        f"{folder}/**/*" for folder in ("notebooks", "rlhf_course", "scripts", "models", "figs")
    ]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and ".ipynb_checkpoints" not in path.parts
            ):
                archive.write(path, Path(target.stem, path.relative_to(ROOT)))


def sitemap(pages: Path, homepage: str) -> None:
    """Write the list of pages for search engines, which accepts only complete addresses."""
    names = sorted(str(path.relative_to(pages)) for path in pages.rglob("*.html"))
    lines = "".join(
        f"<url><loc>{homepage}/{name}</loc></url>\n" for name in names if name != "404.html"
    )
    head = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<urlset'
        ' xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
    )
    (pages / "sitemap.xml").write_text(f"{head}{lines}</urlset>\n")


def build(output: Path) -> None:
    """Build the site aside, and move it to its place when it is complete; a folder already there
    must be a site.
    """
    if output.exists() and not (output / ".buildinfo").exists():  # Sphinx leaves it
        sys.exit(
            f"{output} exists and is not a site built by this command. Choose another folder with"
            " --output."
        )
    formulas.install()
    work = output.with_name(f"{output.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        collect(work / "source")
        pages, trees = work / "html", work / "trees"
        if sphinx(
            [
                "-q",
                "-W",
                "--keep-going",
                "-c",
                str(HERE),
                "-d",
                str(trees),
                str(work / "source"),
                str(pages),
            ]
        ):
            sys.exit("The site was not built: Sphinx's warnings are above.")
        extra = [
            *ROOT.glob("notebooks/**/*.ipynb"),
            *ROOT.glob("slides/slides.*ml"),
            *ROOT.glob("slides/slides.pdf"),
        ]
        for path in extra:
            copy(path, pages / path.relative_to(ROOT))
        write_files(pages)
        pack(pages / ARCHIVE)
        if "homepage" in addresses():
            sitemap(pages, addresses()["homepage"])
        shutil.rmtree(output, ignore_errors=True)
        pages.rename(output)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "site", help="a folder, replaced"
    )
    arguments = parser.parse_args()
    build(arguments.output.resolve())
    print(f"{arguments.output / 'index.html'}")
