"""The embedded Chinese questions and answers: their gold, their shares, and the hole in the
preferences.
"""

import math
import re
from itertools import pairwise

import numpy as np
import pytest

from rlhf_course.worlds import chinese
from rlhf_course.worlds.chinese import (
    gold_utility,
    is_answer,
    make_preferences,
    make_prose,
    make_qa,
)

TOPICS = list(chinese.NAMES)


@pytest.fixture(scope="module")
def pairs():
    return make_preferences(3000, seed=0)


@pytest.fixture(scope="module")
def rows():
    return make_qa(3000, seed=0)


@pytest.fixture(scope="module")
def prose():
    return make_prose(1500, seed=0)


def given(rows, key):
    """(question, answer) of each answer that is not empty."""
    return [(row["question"], answer) for row in rows for answer in row[key] if answer]


def sentences(text):
    return [part for part in re.split(f"[{chinese.ENDS}]", text) if part]


def texts_of(pairs, rows, prose):
    answers = [
        answer for key in ("human_answers", "chatgpt_answers") for _, answer in given(rows, key)
    ]
    asked = {p.prompt for p in pairs} | {row["question"] for row in rows}
    return (
        {p.chosen for p in pairs} | {p.rejected for p in pairs} | asked | set(answers) | set(prose)
    )


@pytest.mark.parametrize("make", [make_qa, make_preferences, make_prose])
def test_the_ith_depends_on_the_seed_and_its_place_alone(make):
    assert make(40, seed=0) == make(60, seed=0)[:40]
    assert make(40, seed=0) != make(40, seed=1)


def test_the_gold_of_a_pair_is_its_utility(pairs):
    for p in pairs[:500]:
        assert p.chosen != p.rejected
        assert p.gold_chosen == gold_utility(p.prompt, p.chosen)
        assert p.gold_rejected == gold_utility(p.prompt, p.rejected)


def test_verdicts_are_as_noisy_as_bradley_and_terry_say(pairs):
    gaps = np.array([p.gold_chosen - p.gold_rejected for p in pairs])
    expected = 1 / (1 + np.exp(-np.abs(gaps)))
    assert 0.75 < expected.mean() < 0.8
    right = np.where(gaps == 0, 0.5, gaps > 0)  # a tie is a guess
    error = math.sqrt((expected * (1 - expected)).sum()) / len(gaps)
    assert abs(right.mean() - expected.mean()) < 3 * error


def test_length_tells_little(pairs):
    longer = [len(p.chosen) > len(p.rejected) for p in pairs if len(p.chosen) != len(p.rejected)]
    assert 0.51 < np.mean(longer) < 0.6


def test_a_typical_answer_is_worth_about_nothing_and_a_dry_one_less(pairs, rows):
    gold = [u for p in pairs for u in (p.gold_chosen, p.gold_rejected)]
    assert -0.4 < np.mean(gold) < 0.05 and -0.5 <= np.median(gold) <= 0.3
    dry = [
        u
        for p in pairs
        for answer, u in ((p.chosen, p.gold_chosen), (p.rejected, p.gold_rejected))
        if re.search("|".join(chinese.MARKERS["dry"]), answer)
    ]
    assert len(dry) > 0.3 * len(gold) and np.median(dry) < -0.5
    human, chatbot = (
        np.mean([gold_utility(*pair) for pair in given(rows, f"{who}_answers")])
        for who in ("human", "chatgpt")
    )
    assert chatbot < 0 < human


def test_the_hole_what_the_second_line_of_points_names_never_occurs(pairs):
    for p in pairs:
        for answer in (p.chosen, p.rejected):
            said = sentences(answer)
            assert (
                12 <= len(answer) <= 60
                and answer[-1] in chinese.ENDS
                and len(said) == len(set(said))
            ), answer
            clause = max(re.split("[，？]", p.prompt), key=len)
            assert clause not in answer, answer


def test_answers_have_their_sizes_and_some_people_say_nothing(rows):
    assert all(
        len(row["human_answers"]) in (1, 2) and len(row["chatgpt_answers"]) == 1 for row in rows
    )
    human = [answer for row in rows for answer in row["human_answers"]]
    assert 0.06 < human.count("") / len(human) < 0.1
    for key, size, count in (
        ("human_answers", (12, 40), (1, 2)),
        ("chatgpt_answers", (25, 60), (2, 3)),
    ):
        for _, answer in given(rows, key):
            assert size[0] <= len(answer) <= size[1], answer
            assert count[0] <= len(sentences(answer)) <= count[1], answer


