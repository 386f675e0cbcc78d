"""Write two notebooks from each exercise source: one with stubs, one with solutions.

    python dev/exercises/make_exercises.py

Sources are notebooks/exercises/ex*.py; engine.py in that folder explains their format.
"""

import ast
import importlib
import inspect
import textwrap
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "exercises"
SETS = sorted(path.stem for path in FOLDER.glob("ex*.py"))
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
METADATA = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
INTRODUCTION = """# Exercises: {0}{1}

These exercises belong to [notebook {2:.2}](../{2}.ipynb). Write each function, then run the cell\
 with `check`: it tries random inputs and explains what is wrong."""
OTHER = """ Stuck? Hints and solutions are folded. [The solved notebook]({}_solved.ipynb) has all\
 solutions."""


def solution_source(exercise) -> str:
    """Return the solution's source, with the stub's docstring."""
    lines, definition = _definition(exercise)
    body = "\n".join(lines[definition.body[0].end_lineno :])
    return f"{_head(exercise, lines, definition)}\n{body}".rstrip()


def stub_source(exercise) -> str:
    """Return a stub: the signature, the docstring's first paragraph, and a raise statement."""
    lines, definition = _definition(exercise)
    return f"{_head(exercise, lines, definition)}\n    raise NotImplementedError"


def _definition(exercise) -> tuple[list[str], ast.FunctionDef]:
    source = textwrap.dedent(inspect.getsource(exercise.solution))
    source = source[source.index("\ndef ") + 1 :]  # without the decorator
    return source.splitlines(), ast.parse(source).body[0]


def _head(exercise, lines: list[str], definition: ast.FunctionDef) -> str:
    docstring = textwrap.indent(f'"""{exercise.stub_doc}"""', " " * 4)
    return "\n".join([*lines[: definition.body[0].lineno - 1], docstring])


def fold(title: str, text: str) -> str:
    """Return Markdown that a click on its title unfolds."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def load(name: str):
    """Return the set of exercises in a source; ``name`` is the file's name without .py."""
    return importlib.import_module(name).SET


def identity(cell, part: str, collection, key: str) -> None:
    """Set a cell's permanent id, and its metadata: the exercise's id, points, and part."""
    cell.id = f"{key}-{part}".replace("_", "-")
    points = collection.exercises[key].difficulty
    name = f"{collection.notebook}/{key}"
    cell.metadata["exercise"] = {"id": name, "points": points, "part": part}


def notebook(name: str, solved: bool) -> tuple[Path, nbformat.NotebookNode]:
    """Return the path of a set's notebook, and the notebook."""
    collection = load(name)
    start = INTRODUCTION.format(collection.title, ", solved" * solved, collection.notebook)
    cells = [new_markdown_cell(start if solved else start + OTHER.format(collection.notebook))]
    cells.append(new_code_cell(f"{collection.imports}\n\nfrom {name} import check"))
    for cell, part in zip(cells, ("introduction", "imports"), strict=True):
        cell.id = part
    for number, (key, exercise) in enumerate(collection.exercises.items(), start=1):
        grade = "●" * exercise.difficulty + "○" * (3 - exercise.difficulty)
        grade = f"{grade} · about {exercise.minutes} minutes"
        heading = f"## {number} · {exercise.title}"
        before = len(cells)
        texts = [heading, grade, exercise.statement]
        for i, hint in enumerate(exercise.hints, start=1):
            texts.append(fold(f"Hint {i}", hint))
        cells.append(new_markdown_cell("\n\n".join(texts)))
        solution = solution_source(exercise)
        cells.append(new_code_cell(solution if solved else stub_source(exercise)))
        cells.append(new_code_cell(f"check({key})"))
        names = ["task", "answer", "check"]
        if exercise.reply:
            names.append("reply")
            reply = fold("An answer", exercise.reply)
            cells.append(new_markdown_cell(f"*Your answer to the question above:* …\n\n{reply}"))
        if not solved:
            names.append("solution")
            cells.append(new_markdown_cell(fold("Solution", f"```python\n{solution}\n```")))
        for cell, part in zip(cells[before:], names, strict=True):
            identity(cell, part, collection, key)
    made = new_notebook(cells=cells, metadata=METADATA)
    made.nbformat_minor = 5
    return FOLDER / f"{collection.notebook}{'_solved' if solved else ''}.ipynb", made


def main() -> None:
    for name in SETS:
        for solved in (False, True):
            path, made = notebook(name, solved)
            nbformat.validate(made)
            nbformat.write(made, path)
            print(path.relative_to(FOLDER.parents[1]))


if __name__ == "__main__":
    main()
