"""The house: imports point one way, no circle, and no file outgrows its idea."""

import ast
import importlib.util
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from builders import SAMPLING, make_samples, make_trainer

from rlhf_course.course.presets import ROOT

PACKAGE = ROOT / "rlhf_course"
MAY_USE = {  # a part of the package → the parts that it may import
    "runtime": set(),
    "data": {"runtime"},
    "policy": {"runtime"},
    "rewards": {"runtime", "data", "policy"},
    "helpers": {"data"},
    "audit": {"runtime", "data", "rewards", "evaluation"},
    "ppo": {"runtime", "data", "policy"},
    "evaluation": {"runtime", "data", "policy", "rewards", "ppo"},
    "baichuan": {"runtime"},
    "course": {"runtime", "ppo"},
    "synthetic": {"runtime", "data", "baichuan", "course"},
    "command_line": {"runtime", "policy", "ppo", "course"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def module(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path) -> set[str]:
    """The package's modules that a file imports, wherever in it."""
    known, found = {module(path) for path in PACKAGE.rglob("*.py")}, set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & known


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_point_one_way(path):
    part = module(path).split(".")[1]
    used = {name.split(".")[1] for name in imports(path) if "." in name}
    assert used - {part} <= MAY_USE[part]


def test_there_is_no_circle():
    inside = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    TopologicalSorter({module(path): imports(path) - {module(path)} for path in inside}).prepare()


@pytest.mark.parametrize("path", FILES, ids=module)
def test_no_file_and_no_function_is_long(path):
    text = path.read_text(encoding="utf-8")
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
    long = [x.name for x in functions if x.end_lineno - x.lineno >= 40]
    assert len(text.splitlines()) <= 300 and not long


def test_a_ppo_step_is_read_in_one_sitting():
    trainer, (queries, _, scores), files = make_trainer(), make_samples(), set()
    sys.settrace(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        responses = trainer.generate(queries, return_prompt=False, max_new_tokens=4, **SAMPLING)
        trainer.step(queries, responses, scores)
    finally:
        sys.settrace(None)
    read = [path for path in map(Path, files) if path.is_relative_to(PACKAGE)]
    assert PACKAGE / "ppo" / "update.py" in read and len(read) <= 7
    assert sum(len(path.read_text("utf-8").splitlines()) for path in read) <= 1150


@pytest.mark.parametrize("folder", ["scripts", "dev", "docs"])
def test_what_others_import_from_the_package_exists(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_course"):
                found = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    where = f"{node.module}.{name}"
                    assert hasattr(found, name) or importlib.util.find_spec(where), (path, where)
