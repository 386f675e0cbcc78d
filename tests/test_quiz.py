"""The quiz: enough questions, every answer explained, and no place where the right one usually
stands.
"""

import sys
from collections import Counter

from rlhf_course.course.presets import ROOT

sys.path.insert(0, str(ROOT / "site"))
from quiz import numbers, questions, quiz_page

ASKED = list(questions())


def test_every_notebook_has_five_questions_or_more():
    counted = Counter(notebook for notebook, _, _ in ASKED)
    assert set(counted) == {path.stem for path in (ROOT / "notebooks").glob("0*.ipynb")}
    assert min(counted.values()) >= 5


def test_every_answer_is_explained_and_one_is_right():
    for _, question, answers in ASKED:
        assert question.endswith("?") and len(answers) >= 3
        assert [right for _, _, right in answers].count(True) == 1
        assert all(text and len(why) > 8 for text, why, _ in answers)
        assert "{" not in "".join(text + why for text, why, _ in answers)


def test_the_right_answer_stands_everywhere_equally_often():
    places = Counter([right for _, _, right in answers].index(True) for _, _, answers in ASKED)
    assert max(places.values()) - min(places.values()) <= 2, places


def test_the_right_answer_is_not_usually_the_longest():
    longest = sum(max(answers, key=lambda answer: len(answer[0]))[2] for _, _, answers in ASKED)
    assert longest < 0.75 * len(ASKED)


def test_numbers_are_those_of_the_package():
    assert f"{numbers()['beta']:.4f}" == "0.1216" and f"{numbers()['ln2']:.4f}" == "0.6931"
    assert "0.1216, from 0.2." in quiz_page() and "<details><summary>0.6931" in quiz_page()
