"""The package as pip installs it: a copy far from the checkout."""

import json
import os
import shutil

import pytest
from builders import SCRIPTS, python

from rlhf_course.course.presets import CONFIGS, ROOT, load_preset

KIND = "Commands, the notebooks' runner, tracking"
LOOK = """
import json
from pathlib import Path
import rlhf_course
from rlhf_course.worlds import chinese, dialogues  # with the words of their grammars
from rlhf_course.worlds.cache import cache_root
from rlhf_course.course.presets import CONFIGS, load_preset
from rlhf_course.course.run_card import RunCard
settings = load_preset("04_gpt2_imdb_ppo", "tiny")
card = RunCard("03", "tiny", 0, "results")
card.finish()
found = {"package": rlhf_course.__file__, "steps": settings.steps, "card": card.output_dir, "cache": cache_root()}
print(json.dumps(found | {"configs": sorted(path.name for path in CONFIGS.glob("*.yaml"))}, default=str))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as ``pip install .`` leaves it; built from a copy, so that the
    checkout stays clean.
    """
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site-packages")
    shutil.copytree(
        ROOT / "rlhf_course", source / "rlhf_course", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    how = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    python("-m", "pip", "install", *how, "--target", target, source, check=True)
    return target


@pytest.mark.fault("pip install . (not --editable), and Python started elsewhere")
def test_an_installed_copy_has_the_settings_and_writes_where_it_was_started(
    installed, tmp_path, outcome
):
    environment = {key: value for key, value in os.environ.items() if key != "RLHF_COURSE_CACHE"}
    environment["PYTHONPATH"] = str(installed)
    done = python("-c", LOOK, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["package"].startswith(str(installed))
    assert found["steps"] == load_preset("04_gpt2_imdb_ppo", "tiny").steps
    assert found["configs"] == sorted(path.name for path in CONFIGS.glob("*.yaml")) != []
    assert found["card"] == str(tmp_path / "results") and found["cache"] == str(
        tmp_path / "build" / "cache"
    )
    assert (tmp_path / "results" / "run_cards" / "03.json").exists()
    outcome("The settings come with the package; relative folders start where Python was started.")


def test_in_a_checkout_relative_paths_start_at_its_root(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = "from rlhf_course.course.presets import ROOT; print(ROOT)"
    done = python("-c", code, cwd=tmp_path, env=environment, check=True)
    assert done.stdout.strip() == str(ROOT) and (ROOT / "notebooks").is_dir()


def test_the_notebook_runner_of_a_checkout_works_with_an_installed_copy(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = python(SCRIPTS / "run_notebooks.py", "--only", "77", cwd=tmp_path, env=environment)
    assert done.returncode == 2 and "there are 00_hello_rlhf" in done.stderr
