"""Generate synthetic preference dialogues in hh-rlhf's format, with exactly known utilities.

So a reward model's best expected accuracy is also known: the mean of sigmoid(|utility gap|).
"""

import random
import re

from rlhf_course.synthetic import grammar
from rlhf_course.synthetic.grammar import WORD, Pair, pick, sample_in_order, sentences

MAX_WORDS = 4  # topic words beyond the fourth add nothing
LENGTHS = range(8, 61)  # of answers, in words
GRAMMAR = grammar.load("dialogues")
POINTS = GRAMMAR["points"]
MARKERS = GRAMMAR["markers"]
SHARES = GRAMMAR["shares"]
TOPICS = GRAMMAR["topics"]


def _stems(text: str) -> set[str]:
    """Return a text's words, each without a final s, so that "tyres" counts as "tyre"."""
    return {word.removesuffix("s") for word in WORD.findall(text.lower())}


def _marked_stems(tips: list[str]) -> set[str]:
    """Return the stems of the words that * marks in the tips: they earn points."""
    marked = re.findall(r"\*(\w+)", " ".join(tips))
    return _stems(" ".join(marked))


NAMES = {topic: _stems(topic) for topic in TOPICS}
VOCABULARY = {topic: _marked_stems(entry["tips"]) for topic, entry in TOPICS.items()}


def _topic_of(stems: set[str]) -> str | None:
    """Return the topic whose NAMES occur most; VOCABULARY breaks ties. None if no word occurs."""
    hits = {topic: (len(NAMES[topic] & stems), len(VOCABULARY[topic] & stems)) for topic in TOPICS}
    topic = max(hits, key=hits.get)
    return topic if any(hits[topic]) else None


def gold_utility(prompt: str, answer: str) -> float:
    """Return the exact utility of any answer to any prompt, in nats: the sum of its POINTS.

    The question is the last human turn. Its topic is the topic whose NAMES occur in it most;
    VOCABULARY breaks ties. A question without such words has no topic. Each kind's points are
    multiplied by its entry in ``counts``; an answer without words has only the points for "empty".
    """
    question = prompt.rpartition("\n\nHuman:")[2].partition("\n\nAssistant:")[0]
    question_sentences = [" ".join(words) for words in sentences(question)]
    answer_sentences = [" ".join(words) for words in sentences(answer)]
    if not answer_sentences:
        return POINTS["empty"]
    question_stems = _stems(question)
    topic = _topic_of(question_stems)
    topic_stems = set() if topic is None else _stems(answer) & VOCABULARY[topic]
    # The bar keeps a marker from matching across two sentences.
    text = f" {' | '.join(answer_sentences)} "
    last_question = question_sentences[-1] if question_sentences else ""
    is_long = last_question.count(" ") > 2  # four words or more
    counts = {
        "word": min(MAX_WORDS, len(topic_stems - question_stems)),
        "no_word": not topic_stems,
        "repeat": len(answer_sentences) - len(set(answer_sentences)),
        "copy": is_long and f" {last_question} " in text,
        "breaks_off": not answer.rstrip(" \n\"')]”’").endswith((".", "!", "?")),
    }
    for kind, markers in MARKERS.items():
        counts[kind] = any(f" {marker} " in text for marker in markers)
    # Round: the terms' order must not matter.
    return round(sum(POINTS[kind] * count for kind, count in counts.items()), 6)


def _answer(rng: random.Random, tips: list[str], civil: bool = False) -> str:
    """Draw an answer from the tips; a civil answer is neither evasive nor insulting."""
    while True:
        text = _draft(rng, tips, civil)
        if len(text.split()) in LENGTHS:
            return text


