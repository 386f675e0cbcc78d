"""Write a command's result as one self-contained page: a verdict, a table, pictures."""

import base64
import io
from pathlib import Path

import matplotlib.pyplot as plt
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from rlhf_course.runtime.files import atomic_file

HERE = Path(__file__).resolve().parent
MARK = '<meta name="generator" content="Hands-on RLHF">'


def picture(figure: Figure) -> str:
    """Close a figure, and return it as PNG in base64."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    plt.close(figure)
    return base64.b64encode(file.getvalue()).decode()


def write(
    target: Path,
    title: str,
    verdict: str,
    about: str,
    columns: dict[str, str],
    rows: list[dict],
    pictures: dict[str, str],
) -> None:
    """Write a page with a table and pictures.

    ``columns`` maps keys of the rows to headings, and ``pictures`` maps captions to PNG in base64.
    A row's ``level`` (stop, watch or fine) colors its last cell. Raises ``FileExistsError`` if
    another program wrote the target.
    """
    templates = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    text = templates.get_template("page.html.j2").render(
        title=title,
        verdict=verdict,
        about=about,
        columns=columns,
        rows=rows,
        pictures=pictures,
    )
    if target.exists() and MARK not in target.read_text("utf-8", errors="replace"):
        raise FileExistsError(f"{target} is not a page of this course. Choose another --output.")
    with atomic_file(target) as path:
        path.write_text(text, encoding="utf-8")
