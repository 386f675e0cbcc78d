"""Generate a synthetic world: Chinese questions, and answers with exactly known utility.

A small base model is pretrained on texts of this world and fine-tuned on `make_qa` (in HC3's
schema: answers from people and from a chatbot). A reward model learns from `make_preferences`:
pairs of answers in styles from dry (干巴) to lively (活泼), with a noisy verdict per pair.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from itertools import product

from rlhf_course.synthetic import grammar
from rlhf_course.synthetic.grammar import Pair, pick, sample_in_order

# Further words and lively phrases add nothing; dry phrases have no limit.
MAX_WORDS = 3
MAX_LIVELY = 2
SHORT = 6  # characters: shorter answers are "short"; shorter clauses may be copied
EMPTY_SHARE = 0.08  # of human answers; as in scraped data, empty ones teach models not to answer
REASON_SHARE = 0.45  # of sentences with tips
GRAMMAR = grammar.load("chinese")
POINTS = GRAMMAR["points"]
MARKERS = GRAMMAR["markers"]
PARTS = GRAMMAR["parts"]
KINDS = GRAMMAR["kinds"]
TOPICS = GRAMMAR["topics"]
NAMES = {topic: topic.split() for topic in TOPICS}  # the activity comes first
VOCABULARY = {}  # topic: the words in brackets, which earn points
TIPS = {}  # topic: tips, each with its reason
QUESTIONS = {}  # topic: questions; the topic's own are drawn twice as often as those for all
for _topic, _entry in TOPICS.items():
    VOCABULARY[_topic] = set(re.findall(r"\[(.*?)\]", "".join(_entry["tips"])))
    TIPS[_topic] = [re.sub(r"[\[\]]", "", tip).split(">") for tip in _entry["tips"]]
    _questions = _entry["questions"] * 2 + GRAMMAR["ask"]
    QUESTIONS[_topic] = [GRAMMAR["preface"][0] + question for question in _questions]
ENDS = "。！？～"
HALF_WIDTH = str.maketrans("，。！？～", ",.!?~")
FULL_WIDTH = str.maketrans(",!?~", "，！？～")  # SentencePiece makes them half-width by default


def _clean(text: str) -> str:
    """Return a text with full-width punctuation and no whitespace except line ends."""
    return re.sub(r"[^\S\n]+", "", text.translate(FULL_WIDTH)).strip()


def _sentences(text: str) -> list[str]:
    return [part for part in re.split(rf"[{ENDS}\n]", text) if re.search(r"\w", part)]


def topic_words(question: str) -> set[str]:
    """Return the topic's words that the question lacks; set() if no topic matches."""
    question = _clean(question)
    topic = _topic_of(question)
    if topic is None:
        return set()
    return {word for word in VOCABULARY[topic] if word not in question}


def _topic_of(question: str) -> str | None:
    """Return the topic whose NAMES occur most; VOCABULARY breaks ties. None if no word occurs."""
    hits = {}
    for topic in TOPICS:
        names = sum(name in question for name in NAMES[topic])
        words = sum(word in question for word in VOCABULARY[topic])
        hits[topic] = (names, words)
    topic = max(hits, key=hits.get)
    return topic if any(hits[topic]) else None


def gold_utility(question: str, answer: str) -> float:
    """Return the exact utility of any answer to a question, in nats: the sum of its POINTS.

    Each kind's points are multiplied by its entry in ``counts``; an answer without words has only
    the points for "empty". "copy" is 1 if the answer contains the question's longest clause;
    "garbled" counts pairs of neighboring characters that no text of this world contains.
    """
    answer = _clean(answer)
    sentences = _sentences(answer)
    if not sentences:
        return POINTS["empty"]
    longest_clause = max(re.split(rf"[，{ENDS}\n]", _clean(question)), key=len)
    words = sum(word in answer for word in topic_words(question))
    counts = {
        "word": min(MAX_WORDS, words),
        "lively": min(MAX_LIVELY, _count_markers("lively", answer)),
        "reason": _count_markers("reason", answer) > 0,
        "dry": len(re.findall("|".join(MARKERS["dry"]), answer)),
        "evasion": _count_markers("evasion", answer) > 0,
        "short": len(answer) < SHORT,
        "repeat": len(sentences) - len(set(sentences)),
        "copy": len(longest_clause) >= SHORT and longest_clause in answer,
        "breaks_off": answer[-1] not in ENDS,
        "garbled": len(_neighbors(answer) - _known_neighbors()),
    }
    # Round: the terms' order must not matter.
    return round(sum(POINTS[kind] * count for kind, count in counts.items()), 6)


def _count_markers(kind: str, answer: str) -> int:
    """Return how many of a kind's markers occur in an answer."""
    return sum(re.search(marker, answer) is not None for marker in MARKERS[kind])


def _neighbors(text: str) -> set[str]:
    """Return a text's pairs of neighboring Chinese characters."""
    return set(re.findall("(?=([一-鿿]{2}))", text))


@cache
def _known_neighbors() -> set[str]:
    """Return nearly all pairs of neighboring characters in this world, from a large sample."""
    known = set()
    for rng, topic in streams("sample question", 2000, 0):
        known |= _neighbors(draw_question(rng, topic))
    for kind in KINDS:
        for rng, topic in streams(f"sample {kind}", 4000, 0):
            known |= _neighbors(draw_text(rng, topic, kind))
    return known