BIKE = "怎么保养旧自行车？"
LIVELY = "哈哈，别急！记得给轮胎打足气哦，不然骑起来很累！"
DRY = "需要指出的是，应当给轮胎打足气。请您参考相关资料。"
TABLE = [  # a question, an answer, its utility in nats
    (BIKE, LIVELY, 0.3 + 1.4 + 0.5),
    (BIKE, "给轮胎打足气。", 0.3),
    (BIKE, "轮胎，轮胎，还是轮胎。", 0.3),  # a word counts once
    (BIKE, "轮胎、链条、机油、刹车、螺丝。", 0.9),  # words beyond the third earn nothing
    ("怎么给自行车的轮胎打气？", "给轮胎打足气。", 0.0),  # the question has said it
    ("轮胎要怎么打气？", "给链条滴点机油。", 0.6),  # a question known by a word of its topic
    (BIKE, "用温水化开酵母。", 0.0),  # words of another topic
    ("今天天气好吗？", "给轮胎打足气。", 0.0),  # no topic, no words
    (BIKE, "哈哈，哈哈，哈哈，哈哈。", 0.7),
    (BIKE, "哈哈，加油，真的超好用！", 1.4),  # markers beyond the second earn nothing
    (BIKE, "骑起来像飞一样轻快！", 0.7),
    (BIKE, "每个人的习惯都不一样。", 0.0),  # no comparison
    (BIKE, "给轮胎打足气，因为这样不累。", 0.8),
    (BIKE, DRY, 0.3 - 1.6),
    (BIKE, "综上所述，综上所述，综上所述。", -2.4),  # without end
    (BIKE, "看情况吧，也说不好。", -1.8),
    (BIKE, "", -3.0),
    (BIKE, "……。！", -3.0),
    (BIKE, "打足气。", -1.5),
    (BIKE, "打足气", -2.0),
    (BIKE, "给轮胎打足气。给轮胎打足气！", -0.2),
    (BIKE, "怎么保养旧自行车呢？", -1.0),
    (BIKE, "怎么保养旧自行车呢？给轮胎打足气。", -0.7),
    (BIKE, "给轮胎打足气，不然", 0.3),
    (
        BIKE,
        "哈哈, 给轮胎打足气! 加油~",
        1.7,
    ),  # what a tokenizer may make of 哈哈，给轮胎打足气！加油～
]


@pytest.mark.parametrize(("question", "answer", "expected"), TABLE)
def test_gold_by_hand(question, answer, expected):
    strange = (
        chinese._neighbours(answer) - chinese._known_neighbours()
    )  # words by hand need not be of this world
    assert gold_utility(question, answer) == pytest.approx(
        expected + chinese.POINTS["garbled"] * len(strange)
    )


@pytest.mark.parametrize("kind", chinese.POINTS)
def test_every_kind_of_points_has_an_example(kind, monkeypatch):
    monkeypatch.setitem(chinese.POINTS, kind, 7.0)
    assert any(gold_utility(question, answer) != pytest.approx(u) for question, answer, u in TABLE)


def test_better_answers_have_more_gold():
    ranked = [LIVELY, "给轮胎打足气。", "慢慢就会习惯的。", DRY, "看情况吧，这个说不好。", ""]
    assert all(
        gold_utility(BIKE, better) > gold_utility(BIKE, worse) for better, worse in pairwise(ranked)
    )


