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


KINDS = {
    "placeholder": PLACEHOLDER,
    "term": ROLE,
    "code": CODE,
    "formula": FORMULA,
    "link": LINK,
    "tag": TAG,
}


def split_message(message: str) -> tuple[dict[str, Counter], str]:
    """Return the parts that a translation must repeat, grouped by kind, and the other words."""
    repeated = {}
    words = message
    for kind, pattern in KINDS.items():
        repeated[kind] = Counter(
            "".join(filter(None, match.groups())) or match[0] for match in pattern.finditer(words)
        )
        words = pattern.sub("](" if kind == "link" else " ", words)
    repeated["number"] = Counter(NUMBER.findall(words))
    return repeated, words


def has_words(message: str) -> bool:
    """Return whether a message has words to translate besides code, formulas and numbers."""
    _, words = split_message(message)
    return bool(re.search("(?!GB)[A-Za-z]{2}", words))


@cache
def terms() -> list[tuple[re.Pattern, list[str]]]:
    """Return the terms, longest first, each as a pattern with its accepted translations."""
    listed = yaml.safe_load((LOCALE / "terms.yaml").read_text(encoding="utf-8"))
    patterns = []
    for term in sorted(listed, key=len, reverse=True):
        accepted = listed[term] if isinstance(listed[term], list) else [listed[term]]
        pattern = re.compile(rf"(?<![\w-]){re.escape(term)}(?:e?s)?(?![\w-])", re.I)
        patterns.append((pattern, [str(translation).lower() for translation in accepted]))
    return patterns


def problems(message: str, translation: str) -> list[str]:
    """Return the forbidden differences between a translation and its message."""
    message = MONTH.sub(lambda match: str([*calendar.month_name].index(match[1])), message)
    expected, words = split_message(message)
    repeated, _ = split_message(translation)
    lines = []
    for kind, counts in expected.items():
        lines += [f"{kind} {part!r} is missing" for part in counts - repeated[kind]]
        lines += [f"{kind} {part!r} is not in the message" for part in repeated[kind] - counts]
    for quoted in re.findall(r"\*[^*]+\*|[“\"][^”\"]+[”\"]", message):
        if quoted in translation:  # a title
            words = words.replace(quoted, " ")
    return lines + wrong_edges(translation) + wrong_terms(words, translation)


def wrong_edges(translation: str) -> list[str]:
    """Return the bold texts that Markdown does not recognize, because of their punctuation."""
    lines = []
    for bold in re.finditer(r"\*\*([^*]+)\*\*", translation):
        before = translation[: bold.start()][-1:]
        after = translation[bold.end() :][:1]
        begins_wrong = bold[1][0] in EDGES and before.isalnum()
        ends_wrong = bold[1][-1] in EDGES and after.isalnum()
        if begins_wrong or ends_wrong:
            lines.append(
                f"{bold[0]}: punctuation at the edge of bold text; Markdown needs it outside"
            )
    return lines


def wrong_terms(words: str, translation: str) -> list[str]:
    """Return the terms among the message's words that have no accepted translation."""
    lines = []
    for pattern, accepted in terms():
        match = pattern.search(words)
        if match and not any(term in translation.lower() for term in accepted):
            lines.append(f"{match[0]!r} should be {' or '.join(accepted)}")
        words = pattern.sub(" ", words)
    return lines