def _draft(rng: random.Random, tips: list[str], civil: bool) -> str:
    """Draw an answer of any length."""
    has = {kind: rng.random() < share for kind, share in SHARES.items()}
    if civil:
        has["evasion"] = False
        has["rudeness"] = False
    if has["rudeness"]:
        has["courtesy"] = False  # both together would read as sarcasm
    without_tips = has["no_tip"] and (has["evasion"] or has["rudeness"])
    count = 0 if without_tips else rng.choice(GRAMMAR["tip_counts"])
    chosen_tips = sample_in_order(rng, tips, count)
    frames = {1: rng.sample(GRAMMAR["one"], 3), 2: rng.sample(GRAMMAR["two"], 1)}
    opening = []
    closing = []
    for kind in ("courtesy", "rudeness", "evasion"):
        if has[kind] and rng.random() < 0.6:
            opening.append(pick(rng, GRAMMAR[kind + "_open"]))
        elif has[kind]:
            closing.insert(0, pick(rng, GRAMMAR[kind + "_end"]))
    if has["lead"] and not (without_tips or has["rudeness"]):
        opening.append(pick(rng, GRAMMAR["lead"]))
    advice = _advice(rng, chosen_tips, frames, with_reasons=has["reason"])
    aside = pick(rng, GRAMMAR["aside"])  # always drawn, so that the seed's other draws stay
    if has["aside"]:
        advice.append(aside)
    return " ".join(part[0].upper() + part[1:] for part in opening + advice + closing)


def _advice(
    rng: random.Random, tips: list[str], frames: dict[int, list[str]], with_reasons: bool
) -> list[str]:
    """Return sentences of one or two tips each; ``frames`` are the sentences' patterns.

    A tip is an imperative, ">" and a reason, which only a sentence's last tip may keep.
    """
    advice = []
    while tips:
        size = 2 if len(tips) > 1 and rng.random() < 0.5 else 1
        phrases = [tip.partition(">")[0] for tip in tips[:size]]
        if with_reasons and (size == len(tips) or rng.random() < 0.5):
            phrases[-1] = tips[size - 1].replace(">", "")
        advice.append(frames[size].pop().format(*phrases))
        tips = tips[size:]
    return advice


def _make_pair(rng: random.Random) -> Pair:
    topic = TOPICS[rng.choice(list(TOPICS))]
    tips = [tip.replace("*", "") for tip in topic["tips"]]
    first, last = [pick(rng, [question]) for question in rng.sample(topic["questions"], 2)]
    preface = ""
    if rng.random() < SHARES["preface"]:
        preface = " " + pick(rng, GRAMMAR["preface"])
    prompt = f"\n\nHuman:{preface} {first}\n\nAssistant:"
    if rng.random() < SHARES["follow_up"]:
        earlier_tips = sample_in_order(rng, tips, 3)
        earlier_answer = _answer(rng, earlier_tips, civil=True)
        thanks = pick(rng, GRAMMAR["thanks"])
        prompt += f" {earlier_answer}\n\nHuman: {thanks} {last}\n\nAssistant:"
        tips = [tip for tip in tips if tip not in earlier_tips]  # no tip is repeated
    return grammar.draw_pair(rng, prompt, lambda: _answer(rng, tips), gold_utility)


def make_pairs(n: int, seed: int = 0) -> list[Pair]:
    """Return n pairs: an everyday question, two answers and a noisy verdict.

    Pair i depends only on (seed, i).
    """
    return [_make_pair(random.Random(f"{seed}-{i}")) for i in range(n)]


def draw_answers(prompt: str, n: int, seed: int = 0) -> list[str]:
    """Draw n answers to one of this world's prompts, as :func:`make_pairs` does; some may be equal.

    They repeat no tip of an earlier turn. Raises ``ValueError`` for a question on no topic.
    """
    question = prompt.rpartition("\n\nHuman:")[2].partition("\n\nAssistant:")[0]
    topic = _topic_of(_stems(question))
    if topic is None:
        raise ValueError(f"The question {question.strip()!r} is on none of the world's topics.")
    tips = [tip.replace("*", "") for tip in TOPICS[topic]["tips"]]
    known = prompt.lower()
    tips = [tip for tip in tips if tip.partition(">")[0].lower() not in known]
    rng = random.Random(f"{seed}-{prompt}")
    return [_answer(rng, tips) for _ in range(n)]
