"""The words of pages, notebooks, docstrings and messages: a list of what is not plain English.

python tests/test_english.py [FILE ...]     every hit, with its place
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[1]
RULES = yaml.safe_load((REPO / "tests" / "fixtures" / "english.yaml").read_text())
# Code, formulas, links, tags and quoted sources keep their words.
MASKED = re.compile(
    r"```.*?```|~~~.*?~~~|\{\{.*?\}\}|\$\$.*?\$\$|\$[^$\n]+\$|``[^`]+``|`[^`\n]+`"
    r"|\]\([^)]*\)|https?://\S+|<!--.*?-->|<[^>]+>|[“\"][^”\"\n]{0,300}[”\"]",
    re.DOTALL,
)
TALKING = {"print", "warn", "error", "fail", "exit", "add_argument", "ArgumentParser", "write"}


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--", *patterns]
    names = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    skipped = re.compile("|".join(RULES["not_ours"]))
    return [name for name in names.split() if not skipped.search(name)]


def markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph and its line, with code, formulas and links blanked."""
    blank = MASKED.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
    line = 1
    for paragraph in re.split(r"\n\s*\n", blank):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def python(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments, docstrings, and the texts of messages with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef
        if isinstance(node, kinds) and (words := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, MASKED.sub(" ", words)
        elif isinstance(node, ast.Raise) or _is_message(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, MASKED.sub(" ", part.value)


def _is_message(node) -> bool:
    called = getattr(node, "func", None)
    return getattr(called, "attr", getattr(called, "id", None)) in TALKING


def cells(name: str) -> Iterator[tuple[str, str]]:
    for number, cell in enumerate(json.loads((REPO / name).read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            found = markdown(source)
        else:
            found = python(re.sub(r"^(\s*)[%!].*", r"\1pass", source, flags=re.MULTILINE))
        yield from ((f"{name}, cell {number}", text) for _, text in found)


@cache
def texts() -> list[tuple[str, str]]:
    """Return (place, text) of every text in English that the project shows."""
    found = []
    for name in tracked("*.md"):
        found += [(f"{name}:{line}", t) for line, t in markdown((REPO / name).read_text())]
    for name in tracked("*.py"):
        found += [(f"{name}:{line}", text) for line, text in python((REPO / name).read_text())]
    for name in tracked("*.ipynb"):
        found += cells(name)
    for name in tracked("*.yaml", "*.yml"):
        found += [(f"{name}:{line}", t) for line, t in markdown((REPO / name).read_text())]
    return found


def hits(kind: str) -> list[str]:
    lines = []
    for pattern, instead in RULES[kind].items():
        flags = 0 if re.search("[A-Z]", pattern.replace("\\W", "")) else re.IGNORECASE
        compiled = re.compile(pattern, flags)
        for place, text in texts():
            for match in compiled.finditer(text):
                around = text[max(0, match.start() - 40) : match.end() + 40].replace("\n", " ")
                lines.append(f"{place}: “{match.group()}” → {instead}: …{around}…")
    return lines


@pytest.mark.parametrize("kind", ["words", "spelling", "patterns"])
def test_plain_english(kind):
    found = hits(kind)
    assert not found, "\n".join([f"{len(found)} hits", *found[:40]])


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for kind in ("words", "spelling", "patterns"):
        for line in hits(kind):
            if not wanted or any(line.startswith(name) for name in wanted):
                print(line)
