"""Define instructions that a program can verify, such as "End your answer with a question".

The idea is that of IFEval (Zhou et al. 2023, arXiv:2311.07911). A program checks the form of an
answer; it does not check whether the answer is true or useful.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

FEWEST_WORDS = 4  # a shorter "sentence" is a fragment such as "Yes."
# Full stops in these abbreviations and numbers end no sentence.
ABBREVIATIONS = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|a\.m|p\.m|U\.S)\.(?=[\s,)])"
)
SENTENCE_END = re.compile(r"""[.!?…]+["”’')\]*]*(?=\s|$)""")


def count_words(text: str) -> int:
    """Return the number of words: parts between spaces that contain a letter or a digit."""
    return sum(any(character.isalnum() for character in word) for word in text.split())


def split_sentences(text: str) -> list[str]:
    """Return the sentences; the last one may lack its end mark.

    A sentence ends with ``.``, ``!``, ``?`` or ``…`` before a space or the end of the text. Full
    stops inside numbers, and of a few abbreviations before more text, do not count.
    """
    text = text.strip()
    masked = ABBREVIATIONS.sub(lambda match: match.group().replace(".", "·"), text)
    sentences = []
    start = 0
    for match in SENTENCE_END.finditer(masked):
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    if text[start:].strip():
        sentences.append(text[start:].strip())
    return sentences


def is_complete(sentence: str) -> bool:
    """Return whether a sentence has its end mark."""
    return SENTENCE_END.search(sentence) is not None


def _has_sentences(text: str, expected: int) -> bool:
    """Return whether the text is one line of ``expected`` complete sentences, without fragments."""
    sentences = split_sentences(text)
    if "\n" in text.strip() or len(sentences) != expected:
        return False
    return all(is_complete(s) and count_words(s) >= FEWEST_WORDS for s in sentences)


def one_sentence(text: str, ended: bool) -> bool:
    """Return whether the answer is one complete sentence of at least four words, on one line."""
    return ended and _has_sentences(text, 1)


def two_sentences(text: str, ended: bool) -> bool:
    """Return whether the answer is two complete sentences of at least four words, on one line."""
    return ended and _has_sentences(text, 2)


def fifteen_words(text: str, ended: bool) -> bool:
    """Return whether the answer has one to fifteen words."""
    return ended and 1 <= count_words(text) <= 15


def final_question(text: str, ended: bool) -> bool:
    """Return whether the last sentence is a question, after at least one other sentence."""
    sentences = split_sentences(text)
    return ended and len(sentences) >= 2 and "?" in sentences[-1][-3:]


def begins_with_sure(text: str, ended: bool) -> bool:
    """Return whether the answer's first word is "Sure", and more words follow."""
    return ended and re.match(r"\W*Sure\b", text) is not None and count_words(text) >= 2


def no_comma(text: str, ended: bool) -> bool:
    """Return whether the answer has at least four words and no comma."""
    return ended and "," not in text and count_words(text) >= FEWEST_WORDS


@dataclass(frozen=True)
class Instruction:
    """Store an instruction: its name, the words appended to the question, and its verifier.

    ``obeys(text, ended)`` is true if the answer follows the instruction; ``ended`` says whether
    the model ended the answer itself, instead of running out of tokens.
    """

    name: str
    words: str
    obeys: Callable[[str, bool], bool]

    def append_to(self, question: str) -> str:
        """Return the question with the instruction's words after it."""
        return f"{question.strip()} {self.words}"


TRAINED = (
    Instruction("one sentence", "Answer in exactly one sentence.", one_sentence),
    Instruction("fifteen words", "Answer in at most fifteen words.", fifteen_words),
    Instruction("final question", "End your answer with a question.", final_question),
)
# No run trains on these; they show whether training on the other instructions carries over.
ONLY_TESTED = (
    Instruction("two sentences", "Answer in exactly two sentences.", two_sentences),
    Instruction("begins with Sure", "Begin your answer with the word Sure.", begins_with_sure),
    Instruction("no comma", "Do not use any commas in your answer.", no_comma),
)
