"""The Python API in scripts of one's own: calls with the wrong thing, or in the wrong order."""

import json
import math

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from builders import (
    SAMPLING,
    difference,
    make_policy,
    make_samples,
    make_trainer,
    save_classifier,
    sgd,
    snapshot,
)
from transformers import AutoTokenizer, GPT2ForSequenceClassification

from rlhf_course import PPOConfig, PPOTrainer
from rlhf_course.course.run_card import RunCard
from rlhf_course.data import tokenize_answers
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint
from rlhf_course.rewards import RewardModel, SentimentReward, pairwise_loss

pytestmark = pytest.mark.usefixtures("own_cache")
LORA = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
QUERIES, RESPONSES, SCORES = make_samples()


def refused(words: str):
    """Expect an error with a sentence that holds these words."""
    return pytest.raises((ValueError, TypeError, OSError), match=words)


def rows(**columns) -> datasets.Dataset:
    given = {"input_ids": [q.tolist() for q in QUERIES]} | columns
    return datasets.Dataset.from_dict(given).with_format("torch")


def test_a_trainer_of_the_wrong_parts():
    with refused("optimizer"):
        make_trainer(make_policy(), optimizer=sgd(make_policy(seed=1)))
    with refused("vocabulary|tokens"):
        other = make_policy(vocab_size=30, eos_token_id=2)
        make_trainer(make_policy(), other).step(QUERIES, RESPONSES, SCORES)


@pytest.mark.parametrize("form", ["torch", None])
def test_ragged_queries_need_no_collator(form):
    trainer = make_trainer(dataset=rows().with_format(form))
    queries = next(iter(trainer.dataloader))["input_ids"]
    responses = trainer.generate(queries, max_new_tokens=4, return_prompt=False, **SAMPLING)
    assert trainer.step(queries, responses, SCORES)["objective/kl"] == pytest.approx(0, abs=1e-4)


def test_tokens_of_another_tokenizer():
    responses = [*RESPONSES[:3], torch.tensor([5, 50256]), *RESPONSES[4:]]
    with refused("response 3|vocabulary|50256"):
        make_trainer().step(QUERIES, responses, SCORES)


def test_responses_with_their_queries_are_noticed():
    trainer = make_trainer()
    responses = trainer.generate(QUERIES, max_new_tokens=4, **SAMPLING)
    with pytest.warns(UserWarning, match="return_prompt"):
        trainer.step(QUERIES, responses, SCORES)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_under_no_grad_still_learns(mode):
    trainer = make_trainer()
    before = snapshot(trainer.model)
    with mode():
        for _ in range(2):
            trainer.step(QUERIES, RESPONSES, SCORES)
    assert difference(before, snapshot(trainer.model))


def test_a_query_of_no_tokens():
    queries = [QUERIES[0], torch.tensor([], dtype=torch.long)]
    with refused("query 1|empty"):
        make_trainer().generate(queries, max_new_tokens=4, **SAMPLING)


def test_a_run_with_another_optimizer_or_schedule(tmp_path):
    def scheduled(is_scheduled: bool):
        trainer = make_trainer(policy := make_policy(), optimizer=sgd(policy))
        if is_scheduled:
            halves = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.5**step)
            trainer.lr_scheduler = halves
        return trainer

    save_checkpoint(make_trainer(), tmp_path / "adam")
    with refused("(?i)optimizer|Adam"):
        load_checkpoint(scheduled(False), tmp_path / "adam/checkpoint-0")
    for saved in (False, True):
        save_checkpoint(scheduled(saved), tmp_path / str(saved))
        with refused("schedule"):
            load_checkpoint(scheduled(not saved), tmp_path / str(saved) / "checkpoint-0")


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """A sentiment classifier's folder, and a reward model with its tokenizer."""
    save_classifier(folder := tmp_path_factory.mktemp("classifier"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = make_policy(vocab_size=len(tokenizer), num_labels=1).config
    return folder, RewardModel(GPT2ForSequenceClassification(config).eval(), tokenizer)


def test_a_column_of_texts_is_scored_whatever_holds_it(classifiers):
    reward, texts = SentimentReward(classifiers[0]), ["A fine film.", "A dull film."]
    columns = pd.Series(texts, index=[7, 3]), np.array(texts), (text for text in texts)
    for column in columns:
        torch.testing.assert_close(reward(column), reward(texts))


def test_answers_without_an_end(classifiers):
    tokenizer = AutoTokenizer.from_pretrained(classifiers[0])
    tokenizer.eos_token = None
    answers = datasets.Dataset.from_dict({"prompt": ["A film?"] * 2, "answer": ["Good.", "Bad."]})
    with refused("EOS|eos_token"):
        tokenize_answers(answers, tokenizer, 64)


def test_a_metric_of_nan_is_null(tmp_path):
    card = RunCard("mine", "tiny", 0, tmp_path)
    card.metric("score", math.nan)
    card.finish()
    text = (tmp_path / "run_cards/mine.json").read_text()
    assert "NaN" not in text and json.loads(text)["metrics"] == {"score": None}


def test_a_policy_that_ppo_has_trained_is_no_silent_reference():
    trainer = make_trainer()
    trainer.step(*make_samples())
    with pytest.warns(UserWarning, match="has trained this policy already"):
        PPOTrainer(trainer.config, trainer.policy, tokenizer=trainer.tokenizer)


def test_a_discount_above_1_is_refused_and_columns_do_not_broadcast():
    with pytest.raises(ValueError, match="at most 1"):
        PPOConfig(lam=95)
    chosen, rejected = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])
    expected = pairwise_loss(chosen, rejected)
    assert torch.equal(pairwise_loss(chosen.unsqueeze(1), rejected), expected)
