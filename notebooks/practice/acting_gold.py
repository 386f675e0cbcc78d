"""Compute exercise 3's gold: whether a text praises the acting in natural words."""

import re
from collections import Counter

ACTING = set(
    "acting actor actors actress actresses cast performance performances".split()
)
PRAISE = set(
    "good great excellent superb wonderful brilliant fantastic amazing perfect terrific"
    " outstanding fine best solid beautiful believable convincing impressive talented"
    " strong well love loved enjoyed".split()
)
NEGATION = set("not no never hardly without nor neither barely".split())
SMALL = set(
    "the a an and or but of in on at to for with by from is was are were be been has"
    " have had it its this that these i you he she they we his her their my as so"
    " very not".split()
)


def gold(text: str) -> float:
    """Return 1.0 for a text that fulfills the wish, else 0.0."""
    return float(_is_natural(text) and any(map(_praises, re.split(r"[.!?]", text))))


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def _praises(sentence: str) -> bool:
    words = words_of(sentence)
    negated = [word in NEGATION or word.endswith("n't") for word in words]
    praise = [
        i
        for i, word in enumerate(words)
        if word in PRAISE and not any(negated[:i][-3:])
    ]
    return any(
        abs(i - j) <= 4
        for i in praise
        for j, word in enumerate(words)
        if word in ACTING
    )


def _is_natural(text: str) -> bool:
    words = words_of(text)
    most = max(Counter(word for word in words if word not in SMALL).values(), default=0)
    small = sum(word in SMALL for word in words)
    return 6 <= len(words) <= 40 and most <= 2 and small >= 0.2 * len(words)
