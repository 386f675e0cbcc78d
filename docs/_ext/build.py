"""Build the site (`make site`): static HTML of notebooks and this folder's pages; no cell runs.

The repository's own pages (README, notebooks, sources) and the links between them stay unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

try:
    import sphinx  # noqa: F401
except ImportError:
    sys.exit("The site needs Sphinx: run `make site`, or pip install -r docs/requirements.txt")

from docs._ext import formulas, languages, translate
from docs._ext.address import addresses
from docs._ext.home import ARCHIVE, home_page
from docs._ext.live import write_files
from docs._ext.translate import say

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
SOURCES = {
    "The package": "rlhf_course/**/*.py",
    "Scripts": "scripts/**/*.py",
    "Figures": "figs/*.py",
}
SOURCES |= {"Settings": "rlhf_course/course/configs/*.yaml"}
RUN = "figs/measured/04_gpt2_imdb_ppo.json"


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
    """Return a notebook's text with links for the site, whose root contains the pages of docs/."""
    text = re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", text)
    text = re.sub(r"\[(`test_\w+`)\]\([./]+(tests/\w+\.py)\)", r"\1 in `\2`", text)
    return re.sub(r"\[([\w ]+)\]\((\w+_solved\.ipynb)\)", r"<a href='\2' download>\1</a>", text)


def fold(notebook: dict) -> None:
    """Tag, in place, the cells for imports and setup, so that Sphinx folds them."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        tags = cell["metadata"].setdefault("tags", [])
        if (
            "parameters" in tags
            or source.endswith("settings.table()")
            or source.startswith(("import ", "from "))
        ):
            imports = source.startswith(("import ", "from "))
            title = say("Imports") if imports else say("Settings")
            cell["metadata"]["mystnb"] = {"code_prompt_show": title}
            tags.append("hide-cell")


def collect(folder: Path) -> None:
    """Copy all pages into one folder, at the paths that their links expect."""
    patterns = [
        "CONTRIBUTING.md",
        "LICENSE",
        "notebooks/*.ipynb",
        "notebooks/classic/*.ipynb",
        "notebooks/exercises/*[!d].ipynb",
        "notebooks/practice/*.ipynb",
        "notebooks/practice/README.md",
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
        notebook = json.loads(for_site(path.read_text()))
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
    """Write this folder's pages, some with measurements or content from the package."""
    # These imports load torch, which takes seconds, so they come after checks for missing tools.
    from docs._ext.api import api_page
    from docs._ext.live import live_page
    from docs._ext.metrics import metrics_page
    from docs._ext.play import play_page

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
    """Return Markdown that lists all source files, for the page about sources."""
    lines = []
    for title, pattern in SOURCES.items():
        names = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob(pattern))
        lines.append(
            f"## {title}\n\n```{{toctree}}\n:titlesonly:\n\n" + "\n".join(names) + "\n```\n"
        )
    return "\n".join(["", *lines])


def pack(target: Path, instead: Path | None = None) -> None:
    """Write a zip with all files that the course needs to run; files in ``instead`` replace
    files of the same name.
    """
    patterns = ["*.md", "LICENSE", "Makefile", "*.txt", "*.toml", "docs/*.md", "slides/slides*.pdf"]
    patterns += ["docs/_ext/live.py", "docs/live/*"]
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
                name = path.relative_to(ROOT)
                other = instead / name if instead else path
                archive.write(other if other.exists() else path, Path(target.stem, name))
        if instead:
            name = Path(translate.CHECK_MESSAGES)
            archive.write(instead / name, target.stem / name)


def sitemap(pages: Path, homepage: str) -> None:
    """Write the sitemap for search engines, which requires absolute URLs."""
    names = sorted(str(path.relative_to(pages)) for path in pages.rglob("*.html"))
    lines = "".join(
        f"<url><loc>{homepage}/{name}</loc></url>\n" for name in names if name != "404.html"
    )
    head = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<urlset'
        ' xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
    )
    (pages / "sitemap.xml").write_text(f"{head}{lines}</urlset>\n")


