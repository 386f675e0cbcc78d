"""Draw the course's figures: all of them, or those named on the command line."""

import argparse
import re
from pathlib import Path

from dev.figures import (
    curves,  # noqa: F401 - registers its figures
    diagrams,  # noqa: F401 - registers its figures
)
from dev.figures.kit import FIGURES, FOLDER, save
from rlhf_course.runtime.files import atomic_file

LISTED = re.compile(
    r"(?<=<!-- figures: written by make figs -->\n).*(?=<!-- end of figures -->)", re.DOTALL
)


def list_figures(readme: Path) -> None:
    """Write all figures and descriptions between a README's marks."""
    sections = [
        f"### {title}\n\n![{title}]({name}.svg)\n\n`{name}`: {description}\n"
        for name, (_, title, description) in FIGURES.items()
    ]
    text = LISTED.sub(lambda _: "\n".join(sections), readme.read_text(encoding="utf-8"))
    with atomic_file(readme) as path:
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Draw the requested figures; raise ``OSError`` or ``ValueError`` for a bad run card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(FIGURES)}"
    )
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="folder to draw into (default: figs)"
    )
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.names} - {*FIGURES}):
        parser.error(f"unknown figures {', '.join(unknown)}; choose from {', '.join(FIGURES)}")
    for name in options.names or FIGURES:
        save(name, options.output)
    if options.output == FOLDER:
        list_figures(FOLDER / "README.md")


if __name__ == "__main__":
    main()
