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
from rlhf_course.synthetic.grammar import Pair, pick, some

MAX_WORDS, MAX_LIVELY = 3, 2  # further words and phrases add nothing; dry phrases have no limit
SHORT = 6  # characters: shorter answers are "short"; shorter clauses may be copied
EMPTY_SHARE = 0.08  # of human answers; as in scraped data, empty ones teach models not to answer
REASON_SHARE = 0.45  # of sentences with tips
GRAMMAR = grammar.load("chinese")
POINTS, MARKERS, PARTS, KINDS, TOPICS = (
    GRAMMAR[key] for key in ("points", "markers", "parts", "kinds", "topics")
)
NAMES = {topic: topic.split() for topic in TOPICS}  # the activity comes first
VOCABULARY = {
    topic: set(re.findall(r"\[(.*?)\]", "".join(TOPICS[topic]["tips"]))) for topic in TOPICS
}
QUESTIONS = {
    t: [GRAMMAR["preface"][0] + q for q in TOPICS[t]["questions"] * 2 + GRAMMAR["ask"]]
    for t in TOPICS
}
TIPS = {t: [re.sub(r"[\[\]]", "", tip).split(">") for tip in TOPICS[t]["tips"]] for t in TOPICS}
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
    hits = {
        t: tuple(sum(w in question for w in words[t]) for words in (NAMES, VOCABULARY))
        for t in TOPICS
    }
    topic = max(hits, key=hits.__getitem__)
    return {word for word in VOCABULARY[topic] if any(hits[topic]) and word not in question}


def gold_utility(question: str, answer: str) -> float:
    """Return the exact utility of any answer to a question, in nats: the sum of its POINTS.

    Each kind's points are multiplied by its entry in ``counts``; an answer without words has only
    the points for "empty". "copy" is 1 if the answer contains the question's longest clause;
    "garbled" counts pairs of neighboring characters that no text of this world contains.
    """
    answer = _clean(answer)
    said = _sentences(answer)
    if not said:
        return POINTS["empty"]
    clause = max(re.split(rf"[，{ENDS}\n]", _clean(question)), key=len)
    found = {
        kind: [marker for marker in markers if re.search(marker, answer)]
        for kind, markers in MARKERS.items()
    }
    counts = {
        "word": min(MAX_WORDS, sum(word in answer for word in topic_words(question))),
        "lively": min(MAX_LIVELY, len(found["lively"])),
        "reason": bool(found["reason"]),
        "dry": len(re.findall("|".join(MARKERS["dry"]), answer)),
        "evasion": bool(found["evasion"]),
        "short": len(answer) < SHORT,
        "repeat": len(said) - len(set(said)),
        "copy": len(clause) >= SHORT and clause in answer,
        "breaks_off": answer[-1] not in ENDS,
        "garbled": len(_neighbors(answer) - _known_neighbors()),
    }
    # Round: the terms' order must not matter.
    return round(sum(POINTS[kind] * count for kind, count in counts.items()), 6)


def _neighbors(text: str) -> set[str]:
    return set(re.findall("(?=([一-鿿]{2}))", text))


@cache
def _known_neighbors() -> set[str]:
    """Return nearly all pairs of neighboring characters in this world, from a large sample."""
    samples = [draw_question(rng, topic) for rng, topic in streams("sample question", 2000, 0)]
    for kind in KINDS:
        samples += [draw_text(*stream, kind) for stream in streams(f"sample {kind}", 4000, 0)]
    return set().union(*map(_neighbors, samples))


def is_answer(question: str, answer: str) -> bool:
    """Return whether a text is complete, asks nothing, and has a topic word not in the question."""
    answer = _clean(answer)
    complete = len(answer) >= SHORT and answer[-1] in ENDS and "？" not in answer
    return complete and any(word in answer for word in topic_words(question))


@cache
def _phrases() -> dict[str, str]:
    """Return a dict that maps every Chinese phrase in the grammar to English."""
    found = {}
    for both in grammar.load("chinese_english").items():
        sides = [[group.split("/") for group in re.split(r"[()]", text)] for text in both]
        chinese, english = ([*map("".join, product(*side))] for side in sides)
        found |= zip(chinese, english, strict=True)
    return found