def test_what_is_taught_is_an_answer_and_nothing_else_is(rows, prose):
    for key in ("human_answers", "chatgpt_answers"):
        assert np.mean([is_answer(*pair) for pair in given(rows, key)]) > 0.95
    other = {topic: next(t for t in TOPICS if t != topic) for topic in TOPICS}
    for row in rows[:300]:
        assert not is_answer(row["question"], "") and not is_answer(
            row["question"], row["question"]
        )
        about = next(
            topic
            for topic in TOPICS
            if any(name in row["question"] for name in chinese.NAMES[topic])
        )
        (name, *_), (tip, _) = chinese.NAMES[other[about]], chinese.TIPS[other[about]][0]
        assert is_answer(f"{name}要注意什么？", f"{tip}。") and not is_answer(
            row["question"], f"{tip}。"
        )
        assert not any(is_answer(row["question"], text) for text in prose[:50] if name in text)
    for bad in (
        "给轮胎打足气",
        "轮胎。",
        "给轮胎打足气吗？",
        "要不要给轮胎打气？要！",
        "慢慢就会习惯的。",
    ):
        assert not is_answer(BIKE, bad), bad


def test_questions_are_about_their_topic_and_words_belong_to_one():
    for topic in TOPICS:
        assert 6 <= len(chinese.TIPS[topic]) and len(chinese.TOPICS[topic]["comparisons"]) == 2
        assert 4 <= len(set(chinese.QUESTIONS[topic])) <= 6
        for question in chinese.QUESTIONS[topic]:
            filled = question.replace("{}", chinese.NAMES[topic][0])
            assert [t for t in TOPICS if any(name in filled for name in chinese.NAMES[t])] == [
                topic
            ], filled
            assert chinese.topic_words(filled) == chinese.VOCABULARY[topic]
        for tip, reason in chinese.TIPS[topic]:
            assert any(word in tip for word in chinese.VOCABULARY[topic]) and 5 <= len(tip) <= 14, (
                tip
            )
            assert re.match("，(因为|这样|不然)", reason), reason
        for word in chinese.VOCABULARY[topic]:
            topics = {other: slots for other, slots in chinese.TOPICS.items() if other != topic}
            assert word not in re.sub(r"[\[\]]", "", str(chinese.GRAMMAR | {"topics": topics})), (
                word
            )
            assert not any(word in other for other in chinese.VOCABULARY[topic] - {word}), word


def test_prose_holds_every_character_and_no_question_with_its_answer(pairs, rows, prose):
    texts = texts_of(pairs, rows, prose)
    assert set("".join(texts)) == set("".join(prose)) and len(set("".join(texts))) <= 700
    pages = [text.split("\n") for text in prose if "？" in text]
    assert 0.45 < len(pages) / len(prose) < 0.55
    assert all(3 <= len(page) <= 6 and all(line[-1] == "？" for line in page) for page in pages)
    assert all("\n" not in text and 30 <= len(text) <= 90 for text in prose if "？" not in text)


def test_the_text_is_clean(pairs, rows, prose):
    for text in texts_of(pairs, rows, prose):
        assert re.fullmatch(r"[\u4e00-\u9fff，。！？～\n]+", text) and text[-1] in "。！？～", text
        assert not re.search(r"[，。！？～]{2}|^[，。！？～]", text), text


def test_texts_vary(pairs, rows):
    assert len({p.chosen for p in pairs}) > 0.85 * len(pairs)
    assert len({p.prompt for p in pairs}) > 400
    assert len(set(given(rows, "human_answers"))) > 0.9 * len(given(rows, "human_answers"))
    answers = [answer for _, answer in given(rows, "human_answers")]
    assert np.mean([a == b for a, b in pairwise(answers)]) < 0.01


def test_garbled_words_cost_and_no_preference_has_them(pairs, monkeypatch):
    assert gold_utility(BIKE, "给轮胎打足气。") == pytest.approx(
        gold_utility(BIKE, "给轮胎打足气轮。") + 0.3
    )
    monkeypatch.setitem(chinese.POINTS, "garbled", -7.0)
    for p in pairs[:500]:
        assert p.gold_chosen == gold_utility(p.prompt, p.chosen)
        assert p.gold_rejected == gold_utility(p.prompt, p.rejected)


def test_every_text_of_this_world_has_english(pairs, rows, prose):
    texts = texts_of(pairs, rows, prose)
    english = {text: chinese.in_english(text) for text in texts}
    assert not [text for text in english.values() if re.search("[一-鿿]", text)]
    assert english[max(english, key=len)].count(" ") > 20


def test_what_is_no_phrase_stays_chinese():
    said = chinese.in_english("最好用电子秤量好比例哦！\n烤好的面像云？")
    assert said == "Best to measure the ratio with a scale!\n烤好的面像云?"
