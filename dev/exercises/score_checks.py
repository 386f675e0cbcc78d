"""Score the exercises' checks on other people's solutions, from a folder of JSON Lines files.

``first`` is the verdict (null: accepted) before the checks' authors read the solutions. ``judged``
is false if that verdict names the wrong mistake. ``dropped`` explains why the solution contradicts
its exercise's current statement.
"""

import json
import sys
from math import sqrt
from pathlib import Path

from dev.exercises.make_exercises import FOLDER, SETS, notebook

PAGE = FOLDER.parents[1] / "docs" / "exercise-checks.md"
HEAD = "| exercises | wrong: rejected | named | located | blamed wrongly | right: accepted |"
LOCATED = ("where", "error")
IMPORTS = "import math, re, torch\nimport numpy as np\nfrom torch.nn.functional import logsigmoid\n"


def verdict(entry: dict) -> str | None:
    """Return the name of a solution's mistake, or None if the checks accept the solution."""
    from checks.guard import guarded
    from engine import LIMIT, Set

    names = {}
    exec(IMPORTS + entry["code"], names)

    def work() -> tuple[str | None, str]:
        wrong = Set.loaded[entry["exercise"]].judge(names[entry["exercise"]])
        return (wrong.name if wrong else None), ""

    name = guarded(work, LIMIT)[0]
    return "error" if name and name[:5] == "Your " else name  # timeout or crash


def share(part: int, whole: int) -> str:
    """Return a percentage with its 95 % Wilson interval, as text."""
    p = part / whole
    z2 = 1.96**2 / whole
    middle = p + z2 / 2
    half = sqrt(z2 * (p * (1 - p) + z2 / 4))
    low = (middle - half) / (1 + z2)
    high = (middle + half) / (1 + z2)
    return f"{part} of {whole}: {100 * p:.1f} ({100 * low:.1f} … {100 * high:.1f})"


def row(title: str, entries: list[dict], run: str) -> str:
    right = [e[run] for e in entries if e["kind"] == "right"]
    wrong = [e for e in entries if e["kind"] != "right"]
    rejected = [e[run] for e in wrong if e[run] is not None]
    named = [name for name in rejected if name and name not in LOCATED]
    blamed = sum(e.get("judged") is False and e[run] == e["first"] for e in wrong)
    cells = [share(len(names), len(wrong)) for names in (rejected, named)]
    cells += [str(sum(name in LOCATED for name in rejected)), str(blamed)]
    return f"| {' | '.join([title, *cells, share(right.count(None), len(right))])} |"


def tables(folder: Path, titles: tuple[str, str]) -> list[str]:
    """Return a folder's tables as Markdown, for the first run and for the current checks."""
    entries = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            entries.append({**entry, "set": path.stem, "now": verdict(entry)})
    page = []
    for title, run in zip(titles, ("first", "now"), strict=True):
        kept = [e for e in entries if run == "first" or "dropped" not in e]
        sets = {e["set"]: [x for x in kept if x["set"] == e["set"]] for e in kept}
        rows = [row(*each, run) for each in [*sets.items(), ("all", kept)]]
        page += [f"### {title}", "\n".join([HEAD, "|---" * 6 + "|", *rows])]
    return page


def main(folder: Path) -> None:
    for name in SETS:
        notebook(name, False)
    page = [PAGE.read_text("utf-8").partition("\n### ")[0].rstrip()]
    page += tables(folder, ("The first run", "Today"))
    for name in ("second", "third"):
        titles = f"The {name} corpus, first run", f"The {name} corpus, today"
        page += tables(folder / name, titles)
    PAGE.write_text("\n\n".join(page) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
