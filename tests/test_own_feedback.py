"""Notebook 09: no answer is lost, a session continues, and agreement is Cohen's."""

import random
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch

from rlhf_course.feedback.linear_model import fit, question_features, share_of_gain
from rlhf_course.feedback.plans import plan_best_and_worst
from rlhf_course.feedback.session import Session, ask, kappa, merge

CHILD = """
import sys
from rlhf_course.feedback.session import Session
def plan(answers):
    return {"number": len(answers) + 1, "texts": ["a", "b"]}
session = Session(sys.argv[1], plan)
while True:
    number = session.question["number"]
    session.answer(number % 2)
    print(number, flush=True)
"""


def plan_of(count, k=2):
    """A plan of `count` questions about k texts."""

    def plan(answers):
        number = len(answers) + 1
        texts = [f"{number}{letter}" for letter in "abcd"[:k]]
        question = {"number": number, "of": count, "texts": texts, "openings": ["…"] * k}
        return question if number <= count else None

    return plan


def test_a_process_killed_at_ten_random_moments_loses_no_answer(tmp_path):
    file, script, dice = tmp_path / "answers.jsonl", tmp_path / "child.py", random.Random(0)
    script.write_text(CHILD, encoding="utf-8")
    told, heard = 0, []
    for _ in range(10):
        child = subprocess.Popen(
            [sys.executable, str(script), str(file)], stdout=subprocess.PIPE, text=True
        )
        first = int(child.stdout.readline())
        assert first == told + 1, "a new start does not go on where the file ends"
        time.sleep(dice.uniform(0, 0.05))
        child.kill()
        heard = [first, *map(int, child.stdout.read().split())]
        child.wait()
        answers = Session(file, plan_of(0)).answers
        told = len(answers)
        assert [a["number"] for a in answers] == [*range(1, told + 1)]
        assert told >= heard[-1]
        assert all(a["best"] == a["number"] % 2 for a in answers)


def test_a_line_that_broke_off_is_asked_again(tmp_path):
    file = tmp_path / "answers.jsonl"
    ask(session := Session(file, plan_of(3)), lambda question: 1)
    assert session.question is None and len(session.answers) == 3
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    again = Session(file, plan_of(3))
    assert again.question["number"] == 3
    again.answer(1)
    assert file.read_bytes() == whole


def test_typed_letters_and_undo(tmp_path, monkeypatch):
    typed = iter(["a", "u", "b", "nonsense", "=", "d"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    session = Session(tmp_path / "answers.jsonl", plan_of(3, k=4))
    ask(session, "letters")
    assert [a["best"] for a in session.answers] == [1, "equal", 3]
    assert Session(session.path, plan_of(3)).answers == session.answers


def test_buttons(tmp_path):
    session = Session(tmp_path / "answers.jsonl", plan_of(2))
    box = ask(session, "buttons")

    def press(name):
        sides, more = (part.children for part in box.children[1:])
        buttons = [*(side.children[1] for side in sides), *more]
        {button.description: button for button in buttons}[name].click()

    for name in ("right", "undo", "left", "equal"):
        press(name)
    assert [a["best"] for a in session.answers] == [0, "equal"]
    press("undo")
    assert [a["best"] for a in session.answers] == [0]


def test_kappa_by_hand():
    first, second = [0] * 5 + [1] * 5, [0, 0, 0, 0, 1, 0, 0, 1, 1, 1]
    # Equal in 7 of 10; by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5: (0.7 − 0.5) / (1 − 0.5).
    assert kappa(first, second) == pytest.approx(0.4)
    assert kappa(first, first) == 1


def test_merged_files_compare_texts_and_not_sides(tmp_path):
    for name, texts, best in (("ann", ["x", "y"], 0), ("bob", ["y", "x"], 1)):
        session = Session(tmp_path / f"{name}.jsonl", lambda answers: None)
        session.question = {"texts": texts}
        session.answer(best)
    table = merge(tmp_path.glob("*.jsonl"))
    assert len(table) == 2 and table["best"].nunique() == 1


def taste_and_texts(count=400):
    """Return hidden weights, features of texts, and a person without noise."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    features = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    utility = features @ weights

    def person(rows, kind="best"):
        values = utility[list(rows)]
        return int(values.argmax() if kind == "best" else values.argmin())

    return weights, features, utility, person


def test_answers_teach_the_direction_of_the_taste():
    weights, features, utility, person = taste_and_texts()
    answers = [{"rows": [row, row + 1], "best": person([row, row + 1])} for row in range(0, 200, 2)]
    learned, covariance = fit(question_features(answers, features), width=3, ridge=1.0)
    assert torch.cosine_similarity(learned, weights, dim=0) > 0.98
    assert (torch.linalg.eigvalsh(covariance) > 0).all()
    assert share_of_gain(learned, utility, features, per_opening=4) > 0.9
    assert share_of_gain(-learned, utility, features, per_opening=4) < -0.5


def test_an_answer_about_the_worst_text_counts_the_other_way():
    _, features, _, _ = taste_and_texts()
    best = {"rows": [3, 5], "best": 0}
    worst = {"rows": [5, 3], "best": 0, "ask": "worst"}
    (from_best,) = question_features([best], features)
    (from_worst,) = question_features([worst], features)
    assert torch.equal(from_best[0] - from_best[1], from_worst[0] - from_worst[1])
    assert question_features([best | {"best": "equal"}], features) == []


def test_best_and_worst_asks_about_the_rest_and_never_twice(tmp_path):
    _, features, _, person = taste_and_texts()
    table = pd.DataFrame({"opening": "It", "text": [str(row) for row in range(len(features))]})
    plan = plan_best_and_worst(
        table, features, lambda questions: fit(questions, 3, 1.0), count=6, seed=0
    )
    session = Session(tmp_path / "answers.jsonl", plan)
    ask(session, lambda question: person(question["rows"], question.get("ask", "best")))
    assert len(session.answers) == 12
    shown = []
    for first, second in zip(session.answers[::2], session.answers[1::2], strict=True):
        assert set(second["rows"]) == set(first["rows"]) - {first["rows"][first["best"]]}
        shown += first["rows"]
    assert len(shown) == len(np.unique(shown)) == 24