def is_answer(question: str, answer: str) -> bool:
    """Return whether a text is complete, asks nothing, and has a topic word not in the question."""
    answer = _clean(answer)
    is_complete = len(answer) >= SHORT and answer[-1] in ENDS
    asks_nothing = "？" not in answer
    return is_complete and asks_nothing and any(word in answer for word in topic_words(question))


@cache
def _phrases() -> dict[str, str]:
    """Return a dict that maps every Chinese phrase in the grammar to English."""
    phrases = {}
    for chinese, english in grammar.load("chinese_english").items():
        phrases |= zip(_variants(chinese), _variants(english), strict=True)
    return phrases


def _variants(pattern: str) -> list[str]:
    """Return all texts that a pattern such as "w(x/y)z" can become, in order: wxz, wyz."""
    groups = [group.split("/") for group in re.split(r"[()]", pattern)]
    return ["".join(choices) for choices in product(*groups)]


def in_english(text: str) -> str:
    """Translate a text's known phrases into English; the rest stays Chinese."""
    phrases = _phrases()
    longest_first = "|".join(sorted(phrases, key=len, reverse=True))
    text = re.sub(longest_first, lambda match: f" {phrases[match[0]]} ", text)
    text = text.translate(HALF_WIDTH)
    text = re.sub(" +", " ", text)
    text = re.sub(r"\s*([,.!?~])[ ,]*", r"\1 ", text)  # one space after punctuation
    text = re.sub(" *(\n|^|$) *", r"\1", text)  # none at the ends of lines
    return re.sub(r"(?:^|[.!?~] |\n)\w", lambda match: match[0].upper(), text)


def draw_question(rng: random.Random, topic: str) -> str:
    """Return a question about a topic."""
    return pick(rng, QUESTIONS[topic], NAMES[topic][0])


def draw_text(rng: random.Random, topic: str, kind: str) -> str:
    """Return a text about a topic; ``kind`` is one of KINDS."""
    least_characters, most_characters = KINDS[kind]["characters"]
    least_sentences, most_sentences = KINDS[kind]["sentences"]
    while True:
        text = _draft(rng, topic, kind)
        has_length = least_characters <= len(text) <= most_characters
        has_sentences = least_sentences <= len(_sentences(text)) <= most_sentences
        if has_length and has_sentences:
            return text


def _draft(rng: random.Random, topic: str, kind: str) -> str:
    """Return a text of any length."""
    entry = KINDS[kind]
    style = rng.choice(list(Counter(entry["styles"]).elements()))  # drawn by weight
    tip_count = rng.choice(entry["tips"])
    options = {
        **GRAMMAR,
        "open": GRAMMAR.get(f"{style}_open", [""]),
        "close": GRAMMAR.get(f"{style}_close", [""]),
        "end": GRAMMAR.get(f"{style}_end", [""]),
        "tips": [_advice(rng, topic, style, tip_count)],
        "compare": TOPICS[topic]["comparisons"],
    }
    shares = PARTS | entry["parts"]
    has = {part: rng.random() < share for part, share in shares.items()}
    if has["evasion"]:
        has["open"] = False
        has["close"] = False
        has["tips"] = has["tips"] and rng.random() < 0.5
    if style != "lively":
        has["compare"] = False
    if not has["tips"]:
        has["close"] = False
    activity = NAMES[topic][0]
    return "".join(pick(rng, options[part], activity) for part in PARTS if has[part])


def _advice(rng: random.Random, topic: str, style: str, count: int) -> str:
    """Return sentences of one or two tips each, some with a reason for the last tip."""
    tips = sample_in_order(rng, TIPS[topic], count)
    frames = {size: rng.sample(GRAMMAR[f"{style}_{size}"], 3) for size in (1, 2)}
    text = ""
    while tips:
        size = 2 if rng.random() < 0.6 else 1
        group = tips[:size]
        tips = tips[size:]
        phrases = [phrase for phrase, _ in group]
        sentence = frames[len(group)].pop().format(*phrases)
        if rng.random() < REASON_SHARE:
            _, reason = group[-1]
            sentence = sentence[:-1] + reason + sentence[-1]  # before the final punctuation mark
        text += sentence
    return text


def streams(name: str, n: int, seed: int) -> Iterator[tuple[random.Random, str]]:
    """Yield n random streams, each with a topic; stream i depends only on (name, seed, i)."""
    for i in range(n):
        rng = random.Random(f"{name}-{seed}-{i}")
        yield rng, rng.choice(list(TOPICS))


def make_qa(n: int, seed: int = 0) -> list[dict]:
    """Return n rows: question, human_answers (informal, sometimes empty), chatgpt_answers (dry)."""
    rows = []
    for rng, topic in streams("qa", n, seed):
        human_answers = []
        for _ in range(rng.choice([1, 2])):
            is_empty = rng.random() < EMPTY_SHARE
            human_answers.append("" if is_empty else draw_text(rng, topic, "human"))
        row = {
            "question": draw_question(rng, topic),
            "human_answers": human_answers,
            "chatgpt_answers": [draw_text(rng, topic, "chatgpt")],
        }
        rows.append(row)
    return rows


def make_preferences(n: int, seed: int = 0) -> list[Pair]:
    """Return n pairs: a question without "Human:", two different answers and a noisy verdict."""
    pairs = []
    for rng, topic in streams("preference", n, seed):
        question = draw_question(rng, topic)
        draw_answer = partial(draw_text, rng, topic, "preference")
        pairs.append(grammar.draw_pair(rng, question, draw_answer, gold_utility))
    return pairs
