"""Grade exercise notebooks on hidden inputs; report points and counts of named mistakes.

HANDED_IN contains a folder or a notebook per student, or one student's notebooks with their
original names. An exercise is worth 1 to 3 points, one per dot in its heading. Submitted code runs
in a forked process with a time limit but no sandbox: use an account or container without valuable
data.

csv          grades.csv: points, mistake and message per student and exercise
html         grades.html: number of students per mistake, exercise by exercise
gradescope   STUDENT/results.json: "tests", each with name, score, max_score and output
classroom50  STUDENT/result.json, schema classroom50/result/v1: score, max-score, and "tests", each
             with test-name, passed, score, max-score; the other fields come from variables that
             Classroom 50's runner sets (CLASSROOM, ASSIGNMENT, SUBMISSION_TAG, …)
"""

import argparse
import csv
import json
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from textwrap import shorten

import torch

from dev.exercises.make_exercises import SETS, load
from rlhf_course.command_line import exits
from rlhf_course.runtime.files import atomic_file, check_folder, read_json

PUBLIC = 1000  # the students' own checks use smaller seeds
CHOSEN: dict[str, dict] = {}  # notebook → exercises; forked processes inherit them
UNNAMED = "missing", "error", "stopped", "where", "unnamed"
FILES = {  # Format → (file per student, {test's field: row's key})
    "gradescope": (
        "results.json",
        {"name": "exercise", "score": "points", "max_score": "max_points", "output": "said"},
    ),
    "classroom50": (
        "result.json",
        {"test-name": "exercise", "passed": "passed", "score": "points", "max-score": "max_points"},
    ),
}
SUBMISSION = "SUBMISSION_TAG COMMIT_URL RELEASE_URL REVIEW_URL CLASSROOM ASSIGNMENT".split()


def students(handed_in: Path) -> dict[str, list[Path]]:
    """Return each student's notebooks; the key is "" if there is only one student.

    Raises ``ValueError`` if there is no notebook.
    """
    if any((handed_in / f"{name}.ipynb").exists() for name in CHOSEN):
        return {"": notebooks(handed_in)}
    found: dict[str, list[Path]] = {}
    for place in sorted(handed_in.glob("[!.]*")):
        if not place.is_dir() and place.suffix != ".ipynb":
            print(f"Not graded: {place.name}. Unpack archives; hand in folders or notebooks.")
        else:
            found.setdefault(place.name.removesuffix(".ipynb"), []).extend(notebooks(place))
    if not any(found.values()):
        raise ValueError(f"{handed_in} has no notebooks. Choose the folder of submissions.")
    return found


def notebooks(place: Path) -> list[Path]:
    """Return [place] for a file, or a folder's sorted notebooks, without Jupyter's copies."""
    paths = sorted(place.rglob("[!.]*.ipynb")) if place.is_dir() else [place]
    return [path for path in paths if path.parent.name != ".ipynb_checkpoints"]


def grade(paths: list[Path], seed: int, limit: float) -> list[dict]:
    """Return a dict per exercise: id, points, maximum, mistake, and message (``said``)."""
    import frozen

    parsed, damaged, rows = {}, "", []
    for path in paths:
        try:
            parsed[path] = frozen.cells(path)
        except (OSError, ValueError) as error:
            damaged += f" {error}"
    for notebook, exercises in CHOSEN.items():
        ordered = sorted(parsed, key=lambda path: (notebook not in path.stem, path))
        for key, exercise in exercises.items():
            places = [path.name for path in ordered if defines(parsed[path], key)]

            def find(key=key, ordered=ordered):
                stub = None
                for path in ordered:
                    answer = frozen.load(parsed[path], key)
                    code = getattr(answer, "__code__", None)
                    if answer and "NotImplementedError" not in getattr(code, "co_names", ()):
                        return answer
                    stub = stub or answer
                return stub

            said, name = frozen.examine(exercise, find, seed, limit)
            if said and len(places) > 1:
                said += f" ({' and '.join(places)} define it; the first written one counts.)"
            row = {"exercise": f"{notebook}/{key}", "points": exercise.difficulty * (not said)}
            row |= {"max_points": exercise.difficulty, "passed": not said, "mistake": name}
            rows.append(row | {"said": (said or "") + damaged * (name == "missing")})
    return rows


def defines(parsed: list, key: str) -> bool:
    """Return whether a parsed notebook has a function named ``key``."""
    return any(getattr(statement, "name", "") == key for cell in parsed for statement in cell)


def result(rows: list[dict], form: str) -> dict:
    """Return a student's results in Gradescope's or Classroom 50's format."""
    tests = [{field: row[own] for field, own in FILES[form][1].items()} for row in rows]
    if form == "gradescope":
        return {"tests": tests}
    named = {x.partition("_")[0].lower(): os.environ.get(x, "") for x in SUBMISSION}
    named["review"] = named["review"] or named["commit"]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    totals = {key: sum(test[key] for test in tests) for key in ("score", "max-score")}
    head = {"schema": "classroom50/result/v1", **named, "datetime": now}
    return {**head, **totals, "tests": tests}


