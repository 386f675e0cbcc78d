"""Build the site (`make site`): static HTML of notebooks and the pages of docs/; no cell runs."""

from __future__ import annotations

import argparse
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

from docs._ext import formulas, languages
from docs._ext.address import addresses
from docs._ext.catalog import LANGUAGE
from docs._ext.collect import HERE, ROOT, SOURCE_FOLDERS, collect, copy
from docs._ext.editions import write_notebooks
from docs._ext.home import ARCHIVE
from docs._ext.live import write_files

ARCHIVED = (  # all that the course needs to run
    "*.md",
    "LICENSE",
    "Makefile",
    "*.txt",
    "*.toml",
    "slides/slides*.pdf",
    "dev/**/*",
    "docs/**/*",
    "figs/**/*",
    "models/**/*",
    "notebooks/**/*",
    "rlhf_course/**/*",
    "scripts/**/*",
)
NOT_ARCHIVED = {"__pycache__", ".ipynb_checkpoints", ".ruff_cache"}
LINK = re.compile(r"""((?:href|src)=")([\w./-]+)(?=["#?])""")


def pack(target: Path, translations: Path | None = None) -> None:
    """Write a zip with all files that the course needs to run.

    Files in the folder ``translations`` replace the files of the same name.
    """
    sources = {}
    for pattern in ARCHIVED:
        for path in ROOT.glob(pattern):
            if path.is_file() and NOT_ARCHIVED.isdisjoint(path.parts):
                sources[path.relative_to(ROOT)] = path
    for path in translations.rglob("*") if translations else ():
        if path.is_file():
            sources[path.relative_to(translations)] = path
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(sources):
            archive.write(sources[name], target.stem / name)


def start_sphinx(source: Path, pages: Path, options: tuple[str, ...] = ()) -> subprocess.Popen:
    """Start Sphinx, which turns a folder of sources into a folder of pages."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", HERE]
    command += [*options, "-d", pages.with_name(f"{pages.name}-trees"), source, pages]
    return subprocess.Popen(command)


def start_english(work: Path) -> subprocess.Popen:
    """Start building the English pages in ``work/html``."""
    return start_sphinx(work / "source", work / "html")


def start_chinese(work: Path) -> subprocess.Popen:
    """Start building the Chinese pages in ``work/zh``."""
    source = work / "chinese-source"
    shutil.copytree(work / "source", source)
    languages.translate_html(source)
    shutil.copytree(ROOT / "figs/zh", source / "figs", dirs_exist_ok=True)
    languages.compile_for_sphinx(work / "locale")
    settings = {
        "language": LANGUAGE,
        "locale_dirs": work / "locale",
        "gettext_auto_build": 0,
        "gettext_compact": 0,
    }
    homepage = addresses().get("homepage")
    if homepage:
        settings["html_baseurl"] = f"{homepage}/zh/"
        settings["ogp_site_url"] = f"{homepage}/zh/"
    options = tuple(f"-D{name}={value}" for name, value in settings.items())
    return start_sphinx(source, work / "zh", options)


def add_downloads(target: Path) -> None:
    """Write the pages' downloads into a folder, with the site's folder layout."""
    for path in [*ROOT.glob("notebooks/**/*.ipynb"), *ROOT.glob("slides/slides.*[lf]")]:
        copy(path, target / path.relative_to(ROOT))
    write_notebooks(target / "zh")
    pack(target / "zh" / ARCHIVE, translations=target / "zh")
    pack(target / ARCHIVE)


def remove_twins(pages: Path, chinese: Path) -> set[str]:
    """Delete the Chinese site's files that equal an English one, and return their paths."""
    shared = set()
    for path in [*chinese.glob("_static/**/*"), *chinese.glob("_images/*")]:
        name = path.relative_to(chinese)
        twin = pages / name
        if path.is_file() and twin.is_file() and twin.read_bytes() == path.read_bytes():
            path.unlink()
            shared.add(str(name))
    return shared


def join(pages: Path, chinese: Path) -> None:
    """Move the Chinese pages to ``pages/zh``; share source pages and identical files; link the
    Chinese slides.
    """
    shared = remove_twins(pages, chinese)
    shared_folders = {"slides", "live", *SOURCE_FOLDERS}

    def shared_link(match: re.Match, folder: Path) -> str:
        """Return a link from a page in ``folder``, which leaves zh/ if its target is shared."""
        target = os.path.normpath(folder / match[2])
        if target in shared or target.split("/")[0] in shared_folders:
            return match[1] + os.path.relpath(target, "zh" / folder)
        return match[0]

    for path in chinese.rglob("*.html"):
        folder = path.relative_to(chinese).parent
        text = path.read_text(encoding="utf-8")
        text = LINK.sub(lambda match, folder=folder: shared_link(match, folder), text)
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
        english = start_english(work)
        chinese = start_chinese(work)
        add_downloads(work / "downloads")
        statuses = [english.wait(), chinese.wait()]
        if any(statuses):
            sys.exit("The site was not built. Fix Sphinx's warnings above.")
        pages = work / "html"
        join(pages, work / "zh")
        shutil.copytree(work / "downloads", pages, dirs_exist_ok=True)
        write_files(pages)
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
