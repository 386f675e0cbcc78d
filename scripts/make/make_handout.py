"""Write what students get, without solutions: build/handout/ and build/handout.zip.

    python scripts/make/make_handout.py [--output build/handout]

Notebooks come without solutions and answers. In place of the sources, frozen/*.json holds each
exercise's twenty inputs of public seeds, the right outputs and gradients, and those of the named
mistakes; notebooks/exercises/frozen.py checks against them. scripts/grade.py has other seeds.
"""

import argparse
import contextlib
import json
import shutil
import sys
import warnings
from pathlib import Path

import nbformat
import torch
from make_exercises import FOLDER, SETS, load, notebook

from rlhf_course.runtime.files import atomic_file, atomic_folder

HERE = Path(__file__).parent
ROOT = FOLDER.parents[1]
SEEDS = range(20)
INTRODUCTION = """# Exercises: {}

For notebook {} of the course. Write each function, then run the cell with `check`: it tries\
 frozen inputs and says what is wrong, by name where it knows the mistake. Hints are folded. Keep\
 the names of functions and files. `make verify`, or `python frozen.py`, lists what is missing."""
NEEDED = ("torch", "numpy", "jupyter")


def record(exercise) -> dict:
    """Return what frozen.py needs of an exercise: inputs, outputs and mistakes, and no code."""
    from checks.symptoms import ignored
    from frozen import decode, encode

    drawn = [exercise.draw(torch.Generator().manual_seed(seed)) for seed in SEEDS]
    cases = decode(encode(drawn))  # as the student's check will have them

    def results(function) -> list | None:
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            found = (exercise.run(function, case) for case in cases)
            return [[encode(result.values), encode(result.slopes)] for result in found]

    mistakes = {name: (m.__doc__, results(m)) for name, m in exercise.mistakes.items()}
    order = range(len(exercise.names))
    return {
        "names": exercise.names,
        "learns": exercise.learns,
        "matters": [i for i in order if matters(ignored, exercise, i, cases)],
        "tensor": exercise.asks_for_tensor,
        "points": exercise.difficulty,
        "cases": encode(cases),
        "wanted": results(exercise.solution),
        "mistakes": {name: said for name, said in mistakes.items() if said[1]},
    }


def matters(ignored, exercise, i: int, cases: list) -> bool:
    """Return whether the solution depends on argument i: an answer without it is found out."""

    def without(*given):
        return exercise.solution(*given[:i], cases[0][i], *given[i + 1 :])

    with contextlib.suppress(Exception):
        names = ["" if j != i else name for j, name in enumerate(exercise.names)]
        return f"`{names[i]}`" in (ignored(exercise.solution, without, names, cases) or "")
    return True


def student_notebook(name: str) -> tuple[str, nbformat.NotebookNode]:
    """Return a set's notebook without solutions and replies, which imports frozen.py."""
    path, made = notebook(name, solved=False)
    found = load(name)
    kept = []
    for cell in made.cells:
        part = cell.metadata.get("exercise", {}).get("part")
        if cell.id == "introduction":
            cell.source = INTRODUCTION.format(found.title, found.notebook[:2])
        if cell.id == "imports":
            cell.source = cell.source.replace(f"from {name} import", "from frozen import")
        if part == "reply":
            cell.source = cell.source.partition("\n\n<details>")[0]
        if part != "solution" and cell.id != "find":
            kept.append(cell)
    made.cells = kept
    return path.name, made


def write(folder: Path) -> None:
    """Write notebooks, frozen results, the checks' code, and how to use them."""
    (folder / "frozen").mkdir()
    for name in SETS:
        file, made = student_notebook(name)
        nbformat.write(made, folder / file)
        records = {key: record(exercise) for key, exercise in load(name).exercises.items()}
        text = json.dumps(records, separators=(",", ":"))
        (folder / "frozen" / file).with_suffix(".json").write_text(text, "utf-8")
    for path in (FOLDER / "engine.py", FOLDER / "frozen.py", *(HERE / "handout").iterdir()):
        shutil.copy(path, folder)
    shutil.copytree(FOLDER / "checks", folder / "checks", ignore=lambda *_: ["__pycache__"])
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    pins = [line.split()[0] for line in lines if line.split("==")[0] in NEEDED]
    (folder / "requirements.txt").write_text("\n".join(pins) + "\n", "utf-8")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "handout")
    target = parser.parse_args(arguments).output
    torch.set_num_threads(1)
    with atomic_folder(target, stale=("*.ipynb", "frozen/*.json")) as folder:
        write(folder)
    with atomic_file(f"{target}.zip") as path:
        shutil.make_archive(str(path.with_suffix("")), "zip", target.parent, target.name)
    print(f"{target} and {target}.zip")


if __name__ == "__main__":
    main(sys.argv[1:])
