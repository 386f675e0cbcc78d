"""The house: imports point one way, no circle, and no file or folder outgrows its idea."""

import ast
from graphlib import TopologicalSorter

import pytest
import yaml

from rlhf_course.course.presets import ROOT

PACKAGE = ROOT / "rlhf_course"
MAY_USE = {  # a part of the package → the parts that it may import
    "runtime": set(),
    "data": {"runtime"},
    "policy": {"runtime"},
    "rewards": {"runtime", "data", "policy"},
    "audit": {"runtime", "data", "rewards"},
    "ppo": {"runtime", "data", "policy"},
    "evaluation": {"runtime", "policy", "rewards", "ppo"},
    "baichuan": {"runtime"},
    "course": {"runtime", "ppo"},
    "worlds": {"runtime", "data", "baichuan", "course"},
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
def test_no_file_is_long(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


def test_no_folder_is_crowded():
    folders = {path.parent for path in FILES} - {PACKAGE / "ppo"}
    assert max(len([path for path in FILES if path.parent == folder]) for folder in folders) <= 8


def test_the_package_is_small():
    assert (
        sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py"))
        <= 5950
    )


def test_developers_run_what_ci_runs():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    assert {"run": ".ci/run"} in jobs["linux"]["steps"]
    linter = next(
        line.split()[0]
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if "ruff==" in line
    )
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][
        0
    ]["hooks"]
    assert all(hook["additional_dependencies"] == [linter] for hook in hooks)
