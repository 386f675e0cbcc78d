"""Draw the figures' shapes (card, boxes, arrows), and save SVG and PNG.

figs/README.md explains the shapes. Coordinates are hundredths of an inch; y points down.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Curve

from rlhf_course.course.plots import COLORS
from rlhf_course.runtime.files import atomic_file

FOLDER = Path(__file__).resolve().parents[2] / "figs"
# name: (function, title, description)
FIGURES: dict[str, tuple[Callable[[], Figure], str, str]] = {}
CARD = "#FBFBF9"
EDGE = "#D8D8D4"
INK = "#222222"
QUIET = "#5C5C5C"
WIDTH = 1000  # hundredths of an inch; 960 px on a page
PNG_DPI = 192  # two pixels per px of the page
# In points; BODY is 18 px on a slide that is 1,136 px wide without margins.
BODY = 11.5
NAME = 12

STYLE = {  # extends the style of the notebooks' plots
    "font.family": "DejaVu Sans",  # shipped with matplotlib
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.edgecolor": "#8A8A8A",
    "font.size": NAME,
    "xtick.labelsize": BODY,
    "ytick.labelsize": BODY,
    "legend.fontsize": BODY,
    "axes.labelsize": BODY,
    "axes.titleweight": "bold",
    "axes.titlesize": 13,
    "axes.facecolor": "none",
    # SVGs inside <img> cannot load fonts, and text in other fonts would not fit.
    "svg.fonttype": "path",
    "svg.hashsalt": "rlhf-course",
}


def tint(color: str, strength: float = 0.14) -> str:
    """Return a light, opaque shade of a color."""
    return to_hex([1 - strength * (1 - channel) for channel in to_rgb(color)])


def figure(title: str, description: str) -> Callable:
    """Return a decorator that registers a figure's function with a title and a text description."""

    def register(function: Callable[[], Figure]) -> Callable[[], Figure]:
        FIGURES[function.__name__] = function, title, description
        return function

    return register


# --- a canvas


