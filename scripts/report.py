"""One page about runs, without a request to anywhere: who passed what, what was measured, and its
curves.

CARDS are run cards, or folders of them: the output of run_notebooks.py, or one that holds a folder
per person.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from command_line import exits
from jinja2 import Environment, FileSystemLoader

from rlhf_course.runtime.files import atomic_file, read_json

HERE = Path(__file__).resolve().parent
TITLE = "<title>Hands-on RLHF: run report"
RESULTS = "run_results.json"  # notebook → what the runner found wrong, "" where it passed
FIRST = [
    "ppo/mean_scores",
    "objective/kl",
    "objective/kl_coef",
    "tokens/responses_len_mean",
    "objective/entropy",
]
SHOWN, WIDTH, HEIGHT = 5, 160, 48  # curves that are not folded; a drawing's size in its own units


def add_results(output: Path, results: dict[str, str]) -> None:
    """Keep the runner's results in an output folder, with those of notebooks that ran before."""
    file = output / RESULTS
    before = read_json(file) if file.exists() else {}
    with atomic_file(file) as path:
        path.write_text(json.dumps(before | results, indent=1) + "\n", encoding="utf-8")


def find(places: list[Path]) -> Iterator[Path]:
    """Yield the run cards in files and folders, also those that a notebook failed to write.

    Raises ``OSError`` for a place that holds none.
    """
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"There is no {place}. Name run cards, or folders of them.")
        nested = {*place.glob("**/run_cards/*.json")}
        for file in place.glob(f"**/{RESULTS}"):
            nested |= {file.parent / "run_cards" / f"{name}.json" for name in _results(file)}
        flat = (path for pattern in ("*.json", "*/*.json") for path in place.glob(pattern))
        found = [place] if place.is_file() else sorted(nested or {*flat})
        if not found:
            raise FileNotFoundError(f"{place} holds no run card; run_notebooks.py writes them.")
        yield from found


def _results(file: Path) -> dict[str, str]:
    """Return the runner's results in a file, {} if there are none that can be read."""
    try:
        return {name: str(problem) for name, problem in read_json(file).items()}
    except (OSError, ValueError):
        return {}


def read(path: Path, target: Path) -> dict:
    """Return what the page says of a card; ``problem`` says what went wrong, if anything did."""
    output = path.resolve().parent.parent
    executed = output / "html" / f"{path.stem}.html"
    folder = path.resolve().parent
    while folder.name in ("run_cards", "build"):  # as the runner lays them out
        folder = folder.parent
    who = {"who": folder.name, "longer": f"{folder.parent.name}/{folder.name}"}
    entry = who | {"name": path.stem, "link": "", "checks": [], "passed": 0}
    if executed.exists():
        relative = Path(os.path.relpath(executed, target.parent)).as_posix()
        entry["link"] = f"./{quote(relative)}"  # a folder's name may begin with javascript:
    problem = _results(output / RESULTS).get(path.stem, "")
    if not path.exists():
        problem = problem or "It wrote no run card, so it stopped early."
        return entry | {"problem": problem, "failed": []}
    try:
        entry |= told(read_json(path))
    except Exception as error:  # whatever another program's JSON leads to
        problem = problem or f"{path} is no run card: {type(error).__name__}: {error}."
    if not entry["checks"]:
        problem = problem or "Its run card holds no check."
    failed = [name for name, passed, _, _ in entry["checks"] if not passed]
    return entry | {"problem": problem, "failed": failed}


def told(card: dict) -> dict:
    """Return what a card holds, as words. Raises any error where it is no run card."""
    checks = [
        (n, c["passed"] is True, short(c.get("value")), c.get("want", ""))
        for n, c in card["checks"].items()
    ]
    drawn = [chart for n, table in card.get("curves", {}).items() for chart in charts(n, table)]
    drawn.sort(key=lambda chart: [*FIRST, chart.get("title")].index(chart.get("title")))
    metrics = card.get("metrics", {}).items()
    versions = (f"{name} {version}" for name, version in card.get("versions", {}).items())
    return {
        "seconds": float(card["wall_s"]),
        "preset": str(card.get("preset", "–")),
        "versions": " · ".join(versions),
        "cost": cost(card),
        "headline": headline(card),
        "checks": checks,
        "passed": sum(passed for _, passed, _, _ in checks),
        "metrics": [(name.replace("_", " "), short(value)) for name, value in metrics],
        "charts": [chart for chart in drawn if "lines" in chart],
        "tables": [chart for chart in drawn if "rows" in chart],
    }


def failure(path: Path) -> str:
    """Return which of a card's checks failed, "" if all passed. Raises as :func:`told`."""
    checks = told(read_json(path))["checks"]
    failed = ", ".join(name for name, passed, _, _ in checks if not passed)
    return failed or ("" if checks else "Its run card holds no check.")


def short(value) -> str:
    """Return a number to four digits, a word as it is, – for nothing."""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value or "–")