def start_sphinx(work: Path) -> list[subprocess.Popen]:
    """Start building English pages in ``work/html`` and, in parallel, Chinese pages in work/zh."""
    shutil.copytree(work / "source", work / "chinese-source")
    languages.translate_html(work / "chinese-source")
    shutil.copytree(ROOT / "figs/zh", work / "chinese-source/figs", dirs_exist_ok=True)
    languages.compile_for_sphinx(work / "locale")
    chinese = ["-D", f"language={translate.LANGUAGE}", "-D", f"locale_dirs={work / 'locale'}"]
    chinese += ["-D", "gettext_auto_build=0", "-D", "gettext_compact=0"]
    runs = []
    for source, pages, options in (("source", "html", []), ("chinese-source", "zh", chinese)):
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", HERE, *options]
        command += ["-d", work / f"trees-{pages}", work / source, work / pages]
        runs.append(subprocess.Popen([*map(str, command)]))
    return runs


def add_downloads(work: Path) -> None:
    """Write the pages' downloads into ``work/downloads``, with the site's folder layout."""
    target = work / "downloads"
    for path in [*ROOT.glob("notebooks/**/*.ipynb"), *ROOT.glob("slides/slides.*[lf]")]:
        copy(path, target / path.relative_to(ROOT))
    translate.write(target / "zh", up="")
    pack(target / ARCHIVE)
    pack(target / "zh" / ARCHIVE, target / "zh")


def join(pages: Path, chinese: Path) -> None:
    """Move the Chinese pages to ``pages/zh``; share source pages and identical files; link the
    Chinese slides.
    """
    shared = {"slides", "rlhf_course", "scripts", "live"}
    shared |= {f"figs/{p.name}" for p in pages.glob("figs/*.html") if p.name != "README.html"}
    for path in [*chinese.glob("_static/**/*"), *chinese.glob("_images/*")]:
        twin = pages / path.relative_to(chinese)
        if path.is_file() and twin.is_file() and twin.read_bytes() == path.read_bytes():
            path.unlink()
            shared.add(str(path.relative_to(chinese)))
    for path in chinese.rglob("*.html"):
        here = path.relative_to(chinese).parent

        def up(match: re.Match, here: Path = here) -> str:
            target = os.path.normpath(here / match[2])
            is_shared = target in shared or target.split("/")[0] in shared
            return match[1] + (os.path.relpath(target, "zh" / here) if is_shared else match[2])

        text = path.read_text(encoding="utf-8")
        text = re.sub(r"""((?:href|src)=")([\w./-]+)(?=["#?])""", up, text)
        text = re.sub(r"slides/slides\.(?=html|pdf)", "slides/slides.zh.", text)
        path.write_text(text, encoding="utf-8")
    chinese.rename(pages / "zh")


def build(output: Path) -> None:
    """Build the site in a temporary folder, then replace ``output``, which must be a site if it
    exists.
    """
    if output.exists() and not (output / ".buildinfo").exists():  # written by Sphinx
        sys.exit(
            f"{output} exists and is not a site built by this command. Choose another folder with"
            " --output."
        )
    formulas.install()
    work = output.with_name(f"{output.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        collect(work / "source")
        pages = work / "html"
        runs = start_sphinx(work)
        add_downloads(work)
        if any([run.wait() for run in runs]):
            sys.exit("The site was not built. Fix Sphinx's warnings above.")
        join(pages, work / "zh")
        shutil.copytree(work / "downloads", pages, dirs_exist_ok=True)
        write_files(pages)
        if "homepage" in addresses():
            sitemap(pages, addresses()["homepage"])
        shutil.rmtree(output, ignore_errors=True)
        pages.rename(output)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "site", help="folder to replace"
    )
    arguments = parser.parse_args()
    build(arguments.output.resolve())
    print(f"{arguments.output / 'index.html'}")
