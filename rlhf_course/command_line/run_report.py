"""Read run cards, and write one self-contained page: checks, measurements, curves."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader

from rlhf_course.command_line.records import LOG
from rlhf_course.command_line.training_card import read_training
from rlhf_course.runtime.files import atomic_file, read_json

TITLE = "<title>Hands-on RLHF: run report"
NO_CHECKS = "The run card has no checks."
RESULTS = "run_results.json"  # notebook → problem, or "" if it passed
FIRST = ["ppo/mean_scores", "objective/kl", "objective/kl_coef", "tokens/responses_len_mean"]
OBJECTIVE = "objective"  # score − β·KL
SHOWN = 5  # curves that are not folded
WIDTH = 160  # of a drawing, in SVG units
HEIGHT = 48


def add_results(output: Path, results: dict[str, str]) -> None:
    """Merge the runner's results into an output folder's results file."""
    file = output / RESULTS
    before = read_json(file) if file.exists() else {}
    with atomic_file(file) as path:
        path.write_text(json.dumps(before | results, indent=1) + "\n", encoding="utf-8")


def find(places: list[Path]) -> list[Path]:
    """Return the paths of the run cards in ``places``.

    The paths include the missing cards of runs whose results were recorded. Raises ``OSError`` for
    a path without cards.
    """
    cards = []
    for place in places:
        cards_here = sorted(_cards_in(place))
        if not cards_here:
            raise FileNotFoundError(
                f"{place} has no run card and no {LOG}. Create one with run_notebooks.py, or with a"
                " training command."
            )
        cards += cards_here
    return list(dict.fromkeys(cards))


def _cards_in(place: Path) -> set[Path]:
    """Return the run cards and the training commands' logs of a folder, or of a file."""
    if place.is_file():
        return {place}
    cards = set(place.rglob("run_cards/*.json"))
    for file in place.rglob(RESULTS):
        cards |= {file.parent / "run_cards" / f"{name}.json" for name in _results(file)}
    cards |= set(place.rglob(LOG))
    return cards or set(place.rglob("*.json"))


def _results(file: Path) -> dict[str, str]:
    """Read the runner's results from a file; return {} if the file is unreadable."""
    try:
        return {name: str(problem) for name, problem in read_json(file).items()}
    except (OSError, ValueError):
        return {}


def read(path: Path, target: Path) -> dict:
    """Return a card's entry for the page; ``problem`` is "" if run and card are complete."""
    folder = path.resolve().parent
    executed = folder.parent / "html" / f"{path.stem}.html"
    results = folder.parent / RESULTS
    problem = _results(results).get(path.stem, "")
    if problem and path.exists() and path.stat().st_mtime > results.stat().st_mtime:
        problem = ""  # the notebook was run again, cell by cell
    folder = run_folder(folder)
    name = path.stem
    if path.name == LOG:
        name = folder.name
        folder = folder.parent
    entry = {"folder": folder, "name": name, "checks": [], "passed": 0}
    if executed.exists():
        relative = Path(os.path.relpath(executed, target.parent)).as_posix()
        entry["link"] = f"./{quote(relative)}"  # a folder's name may start with javascript:
    try:
        is_training = path.name == LOG
        entry |= describe(read_training(path.parent) if is_training else read_json(path))
        if not problem and not entry["checks"]:
            problem = NO_CHECKS
    except Exception as error:  # other programs' JSON may raise any error
        if not problem:
            problem = f"{path} is not a run card: {type(error).__name__}: {error}."
    entry["problem"] = problem
    entry["failed"] = [name for name, passed, _, _ in entry["checks"] if not passed]
    return entry


def describe(card: dict) -> dict:
    """Return a run card's contents as text; other JSON raises an error of no particular type."""
    checks = [
        (name, check["passed"] is True, short(check.get("value")), check.get("want", ""))
        for name, check in card["checks"].items()
    ]
    curves = card.get("curves", {})
    drawings = [drawing for name, table in curves.items() for drawing in draw(name, table)]
    drawings.sort(key=position)
    metrics = card.get("metrics", {})
    versions = [f"{name} {version}" for name, version in card.get("versions", {}).items()]
    return {
        "seconds": float(card["wall_s"]),
        "preset": str(card.get("preset", "–")),
        "versions": " · ".join(versions),
        "cost": cost(card),
        "headline": headline(card),
        "texts": card.get("texts"),
        "checks": checks,
        "passed": sum(passed for _, passed, _, _ in checks),
        "metrics": [(name.replace("_", " "), short(value)) for name, value in metrics.items()],
        "curves": drawings,
        "tables": [
            (name, list(table), text_rows(table))
            for name, table in curves.items()
            if has_words(table)
        ],
    }


def position(drawing: dict) -> int:
    """Return the position of a curve on the page: those in ``FIRST`` come first."""
    title = drawing["title"]
    return FIRST.index(title) if title in FIRST else len(FIRST)


def failure(path: Path) -> str:
    """Return the failed checks' names, or "" if all passed; raise :func:`describe`'s errors."""
    checks = describe(read_json(path))["checks"]
    if not checks:
        return NO_CHECKS
    return ", ".join(name for name, passed, _, _ in checks if not passed)