def charts(name: str, table: dict[str, list]) -> Iterator[dict]:
    """A recorded table as small drawings, one per column; as a table where its rows are things and
    not steps.
    """
    count = len(next(iter(table.values())))
    words = [column for column in table if any(isinstance(x, str) for x in table[column])]
    numbers = [column for column in table if column not in words and not column.startswith("time/")]
    things = [tuple(str(table[word][i]) for word in words) for i in range(count)]
    if len(set(things)) * 2 > count and words:
        rows = [[short(table[column][i]) for column in table] for i in range(count)]
        yield {"name": name, "columns": [*table], "rows": rows}
        return
    groups = {thing: [i for i in range(count) if things[i] == thing] for thing in things}
    axis = next((column for column in numbers[:1] if None not in table[column]), "")
    along = axis and all(
        table[axis][i] < table[axis][j] for g in groups.values() for i, j in pairwise(g)
    )
    for column in numbers[bool(along) :]:
        known = [i for i in range(count) if table[column][i] is not None]
        low, high = (edge([table[column][i] for i in known], default=0) for edge in (min, max))
        if low == high or column.endswith("_ci"):
            continue
        xs, ys = table[axis] if along else range(count), table[column]
        wide, tall = WIDTH / (max(xs) - min(xs)), HEIGHT / (high - low)
        points = {i: f"{(xs[i] - min(xs)) * wide:.1f},{(high - ys[i]) * tall:.1f}" for i in known}
        about = f"{short(ys[known[0]])} → {short(ys[known[-1]])}"
        about = f"{short(low)} … {short(high)}" if words else about
        lines = [
            (", ".join(thing), " ".join(points[i] for i in group if i in points))
            for thing, group in groups.items()
        ]
        yield {
            "title": column,
            "where": f"{name} over {axis}" if along else name,
            "about": about,
            "lines": lines,
        }


def cost(card: dict) -> str:
    """Time and memory of a run; on a GPU, its memory."""
    memory = card.get("peak_cuda_mb") or card.get("peak_rss_mb")
    return f"{card['wall_s']:.0f} s, {memory / 1024:.1f} GB" if card else "not measured"


def headline(card: dict) -> str:
    """The first metric that was measured before and after."""
    metrics, what = card.get("metrics", {}), headline_of(card)
    if what is None:
        return "–"
    before, after = metrics[f"{what}_before"], metrics[f"{what}_after"]
    return f"{what.replace('_', ' ')} {before:.2f} → {after:.2f}"


def headline_of(card: dict) -> str | None:
    """Its name."""
    metrics = card.get("metrics", {})
    names = [name.removesuffix("_before") for name in metrics if name.endswith("_before")]
    pairs = {name: (metrics[f"{name}_before"], metrics.get(f"{name}_after")) for name in names}
    return next((name for name, both in pairs.items() if None not in both), None)


def write(places: list[Path], target: Path) -> list[dict]:
    """Write the page; return what it says of each card. Raises ``OSError`` if there are none."""
    if target.is_file() and TITLE not in target.read_text("utf-8", "replace"):
        raise FileExistsError(f"{target} is not a page of this command. Name another --output.")
    entries = [read(path, target) for path in dict.fromkeys(find(places))]
    if len({(entry["who"], entry["name"]) for entry in entries}) < len(entries):
        entries = [entry | {"who": entry["longer"]} for entry in entries]
    how = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=FileSystemLoader(HERE), **how).get_template("report.html.j2")
    people, names = (sorted({entry[key] for entry in entries}) for key in ("who", "name"))
    sizes = {"width": WIDTH, "height": HEIGHT, "shown": SHOWN}
    with atomic_file(target) as path:
        text = template.render(entries=entries, people=people, names=names, **sizes)
        path.write_text(text, encoding="utf-8")
    return entries


def show(entries: list[dict]) -> None:
    """Print a row per card, and below them what did not pass."""
    several = len({entry["who"] for entry in entries}) > 1
    names = [f"{entry['who']}: " * several + entry["name"] for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        checks = f"{entry['passed']}/{len(entry['checks'])} passed"
        words = f"{entry.get('cost', '–'):14} {entry.get('headline', '–')}"
        print(f"{name:{max(map(len, names))}}  {checks:13} {words}")
    for name, entry in zip(names, entries, strict=True):
        if problem := entry["problem"] or ", ".join(entry["failed"]):
            print(f"{name} did not pass. {problem}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Write the page and say what did not pass; the exit code is 1 if a card cannot be read."""
    how = {"description": __doc__, "formatter_class": argparse.RawTextHelpFormatter}
    parser = argparse.ArgumentParser("report.py", **how)
    text = "run cards, or folders of them"
    parser.add_argument("cards", nargs="+", type=Path, metavar="CARDS", help=text)
    text = "the page (default: report.html)"
    parser.add_argument("--output", type=Path, default=Path("report.html"), help=text)
    chosen = parser.parse_args(arguments)
    entries = write(chosen.cards, chosen.output.resolve())
    show(entries)
    print(f"Open {chosen.output}")
    return int(any(entry["problem"] for entry in entries))


if __name__ == "__main__":
    sys.exit(exits.run("report.py", main))
