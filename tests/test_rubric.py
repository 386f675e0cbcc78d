"""Notebook 10's rubric, questions and facts."""

import json

import pytest

from rlhf_course.course.presets import shipped
from rlhf_course.data.rubric import HIDDEN, MOST_WORDS, RUBRIC, TRAINED
from rlhf_course.questions import ask_facts, ask_sums, load_answered, load_questions

QUESTION = "How do I clean a rusty bike chain?"


def items(answer, ended=True, question=QUESTION):
    """Return the names of the items that an answer fulfills."""
    return {name for name, item in RUBRIC.items() if item(question, answer, ended)}


def test_a_good_answer_fulfills_every_item():
    assert items("Brush off the rust, then soak the chain in oil.") == set(RUBRIC)


@pytest.mark.parametrize(
    ("answer", "ended", "missing"),
    [
        ("Brush the chain.\n\nThen oil it.", True, "one paragraph"),
        ("Oil the chain, " + " and ".join(f"part{n}" for n in range(20)), True, "at most"),
        ("Oil the chain and then", False, "ends by itself"),
        ("Oil the chain. Oil the chain.", True, "no repetition"),
        ("Ask a friend of yours.", True, "names the subject"),
    ],
)
def test_one_fault_costs_one_item(answer, ended, missing):
    [lost] = set(RUBRIC) - items(answer, ended)
    assert lost.startswith(missing)


def test_an_empty_answer_is_short_and_nothing_else():
    assert items("") == {"ends by itself"}
    assert items("Yes.") == {"one paragraph", f"at most {MOST_WORDS} words", "ends by itself"}


def test_three_words_satisfy_the_trained_items_and_miss_the_hidden_one():
    assert items("Thanks for asking.") == set(TRAINED)
    assert set(HIDDEN) & set(TRAINED) == set()


def test_a_subject_is_found_in_another_form_of_its_word_and_not_in_empty_words():
    assert "names the subject" in items("Cleaning it takes an hour.")
    assert "names the subject" not in items("You should do it well.", question="What should I do?")


def test_synthetic_and_shipped_questions_are_distinct_and_held_out():
    for source in ("dialogues", shipped("models/hh-questions")):
        train, held_out = load_questions(source)
        assert len(set(train)) == len(train) and len(held_out) >= 300
        assert not set(train) & set(held_out)
        assert {question for question, _ in load_answered(source)} <= set(held_out)


def test_a_line_without_a_question_is_named(tmp_path):
    rows = [{"question": "Why?"}, {"text": "no question"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"Line 2 of .*train\.jsonl has no question"):
        load_questions(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(ValueError, match=r"There is no file .*test\.jsonl"):
        load_questions(tmp_path)


def test_a_hundred_facts_and_sums_have_one_word_answers():
    facts = ask_facts()
    assert len(facts) == 100 and len({question for question, _ in facts}) == 100
    assert all(answer.isalpha() for _, answer in facts)
    assert all(eval(q[8:-1]) == int(answer) for q, answer in ask_sums(20))