def short(value) -> str:
    """Return a number to four significant digits, a text unchanged, or – for an empty value."""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value or "–")


def has_words(table: dict[str, list]) -> bool:
    """Return whether a table contains text."""
    return any(isinstance(value, str) for column in table.values() for value in column)


def text_rows(table: dict[str, list]) -> list[list[str]]:
    """Return a table's rows as text."""
    return [[short(value) for value in row] for row in zip(*table.values(), strict=True)]


def draw(name: str, table: dict[str, list]) -> Iterator[dict]:
    """Yield a drawing per column; x is the first column if it increases, else the row number."""
    if has_words(table):
        return
    axis, xs = next(iter(table.items()))
    if None in xs or any(first >= second for first, second in pairwise(xs)):
        axis = ""
        xs = range(len(xs))
    for column, ys in table.items():
        if column == axis or column.startswith("time/") or column.endswith("_ci"):
            continue
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
        low = min((y for _, y in points), default=0)
        high = max((y for _, y in points), default=0)
        if low == high:
            continue
        x_scale = WIDTH / (xs[-1] - xs[0])
        y_scale = HEIGHT / (high - low)
        svg_points = [f"{(x - xs[0]) * x_scale:.1f},{(high - y) * y_scale:.1f}" for x, y in points]
        yield {
            "title": column,
            "where": f"{name} over {axis}" if axis else name,
            "about": f"{short(points[0][1])} → {short(points[-1][1])}",
            "points": " ".join(svg_points),
        }


def cost(card: dict) -> str:
    """Return a run's time and peak memory (the GPU's if there is one) as text."""
    memory = card.get("peak_cuda_mb") or card.get("peak_rss_mb")
    return f"{card['wall_s']:.0f} s, {memory / 1024:.1f} GB"


def headline(card: dict) -> str:
    """Return the first metric with values before and after, as text, or – if there is none.

    If the card has the objective, score − β·KL, its values follow in parentheses.
    """
    metric = headline_of(card)
    if metric is None:
        return "–"
    text = change(card, metric)
    if metric != OBJECTIVE and card["metrics"].get(f"{OBJECTIVE}_after") is not None:
        text += f" ({change(card, OBJECTIVE)})"
    return text


def change(card: dict, metric: str) -> str:
    """Return a metric's values before and after as text."""
    before = card["metrics"][f"{metric}_before"]
    after = card["metrics"][f"{metric}_after"]
    return f"{metric.replace('_', ' ')} {before:.2f} → {after:.2f}"


def headline_of(card: dict) -> str | None:
    """Return the headline metric's name, or None."""
    metrics = {name: x for name, x in card.get("metrics", {}).items() if x is not None}
    for name in metrics:
        metric = name.removesuffix("_before")
        if name.endswith("_before") and f"{metric}_after" in metrics:
            return metric
    return None


def check_own(target: Path) -> None:
    """Raise ``FileExistsError`` for a file that this command did not write."""
    if target.is_file() and TITLE not in target.read_text("utf-8", "replace"):
        raise FileExistsError(f"{target} is not a run report. Choose another --output.")


def write(places: list[Path], target: Path) -> list[dict]:
    """Write the page; return its entries. Raises ``OSError`` for a path without cards."""
    check_own(target)
    entries = [read(path, target) for path in find(places)]
    name_people(entries)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = templates.get_template("report.html.j2").render(
        entries=entries,
        people=sorted({entry["who"] for entry in entries}),
        names=sorted({entry["name"] for entry in entries}),
        width=WIDTH,
        height=HEIGHT,
        shown=SHOWN,
    )
    with atomic_file(target) as path:
        path.write_text(text, encoding="utf-8")
    return entries


def name_people(entries: list[dict]) -> None:
    """Set each entry's ``who``: the end of its folder's path, as short as distinguishes all."""
    for depth in range(1, 9):
        for entry in entries:
            entry["who"] = "/".join(entry["folder"].parts[-depth:])
        if len({(entry["who"], entry["name"]) for entry in entries}) == len(entries):
            return


def run_folder(folder: Path) -> Path:
    """Return a run's folder without the runner's own folders at its end."""
    while folder.name in ("run_cards", "build"):
        folder = folder.parent
    return folder


def show(entries: list[dict]) -> None:
    """Print a row per card, then the problems."""
    people = {entry["who"] for entry in entries}
    names = [entry["name"] for entry in entries]
    if len(people) > 1:
        names = [f"{entry['who']}: {entry['name']}" for entry in entries]
    width = max(map(len, names), default=0)
    for name, entry in zip(names, entries, strict=True):
        checks = f"{entry['passed']}/{len(entry['checks'])} passed"
        cost = entry.get("cost", "–")
        print(f"{name:{width}}  {checks:13} {cost:14} {entry.get('headline', '–')}")
    for name, entry in zip(names, entries, strict=True):
        problem = entry["problem"] or ", ".join(entry["failed"])
        if problem:
            print(f"{name} did not pass. {problem}", file=sys.stderr)
