"""Check exercises against frozen inputs and outputs, without solutions.

    python frozen.py [00 01 …]

The command checks all notebooks in its folder or the given ones, lists missing answers,
and exits with 1 if there are any. Notebooks import ``check``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import linecache
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checks.compare import Result, alike
from checks.guard import guarded
from engine import LIMIT, UNWRITTEN, Exercise, Wrong

HERE = Path(__file__).parent
MISSING = Wrong("No notebook defines this function.", "missing")
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)


def encode(x: Any) -> Any:
    """Return a result or argument as JSON data; ``decode`` is the inverse."""
    if isinstance(x, Tensor):
        return {"dtype": str(x.dtype)[6:], "tensor": x.tolist()}
    if isinstance(x, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in x.items()]}
    if isinstance(x, tuple):
        return {"tuple": [encode(part) for part in x]}
    return [encode(part) for part in x] if isinstance(x, list) else x


def decode(x: Any) -> Any:
    """Return the result or argument that ``encode`` received."""
    if isinstance(x, list):
        return [decode(part) for part in x]
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        return torch.tensor(x["tensor"], dtype=getattr(torch, x["dtype"]))
    if "tuple" in x:
        return tuple(decode(x["tuple"]))
    return {decode(key): decode(value) for key, value in x["dict"]}


class Recorded:
    """Look up a function's results for the frozen inputs."""

    def __init__(self, cases: list, results: list, matters: list) -> None:
        self.cases = cases
        self.matters = matters
        self.results = [Result(*decode(result)) for result in results]

    def result(self, arguments: tuple) -> Result:
        """Return the result for frozen inputs; raise LookupError for others."""
        for case, result in zip(self.cases, self.results):
            if all(alike(case[i], arguments[i]) for i in self.matters):
                return result
        raise LookupError("not among the frozen inputs")

    def __call__(self, *arguments: Any) -> Any:
        return self.result(arguments).values


class Frozen(Exercise):
    """Judge answers with an exercise's recorded solution and named mistakes."""

    def __init__(self, record: dict) -> None:
        self.names = record["names"]
        self.learns = record["learns"]
        self.asks_for_tensor = record["tensor"]
        self.points = record["points"]
        cases = decode(record["cases"])
        every = range(len(self.names))
        self.solution = Recorded(cases, record["wanted"], record["matters"])
        self.mistakes = {
            name: (message, *(Recorded(cases, results, every) for results in recorded))
            for name, (message, *recorded) in record["mistakes"].items()
        }
        self._frozen = cases, self.solution.results

    def expected(self, seed: int) -> tuple[list[tuple], list[Result]]:
        """Return the frozen inputs and outputs, for any seed."""
        return self._frozen

    def run(self, function: Callable, arguments: tuple) -> Result:
        """Look up a recorded function's result, or run any other function."""
        if isinstance(function, Recorded):
            return function.result(arguments)
        return super().run(function, arguments)


def records() -> dict[str, dict[str, dict]]:
    """Return notebook → exercise → its record for Frozen."""
    files = sorted((HERE / "frozen").glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in files}


def check(answer: Callable) -> None:
    """Print the verdict on an answer."""
    name = getattr(answer, "__name__", None)
    known = {}
    for exercises in records().values():
        known |= exercises
    if name not in known:
        print(f"✘ {answer!r} is unknown. Pass an exercise's function to check().")
        return
    message, _ = examine(Frozen(known[name]), lambda: answer)
    if message:
        print(f"✘ {name}: {message}")
    else:
        print(f"✔ {name} is right on the frozen inputs.")


def examine(
    exercise: Exercise, find: Callable, seed: int = 0, limit: float = LIMIT
) -> tuple[str | None, str]:
    """Judge the answer that ``find`` returns; return a message and the mistake's name.

    If the system can fork, the answer runs in a separate process. A right answer gives
    (None, "right"); a crash or the time limit gives the name "stopped".
    """

    def work() -> tuple[str | None, str]:
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            try:
                answer = find()
                wrong = MISSING if answer is None else exercise.judge(answer, seed)
            except (Exception, SystemExit) as error:
                message = f"The cell stops with {type(error).__name__}: {error}"
                wrong = Wrong(message, "error")
        if wrong is None:
            return None, "right"
        unwritten = str(wrong) == UNWRITTEN
        return str(wrong), "missing" if unwritten else wrong.name or "unnamed"

    message, name = guarded(work, limit)
    return message, name or "stopped"


def cells(path: Path) -> list[list[ast.stmt]]:
    """Return the statements of each code cell in a notebook, without calls of check.

    Functions from a cell with a syntax error raise that error when called.
    Raises ``ValueError`` if the file is not a notebook.
    """
    try:
        saved = json.loads(path.read_text("utf-8"))["cells"]
        sources = ["".join(x["source"]) for x in saved if x["cell_type"] == "code"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a notebook. Save it again.") from None
    parsed = []
    for number, source in enumerate(sources):
        source = re.sub(r"(?m)^(\s*)[%!]", r"\1pass  # %", source)
        name = f"<{path.name}, cell {number}>"
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            stop = f"(*_): raise SyntaxError({str(error)!r})"
            functions = re.findall(r"(?m)^def (\w+)", source)
            tree = ast.parse("\n".join(f"def {key}{stop}" for key in functions))
        for statement in tree.body:
            statement.place = name
        parsed.append([x for x in tree.body if not _is_check(x)])
    return parsed


def _is_check(statement: ast.stmt) -> bool:
    call = getattr(statement, "value", None)
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "check"


def load(parsed: list[list[ast.stmt]], key: str) -> Callable | None:
    """Return a notebook's function ``key``, or None if no cell defines it.

    Runs the defining cells, and the imports and definitions of other cells.
    """
    names: dict[str, Any] = {"__name__": "answer"}
    for cell in parsed:
        is_answer = any(key in _bound(statement) for statement in cell)
        for statement in cell:
            code = compile(ast.Module([statement], []), statement.place, "exec")
            if is_answer:
                exec(code, names)
            elif isinstance(statement, DEFINITIONS):
                with contextlib.suppress(Exception):
                    exec(code, names)
    return names.get(key)


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a definition or an assignment binds."""
    targets = getattr(statement, "targets", [])
    return [
        getattr(x, "name", None) or getattr(x, "id", "") for x in (statement, *targets)
    ]


def main(only: list[str]) -> int:
    """Check the notebooks in this file's folder; return 1 if an answer is missing."""
    points = 0
    total = 0
    missing = []
    for notebook, exercises in records().items():
        if only and notebook[:2] not in only:
            continue
        path = HERE / f"{notebook}.ipynb"
        parsed = cells(path) if path.exists() else []
        for key, record in exercises.items():
            exercise = Frozen(record)
            message, _ = examine(exercise, functools.partial(load, parsed, key))
            total += exercise.points
            if message:
                print(f"✘ {notebook} {key}: {message}")
                missing.append(f"{notebook}/{key}")
            else:
                print(f"✔ {notebook} {key}")
                points += exercise.points
    print(f"{points} of {total} points.")
    if missing:
        print("Missing:", *missing, sep="\n  ")
    return 1 if missing or not total else 0


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPU threads would prevent a fork
    sys.exit(main(sys.argv[1:]))
