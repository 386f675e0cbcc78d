"""Check a translation: it must repeat its message's numbers, formulas, code and links, and use
the terms of locale/terms.yaml.
"""

from __future__ import annotations

import calendar
import re
from collections import Counter
from functools import cache
from pathlib import Path

import yaml

LOCALE = Path(__file__).resolve().parents[2] / "locale"
EDGES = "，。：；！？、（）“”「」《》"
NUMBER = re.compile(r"−?\d+(?:[.,]\d+)*")
CODE = re.compile(r"``.+?``|`[^`]+`")
FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$]+\$", re.S)
ROLE = re.compile(r"\{([a-z]\w*)\}`(?:[^`<]*<)?([^`>]+)>?`")
LINK = re.compile(r"\]\(([^)\s]+)|(https?://[^\s)>\]]+)|(?:href|src)=[\"']([^\"']+)")
TAG = re.compile(r"<[^<>]+>")
# Chinese months are numbers.
MONTH = re.compile(rf"({'|'.join(calendar.month_name[1:])})(?= \d{{4}})")
PLACEHOLDER = re.compile(r"\{\{[^{}]+\}\}")  # replaced by a number in the slides


def parts(message: str) -> tuple[dict[str, Counter], str]:
    """Return the parts that a translation must repeat, grouped by kind, and the other words."""
    found, text = {}, message
    kinds = {"placeholder": PLACEHOLDER, "term": ROLE, "code": CODE, "formula": FORMULA}
    kinds |= {"link": LINK, "tag": TAG}
    for kind, pattern in kinds.items():
        found[kind] = Counter(
            "".join(filter(None, m.groups())) or m[0] for m in pattern.finditer(text)
        )
        text = pattern.sub("](" if kind == "link" else " ", text)
    found["number"] = Counter(NUMBER.findall(text))
    return found, text


def has_words(message: str) -> bool:
    """Return whether a message has words to translate besides code, formulas and numbers."""
    return bool(re.search("(?!GB)[A-Za-z]{2}", parts(message)[1]))


@cache
def terms() -> list[tuple[re.Pattern, list[str]]]:
    """Return the terms, longest first, each as a pattern with its accepted translations."""
    listed = yaml.safe_load((LOCALE / "terms.yaml").read_text(encoding="utf-8"))
    found = []
    for term in sorted(listed, key=len, reverse=True):
        accepted = listed[term] if isinstance(listed[term], list) else [listed[term]]
        pattern = re.compile(rf"(?<![\w-]){re.escape(term)}(?:e?s)?(?![\w-])", re.I)
        found.append((pattern, [str(one).lower() for one in accepted]))
    return found


def problems(message: str, translation: str) -> list[str]:
    """Return the forbidden differences between a translation and its message."""
    message = MONTH.sub(lambda m: str([*calendar.month_name].index(m[1])), message)
    (before, words), (after, _) = parts(message), parts(translation)
    found = []
    for kind in before:
        lost, added = before[kind] - after[kind], after[kind] - before[kind]
        found += [f"{kind} {one!r} is missing" for one in lost]
        found += [f"{kind} {one!r} is not in the message" for one in added]
    for quoted in re.findall(r"\*[^*]+\*|[“\"][^”\"]+[”\"]", message):
        words = words.replace(quoted, " ") if quoted in translation else words  # a title
    for bold in re.finditer(r"\*\*([^*]+)\*\*", translation):
        before, after = translation[: bold.start()][-1:], translation[bold.end() :][:1]
        ends = bold[1][-1] in EDGES and after.isalnum()
        if ends or bold[1][0] in EDGES and before.isalnum():
            found.append(
                f"{bold[0]}: punctuation at the edge of bold text; Markdown needs it outside"
            )
    for pattern, accepted in terms():
        if pattern.search(words) and not any(one in translation.lower() for one in accepted):
            found.append(f"{pattern.search(words)[0]!r} should be {' or '.join(accepted)}")
        words = pattern.sub(" ", words)
    return found
