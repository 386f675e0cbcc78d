"""Print messages in the language of the notebook's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

FILE = Path("messages.json")  # `make zh` writes it beside the Chinese notebooks


def say(message: str) -> str:
    """Return a message in the language of the working folder's FILE, else unchanged.

    FILE maps English messages to translations; {0}, {1}, … stand for values in them.
    """
    if not FILE.exists():
        return message
    known = json.loads(FILE.read_text(encoding="utf-8"))
    if message in known:
        return known[message]
    for text in sorted((t for t in known if " " in t), key=len, reverse=True):
        pattern = re.sub(r"\\\{\d\\\}", "(.+?)", re.escape(text)) + r"(?!\S)"

        def fill(match: re.Match, text: str = text) -> str:
            values = [known.get(value, value) for value in match.groups()]
            return re.sub(r"\{(\d)\}", lambda m: values[int(m[1])], known[text])

        message = re.sub(pattern, fill, message)
    return message