def page(target: Path, graded: dict[str, list[dict]]) -> None:
    """Write the instructor's page: a row per mistake, by exercise, most frequent first."""
    from rlhf_course.command_line import page as pages

    all_rows = [row for student in graded.values() for row in student]
    made = Counter((row["exercise"], row["mistake"]) for row in all_rows)
    said = {(row["exercise"], row["mistake"]): shorten(row["said"], 200) for row in all_rows}
    rows = [
        {
            "exercise": exercise,
            "right": f"{made[exercise, 'right']} of {len(graded)}",
            "students": students,
            "mistake": name.removeprefix("stock:").replace("_", " "),
            "message": "" if name in UNNAMED else said[exercise, name],
        }
        for (exercise, name), students in made.most_common()
        if name != "right"
    ]
    named = sum(row["students"] for row in rows if row["message"])
    pages.write(
        target,
        title="Which mistakes the class makes",
        verdict=f"{len(graded)} students; the checks name {named} of the mistakes.",
        about="missing: not submitted or not written. error: raises an error. stopped: crashed or "
        "exceeded the time limit. where: wrong in some cases. unnamed: a mistake that no "
        "check names.",
        columns={key: key for key in ("exercise", "right", "students", "mistake", "message")},
        rows=sorted(rows, key=lambda row: row["exercise"]),
        pictures={},
    )


def write(folder: Path, form: str, graded: dict[str, list[dict]]) -> None:
    """Write all grades to ``folder`` in the given format; as csv, refuse to lose other grades."""
    if form == "html":
        page(folder / "grades.html", graded)
    elif form == "csv":
        rows = [{"student": who, **row} for who, student in graded.items() for row in student]
        file = folder / "grades.csv"
        if file.exists():
            with file.open(newline="") as table:
                before = [*csv.DictReader(table)]
            if not before or before[0].keys() != rows[0].keys():
                raise ValueError(f"{file} was not written by grade.py. Choose another --output.")
            old, new = ({(x["student"], x["exercise"]) for x in part} for part in (before, rows))
            if old - new:
                lost = " in ".join(min(old - new))
                raise ValueError(f"{file} would lose the grade of {lost}. Choose another --output.")
        with atomic_file(file) as path, path.open("w", newline="") as table:
            writer = csv.DictWriter(table, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        results = {folder / who / FILES[form][0]: result(x, form) for who, x in graded.items()}
        for file, found in results.items():
            if file.exists() and read_json(file).keys() != found.keys():
                raise ValueError(f"{file} was not written by grade.py. Choose another --output.")
        for file, found in results.items():
            with atomic_file(file) as path:
                path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def main(arguments: list[str]) -> None:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("grade.py", **how)
    parser.add_argument("handed_in", type=Path, metavar="HANDED_IN")
    parser.add_argument("--seed", type=int, required=True, help=f"{PUBLIC} or more; keep it secret")
    parser.add_argument("--format", choices=["csv", "html", *FILES], default="csv")
    parser.add_argument("--output", type=Path, default=Path("build/grades"), help="folder")
    parser.add_argument("--only", nargs="+", help="notebook numbers, as in --only 00 01")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds per exercise")
    chosen = parser.parse_args(arguments)
    if chosen.seed < PUBLIC or not hasattr(os, "fork"):
        raise ValueError(f"--seed is {chosen.seed}; use {PUBLIC} or more, on Linux or macOS.")
    torch.set_num_threads(1)
    names = [name for name in SETS if not chosen.only or name[2:4] in chosen.only]
    if unknown := {*(chosen.only or ())} - {name[2:4] for name in names}:
        raise ValueError(f"--only {min(unknown)} matches no notebook. Use numbers such as 00 01.")
    CHOSEN.clear()
    CHOSEN.update({made.notebook: made.exercises for made in map(load, names)})
    for exercise in (made for exercises in CHOSEN.values() for made in exercises.values()):
        exercise.expected(chosen.seed)  # once, before the fork
    handed_in = students(chosen.handed_in)
    is_inside = chosen.output.resolve().is_relative_to(chosen.handed_in.resolve())
    if is_inside and "" not in handed_in:
        raise ValueError("--output is inside HANDED_IN, among students' files. Choose another.")
    work = partial(grade, seed=chosen.seed, limit=chosen.limit)
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        graded = dict(zip(handed_in, pool.map(work, handed_in.values()), strict=True))
    for who, rows in graded.items():
        points, most = (sum(row[key] for row in rows) for key in ("points", "max_points"))
        print(f"{who or chosen.handed_in}: {points} of {most} points")
    write(folder := check_folder(chosen.output), chosen.format, graded)
    print(f"Grades are in {folder}.")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd's GPU threads would prevent a fork
    sys.exit(exits.run("grade.py", main))
