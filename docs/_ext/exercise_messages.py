"""Collect, for translation, the messages of the exercises' `check` and the stubs' docstrings."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXERCISES = ROOT / "notebooks" / "exercises"

# The engine's composed sentences, its conditions, and the words that it fills in.
PARTS = [
    "Your result differs at {}: got {}; expected {}.",
    "Your result differs: got {}; expected {}.",
    "The gradient with respect to `{}` differs at {}: got {}; expected {}.",
    "The gradient with respect to `{}` differs: got {}; expected {}.",
    "`{}` is {}",
    "`{}` is below `{}`",
    "`{}` is equal to `{}`",
    "`{}` is above `{}`",
    "first",
    "last",
    "mean",
    "sum",
    "variance",
    "standard deviation",
]


def messages() -> list[str]:
    """Return the messages to translate; {0}, {1} … stand for parts that vary between answers."""
    return list(dict.fromkeys([*_templates(), *mistakes(), *stubs()]))


def mistakes() -> list[str]:
    """Return the messages about named mistakes, in the order of the exercises."""
    return [message for exercise in _exercises() for message, *_ in exercise.mistakes.values()]


def stubs() -> list[str]:
    """Return the docstrings of the exercises' stubs."""
    return [" ".join(exercise.stub_doc.split()) for exercise in _exercises()]


@cache
def _exercises() -> list:
    from dev.exercises.make_exercises import SETS, load

    return [exercise for name in SETS for exercise in load(name).exercises.values()]


def _templates() -> list[str]:
    """Return the sentences of the engine: its strings with words, except names and docstrings.

    languages.py has no sentences of its own.
    """
    texts = []
    for path in (EXERCISES / "engine.py", *sorted(EXERCISES.glob("checks/[!l]*.py"))):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Dict):
                skipped |= {id(key) for key in node.keys}
            elif isinstance(node, ast.JoinedStr):
                skipped |= {id(part) for part in node.values}
        texts += [_text(node).strip() for node in nodes if id(node) not in skipped]
    sentences = [text for text in texts if _is_sentence(text)]
    return [numbered(text) for text in (*sentences, *PARTS)]


def _is_sentence(text: str) -> bool:
    """Return whether a string is a sentence: it has words, and values or more than a name."""
    has_words = len(re.findall("[A-Za-z]{2,}", text)) > 1
    return has_words and not text.startswith("{") and ("{" in text or text.count(" ") > 1)


def _text(node: ast.AST) -> str:
    """Return a string's text, with {} for each value that it fills in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return node.value if isinstance(getattr(node, "value", None), str) else ""


def numbered(text: str) -> str:
    """Return a template with {0}, {1}, … in place of {}."""
    count = itertools.count()
    return re.sub(r"\{[^{}]*\}", lambda _: f"{{{next(count)}}}", text)
