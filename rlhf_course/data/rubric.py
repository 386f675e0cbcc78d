"""Define notebook 10's wish as a rubric: five items that a program checks in an answer.

The idea of a rubric as a reward is that of Rubrics as Rewards (Gunjal et al. 2025,
arXiv:2507.17746), where language models judge the items. Programs judge these items. They check an
answer's form and its words; they do not check whether the answer is true or useful.
"""

import re

WISH = "Answer in at most twenty words."  # stands after each question
MOST_WORDS = 20
GROUP = 3  # words of a group that must not occur twice
SHORTEST = 4  # letters of a content word
STEM = 5  # letters that are compared, so that "cooking" counts as "cooked"
# Frequent words of four letters or more that say nothing about a question's subject.
EMPTY_WORDS = set(
    "about also been being best could does doing easy from give good have help into just know"
    " like long made make makes many more most much need only other please really should some"
    " someone something tell than that them then there these they thing things this those very want"
    " well were what when where which while will with would your".split()
)
WORD = re.compile(r"[a-z0-9]+(?:['’][a-z]+)?")


def words_of(text: str) -> list[str]:
    """Return the text's words in lower case."""
    return WORD.findall(text.lower())


def one_paragraph(question: str, answer: str, ended: bool) -> bool:
    """Return whether the answer has words and no line break."""
    return bool(words_of(answer)) and "\n" not in answer.strip()


def few_words(question: str, answer: str, ended: bool) -> bool:
    """Return whether the answer has one to ``MOST_WORDS`` words."""
    return 1 <= len(words_of(answer)) <= MOST_WORDS


def ends_itself(question: str, answer: str, ended: bool) -> bool:
    """Return whether the model ended the answer, instead of running out of tokens."""
    return ended


def no_repetition(question: str, answer: str, ended: bool) -> bool:
    """Return whether the answer has at least ``GROUP`` words, and no group of them twice."""
    words = words_of(answer)
    groups = [tuple(words[start : start + GROUP]) for start in range(len(words) - GROUP + 1)]
    return bool(groups) and len(set(groups)) == len(groups)


def content_stems(text: str) -> set[str]:
    """Return the first letters of the text's content words."""
    words = [word for word in words_of(text) if len(word) >= SHORTEST]
    return {word[:STEM] for word in words if word not in EMPTY_WORDS}


def names_subject(question: str, answer: str, ended: bool) -> bool:
    """Return whether the answer has a content word of the question; see ``content_stems``."""
    return bool(content_stems(question) & content_stems(answer))


# An item maps a question, an answer, and whether the model ended the answer, to true or false.
TRAINED = {
    "one paragraph": one_paragraph,
    f"at most {MOST_WORDS} words": few_words,
    "ends by itself": ends_itself,
    "no repetition": no_repetition,
}
# No reward and no reward model sees this item.
HIDDEN = {"names the subject": names_subject}
RUBRIC = TRAINED | HIDDEN
