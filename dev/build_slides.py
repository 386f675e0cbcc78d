"""Build the slides: insert measured numbers and figures into slides.md, and render them with Marp.

The Chinese slides are slides.md with the translations in locale/.

``{{NOTEBOOK.metrics.NAME:FORMAT}}`` is replaced by a number of figs/measured/NOTEBOOK.json,
``{{NOTEBOOK.checks:passed}}`` by the number of its passed checks, and ``{{published.…}}`` by a
number of published.yaml. ``make slides`` runs this.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from docs._ext.editions import slides_in_chinese
from rlhf_course.course.presets import CONFIGS
from rlhf_course.runtime.files import atomic_file, read_json

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "slides"
PUBLISHED = CONFIGS / "published.yaml"  # the tutorials' results
SOURCE = HERE / "slides.md"
THEME = HERE / "theme.css"
NAMES = {"en": "slides", "zh": "slides.zh"}
BROWSERS = "chromium", "chromium-browser", "google-chrome"
IMAGE = re.compile(r"!\[([^\]]*)\]\(\.\./figs/([^)]+)\)")
PLACEHOLDER = re.compile(r"\{\{([^{}]+)\}\}")
MIME = {".svg": "image/svg+xml", ".png": "image/png"}
STAMP = "source-sha256"


def split_slides(markdown: str) -> list[str]:
    """Return the slides' Markdown, one string per slide, without the front matter."""
    return re.split(r"^---\n", markdown, flags=re.M)[2:]


def heading(slide: str) -> str:
    """Return the slide's heading, or ""."""
    match = re.search(r"^# (.+)$", slide, re.M)
    return match[1] if match else ""


def lookup(node, path: str):
    """Return the value at a dotted path; names may contain dots. Raises ``KeyError``."""
    if path in node:
        return node[path]
    for name in node:
        if path.startswith(f"{name}.") and isinstance(node[name], dict):
            return lookup(node[name], path[len(name) + 1 :])
    raise KeyError(path)


def number(cards: dict, placeholder: str) -> str:
    """Return a placeholder's text; raise ``KeyError`` for a missing measurement, ``ValueError``
    for an invalid format.
    """
    path, _, form = placeholder.rpartition(":")
    value = lookup(cards, path)
    if form == "passed":
        return f"{sum(check['passed'] for check in value.values())} of {len(value)}"
    return format(value, form).replace("-", "−")


def fill(markdown: str, cards: dict) -> str:
    """Return the Markdown with placeholders replaced; raise ``SystemExit`` with a list of the
    placeholders that have no value.
    """
    problems = []
    for position, slide in enumerate(split_slides(markdown), start=1):
        for placeholder in PLACEHOLDER.findall(slide):
            try:
                number(cards, placeholder)
            except (KeyError, TypeError, ValueError) as error:
                reason = "not measured" if isinstance(error, KeyError) else error
                problems.append(
                    f"slide {position} ({heading(slide)}): {{{{{placeholder}}}}}: {reason}"
                )
    if problems:
        raise SystemExit("Placeholders have no value. Run `make render`:\n" + "\n".join(problems))
    return PLACEHOLDER.sub(lambda match: number(cards, match[1]), markdown)


def embed(markdown: str, figures: Path) -> str:
    """Return the Markdown with figures embedded, so that the slides are one file."""

    def as_tag(match: re.Match) -> str:
        path = figures / match[2]
        if not path.exists():
            raise SystemExit(f"slides.md needs figs/{match[2]}. Run `make figs`.")
        data = base64.b64encode(path.read_bytes()).decode()
        return f'<img alt="{html.escape(match[1])}" src="data:{MIME[path.suffix]};base64,{data}">'

    return IMAGE.sub(as_tag, markdown)


def content(figures: Path, language: str = "en") -> str:
    """Return slides.md with numbers and figures, in English or Chinese."""
    cards = {path.stem: read_json(path) for path in sorted((figures / "measured").glob("*.json"))}
    cards["published"] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    source = slides_in_chinese() if language == "zh" else SOURCE.read_text(encoding="utf-8")
    return embed(fill(source, cards), figures)


def fingerprint(markdown: str) -> str:
    """Return a hash of the slides' sources; HTML and PDF store it, to detect stale files."""
    return hashlib.sha256(f"{markdown}\0{THEME.read_text(encoding='utf-8')}".encode()).hexdigest()


def run_marp(marp: Path, markdown: str, output: Path, *options: str) -> None:
    """Render Markdown to a file with Marp; raise ``SystemExit`` with Marp's output if it fails."""
    browser = os.environ.get("CHROME_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        raise SystemExit(
            "The PDF needs Chromium: install Debian's package chromium, or set CHROME_PATH to a"
            " browser."
        )
    environment = os.environ | {"CHROME_PATH": browser}
    if os.geteuid() == 0:  # Chromium's sandbox does not start if the user is root
        environment["CHROME_NO_SANDBOX"] = "1"
    command = [
        marp,
        "--no-config-file",
        "--html",
        "--theme-set",
        THEME,
        *options,
        "--output",
        output,
    ]
    done = subprocess.run(command, input=markdown, env=environment, capture_output=True, text=True)
    if done.returncode or not output.exists():
        raise SystemExit(f"Marp failed:\n{done.stdout}{done.stderr}")


def build(marp: Path, figures: Path, language: str) -> None:
    """Write one language's slides as HTML and as PDF, or neither if one fails."""
    if not marp.exists():
        raise SystemExit(f"{marp} does not exist. Run `make slides` to install Marp.")
    markdown = content(figures, language)
    stamp = fingerprint(markdown)
    name = HERE / NAMES[language]
    with atomic_file(Path(f"{name}.html")) as page, atomic_file(Path(f"{name}.pdf")) as pdf:
        run_marp(marp, markdown, page, "--template", "bespoke")
        text = page.read_text(encoding="utf-8").replace(
            "<head>", f'<head><meta name="{STAMP}" content="{stamp}">', 1
        )
        # Marp's viewer contains its licenses' URL; the page must not name a host.
        text = re.sub(r"https://unpkg\.com/(@marp-team/marp-cli)@([\d.]+)/lib/", r"\1 \2, ", text)
        page.write_text(text, encoding="utf-8")
        run_marp(marp, markdown, pdf, "--pdf", "--pdf-outlines")
        with pdf.open("ab") as file:
            file.write(
                f"\n% {STAMP} {stamp}\n".encode()
            )  # PDF readers skip a comment after the end
    print(f"{len(split_slides(markdown))} slides: slides/{name.name}.html and .pdf")


def main(arguments: list[str]) -> None:
    """Build the slides with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--marp", type=Path, required=True, help="Marp's command-line tool")
    parser.add_argument(
        "--figs", type=Path, default=ROOT / "figs", help="figures and measured/ (default: figs)"
    )
    chosen = parser.parse_args(arguments)
    for language in NAMES:
        build(chosen.marp.resolve(), chosen.figs.resolve(), language)


if __name__ == "__main__":
    main(sys.argv[1:])
