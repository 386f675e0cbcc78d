"""SentimentReward and the evaluation of a policy."""

import numpy as np
import pytest
import torch
from builders import (
    EOS,
    SAMPLING,
    invalid,
    make_policy,
    make_trainer,
    reviews,
    save_classifier,
)

from rlhf_course.evaluation import distinct_n, evaluate, mean_ci, unknown_words
from rlhf_course.rewards import SentimentReward

pytestmark = pytest.mark.quick

TEXTS = [review["text"] for review in reviews(60)]


def test_positive_is_picked_by_name_whatever_its_place(tmp_path):
    usual = SentimentReward(save_classifier(tmp_path / "a"))
    turned = SentimentReward(save_classifier(tmp_path / "b", ["positive", "negative"]))
    torch.testing.assert_close(usual.logits(TEXTS), turned.logits(TEXTS))
    torch.testing.assert_close(usual(TEXTS), usual.logits(TEXTS)[:, 1])
    torch.testing.assert_close(turned(TEXTS), turned.logits(TEXTS)[:, 0])


def test_a_classifier_without_the_label_lists_those_it_has(tmp_path):
    with pytest.raises(ValueError, match="has no label 'POSITIVE'; it has LABEL_0, LABEL_1"):
        SentimentReward(save_classifier(tmp_path, ["LABEL_0", "LABEL_1"]))


def test_scores_do_not_depend_on_batching_or_order(tmp_path):
    folder = save_classifier(tmp_path)
    one, many = SentimentReward(folder, batch_size=1), SentimentReward(folder, batch_size=64)
    texts = [text[: 5 + 7 * i] for i, text in enumerate(TEXTS)]
    torch.testing.assert_close(one(texts), many(texts), atol=1e-5, rtol=0)
    torch.testing.assert_close(many(texts[::-1]).flip(0), many(texts), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="batch_size is -1"):
        SentimentReward(folder, batch_size=-1)(texts)
    assert one(["x" * 5000]).isfinite().all()  # longer than the classifier reads


class WordTokenizer:
    """Token ids as words."""

    pad_token_id = eos_token_id = EOS

    def batch_decode(self, rows, skip_special_tokens=False):
        return ["".join(f" w{int(i)}" for i in row) for row in rows]


def test_evaluation_is_repeatable_and_leaves_the_run_alone():
    trainer = make_trainer(make_policy(0).train(), make_policy(1))
    alike = make_trainer(make_policy(0), make_policy(0))
    trainer.tokenizer = alike.tokenizer = WordTokenizer()
    queries, lengths = [torch.tensor([1, 2])] * 30, [5] * 30
    settings = SAMPLING | {"batch_size": 7}

    def score(queries, responses):
        return torch.tensor([float(text.count("w7")) for text in responses])

    state = torch.get_rng_state()
    first, again = (
        evaluate(trainer, score, queries, lengths, seed=1, **settings) for _ in range(2)
    )
    assert (
        first.equals(again) and torch.equal(state, torch.get_rng_state()) and trainer.model.training
    )
    assert first["length"].max() <= 5 and first["kl"].mean() > 0
    same = evaluate(alike, score, queries, lengths, **settings)
    assert np.abs(same["kl"]).max() < 1e-5
    with invalid(r"30 texts got scores of shape \(\)"):
        evaluate(alike, lambda *texts: torch.tensor(1.0), queries, lengths, **settings)
    with pytest.raises(TypeError, match="queries must be a list"):
        evaluate(alike, score, "w1 w2", **settings)


def test_confidence_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = [
        abs(mean - 2) <= half
        for mean, half in (mean_ci(rng.normal(2, 3, 100)) for _ in range(1000))
    ]
    assert 0.92 < np.mean(hits) < 0.975


def test_distinct_n():
    assert distinct_n(["a b a", "a b"], 1) == 2 / 5
    assert distinct_n(["a b a", "a b"], 2) == 2 / 3
    assert np.isnan(distinct_n(["", ""], 2))


def test_no_share_of_unknown_words_where_there_are_none():
    assert unknown_words(["fine xyz fine cu", "gut"], {"fine"}) == 1 / 3
    assert np.isnan(unknown_words(["很高兴", "..."], {"fine"}))
