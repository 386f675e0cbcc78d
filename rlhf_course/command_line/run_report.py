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

from rlhf_course.runtime.files import atomic_file, read_json

TITLE = "<title>Hands-on RLHF: run report"
RESULTS = "run_results.json"  # notebook → problem, or "" if it passed
FIRST = ["ppo/mean_scores", "objective/kl", "objective/kl_coef", "tokens/responses_len_mean"]
SHOWN, WIDTH, HEIGHT = 5, 160, 48  # unfolded curves; a drawing's size in SVG units


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
    found = []
    for place in places:
        cards = {place} if place.is_file() else {*place.rglob("run_cards/*.json")}
        for file in place.rglob(RESULTS):
            cards |= {file.parent / "run_cards" / f"{name}.json" for name in _results(file)}
        cards = cards or {*place.rglob("*.json")}
        if not cards:
            raise FileNotFoundError(f"{place} has no run card. Create one with run_notebooks.py.")
        found += sorted(cards)
    return [*dict.fromkeys(found)]


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
    while folder.name in ("run_cards", "build"):  # the runner's own folders
        folder = folder.parent
    entry = {"folder": folder, "name": path.stem, "checks": [], "passed": 0}
    if executed.exists():
        relative = Path(os.path.relpath(executed, target.parent)).as_posix()
        entry["link"] = f"./{quote(relative)}"  # a folder's name may start with javascript:
    try:
        entry |= told(read_json(path))
        problem = problem or ("" if entry["checks"] else "The run card has no checks.")
    except Exception as error:  # other programs' JSON may raise any error
        problem = problem or f"{path} is not a run card: {type(error).__name__}: {error}."
    failed = [name for name, passed, _, _ in entry["checks"] if not passed]
    return entry | {"problem": problem, "failed": failed}


def told(card: dict) -> dict:
    """Return a run card's contents as text; other JSON raises an error of no particular type."""
    checks = [
        (name, check["passed"] is True, short(check.get("value")), check.get("want", ""))
        for name, check in card["checks"].items()
    ]
    curves = card.get("curves", {}).items()
    drawn = [curve for name, table in curves for curve in draw(name, table)]
    drawn.sort(key=lambda curve: [*FIRST, curve["title"]].index(curve["title"]))
    versions = (f"{name} {version}" for name, version in card.get("versions", {}).items())
    return {
        "seconds": float(card["wall_s"]),
        "preset": str(card.get("preset", "–")),
        "versions": " · ".join(versions),
        "cost": cost(card),
        "headline": headline(card),
        "checks": checks,
        "passed": sum(passed for _, passed, _, _ in checks),
        "metrics": [(n.replace("_", " "), short(x)) for n, x in card.get("metrics", {}).items()],
        "curves": drawn,
        "tables": [(name, *rows(table)) for name, table in curves if has_words(table)],
    }


def failure(path: Path) -> str:
    """Return the failed checks' names, or "" if all passed; raise :func:`told`'s errors."""
    checks = told(read_json(path))["checks"]
    failed = ", ".join(name for name, passed, _, _ in checks if not passed)
    return failed or ("" if checks else "The run card has no checks.")


def short(value) -> str:
    """Return a number to four significant digits, a text unchanged, or – for an empty value."""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value or "–")


def has_words(table: dict[str, list]) -> bool:
    """Return whether a table contains text."""
    return any(isinstance(value, str) for column in table.values() for value in column)


def rows(table: dict[str, list]) -> tuple[list, list]:
    """Return a table's column names, and its rows as text."""
    return [*table], [[*map(short, row)] for row in zip(*table.values(), strict=True)]


def draw(name: str, table: dict[str, list]) -> Iterator[dict]:
    """Yield a drawing per column; x is the first column if it increases, else the row number."""
    axis, xs = next(iter(table.items()))
    if has_words(table):
        return
    if None in xs or any(a >= b for a, b in pairwise(xs)):
        axis, xs = "", range(len(xs))
    for column, ys in table.items():
        known = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
        low, high = (edge((y for _, y in known), default=0) for edge in (min, max))
        if low == high or column == axis or column.startswith("time/") or column.endswith("_ci"):
            continue
        wide, tall = WIDTH / (xs[-1] - xs[0]), HEIGHT / (high - low)
        points = (f"{(x - xs[0]) * wide:.1f},{(high - y) * tall:.1f}" for x, y in known)
        where = f"{name} over {axis}" if axis else name
        about = f"{short(known[0][1])} → {short(known[-1][1])}"
        yield {"title": column, "where": where, "about": about, "points": " ".join(points)}


def cost(card: dict) -> str:
    """Return a run's time and peak memory (the GPU's if there is one) as text."""
    memory = card.get("peak_cuda_mb") or card.get("peak_rss_mb")
    return f"{card['wall_s']:.0f} s, {memory / 1024:.1f} GB"


def headline(card: dict) -> str:
    """Return the first metric with values before and after, as text, or – if there is none."""
    what, metrics = headline_of(card), card.get("metrics", {})
    if what is None:
        return "–"
    before, after = metrics[f"{what}_before"], metrics[f"{what}_after"]
    return f"{what.replace('_', ' ')} {before:.2f} → {after:.2f}"


def headline_of(card: dict) -> str | None:
    """Return the headline metric's name, or None."""
    metrics = {name: x for name, x in card.get("metrics", {}).items() if x is not None}
    names = (name.removesuffix("_before") for name in metrics if name.endswith("_before"))
    return next((name for name in names if f"{name}_after" in metrics), None)


def check_own(target: Path) -> None:
    """Raise ``FileExistsError`` for a file that this command did not write."""
    if target.is_file() and TITLE not in target.read_text("utf-8", "replace"):
        raise FileExistsError(f"{target} is not a run report. Choose another --output.")


def write(places: list[Path], target: Path) -> list[dict]:
    """Write the page; return its entries. Raises ``OSError`` for a path without cards."""
    check_own(target)
    entries = [read(path, target) for path in find(places)]
    for depth in range(1, 9):  # the shortest paths that distinguish people
        entries = [e | {"who": "/".join(e["folder"].parts[-depth:])} for e in entries]
        if len({(entry["who"], entry["name"]) for entry in entries}) == len(entries):
            break
    how = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(Path(__file__).resolve().parent)
    template = Environment(loader=loader, **how).get_template("report.html.j2")
    people, names = (sorted({entry[key] for entry in entries}) for key in ("who", "name"))
    sizes = {"width": WIDTH, "height": HEIGHT, "shown": SHOWN}
    with atomic_file(target) as path:
        text = template.render(entries=entries, people=people, names=names, **sizes)
        path.write_text(text, encoding="utf-8")
    return entries


def show(entries: list[dict]) -> None:
    """Print a row per card, then the problems."""
    several = len({entry["who"] for entry in entries}) > 1
    names = [f"{entry['who']}: " * several + entry["name"] for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        checks = f"{entry['passed']}/{len(entry['checks'])} passed"
        words = f"{entry.get('cost', '–'):14} {entry.get('headline', '–')}"
        print(f"{name:{max(map(len, names))}}  {checks:13} {words}")
    for name, entry in zip(names, entries, strict=True):
        if problem := entry["problem"] or ", ".join(entry["failed"]):
            print(f"{name} did not pass. {problem}", file=sys.stderr)
