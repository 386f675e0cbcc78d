"""Measure the exercises' checks on solutions by others, and write the table on the site.

    python scripts/make/score_checks.py tests/fixtures/solutions

The folder has lines of JSON with exercise, kind (right or wrong), why and code. ``first`` is
the verdict of the run before the authors of the checks had read the solutions (null: accepted);
``judged`` is false where that verdict blames something else than what is wrong.
"""

import json
import sys
from math import sqrt
from pathlib import Path

from make_exercises import FOLDER

sys.path.insert(0, str(FOLDER))
from checks.guard import guarded
from engine import LIMIT, Set

PAGE = FOLDER.parents[1] / "site" / "exercise-checks.md"
COLUMNS = "| wrong: rejected | named | located | blamed wrongly | right: accepted |"
LOCATED, PLAIN = ("where", "error"), ("", "late")


def verdict(entry: dict) -> str | None:
    """The name of the mistake that the checks see in a solution; None if they accept it."""
    exercise = Set.loaded[entry["exercise"]]

    def work():
        names = dict(sys.modules["__main__"].__dict__)
        exec(entry["code"], names)
        wrong = exercise.judge(names[entry["exercise"]])
        return wrong and wrong.name, ""

    name = guarded(work, LIMIT)[0]
    return "late" if name and " " in name and ":" not in name else name


def share(part: int, whole: int) -> str:
    """A share with its 95 % Wilson interval."""
    p, z = part / whole, 1.96
    middle, half = p + z * z / whole / 2, z * sqrt(p * (1 - p) / whole + (z / whole / 2) ** 2)
    low, high = ((middle + side * half) / (1 + z * z / whole) for side in (-1, 1))
    return f"{part}/{whole} = {p:.1%} ({low:.1%} to {high:.1%})"
