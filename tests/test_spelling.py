"""The loss against misspelling that the shipped policy was trained with."""

import re
from types import SimpleNamespace

import pytest
import torch
from make.spelling import SpellingLoss

from rlhf_course.evaluation import words_of
from rlhf_course.worlds.small_models import train_tokenizer

TEXTS = ["The cat's café. Catalogues", "He caters; the theory, 2nd cat", "a (the)an 'an"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, 290)


@pytest.fixture(scope="module")
def loss(tokenizer) -> SpellingLoss:
    return SpellingLoss(TEXTS, tokenizer, 10.0)


def spoils(text: str, words: set[str]) -> bool:
    """Whether letters in a text are no word, or at its end begin none."""
    for run in re.finditer("[a-z]+", text.lower()):
        if run.end() < len(text) and run.group() not in words:
            return True
        if not any(word.startswith(run.group()) for word in words):
            return True
    return False


@pytest.mark.parametrize(
    "before", ["The cat", " ca", "He caters;", " the", " th", "1", " café", " xx", "é"]
)
def test_what_is_harmless_leaves_only_known_words(before, tokenizer, loss):
    words = {word for text in TEXTS for word in words_of(text)}
    unfinished = loss.unfinished(tokenizer(before)["input_ids"])[-1]
    assert (
        before.lower().endswith(unfinished)
        and bool(unfinished) == before[-1:].isascii() * before[-1:].isalpha()
    )
    texts = [
        unfinished + tokenizer.decode([token], skip_special_tokens=True)
        for token in range(len(tokenizer))
    ]
    harmless = loss.harmless([unfinished])[0].tolist()
    assert any(harmless) is (before != " xx") and not all(harmless)
    for text, fits in zip(texts[1:], harmless[1:], strict=True):  # the first is EOS
        assert fits is not spoils(text, words), text


def test_it_is_cross_entropy_plus_minus_the_logarithm_of_what_is_harmless(tokenizer, loss):
    ids = tokenizer("The theory, cat")["input_ids"]
    labels = torch.tensor([ids + [-100, -100], ids[:2] + [-100] * len(ids)])
    torch.manual_seed(0)
    logits = torch.randn(*labels.shape, len(tokenizer), requires_grad=True)
    outputs = SimpleNamespace(logits=logits)
    by_hand = []
    for row, probs in zip(labels.tolist(), logits.softmax(-1), strict=True):
        tokens = [token for token in row if token >= 0]
        for place, word in enumerate(loss.unfinished(tokens)[:-1]):
            right = probs[place][loss.harmless([word])[0]].sum()
            by_hand.append(-probs[place, tokens[place + 1]].log() - 10 * right.log())
    assert torch.isclose(loss(outputs, labels), torch.stack(by_hand).mean(), atol=1e-5)
    plain = SpellingLoss(TEXTS, tokenizer, 0.0)(outputs, labels)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    assert torch.isclose(plain, expected, atol=1e-5)
