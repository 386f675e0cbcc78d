"""The package as pip installs it: far from the checkout, with all that it imports declared, and
without what Windows lacks; nobody has tried the course there yet.
"""

import ast
import json
import os
import re
import shutil
import sys
import tomllib

import pytest
from builders import python

from rlhf_course.course.presets import CONFIGS, ROOT, load_preset

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAMED = {"yaml": "pyyaml", "IPython": "ipython", "bs4": "beautifulsoup4", "zmq": "pyzmq"}
NAMED["hydra"] = "hydra_core"
# The only parts of the package that need the extra ``notebooks``.
NOTEBOOKS = (
    "rlhf_course/course/plots.py",
    "rlhf_course/course/progress.py",
    "rlhf_course/command_line/",
    "rlhf_course/feedback/",
)
REPLAY = "rlhf_course/command_line/engines/replay.py"  # runs in an engine's own environment
LOOK = """
import json, psutil, sys
sys.modules |= dict.fromkeys(["resource", "fcntl"])  # Windows lacks them
import rlhf_course
import rlhf_course.course.plots
from rlhf_course import PPOTrainer
from rlhf_course.synthetic import chinese, dialogues  # with the words of their grammars
from rlhf_course.course.presets import CONFIGS, load_preset
from rlhf_course.course.run_card import RunCard
del sys.modules["resource"], sys.modules["fcntl"]
settings = load_preset("04_gpt2_imdb_ppo", "tiny")
RunCard("03", "tiny", 0, "results").finish()
names = sorted(path.name for path in CONFIGS.glob("*.yaml"))
print(json.dumps({"package": rlhf_course.__file__, "steps": settings.steps, "configs": names}))
"""


def distributions(requirements: list[str]) -> set[str]:
    """The names of what is required, in the spelling of an import."""
    return {re.match(r"[\w-]+", line)[0].lower().replace("-", "_") for line in requirements}


def imported(folder: str) -> dict[str, set[str]]:
    """Distribution → the files of a folder that import it, but Python's and the course's."""
    paths, found = sorted((ROOT / folder).rglob("*.py")), {}
    own = {"rlhf_course", "dev", "docs", "scripts", "engine", "checks", "frozen"}
    own |= {path.stem for path in paths} | {path.parent.name for path in paths}
    own |= {path.name.split(".")[0] for path in (ROOT / folder).rglob("*.py.j2")}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.split(".")[0] for name in names} - own - sys.stdlib_module_names:
                name = NAMED.get(name, name).lower()
                found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_what_the_package_imports_is_declared():
    core, extras = distributions(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    notebooks, track = (core | distributions(extras[name]) for name in ("notebooks", "track"))
    lines = (
        (ROOT / "rlhf_course/command_line/engines/verl-requirements.txt").read_text().splitlines()
    )
    engine = distributions([line for line in lines if line[0] != "#"])
    for name, files in imported("rlhf_course").items():
        needs_extra = all(file.startswith(NOTEBOOKS) for file in files)
        known = notebooks | track if needs_extra else track
        known = known | engine if files == {REPLAY} else known
        assert name in known, f"{sorted(files)} import {name}: declare it in pyproject.toml"
    for name, files in imported("scripts").items():
        assert name in notebooks | track, f"{sorted(files)} import {name}: declare it"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as ``pip install .`` leaves it, built from a copy."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site-packages")
    shutil.copytree(
        ROOT / "rlhf_course", source / "rlhf_course", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    how = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    python("-m", "pip", "install", *how, "--target", target, source, check=True)
    return target


def test_an_installed_copy_has_the_settings_and_writes_where_it_was_started(installed, tmp_path):
    done = python("-c", LOOK, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["package"].startswith(str(installed))
    assert found["steps"] == load_preset("04_gpt2_imdb_ppo", "tiny").steps
    assert found["configs"] == sorted(path.name for path in CONFIGS.glob("*.yaml")) != []
    assert (tmp_path / "results/run_cards/03.json").exists()