def canvas(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return an empty figure, and axes that cover the figure."""
    drawing = plt.figure(figsize=(width / 100, height / 100))
    drawing.set_layout_engine("none")
    axis = drawing.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    return drawing, axis


class Box:
    """Hold a shape's center and size, and the midpoints of its sides for arrows."""

    def __init__(self, x: float, y: float, width: float, height: float) -> None:
        self.x = x
        self.y = y
        self.width = width
        self.height = height

    @property
    def left(self) -> tuple[float, float]:
        return self.x - self.width / 2, self.y

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def top(self) -> tuple[float, float]:
        return self.x, self.y - self.height / 2

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2


def _shape(axis: Axes, box: Box, rounding: float, **style) -> Box:
    corner = box.x - box.width / 2, box.y - box.height / 2
    outline = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
    axis.add_patch(FancyBboxPatch(corner, box.width, box.height, boxstyle=outline, **style))
    return box


class Said(str):
    """Mark a text as translated."""


say: Callable[[str], str] = str  # docs/_ext/figures.py translates with it


def words(axis: Axes, x: float, y: float, text: str, size: float = BODY, **style) -> None:
    """Write lines of text around (x, y), aligned by baseline, so that descenders shift no line."""
    lines = say(text).split("\n")
    for row, line in enumerate(map(Said, lines)):
        baseline = y + size * (0.5 + 1.7 * (row - (len(lines) - 1) / 2))
        axis.text(x, baseline, line, size=size, **{"ha": "center", "va": "baseline"} | style)


def _name(
    axis: Axes, box: Box, name: str, below: str, below_style: dict | None = None, **style
) -> None:
    """Write a name in the middle of a box, with smaller words below the name."""
    up = name.count("\n") + 1
    down = below.count("\n") + 1 if below else 0
    words(axis, box.x, box.y - 10 * down, name, **{"size": NAME} | style)
    if below:
        words(axis, box.x, box.y + 10.5 * up, below, **{"color": QUIET} | (below_style or {}))


def model(axis: Axes, box: Box, name: str, role: str, below: str = "", frozen: bool = False) -> Box:
    """Draw a network or a part of it as a rounded, tinted box, dashed if frozen."""
    color = COLORS[role]
    style = {"fc": tint(color), "ec": color, "lw": 2.0, "ls": (0, (4, 2)) if frozen else "-"}
    _shape(axis, box, 9, zorder=2, **style)
    _name(axis, box, name, below, weight="bold")
    return box


def data(axis: Axes, box: Box, name: str, shape: str = "", role: str | None = None) -> Box:
    """Draw a text or tensor: a white rectangle with its name, and the tensor's shape below it."""
    _shape(axis, box, 0, zorder=2, fc="white", ec=COLORS[role] if role else "#9A9A9A", lw=1.2)
    _name(axis, box, name, shape, {"family": "DejaVu Sans Mono"})
    return box


def step(axis: Axes, box: Box, name: str, below: str = "") -> Box:
    """Draw a computation without weights: a gray pill."""
    _shape(axis, box, box.height / 2, zorder=2, fc="#E9E9E6", ec="none")
    _name(axis, box, name, below)
    return box


def panel(axis: Axes, x, y, width, height, title: str, below: str = "", indent: float = 14) -> None:
    """Draw a pale area with corner (x, y) around a group of shapes, and a title at its top left."""
    _shape(
        axis,
        Box(x + width / 2, y + height / 2, width, height),
        12,
        zorder=0,
        fc="#F1F1ED",
        ec="none",
    )
    words(axis, x + indent, y + 21, title, size=13, weight="bold", ha="left")
    words(axis, x + indent, y + 43, below, color=QUIET, ha="left")


def arrow(
    axis: Axes,
    *points: tuple[float, float],
    color: str = "#4A4A4A",
    dashed: bool = False,
    lw: float = 1.4,
):
    """Draw an arrow through the points, with rounded corners."""
    vertices = [points[0]]
    codes = [Curve.MOVETO]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        vertices += [_toward(corner, before), corner, _toward(corner, after)]
        codes += [Curve.LINETO, Curve.CURVE3, Curve.CURVE3]
    curve = Curve([*vertices, points[-1]], [*codes, Curve.LINETO])
    style = {
        "arrowstyle": "-|>,head_length=4.5,head_width=2.6",
        "shrinkA": 0,
        "shrinkB": 0,
        "joinstyle": "miter",
    }
    style |= {"color": color, "lw": lw, "ls": (0, (3, 2)) if dashed else "-", "capstyle": "butt"}
    axis.add_patch(FancyArrowPatch(path=curve, zorder=3, **style))


def _toward(
    corner: tuple[float, float], other: tuple[float, float], radius: float = 8
) -> tuple[float, float]:
    """Return the point ``radius`` from the corner toward the other point, at most halfway."""
    dx = other[0] - corner[0]
    dy = other[1] - corner[1]
    share = min(0.5, radius / max((dx * dx + dy * dy) ** 0.5, 1e-9))
    return corner[0] + share * dx, corner[1] + share * dy


# --- curves


def on_card(
    curves: Figure, height: float, width: float = WIDTH, small_print: str = "", legend: str = ""
) -> Figure:
    """Return the figure, resized to a card, with small print at the bottom right.

    ``legend`` names the side, above or below the axes, where an outside legend gets its own margin.
    """
    curves.set_size_inches(width / 100, height / 100)
    low = 0 if legend == "below" else 38 if small_print else 12
    high = height - (0 if legend == "above" else 12)
    margins = {"w_pad": 0.08, "h_pad": 0.08, "wspace": 0.05, "hspace": 0.05}
    curves.get_layout_engine().set(
        rect=(0.01, low / height, 0.98, (high - low) / height), **margins
    )
    curves.text(
        1 - 20 / width, 18 / height, small_print, size=BODY, color=QUIET, ha="right", va="baseline"
    )
    return curves


# --- files


def save(
    name: str,
    folder: Path = FOLDER,
    endings: Sequence[str] = ("svg", "png"),
    style: dict | None = None,
) -> None:
    """Draw a figure as NAME.svg and NAME.png, on a pale card that suits light and dark pages."""
    function, title, description = FIGURES[name]
    with plt.rc_context(STYLE | (style or {})):
        drawing = function()
        width, height = (100 * inches for inches in drawing.get_size_inches())
        card = drawing.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height), zorder=-10)
        card.axis("off")
        _shape(card, Box(width / 2, height / 2, width - 2, height - 2), 12, fc=CARD, ec=EDGE, lw=1)
        drawing.patch.set_alpha(0)
        if "svg" in endings:
            with atomic_file(folder / f"{name}.svg") as path:
                drawing.savefig(
                    path,
                    format="svg",
                    metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
                )
                path.write_text(
                    tidy(path.read_text(encoding="utf-8"), title, description), encoding="utf-8"
                )
        if "png" in endings:
            with atomic_file(folder / f"{name}.png") as path:
                small = {"metadata": {"Software": None}, "pil_kwargs": {"optimize": True}}
                drawing.savefig(path, format="png", dpi=PNG_DPI, **small)
        plt.close(drawing)


def tidy(svg: str, title: str, description: str) -> str:
    """Return matplotlib's SVG with title and description, shortened and without its DTD.

    Coordinates keep two decimals and generated ids become numbers, because the last bits of floats
    may differ between machines.
    """
    svg = svg[svg.index("<svg ") :]
    head = f' role="img">\n <title>{escape(title)}</title>\n <desc>{escape(description)}</desc>'
    svg = svg.replace(">", head, 1)
    svg = re.sub(
        r'(?: d="|translate\()[^")]*',
        lambda match: re.sub(r"-?\d+\.\d+", _short, match.group()),
        svg,
    )
    for number, name in enumerate(
        dict.fromkeys(re.findall(r'id="((?:C\w+_)?[a-z]?[0-9a-f]{10})"', svg))
    ):
        svg = svg.replace(name, f"i{number}")
    return svg


def _short(number: re.Match) -> str:
    return f"{round(float(number.group()), 2):g}"