def in_english(text: str) -> str:
    """Translate a text's known phrases into English; the rest stays Chinese."""
    phrases = _phrases()
    longest_first = "|".join(sorted(phrases, key=len, reverse=True))
    text = re.sub(longest_first, lambda found: f" {phrases[found[0]]} ", text).translate(HALF_WIDTH)
    text = re.sub(r"\s*([,.!?~])[ ,]*", r"\1 ", re.sub(" +", " ", text))
    text = re.sub(" *(\n|^|$) *", r"\1", text)
    return re.sub(r"(?:^|[.!?~] |\n)\w", lambda found: found[0].upper(), text)


def draw_question(rng: random.Random, topic: str) -> str:
    return pick(rng, QUESTIONS[topic], NAMES[topic][0])


def draw_text(rng: random.Random, topic: str, kind: str) -> str:
    """Return a text about a topic; ``kind`` is one of KINDS."""
    wanted = KINDS[kind]
    style = rng.choice([*Counter(wanted["styles"]).elements()])
    own = {
        **{part: GRAMMAR.get(f"{style}_{part}", [""]) for part in ("open", "close", "end")},
        "tips": [_advice(rng, topic, style, rng.choice(wanted["tips"]))],
        "compare": TOPICS[topic]["comparisons"],
    }
    has = {part: rng.random() < share for part, share in (PARTS | wanted["parts"]).items()}
    if has["evasion"]:
        has |= {"open": False, "close": False, "tips": has["tips"] and rng.random() < 0.5}
    has |= {"compare": has["compare"] and style == "lively", "close": has["close"] and has["tips"]}
    text = "".join(pick(rng, (GRAMMAR | own)[part], NAMES[topic][0]) for part in PARTS if has[part])
    sizes = {"characters": len(text), "sentences": len(_sentences(text))}
    fits = all(wanted[what][0] <= size <= wanted[what][1] for what, size in sizes.items())
    return text if fits else draw_text(rng, topic, kind)


def _advice(rng: random.Random, topic: str, style: str, count: int) -> str:
    """Return sentences of one or two tips each, some with a reason for the last tip."""
    tips, text = some(rng, TIPS[topic], count), ""
    frames = {size: rng.sample(GRAMMAR[f"{style}_{size}"], 3) for size in (1, 2)}
    while tips:
        now, tips = tips[: (size := 1 + (rng.random() < 0.6))], tips[size:]
        frame = frames[len(now)].pop().format(*(tip for tip, _ in now))
        text += frame[:-1] + now[-1][1] * (rng.random() < REASON_SHARE) + frame[-1]
    return text


def streams(what: str, n: int, seed: int) -> Iterator[tuple[random.Random, str]]:
    """Yield n random streams, each with a topic; stream i depends only on (what, seed, i)."""
    for i in range(n):
        rng = random.Random(f"{what}-{seed}-{i}")
        yield rng, rng.choice(list(TOPICS))


def make_qa(n: int, seed: int = 0) -> list[dict]:
    """Return n rows: question, human_answers (informal, sometimes empty), chatgpt_answers (dry)."""
    made = []
    for rng, topic in streams("qa", n, seed):
        human = [
            "" if rng.random() < EMPTY_SHARE else draw_text(rng, topic, "human")
            for _ in range(rng.choice([1, 2]))
        ]
        row = {"question": draw_question(rng, topic), "human_answers": human}
        made.append(row | {"chatgpt_answers": [draw_text(rng, topic, "chatgpt")]})
    return made


def make_preferences(n: int, seed: int = 0) -> list[Pair]:
    """Return n pairs: a question without "Human:", two different answers and a noisy verdict."""
    return [
        grammar.draw_pair(
            rng,
            draw_question(rng, topic),
            partial(draw_text, rng, topic, "preference"),
            gold_utility,
        )
        for rng, topic in streams("preference", n, seed)
    ]
