"""Write the students' handout, without solutions: build/handout/ and build/handout.zip.

    python dev/exercises/make_handout.py [--output build/handout]

Its notebooks have no solutions or answers. In place of the sources, the handout has
frozen/*.json, which contains each exercise's inputs for twenty public seeds, and the outputs and
gradients of its solution and of each mistake. notebooks/exercises/frozen.py compares answers with
these results. scripts/grade.py uses other seeds.
"""

import argparse
import json
import shutil
import sys
import warnings
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import nbformat
import torch

from dev.exercises.make_exercises import FOLDER, SETS, load, notebook
from rlhf_course.runtime.files import atomic_file, atomic_folder

HERE = Path(__file__).resolve().parent

SEEDS = range(20)
INTRODUCTION = """# Exercises: {}

These exercises belong to notebook {} of the course. Write each function, then run the cell with\
 `check`: it tries frozen inputs and explains what is wrong. Hints are folded. Keep the names of\
 functions and files. `make verify`, or `python frozen.py`, lists missing answers."""


def record(exercise) -> dict:
    """Return an exercise's record for frozen.py: inputs, outputs, and mistakes, without code."""
    from checks.symptoms import _moves
    from frozen import decode, encode

    drawn = [exercise.draw(torch.Generator().manual_seed(seed)) for seed in SEEDS]
    cases = decode(encode(drawn))  # as in the student's check

    def results(function) -> list | None:
        """Return the function's results, or None if it raises an error for some inputs."""
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            outputs = (exercise.run(function, case) for case in cases)
            return [[encode(output.values), encode(output.slopes)] for output in outputs]

    def matters(i: int) -> bool:
        pairs = ((case, (*case[:i], other[i], *case[i + 1 :])) for case, other in pairwise(cases))
        return any(_moves(exercise.solution, *pair) for pair in pairs)

    mistakes = {}
    for name, (message, *codes) in exercise.mistakes.items():
        recorded = [results(code) for code in codes]
        mistakes[name] = [message, *(outputs for outputs in recorded if outputs)]
    return {
        "names": exercise.names,
        "learns": exercise.learns,
        "matters": [i for i in range(len(exercise.names)) if matters(i)],
        "tensor": exercise.asks_for_tensor,
        "points": exercise.difficulty,
        "cases": encode(cases),
        "wanted": results(exercise.solution),
        "mistakes": mistakes,
    }


def student_notebook(name: str) -> tuple[str, nbformat.NotebookNode]:
    """Return a set's file name and notebook, which imports frozen.py and has no solutions."""
    path, made = notebook(name, solved=False)
    collection = load(name)
    kept = []
    for cell in made.cells:
        part = cell.metadata.get("exercise", {}).get("part")
        if cell.id == "introduction":
            cell.source = INTRODUCTION.format(collection.title, collection.notebook[:2])
        if cell.id == "imports":
            cell.source = cell.source.replace(f"from {name} import", "from frozen import")
        if part == "reply":
            cell.source = cell.source.partition("\n\n<details>")[0]
        if part != "solution":
            kept.append(cell)
    made.cells = kept
    return path.name, made


def write(folder: Path) -> None:
    """Write notebooks, frozen results, the checks' code, and instructions to ``folder``."""
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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/handout"))
    target = parser.parse_args(arguments).output.resolve()
    archive = Path(f"{target}.zip")
    is_ours = (target / "frozen.py").exists()  # an earlier handout
    if not is_ours and (archive.exists() or target.exists() and any(target.iterdir())):
        raise SystemExit(f"{target} or {archive.name} has other files. Choose another --output.")
    torch.set_num_threads(1)
    with atomic_folder(target, stale=("*.ipynb", "*/*.json", "**/__pycache__/*")) as folder:
        write(folder)
    with atomic_file(archive) as path:
        shutil.make_archive(str(path.with_suffix("")), "zip", target.parent, target.name)
    print(f"{target} and {archive}")


if __name__ == "__main__":
    main(sys.argv[1:])
