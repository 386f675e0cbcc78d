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

pytestmark = pytest.mark.quick

ENGINES = json.loads((ROOT / "tests/fixtures/engine_options.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/larger-models.md").read_text(encoding="utf-8")
PAGE, _, SECTION = PAGE.partition("\n## Names in other libraries\n")
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")][1:]


def source(package: str, file: str) -> ast.Module:
    """The syntax tree of an installed package's file, which is not imported."""
    folder = Path(find_spec(package).origin).parent
    return ast.parse((folder / file).read_text(encoding="utf-8"))


def trl_defaults() -> dict[str, str]:
    """Fields of GRPOConfig and of the classes that it inherits from → defaults, as source."""
    found, configs = {}, ["trainer/grpo_config.py", "trainer/base_config.py"]
    trees = [source("trl", file) for file in configs]
    for tree in (source("transformers", "training_args.py"), *trees[::-1]):
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                given = {x.arg: ast.unparse(x.value) for x in node.value.keywords}
                found[node.target.id] = given.get("default")
    return found


def trl_names() -> set[str]:
    """Fields of GRPOConfig, and texts of the trainer, which logs."""
    trainer = ast.walk(source("trl", "trainer/grpo_trainer.py"))
    return {*trl_defaults()} | {x.value for x in trainer if isinstance(x, ast.Constant)}


def verl_names() -> set[str]:
    """Options and their sections, with and without the sections above, and statistics."""
    parts = [name.split(".") for name in ENGINES["verl"]["options"]]
    sizes = [(part, range(len(part) + 1)) for part in parts]
    names = {".".join(part[a:b]) for part, size in sizes for a in size for b in size if a < b}
    return names | {*ENGINES["verl"]["statistics"]}


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
def test_every_name_in_the_table_is_in_the_package(column):
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


def test_the_defaults_on_the_page_are_those_of_the_packages():
    table = re.findall(r"^\| (verl|trl) `([^`]+)`[^|]* \| ([^|]+) \|", PAGE, re.MULTILINE)
    flags = re.findall(r"`(--[\w.]+)` ([\d.]+\d|\d)", PAGE.partition("OpenRLHF 0.11.2")[2])
    assert len(table) == 12 and len(flags) == 3
    verl, trl = ENGINES["verl"]["options"], trl_defaults()
    for engine, name, default in table:
        assert default == (str(verl[name]) if engine == "verl" else trl[name]), name
    for flag, default in flags:
        assert default == ENGINES["openrlhf"]["options"][flag], flag
