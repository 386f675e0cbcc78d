"""One page about runs, without a request to anywhere: who passed what, what was measured, and its
curves.

CARDS are run cards, or folders of them: the output of run_notebooks.py, or one that holds a folder
per person.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from rlhf_course.runtime import command
from rlhf_course.runtime.files import atomic_file, read_json

HERE = Path(__file__).resolve().parent
FIRST = [
    "ppo/mean_scores",
    "objective/kl",
    "objective/kl_coef",
    "tokens/responses_len_mean",
    "objective/entropy",
]
SHOWN, WIDTH, HEIGHT = (
    5,
    160,
    48,
)  # curves that are not folded; a drawing's size, in units of its own


def find(places: list[Path]) -> Iterator[Path]:
    """The run cards in files and folders, and where one is missing beside an executed page. Raises
    ``OSError``.
    """
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"There is no {place}. Name run cards, or folders of them.")
        pages = {
            path.parents[1] / "run_cards" / f"{path.stem}.json"
            for path in place.glob("html/*.html")
        }
        nested = {*place.glob("**/run_cards/*.json")} | pages
        found = (
            [place]
            if place.is_file()
            else sorted(nested or {*place.glob("*.json")} or {*place.glob("*/*.json")})
        )
        if not found:
            raise FileNotFoundError(f"{place} holds no run card; run_notebooks.py writes them.")
        yield from found


def read(path: Path, target: Path) -> dict:
    """What the page says of a card; ``problem`` says why there is nothing to say."""
    folder = path.resolve().parent
    executed = folder.parent / "html" / f"{path.stem}.html"
    while folder.name in ("run_cards", "build"):  # as the runner lays them out
        folder = folder.parent
    link = Path(os.path.relpath(executed, target.parent)).as_posix() if executed.exists() else ""
    entry = {
        "who": folder.name,
        "name": path.stem,
        "link": link,
        "card": {},
        "checks": [],
        "passed": 0,
    }
    if not path.exists():
        return entry | {
            "problem": "It wrote no run card, so it stopped early; its executed page shows where."
        }
    try:
        card = read_json(path)
    except ValueError as error:
        return entry | {"problem": str(error)}
    try:
        return entry | told(card)
    except Exception as error:  # whatever another program's JSON leads to
        return entry | {"problem": f"{path} is no run card: {type(error).__name__}: {error}."}


def told(card: dict) -> dict:
    """What a card holds, as words. Raises whatever follows where it is no run card."""
    checks = [
        (n, c["passed"] is True, short(c.get("value")), c.get("want", ""))
        for n, c in card["checks"].items()
    ]
    drawn = [
        chart for name, table in card.get("curves", {}).items() for chart in charts(name, table)
    ]
    drawn.sort(key=lambda chart: [*FIRST, chart.get("title")].index(chart.get("title")))
    return {
        "card": card,
        "cost": cost(card),
        "headline": headline(card),
        "checks": checks,
        "passed": sum(passed for _, passed, _, _ in checks),
        "metrics": [
            (name.replace("_", " "), short(value))
            for name, value in card.get("metrics", {}).items()
        ],
        "charts": [chart for chart in drawn if "lines" in chart],
        "tables": [chart for chart in drawn if "rows" in chart],
    }


def short(value) -> str:
    """A number to four digits, a word as it is, – for nothing."""
    return f"{value:.4g}" if isinstance(value, int | float) else value or "–"


def charts(name: str, table: dict[str, list]) -> Iterator[dict]:
    """A recorded table as small drawings, one per column; as a table where its rows are things and
    not steps.
    """
    count = len(next(iter(table.values())))
    words = [
        column
        for column, values in table.items()
        if any(isinstance(value, str) for value in values)
    ]
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
        about = (
            f"{short(low)} … {short(high)}"
            if words
            else f"{short(ys[known[0]])} → {short(ys[known[-1]])}"
        )
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
    return (
        f"{what.replace('_', ' ')} {metrics[f'{what}_before']:.2f} → {metrics[f'{what}_after']:.2f}"
        if what
        else "–"
    )


def headline_of(card: dict) -> str | None:
    """Its name."""
    names = card.get("metrics", {})
    return next(
        (k[:-7] for k in names if k.endswith("_before") and f"{k[:-7]}_after" in names), None
    )


def write(places: list[Path], target: Path) -> list[dict]:
    """Write the page; returns what it says of each card. Raises ``OSError`` where there are no
    cards.
    """
    entries = [read(path, target) for path in dict.fromkeys(find(places))]
    template = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    people, names = (sorted({entry[key] for entry in entries}) for key in ("who", "name"))
    filled = {
        "entries": entries,
        "people": people,
        "names": names,
        "width": WIDTH,
        "height": HEIGHT,
        "shown": SHOWN,
    }
    with atomic_file(target) as path:
        path.write_text(template.get_template("report.html.j2").render(filled), encoding="utf-8")
    return entries


def main(arguments: list[str]) -> int:
    """Write the page and say what did not pass; the exit code is 1 where a card cannot be read."""
    parser = argparse.ArgumentParser(
        "report.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "cards", nargs="+", type=Path, metavar="CARDS", help="run cards, or folders of them"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the page (default: report.html)"
    )
    chosen = parser.parse_args(arguments)
    entries = write(chosen.cards, chosen.output.resolve())
    for entry in entries:
        failed = [name for name, passed, _, _ in entry["checks"] if not passed]
        said = entry.get("problem") or (
            "passed" if not failed else f"not passed: {', '.join(failed)}"
        )
        print(
            f"{entry['who']:20} {entry['name']:24} {entry['passed']}/{len(entry['checks'])}  {said}"
        )
    print(f"Open {chosen.output}")
    return int(any(entry.get("problem") for entry in entries))


if __name__ == "__main__":
    sys.exit(command.run("report.py", main))
