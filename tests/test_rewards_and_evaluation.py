"""SentimentReward and the evaluation of a policy."""

import numpy as np
import pytest
import torch
from builders import (
    EOS,
    SAMPLING,
    make_policy,
    make_trainer,
    review_tokenizer,
    reviews,
    save_classifier,
)
from transformers import RobertaConfig, RobertaForSequenceClassification

from rlhf_course.data import encode
from rlhf_course.evaluation import distinct_n, evaluate, mean_ci
from rlhf_course.rewards import RewardModel, SentimentReward

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
    assert one(["x" * 5000]).isfinite().all()  # longer than the classifier reads


@pytest.fixture
def roberta(request, tmp_path):
    """A RoBERTa of 22 positions, the first two without a token: (folder, tokenizer, model)."""
    torch.manual_seed(0)
    tokenizer = review_tokenizer()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    special = {"pad_token_id": 1, "initializer_range": 0.5, "max_position_embeddings": 22}
    config = RobertaConfig(vocab_size=len(tokenizer), num_labels=request.param, **sizes, **special)
    if request.param == 2:
        config.id2label, config.label2id = (
            {0: "NEGATIVE", 1: "POSITIVE"},
            {"NEGATIVE": 0, "POSITIVE": 1},
        )
    model = RobertaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path), tokenizer, model


@pytest.mark.parametrize("roberta", [2], indirect=True)
def test_a_robertas_long_texts_are_cut_to_the_tokens_it_has_positions_for(roberta):
    """Their end is kept, behind [CLS]."""
    folder, tokenizer, model = roberta
    tokenizer.truncation_side = "left"
    tokens = tokenizer([TEXTS[0] * 5], truncation=True, max_length=20, return_tensors="pt")
    wanted = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits[
        :, 1
    ]
    torch.testing.assert_close(SentimentReward(folder)([TEXTS[0] * 5]), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("roberta", [1], indirect=True)
def test_a_roberta_as_a_reward_model_gives_the_scores_that_transformers_gives(roberta):
    """Its positions begin behind the padding token's index."""
    folder, tokenizer, model = roberta
    scorer = RewardModel(folder, tokenizer)
    assert scorer.max_length == 20
    for prompt, answer in (("film", "good"), ("film", "a good film"), ("film " * 30, "good")):
        (ids,) = encode(tokenizer, [prompt], [answer])
        ids = ids if len(ids) <= 20 else [ids[0], *ids[-19:]]
        wanted = model(input_ids=torch.tensor([ids])).logits[:, 0]
        torch.testing.assert_close(scorer([prompt], [answer]), wanted, atol=1e-5, rtol=0)
    answers = ["good", "a good film"]
    one_by_one = torch.cat([scorer(["film"], [answer]) for answer in answers])
    torch.testing.assert_close(scorer(["film"] * 2, answers), one_by_one, atol=1e-5, rtol=0)


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
    assert distinct_n(["", ""], 2) == 0
