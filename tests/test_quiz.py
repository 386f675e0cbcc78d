"""The quiz: enough questions, every answer explained, and no place where the right one usually
stands.
"""

import sys
from collections import Counter

from rlhf_course.course.presets import ROOT

sys.path.insert(0, str(ROOT / "site"))
from quiz import questions

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
