"""Find what is not plain English in pages, notebooks, docstrings, comments and messages.

python dev/lint_english.py [FILE ...]   list the finds, each with its place; exit with 1 if any

english.yaml contains the rules. Without arguments, the command reads all files of the project.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
RULES = yaml.safe_load(Path(__file__).with_name("english.yaml").read_text(encoding="utf-8"))
# Code, formulas, links, tags and quoted sources keep their words.
MASKED = re.compile(
    r"```.*?```|~~~.*?~~~|\{\{.*?\}\}|\$\$.*?\$\$|\$[^$\n]+\$|``[^`]+``|`[^`\n]+`"
    r"|\]\([^)]*\)|https?://\S+|<!--.*?-->|<[^>]+>|[“\"][^”\"\n]{0,300}[”\"]",
    re.DOTALL,
)
MAGIC = re.compile(r"^(\s*)[%!].*", re.MULTILINE)
# The functions whose arguments a reader sees.
TALKING = {"print", "warn", "error", "fail", "exit", "add_argument", "ArgumentParser", "write"}
Passage = tuple[str, str]  # a place, and the text there


def project_files() -> list[str]:
    """Return the names of the files in git whose English is ours."""
    command = ["git", "ls-files", "--", "*.md", "*.py", "*.ipynb", "*.yaml", "*.yml"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if is_ours(name)]


def is_ours(name: str) -> bool:
    """Return whether the English of a file is ours: not a dataset's, a recorded run's, a copy."""
    return not any(re.search(pattern, name) for pattern in RULES["not_ours"])


def passages(name: str) -> Iterator[Passage]:
    """Yield the English texts of a file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".ipynb"):
        yield from in_notebook(name, text)
    else:
        read = in_python if name.endswith(".py") else in_markdown
        for line, passage in read(text):
            yield f"{name}:{line}", passage


def in_notebook(name: str, text: str) -> Iterator[Passage]:
    """Yield the texts of a notebook's cells."""
    for number, cell in enumerate(json.loads(text)["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            found_in_cell = in_markdown(source)
        else:
            found_in_cell = in_python(MAGIC.sub(r"\1pass", source))
        for _, passage in found_in_cell:
            yield f"{name}, cell {number}", passage


def in_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph and its line, with code, formulas and links blanked."""
    blanked = MASKED.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    line = 1
    for paragraph in re.split(r"\n\s*\n", blanked):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments, docstrings, and the texts of messages with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                yield node.body[0].lineno, MASKED.sub(" ", docstring)
        elif isinstance(node, ast.Raise) or is_message(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, MASKED.sub(" ", part.value)


def is_message(node: ast.AST) -> bool:
    """Return whether a node is a call that shows its strings to a reader."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in TALKING


def compiled_rules() -> list[tuple[re.Pattern, str]]:
    """Return each rule's pattern, and what to write instead."""
    rules = []
    for kind in ("words", "spelling", "patterns"):
        for pattern, instead in RULES[kind].items():
            has_capitals = re.search("[A-Z]", pattern.replace("\\W", ""))
            rules.append((re.compile(pattern, 0 if has_capitals else re.IGNORECASE), instead))
    return rules


def finds(names: list[str]) -> Iterator[str]:
    """Yield a line for each find: its place, what to write instead, and the words around it."""
    rules = compiled_rules()
    for name in names:
        for place, text in passages(name):
            for pattern, instead in rules:
                for match in pattern.finditer(text):
                    around = text[max(0, match.start() - 40) : match.end() + 40]
                    around = around.replace("\n", " ")
                    yield f"{place}: “{match.group()}” → {instead}: …{around}…"


def main() -> int:
    """Print the finds in the named files, or in all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="files to read (default: all of the project)")
    chosen = parser.parse_args().files
    count = 0
    for line in finds([name for name in chosen if is_ours(name)] if chosen else project_files()):
        print(line)
        count += 1
    if count:
        print(f"{count} finds; dev/english.yaml contains the rules.", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
