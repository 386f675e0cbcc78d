"""Names of other engines' options and statistics are those of the packages themselves.

verl's and OpenRLHF's come from fixtures/engine_options.json, trl's from what is installed.
"""

import ast
import json
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf_course.course.presets import ROOT

ENGINES = json.loads((ROOT / "tests/fixtures/engine_options.json").read_text(encoding="utf-8"))
NOTEBOOK = json.loads((ROOT / "notebooks/07_after_ppo.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"]]
SECTION = next(text for text in CELLS if "## 11 ·" in text).partition("## 11 ·")[2]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")][1:]
PAGE = (ROOT / "site/larger-models.md").read_text(encoding="utf-8")


def source(package: str, file: str) -> ast.Module:
    """The syntax tree of an installed package's file, which is not imported."""
    folder = Path(find_spec(package).origin).parent
    return ast.parse((folder / file).read_text(encoding="utf-8"))


def trl_names() -> set[str]:
    """Fields of GRPOConfig and of what it inherits from, and texts of the trainer, which logs."""
    files = ("trl", "trainer/grpo_config.py"), ("trl", "trainer/base_config.py")
    files += (("transformers", "training_args.py"),)
    nodes = [node for file in files for node in ast.walk(source(*file))]
    fields = {x.target.id for x in nodes if isinstance(x, ast.AnnAssign)}
    trainer = ast.walk(source("trl", "trainer/grpo_trainer.py"))
    return fields | {x.value for x in trainer if isinstance(x, ast.Constant)}


def verl_names() -> set[str]:
    """Options, with and without the names of the sections above, and statistics."""
    parts = [name.split(".") for name in ENGINES["verl"]["options"]]
    ends = {".".join(part[start:]) for part in parts for start in range(len(part))}
    return ends | {*ENGINES["verl"]["statistics"]}


KNOWN = [trl_names, verl_names, lambda: {*ENGINES["openrlhf"]["options"]}]


def missing(rows: list[list[str]], column: int, known: set[str]) -> list[str]:
    """Names in backticks of a column that the package does not have.

    `_low` beside `actor.clip_ratio` is short for `actor.clip_ratio_low`.
    """
    found = []
    for row in rows:
        names = re.findall(r"`([^`]+)`", row[column])
        for name in names:
            found.append(names[0] + name if name.startswith("_") else name)
    assert len(found) > 8
    return [name for name in found if name not in known]


@pytest.mark.parametrize("column", [1, 2, 3], ids=["trl", "verl", "openrlhf"])
def test_every_name_in_notebook_07_is_in_the_package(column):
    known = KNOWN[column - 1]()
    assert not missing(ROWS, column, known)
    stale = [[*row[:column], row[column].replace("`", "`x", 1), *row[column + 1 :]] for row in ROWS]
    assert missing(stale, column, known)


def test_the_text_names_the_versions_and_their_defaults():
    versions = {name: ENGINES[name]["version"] for name in ENGINES}
    trl = ".".join(version("trl").split(".")[:2])
    for text in (SECTION, PAGE):
        assert f"verl {versions['verl']}" in text and f"trl {trl}" in text
        assert f"OpenRLHF {versions['openrlhf']}" in text
    defaults = ENGINES["verl"]["options"]
    assert "`clip_ratio_c` (dual clip, 3 unless changed)" in SECTION
    assert defaults["actor_rollout_ref.actor.clip_ratio_c"] == 3
    assert "`algorithm.lam` (1 unless changed)" in SECTION and defaults["algorithm.lam"] == 1
    assert "`algorithm.use_kl_in_reward` (off unless changed)" in SECTION
    assert defaults["algorithm.use_kl_in_reward"] is False
