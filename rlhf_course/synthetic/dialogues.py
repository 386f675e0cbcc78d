"""Generate synthetic preference dialogues in hh-rlhf's format, with exactly known utilities.

So a reward model's best expected accuracy is also known: the mean of sigmoid(|utility gap|).
"""

import random
import re

from rlhf_course.synthetic import grammar
from rlhf_course.synthetic.grammar import WORD, Pair, pick, sentences, some

MAX_WORDS = 4  # topic words beyond the fourth add nothing
LENGTHS = range(8, 61)  # of answers, in words
GRAMMAR = grammar.load("dialogues")
POINTS, MARKERS, SHARES, TOPICS = (
    GRAMMAR[key] for key in ("points", "markers", "shares", "topics")
)


def _stems(text: str) -> set[str]:
    """Return a text's words, each without a final s, so that "tyres" counts as "tyre"."""
    return {word.removesuffix("s") for word in WORD.findall(text.lower())}


NAMES = {topic: _stems(topic) for topic in TOPICS}
VOCABULARY = {
    topic: _stems(" ".join(re.findall(r"\*(\w+)", " ".join(TOPICS[topic]["tips"]))))
    for topic in TOPICS
}


def gold_utility(prompt: str, answer: str) -> float:
    """Return the exact utility of any answer to any prompt, in nats: the sum of its POINTS.

    The question is the last human turn. Its topic is the topic whose NAMES occur in it most;
    VOCABULARY breaks ties. A question without such words has no topic. Each kind's points are
    multiplied by its entry in ``counts``; an answer without words has only the points for "empty".
    """
    question = prompt.rpartition("\n\nHuman:")[2].partition("\n\nAssistant:")[0]
    asked, said = ([" ".join(words) for words in sentences(text)] for text in (question, answer))
    if not said:
        return POINTS["empty"]
    seen = _stems(question)
    hits = {topic: (len(NAMES[topic] & seen), len(VOCABULARY[topic] & seen)) for topic in TOPICS}
    topic = max(hits, key=hits.__getitem__)
    used = _stems(answer) & VOCABULARY[topic] if any(hits[topic]) else set()
    text = f" {' | '.join(said)} "  # the bar keeps a marker from matching across two sentences
    counts = {
        **{kind: any(f" {m} " in text for m in markers) for kind, markers in MARKERS.items()},
        "word": min(MAX_WORDS, len(used - seen)),
        "no_word": not used,
        "repeat": len(said) - len(set(said)),
        "copy": bool(asked) and asked[-1].count(" ") > 2 and f" {asked[-1]} " in text,
        "breaks_off": not answer.rstrip(" \n\"')]”’").endswith((".", "!", "?")),
    }
    # Round: the terms' order must not matter.
    return round(sum(POINTS[kind] * count for kind, count in counts.items()), 6)


def _answer(rng: random.Random, tips: list[str], civil: bool = False) -> str:
    """Draw an answer from the tips; a civil answer is neither evasive nor insulting."""
    has = {
        k: rng.random() < share and not (civil and k in ("evasion", "rudeness"))
        for k, share in SHARES.items()
    }
    has["courtesy"] &= not has["rudeness"]  # both together would read as sarcasm
    bare = has["no_tip"] and (has["evasion"] or has["rudeness"])
    rest = some(rng, tips, 0 if bare else rng.choice(GRAMMAR["tip_counts"]))
    parts, after = [], []
    frames = {1: rng.sample(GRAMMAR["one"], 3), 2: rng.sample(GRAMMAR["two"], 1)}
    for kind in ("courtesy", "rudeness", "evasion"):
        if has[kind] and rng.random() < 0.6:
            parts.append(pick(rng, GRAMMAR[kind + "_open"]))
        elif has[kind]:
            after.insert(0, pick(rng, GRAMMAR[kind + "_end"]))
    if has["lead"] and not (bare or has["rudeness"]):
        parts.append(pick(rng, GRAMMAR["lead"]))
    while rest:
        size = 2 if len(rest) > 1 and rng.random() < 0.5 else 1
        heads = [tip.partition(">")[0] for tip in rest[:size]]
        if has["reason"] and (size == len(rest) or rng.random() < 0.5):
            heads[-1] = rest[size - 1].replace(">", "")
        parts.append(frames[size].pop().format(*heads))
        rest = rest[size:]
    parts += [pick(rng, GRAMMAR["aside"])] * has["aside"] + after
    text = " ".join(part[0].upper() + part[1:] for part in parts)
    return text if len(text.split()) in LENGTHS else _answer(rng, tips, civil)


def _make_pair(rng: random.Random) -> Pair:
    topic = TOPICS[rng.choice(list(TOPICS))]
    tips = [tip.replace("*", "") for tip in topic["tips"]]
    first, last = (pick(rng, [question]) for question in rng.sample(topic["questions"], 2))
    preface = f" {pick(rng, GRAMMAR['preface'])}" if rng.random() < SHARES["preface"] else ""
    prompt = f"\n\nHuman:{preface} {first}\n\nAssistant:"
    if rng.random() < SHARES["follow_up"]:  # no tip from the earlier answer is repeated
        given = some(rng, tips, 3)
        prompt += f" {_answer(rng, given, civil=True)}"
        prompt += f"\n\nHuman: {pick(rng, GRAMMAR['thanks'])} {last}\n\nAssistant:"
        tips = [tip for tip in tips if tip not in given]
    return grammar.draw_pair(rng, prompt, lambda: _answer(rng, tips), gold_utility)


def make_pairs(n: int, seed: int = 0) -> list[Pair]:
    """Return n pairs: an everyday question, two answers and a noisy verdict.

    Pair i depends only on (seed, i).
    """
    return [_make_pair(random.Random(f"{seed}-{i}")) for i in range(n)]
