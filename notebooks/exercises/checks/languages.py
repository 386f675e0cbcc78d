"""Print messages in the language of the notebook's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

FILE = Path("messages.json")  # `make zh` writes it beside the Chinese notebooks
WORDS = ("where {0}", "the {0} position", "a {0}.")  # {0} is one of the engine's words


def say(message: str) -> str:
    """Translate a message with the working folder's FILE; without FILE, return it
    unchanged.

    FILE maps English messages to translations; {0}, {1}, … stand for values in them.
    """
    if not FILE.exists():
        return message
    known = json.loads(FILE.read_text(encoding="utf-8"))
    if message in known:
        return known[message]
    return "\n".join(_line(line, known) for line in message.split("\n"))


def _line(line: str, known: dict[str, str]) -> str:
    """Translate the sentences of a line; unknown sentences stay in English."""
    if line in known:
        return known[line]
    for text in sorted(known, key=len, reverse=True):
        if " " in text and line.startswith(f"{text} "):
            return f"{known[text]} {_line(line[len(text) + 1 :], known)}"
    templates = sorted((t for t in known if "{0}" in t), key=len, reverse=True)
    for more in (" (?P<more>.+)", ""):
        for text in templates:
            pattern = re.sub(r"\\\{(\d)\\\}", r"(?P<v\1>.*?)", re.escape(text))
            if not (found := re.fullmatch(pattern + more, line)):
                continue
            first = _fill(text, found.groupdict(), known)
            if not more:
                return first
            if (rest := _line(found["more"], known)) != found["more"]:
                return f"{first} {rest}"
    return line


def _fill(text: str, values: dict[str, str], known: dict[str, str]) -> str:
    """Fill values into a translated sentence; translate only the values of WORDS."""

    def value(match: re.Match) -> str:
        given = values[f"v{match[1]}"]
        is_word = any(part in text for part in WORDS)
        return _line(given, known) if is_word else given

    return re.sub(r"\{(\d)\}", value, known[text])
