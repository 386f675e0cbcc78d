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
    submissions: dict[str, list[Path]] = {}
    for place in sorted(handed_in.glob("[!.]*")):
        if not place.is_dir() and place.suffix != ".ipynb":
            print(f"Not graded: {place.name}. Unpack archives; hand in folders or notebooks.")
        else:
            name = place.name.removesuffix(".ipynb")
            submissions.setdefault(name, []).extend(notebooks(place))
    if not any(submissions.values()):
        raise ValueError(f"{handed_in} has no notebooks. Choose the folder of submissions.")
    return submissions


def notebooks(place: Path) -> list[Path]:
    """Return [place] for a file, or a folder's sorted notebooks, without Jupyter's copies."""
    paths = sorted(place.rglob("[!.]*.ipynb")) if place.is_dir() else [place]
    return [path for path in paths if path.parent.name != ".ipynb_checkpoints"]


def grade(paths: list[Path], seed: int, limit: float) -> list[dict]:
    """Return a dict per exercise: id, points, maximum, mistake, and message (``said``)."""
    parsed, damage = parse(paths)
    rows = []
    for notebook, exercises in CHOSEN.items():
        # Files named after the notebook come first.
        ordered = sorted(parsed, key=lambda path: (notebook not in path.stem, path))
        for key, exercise in exercises.items():
            message, mistake = examine(parsed, ordered, key, exercise, seed, limit)
            if mistake == "missing":
                message += damage
            passed = not message
            rows.append(
                {
                    "exercise": f"{notebook}/{key}",
                    "points": exercise.difficulty if passed else 0,
                    "max_points": exercise.difficulty,
                    "passed": passed,
                    "mistake": mistake,
                    "said": message,
                }
            )
    return rows


def parse(paths: list[Path]) -> tuple[dict[Path, list], str]:
    """Return the readable notebooks' parsed cells, and what is wrong with the other notebooks."""
    import frozen

    parsed = {}
    damage = ""
    for path in paths:
        try:
            parsed[path] = frozen.cells(path)
        except (OSError, ValueError) as error:
            damage += f" {error}"
    return parsed, damage


def examine(
    parsed: dict[Path, list], ordered: list[Path], key: str, exercise, seed: int, limit: float
) -> tuple[str, str]:
    """Return the message about an answer, "" if it is right, and the mistake's name."""
    import frozen

    def find():
        """Return the first written answer, or else a stub, or None."""
        stub = None
        for path in ordered:
            answer = frozen.load(parsed[path], key)
            code = getattr(answer, "__code__", None)
            is_written = "NotImplementedError" not in getattr(code, "co_names", ())
            if answer and is_written:
                return answer
            stub = stub or answer
        return stub

    message, mistake = frozen.examine(exercise, find, seed, limit)
    places = [path.name for path in ordered if defines(parsed[path], key)]
    if message and len(places) > 1:
        message += f" ({' and '.join(places)} define it; the first written one counts.)"
    return message or "", mistake


def defines(parsed: list, key: str) -> bool:
    """Return whether a parsed notebook has a function named ``key``."""
    return any(getattr(statement, "name", "") == key for cell in parsed for statement in cell)


def result(rows: list[dict], form: str) -> dict:
    """Return a student's results in Gradescope's or Classroom 50's format."""
    _, fields = FILES[form]
    tests = [{field: row[column] for field, column in fields.items()} for row in rows]
    if form == "gradescope":
        return {"tests": tests}
    submission = {}
    for variable in SUBMISSION:
        name = variable.partition("_")[0].lower()
        submission[name] = os.environ.get(variable, "")
    submission["review"] = submission["review"] or submission["commit"]
    return {
        "schema": "classroom50/result/v1",
        **submission,
        "datetime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "score": sum(test["score"] for test in tests),
        "max-score": sum(test["max-score"] for test in tests),
        "tests": tests,
    }


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
        write_csv(folder / "grades.csv", graded)
    else:
        write_results(folder, form, graded)


def write_csv(file: Path, graded: dict[str, list[dict]]) -> None:
    """Write one row per student and exercise; raise ``ValueError`` if grades would be lost."""
    rows = [{"student": name, **row} for name, student in graded.items() for row in student]
    if file.exists():
        with file.open(newline="") as table:
            before = list(csv.DictReader(table))
        if not before or before[0].keys() != rows[0].keys():
            raise ValueError(f"{file} was not written by grade.py. Choose another --output.")
        old_grades = {(row["student"], row["exercise"]) for row in before}
        new_grades = {(row["student"], row["exercise"]) for row in rows}
        lost = old_grades - new_grades
        if lost:
            student, exercise = min(lost)
            raise ValueError(
                f"{file} would lose the grade of {student} in {exercise}. Choose another --output."
            )
    with atomic_file(file) as path, path.open("w", newline="") as table:
        writer = csv.DictWriter(table, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_results(folder: Path, form: str, graded: dict[str, list[dict]]) -> None:
    """Write one file per student; raise ``ValueError`` if another program wrote one of them."""
    name, _ = FILES[form]
    results = {folder / student / name: result(rows, form) for student, rows in graded.items()}
    for file, content in results.items():
        if file.exists() and read_json(file).keys() != content.keys():
            raise ValueError(f"{file} was not written by grade.py. Choose another --output.")
    for file, content in results.items():
        with atomic_file(file) as path:
            path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "grade.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("handed_in", type=Path, metavar="HANDED_IN")
    parser.add_argument("--seed", type=int, required=True, help=f"{PUBLIC} or more; keep it secret")
    parser.add_argument("--format", choices=["csv", "html", *FILES], default="csv")
    parser.add_argument("--output", type=Path, default=Path("build/grades"), help="folder")
    parser.add_argument("--only", nargs="+", help="notebook numbers, as in --only 00 01")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds per exercise")
    return parser


def choose_exercises(only: list[str] | None, seed: int) -> None:
    """Fill ``CHOSEN``, and compute the solutions' results once, before the processes fork."""
    names = [name for name in SETS if not only or name[2:4] in only]
    unknown = set(only or ()) - {name[2:4] for name in names}
    if unknown:
        raise ValueError(f"--only {min(unknown)} matches no notebook. Use numbers such as 00 01.")
    CHOSEN.clear()
    for name in names:
        collection = load(name)
        CHOSEN[collection.notebook] = collection.exercises
        for exercise in collection.exercises.values():
            exercise.expected(seed)


def main(arguments: list[str]) -> None:
    chosen = make_parser().parse_args(arguments)
    if chosen.seed < PUBLIC or not hasattr(os, "fork"):
        raise ValueError(f"--seed is {chosen.seed}; use {PUBLIC} or more, on Linux or macOS.")
    torch.set_num_threads(1)
    choose_exercises(chosen.only, chosen.seed)
    handed_in = students(chosen.handed_in)
    is_inside = chosen.output.resolve().is_relative_to(chosen.handed_in.resolve())
    if is_inside and "" not in handed_in:
        raise ValueError("--output is inside HANDED_IN, among students' files. Choose another.")
    grade_one = partial(grade, seed=chosen.seed, limit=chosen.limit)
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        graded = dict(zip(handed_in, pool.map(grade_one, handed_in.values()), strict=True))
    for student, rows in graded.items():
        points = sum(row["points"] for row in rows)
        maximum = sum(row["max_points"] for row in rows)
        print(f"{student or chosen.handed_in}: {points} of {maximum} points")
    folder = check_folder(chosen.output)
    write(folder, chosen.format, graded)
    print(f"Grades are in {folder}.")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd's GPU threads would prevent a fork
    sys.exit(exits.run("grade.py", main))
