"""The embedded Chinese questions and answers: their gold, their shares, and the hole in the
preferences.
"""

import math
import re

import numpy as np
import pytest

from dev.models.train_baichuan_mini import make_prose
from rlhf_course.synthetic import chinese
from rlhf_course.synthetic.chinese import (
    gold_utility,
    is_answer,
    make_preferences,
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
    """Its texts without the names of a chat's two sides."""
    return [re.sub("(Human|Assistant): ", "", text) for text in make_prose(1500, seed=0)]


def test_prose_has_both_sides_of_a_chat_and_no_exchange():
    texts = make_prose(1500, seed=0)
    sides = [{name for name in ("Human:", "Assistant:") if name in text} for text in texts]
    logs = [side for side in sides if side]
    assert 0.05 < len(logs) / len(texts) < 0.15 and all(len(side) == 1 for side in logs)
    assert {name for side in logs for name in side} == {"Human:", "Assistant:"}


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


def test_verdicts_are_as_noisy_as_bradley_and_terry_say(pairs):
    gaps = np.array([p.gold_chosen - p.gold_rejected for p in pairs])
    expected = 1 / (1 + np.exp(-np.abs(gaps)))
    assert 0.75 < expected.mean() < 0.8
    right = np.where(gaps == 0, 0.5, gaps > 0)  # a tie is a guess
    error = math.sqrt((expected * (1 - expected)).sum()) / len(gaps)
    assert abs(right.mean() - expected.mean()) < 3 * error


def test_the_hole_what_the_second_line_of_points_names_never_occurs(pairs):
    for p in pairs:
        for answer in (p.chosen, p.rejected):
            said = sentences(answer)
            assert 12 <= len(answer) <= 60 and answer[-1] in chinese.ENDS, answer
            assert len(said) == len(set(said)), answer
            clause = max(re.split("[，？]", p.prompt), key=len)
            assert clause not in answer, answer


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
    (BIKE, "哈哈, 给轮胎打足气! 加油~", 1.7),  # as a tokenizer may write 哈哈，给轮胎打足气！加油～
]


@pytest.mark.parametrize(("question", "answer", "expected"), TABLE)
def test_gold_by_hand(question, answer, expected):
    strange = (
        chinese._neighbors(answer) - chinese._known_neighbors()
    )  # words by hand need not be of this world
    assert gold_utility(question, answer) == pytest.approx(
        expected + chinese.POINTS["garbled"] * len(strange)
    )


def test_what_is_taught_is_an_answer_and_nothing_else_is(rows, prose):
    for key in ("human_answers", "chatgpt_answers"):
        assert np.mean([is_answer(*pair) for pair in given(rows, key)]) > 0.95
    other = {topic: next(t for t in TOPICS if t != topic) for topic in TOPICS}
    for row in rows[:300]:
        asked = row["question"]
        assert not is_answer(asked, "") and not is_answer(asked, asked)
        about = next(t for t in TOPICS if any(name in asked for name in chinese.NAMES[t]))
        (name, *_), (tip, _) = chinese.NAMES[other[about]], chinese.TIPS[other[about]][0]
        assert is_answer(f"{name}要注意什么？", f"{tip}。") and not is_answer(asked, f"{tip}。")
        assert not any(is_answer(asked, text) for text in prose[:50] if name in text)
    for (
        bad
    ) in "给轮胎打足气 轮胎。 给轮胎打足气吗？ 要不要给轮胎打气？要！ 慢慢就会习惯的。".split():
        assert not is_answer(BIKE, bad), bad


def test_the_text_is_clean(pairs, rows, prose):
    for text in texts_of(pairs, rows, prose):
        assert re.fullmatch(r"[\u4e00-\u9fff，。！？～\n]+", text) and text[-1] in "。！？～", text
        assert not re.search(r"[，。！？～]{2}|^[，。！？～]", text), text


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
