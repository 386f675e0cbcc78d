"""The house: imports point one way, and in no circle."""

import ast
import importlib.util
from graphlib import TopologicalSorter

import pytest

from rlhf_course.course.presets import ROOT

pytestmark = pytest.mark.quick

PACKAGE = ROOT / "rlhf_course"
MAY_USE = {  # a part of the package → the parts that it may import
    "runtime": set(),
    "data": {"runtime"},
    "policy": {"runtime"},
    "rewards": {"runtime", "data", "policy"},
    "helpers": {"data"},
    "clinic": {"data", "policy", "rewards", "ppo", "evaluation", "course", "synthetic"},
    "feedback": set(),
    "problems": {"data", "course"},
    "questions": {"synthetic"},
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


@pytest.mark.parametrize("folder", ["scripts", "dev", "docs"])
def test_what_others_import_from_the_package_exists(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_course"):
                found = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    where = f"{node.module}.{name}"
                    assert hasattr(found, name) or importlib.util.find_spec(where), (path, where)
