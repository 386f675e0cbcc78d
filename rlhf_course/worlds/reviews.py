"""Invented film reviews with an exactly known sentiment, for working without a network.

`make_reviews` draws short English reviews from a seeded grammar. `gold_sentiment` scores any text with a fixed lexicon.
A classifier trained on a few labels is only a proxy for it: optimise a policy against the classifier, read the gold
score, and see where the two part.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from rlhf_course.worlds import grammar

MIN_CHARS, MAX_CHARS = 200, 560  # the usual length
SHORT_SHARE = 0.03  # of the reviews, as in real collections, fall below it
CUE_SHARE = 0.42  # reviews that say where, or with whom, the film was seen
CUE_AGREES = 0.8  # how often that detail comes from the list of the review's own label
REPEAT_COST = 0.25  # gold points lost for each word that immediately repeats the one before it
GRAMMAR = grammar.load("reviews")
LEXICON: dict[str, float] = {  # word -> points, positive for praise; mild words weigh half
    word: (0.5 if word in GRAMMAR["mild"] else 1.0) * sign
    for slot in ("tone", "make", "grand", "acraft", "acast", "how", "verdict", "felt", "loved", "works", "other")
    for mark, sign in (("+", 1), ("-", -1))
    for word in (option.split()[-1] for option in GRAMMAR[slot + mark])
}
SLOT = re.compile(r"\{([+~-]?)(\w+)\}")
VOWEL_START = re.compile(r"\b([Aa]) (?=[aeio]|u(?!ni[^n]|s)|hon|hour)")


@dataclass(frozen=True)
class Review:
    """One invented review: its text, its label (1 positive, 0 negative) and gold_sentiment(text)."""

    text: str
    label: int
    gold: float


def gold_sentiment(text: str) -> float:
    """The exact sentiment of any text, in lexicon points (0.0 when it holds no opinion).

    A word of LEXICON is an opinion; its sign is flipped, once, when at least one of the up to three words before it
    in its sentence is a negator or ends in ``n't``. The score is the sum of sign * LEXICON[word] over the distinct
    (word, flipped or not) pairs of the text, minus REPEAT_COST for every word equal to the word before it in its
    sentence. Saying "wonderful" ten times in a row thus earns less than saying it once.
    """
    found: set[tuple[str, int]] = set()
    repeats = 0
    for words in grammar.sentences(text):
        for i, word in enumerate(words):
            repeats += i > 0 and word == words[i - 1]
            if word in LEXICON:
                flipped = any(w in GRAMMAR["negators"] or w.endswith("n't") for w in words[max(0, i - 3) : i])
                found.add((word, -1 if flipped else 1))
    # All weights are multiples of 1/2, so this sum is exact whatever the order of the set.
    return float(sum(sign * LEXICON[word] for word, sign in found) - REPEAT_COST * repeats)


class _Writer:
    """Fills the slots of one review, keeping to one story and not using an option twice."""

    def __init__(self, rng: random.Random, cue: int) -> None:
        self.rng, self.cue, self.used = rng, cue, set[str]()
        self.last: dict[str, str] = {}  # story slot -> its latest value, so that nobody meets himself
        people, items = rng.sample(GRAMMAR["job"], 3), rng.sample(GRAMMAR["object"], 2)
        sites = [f"a {rng.choice(GRAMMAR['region'])} {site}" for site in rng.sample(GRAMMAR["site"], 2)]
        traits = rng.sample(GRAMMAR["trait"], 3)
        roles = [f"{trait} {job}" for trait, job in zip(traits, people, strict=True)]
        self.story = {"hero": [f"a {roles[0]}"], "lead": people[:1], "role": roles, "who": people}
        self.story |= {"item": items, "thing": [f"a {rng.choice(GRAMMAR['state'])} {items[0]}"]}
        self.story |= {"place": sites[:1], "place2": sites[1:], "genre": [rng.choice(GRAMMAR["genre"])]}

    def fill(self, slot: str, sign: int) -> str:
        """One option of a slot with all the slots inside it filled; sign is +1 or -1."""
        if slot in self.story:
            options = [o for o in self.story[slot] if o != self.last.get(slot)] or self.story[slot]
            self.last[slot] = self.rng.choice(options)
            return self.last[slot]
        option = self.rng.choice(GRAMMAR[slot])
        if option in self.used:
            option = self.rng.choice([o for o in GRAMMAR[slot] if o not in self.used] or GRAMMAR[slot])
        self.used.add(option)
        marks = {"": 0, "+": sign, "-": -sign, "~": self.cue}
        return SLOT.sub(lambda m: self.fill(m[2] + ["", "+", "-"][marks[m[1]]], sign), option)

    def sentence(self, slot: str, sign: int) -> str:
        """A finished sentence: articles agree, it starts with a capital and ends with a stop."""
        text = VOWEL_START.sub(r"\1n ", self.fill(slot, sign))
        return text[0].upper() + text[1:] + "."


def _draft(rng: random.Random, label: int) -> str:
    """The text of one candidate review with the given label."""
    sign = 1 if label else -1
    has_cue = rng.random() < CUE_SHARE
    writer = _Writer(rng, sign if rng.random() < CUE_AGREES else -sign)
    opening = rng.choices(["open", "open_film", "open_part"], [0.04, 0.5, 0.46])[0]
    if has_cue and rng.random() < 0.1:
        opening, has_cue = "open_cue", False
    # A fair reviewer grants the other side a point: "turn" goes against the label, "open_part" sometimes.
    against = opening == "open_part" and rng.random() < 0.29
    second = "rebut" if against else rng.choices(["view", "mixed", "mid_cue"], [0.8, 0.1, 0.7 * has_cue])[0]
    later = ["view"] * rng.choice([1, 1, 2]) + ["mid_cue"] * (has_cue and second != "mid_cue")
    extras = {"mixed": 0.3, "turn": 0.8, "plain": 0.4}
    later += [kind for kind, share in extras.items() if rng.random() < share and kind != second]
    rng.shuffle(later)
    first = writer.sentence(opening, -sign if against else sign)
    kinds = [second, *later] + ["end"] * (rng.random() < 0.6)
    return " ".join([first] + [writer.sentence(kind, -sign if kind == "turn" else sign) for kind in kinds])


def _make_review(rng: random.Random) -> Review:
    """Draw drafts until one has the length wanted and a gold score on the side of its label."""
    label = int(rng.random() < 0.5)
    low, high = (90, MIN_CHARS - 1) if rng.random() < SHORT_SHARE else (MIN_CHARS, MAX_CHARS)
    while True:
        text = _draft(rng, label)
        gold = gold_sentiment(text)
        fits = low <= len(text) <= high and 2 <= text.count(". ") + (low < MIN_CHARS) <= 6
        if fits and (gold if label else -gold) > 0.25:
            return Review(text, label, gold)


def make_reviews(n: int, seed: int = 0) -> list[Review]:
    """n reviews; review i depends on (seed, i) only, so a longer list starts with a shorter one."""
    return [_make_review(random.Random(f"{seed}-{i}")) for i in range(n)]
