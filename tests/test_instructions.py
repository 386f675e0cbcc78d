"""Instructions that a program verifies: right texts, wrong texts, and the record of the runs."""

import pytest

from rlhf_course.data.instructions import ONLY_TESTED, TRAINED, count_words, split_sentences

INSTRUCTIONS = {instruction.name: instruction for instruction in (*TRAINED, *ONLY_TESTED)}
OBEYS = [
    ("one sentence", "Start small and have fun at home."),
    ("one sentence", "Dr. Smith paid 3.5 dollars at 9 a.m. (e.g. in cash) for it!"),
    ("one sentence", ' She said, "Bring the dog home."\n'),
    ("fifteen words", "Paris."),
    ("fifteen words", "one two three four five six seven eight nine ten 11 12 13 14 15 –"),
    ("final question", "Begin with warm water. Do you have soap?"),
    ("final question", 'Adele sings. Have you heard "Hello?"'),
    ("two sentences", "Whisk the eggs first. Then add the warm milk."),
    ("begins with Sure", "Sure, here is a recipe."),
    ("begins with Sure", '"Sure! I can help."'),
    ("no comma", "Wash it by hand with soap."),
]
DISOBEYS = [
    ("one sentence", "Start small. Have fun at home with it."),
    ("one sentence", "Start small and have fun at home"),
    ("one sentence", "Yes."),
    ("one sentence", "Begin with these tools:\nflour and eggs."),
    ("one sentence", ""),
    ("fifteen words", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"),
    ("fifteen words", " – "),
    ("final question", "Do you have soap? Begin with warm water."),
    ("final question", "Do you have soap?"),
    ("two sentences", "Whisk the eggs first."),
    ("two sentences", "Whisk the eggs first. Add the warm milk. Stir it all well."),
    ("begins with Sure", "Surely you can do this."),
    ("begins with Sure", "Sure."),
    ("begins with Sure", "I am sure that it works."),
    ("no comma", "Wash it by hand, with soap."),
    ("no comma", "Wash it."),
]


@pytest.mark.parametrize(("name", "text"), OBEYS)
def test_right_text_obeys_only_if_it_ended(name, text):
    assert INSTRUCTIONS[name].obeys(text, True)
    assert not INSTRUCTIONS[name].obeys(text, False)


@pytest.mark.parametrize(("name", "text"), DISOBEYS)
def test_wrong_text_does_not_obey(name, text):
    assert not INSTRUCTIONS[name].obeys(text, True)


def test_sentences_and_words():
    text = 'It costs 3.5 dollars, e.g. at Dr. Who. "Really?" Yes! And then'
    expected = ["It costs 3.5 dollars, e.g. at Dr. Who.", '"Really?"', "Yes!", "And then"]
    assert split_sentences(text) == expected
    assert count_words("well-known facts – all 3") == 4


def test_words_are_appended_to_the_question():
    assert TRAINED[0].append_to("Why? ") == "Why? Answer in exactly one sentence."
