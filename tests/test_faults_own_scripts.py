"""Faults of those who write their own scripts: calls in the wrong order, with the wrong thing, or
twice.
"""

import importlib
import json
import math
import re
from functools import partial

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from builders import (
    EOS,
    SAMPLING,
    difference,
    make_policy,
    make_samples,
    make_trainer,
    save_classifier,
    sgd,
    snapshot,
)
from fault_page import case
from peft import LoraConfig
from transformers import AutoTokenizer, GPT2ForSequenceClassification

from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer
from rlhf_course.course.plots import over_text
from rlhf_course.course.run_card import RunCard
from rlhf_course.data import load_reviews, tokenize_answers
from rlhf_course.policy.adapters import RewardAdapter
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint
from rlhf_course.rewards import RewardModel, SentimentReward, load_reward_model

KIND = "More: the Python API and data"
fault = partial(case, named=True)
pytestmark = pytest.mark.usefixtures("own_cache")
REFUSED = (ValueError, TypeError, OSError)
LORA = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
QUERIES, RESPONSES, SCORES = make_samples()


def refused(outcome, call, words: str) -> None:
    """A call ends with one or two sentences that hold these words."""
    with pytest.raises(REFUSED, match=words) as raised:
        call()
    text = str(raised.value)
    assert len(text) < 400 and "\n" not in text.strip(), text
    outcome(text)


def works_or_refused(outcome, call, words: str, works: str) -> None:
    """A call, with assertions of its own, does what was wanted, or ends with a sentence that holds
    these words.
    """
    try:
        call()
    except REFUSED as error:
        text = str(error)
        assert re.search(words, text) and len(text) < 400, text
        outcome(text)
    else:
        outcome(works)


# --- a trainer
# ----------------------------------------------------------------------------------------------------


def steps(*models, **options):
    """A trainer of these parts, and a step that moves its policy."""
    policy, *reference = models or [make_policy()]
    trainer, before = make_trainer(policy, *reference, **options), snapshot(policy)
    trainer.step(QUERIES, RESPONSES, SCORES)
    assert difference(before, snapshot(policy)), "nothing was learnt"


def rows(**columns) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"input_ids": [q.tolist() for q in QUERIES]} | columns
    ).with_format("torch")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        fault(
            lambda: steps(*[make_policy()] * 2),
            "reference",
            done="the policy itself is given as its reference",
        ),
        fault(
            lambda: steps(optimizer=sgd(make_policy(seed=1))),
            "optimizer",
            done="the optimizer holds the weights of another model",
        ),
        fault(
            lambda: steps(make_policy().requires_grad_(False)),
            "frozen|requires_grad|trainable",
            done="a policy all of whose weights are frozen",
        ),
        fault(
            lambda: steps(make_policy(), make_policy(vocab_size=30, eos_token_id=2)),
            "vocabulary|tokens",
            done="a reference with fewer tokens than the policy",
        ),
        fault(
            lambda: make_trainer(dataset=datasets.DatasetDict(train=rows())),
            "split",
            done="a dataset with all its splits is given to the trainer",
        ),
    ],
)
def test_a_trainer_of_the_wrong_parts(call, words, outcome):
    refused(outcome, call, words)


@pytest.mark.parametrize("form", ["torch", None])
@pytest.mark.fault("queries of several lengths, and no data_collator")
def test_ragged_queries_without_a_collator(form, outcome):
    trainer = make_trainer(dataset=rows().with_format(form))
    queries = next(iter(trainer.dataloader))["input_ids"]
    responses = trainer.generate(queries, max_new_tokens=4, return_prompt=False, **SAMPLING)
    assert trainer.step(queries, responses, SCORES)["objective/kl"] == pytest.approx(0, abs=1e-4)
    outcome("Batches are lists, which generate and step take.")


@pytest.mark.parametrize("tokens", [EOS, [None], [EOS + 1]])
@pytest.mark.fault("`PPOConfig(begin_suppress_tokens=39)`, without the list")
def test_a_token_that_is_no_list(tokens, outcome):
    refused(outcome, lambda: make_trainer(begin_suppress_tokens=tokens), "begin_suppress_tokens")


# --- a step
# -------------------------------------------------------------------------------------------------------


@pytest.mark.fault("a step with tokens that the policy does not know")
def test_tokens_of_another_tokenizer(outcome):
    trainer = make_trainer()
    responses = [*RESPONSES[:3], torch.tensor([5, 50256]), *RESPONSES[4:]]
    refused(
        outcome, lambda: trainer.step(QUERIES, responses, SCORES), "response 3|vocabulary|50256"
    )


@pytest.mark.fault("a step with tokens in int32")
def test_tokens_in_int32(outcome):
    found = []
    for kind in (torch.int64, torch.int32):
        queries, responses = (
            [tokens.to(kind) for tokens in given] for given in (QUERIES, RESPONSES)
        )
        found.append(make_trainer(policy=make_policy()).step(queries, responses, SCORES))
    assert found[0]["ppo/loss/total"] == pytest.approx(found[1]["ppo/loss/total"])
    outcome("The step is that of int64.")


@pytest.mark.fault(
    "a step with responses that begin with their queries (generate without return_prompt=False)"
)
def test_responses_with_their_queries(outcome):
    trainer = make_trainer()
    responses = trainer.generate(QUERIES, max_new_tokens=4, **SAMPLING)
    with pytest.warns(UserWarning, match="return_prompt") as warned:
        trainer.step(QUERIES, responses, SCORES)
    outcome(str(warned[0].message))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.fault("a whole loop under torch.no_grad()")
def test_a_step_without_gradients(mode, outcome):
    trainer, masks = make_trainer(), [torch.ones(len(r)) for r in RESPONSES]
    before = snapshot(trainer.model)
    with mode():
        for _ in range(2):
            trainer.step(QUERIES, RESPONSES, SCORES, [keep * 1 for keep in masks])
    assert difference(before, snapshot(trainer.model)), "nothing was learnt"
    outcome("The step is done with gradients.")


@pytest.mark.fault("responses and scores made under torch.inference_mode()")
def test_samples_of_inference_mode(outcome):
    trainer = make_trainer()
    with torch.inference_mode():
        responses = trainer.generate(QUERIES, max_new_tokens=4, return_prompt=False, **SAMPLING)
        scores = torch.tensor(SCORES) * 1.0
    stats = trainer.step(QUERIES, responses, scores)
    assert math.isfinite(stats["ppo/loss/total"])
    outcome("The step is as with any other samples.")


# --- generation
# ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("generate with lists of token ids, of a dataset without set_format")
def test_queries_that_are_lists(outcome):
    queries = [query.tolist() for query in QUERIES]

    def use():
        assert len(make_trainer().generate(queries, max_new_tokens=4, **SAMPLING)) == 8

    works_or_refused(outcome, use, "query 0|quer.*tensor", "They are taken as tensors.")


@pytest.mark.fault("generate with a query of no tokens")
def test_a_query_of_no_tokens(outcome):
    queries = [QUERIES[0], torch.tensor([], dtype=torch.long)]
    refused(
        outcome,
        lambda: make_trainer().generate(queries, max_new_tokens=4, **SAMPLING),
        "query 1|empty",
    )


@pytest.mark.fault("generate without do_sample=True, then a step")
def test_without_do_sample_answers_are_greedy(outcome):
    one, other = (
        make_trainer().generate(QUERIES, max_new_tokens=4, return_prompt=False) for _ in range(2)
    )
    assert (
        all(map(torch.equal, one, other))
        and "without do_sample decoding is greedy" in PPOTrainer.generate.__doc__
    )
    make_trainer().step(QUERIES, one, SCORES)
    outcome(
        "Decoding is greedy, as the docstring says: the most probable tokens, the same each time."
    )


@pytest.mark.fault("generate without max_new_tokens or a length_sampler, with queries of 30 tokens")
def test_a_length_is_needed(outcome):
    with pytest.warns(UserWarning, match="recommend setting `max_new_tokens`"):
        found = make_trainer().generate([torch.arange(30)] * 2, return_prompt=False, **SAMPLING)
    assert max(map(len, found)) <= 20
    outcome("At most 20 tokens are sampled; transformers warns, and names max_new_tokens.")


@pytest.mark.fault("a LengthSampler and sizes that are numpy's numbers")
def test_lengths_of_numpy(outcome):
    sampler = LengthSampler(np.int64(2), np.int64(4))
    found = make_trainer().generate(
        QUERIES, sampler, batch_size=np.int64(4), return_prompt=False, **SAMPLING
    )
    assert {len(response) for response in found} <= {1, 2, 3}
    outcome("They are taken as the numbers that they are.")


# --- stopping and going on
# ----------------------------------------------------------------------------------------


@pytest.mark.fault("load_checkpoint with the folder above checkpoint-1")
def test_the_folder_above_a_checkpoint(tmp_path, outcome):
    save_checkpoint(make_trainer(), tmp_path)
    refused(outcome, lambda: load_checkpoint(make_trainer(), tmp_path), "checkpoint-0")


@pytest.mark.fault("a run with Adam goes on with SGD")
def test_another_optimizer(tmp_path, outcome):
    trainer = make_trainer()
    trainer.step(QUERIES, RESPONSES, SCORES)
    save_checkpoint(trainer, tmp_path)
    policy = make_policy()

    def resume():
        trainer = make_trainer(policy, optimizer=sgd(policy))
        load_checkpoint(trainer, tmp_path / "checkpoint-1")
        trainer.step(QUERIES, RESPONSES, SCORES)

    refused(outcome, resume, "(?i)optimizer|Adam")


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.fault(
    "a run goes on with a learning-rate schedule that it did not have, or without the one it had"
)
def test_another_schedule(saved, tmp_path, outcome):
    def make(scheduled: bool):
        trainer = make_trainer(policy := make_policy(), optimizer=sgd(policy))
        if scheduled:
            trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                trainer.optimizer, lambda step: 0.5**step
            )
        return trainer

    save_checkpoint(make(saved), tmp_path)
    refused(
        outcome, lambda: load_checkpoint(make(not saved), tmp_path / "checkpoint-0"), "schedule"
    )


@pytest.mark.fault("`save_pretrained('~/policy')`")
def test_a_folder_under_home(tmp_path, monkeypatch, outcome):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def use():
        make_policy().save_pretrained("~/policy")
        assert (tmp_path / "home/policy/config.json").exists()

    works_or_refused(outcome, use, "~", "It goes to the folder policy in the home folder.")
    assert not (tmp_path / "~").exists()


# --- rewards
# ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """A sentiment classifier's folder, and a reward model with its tokenizer."""
    save_classifier(folder := tmp_path_factory.mktemp("classifier"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = make_policy(vocab_size=len(tokenizer), num_labels=1).config
    return folder, RewardModel(GPT2ForSequenceClassification(config).eval(), tokenizer)


@pytest.mark.fault("SentimentReward is given a column of a table")
def test_a_column_of_texts(classifiers, outcome):
    reward, texts = SentimentReward(classifiers[0], device="cpu"), ["A fine film.", "A dull film."]
    for column in (
        pd.Series(texts, index=[7, 3]),
        (text for text in texts),
        np.array(texts),
        datasets.Dataset.from_dict({"x": texts})["x"],
    ):
        torch.testing.assert_close(reward(column), reward(texts))
    torch.testing.assert_close(reward(pd.Series(texts[:1])), reward(texts[:1]))
    outcome("Its texts are scored, whatever holds them.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.fault('`SentimentReward(..., device="cuda")` on a machine without a GPU')
def test_a_device_that_is_not_there(classifiers, outcome):
    refused(outcome, lambda: SentimentReward(classifiers[0], device="cuda"), "(?i)device|GPU")


@pytest.mark.fault("a RewardModel is given fewer answers than prompts")
def test_fewer_answers_than_prompts(classifiers, outcome):
    refused(
        outcome, lambda: classifiers[1](["A film?"] * 3, ["Good.", "Bad."]), "3 prompts|2 answers"
    )


@pytest.mark.fault("two RewardAdapters on one policy")
def test_two_judges_on_one_base(tmp_path, outcome):
    make_policy().save_pretrained(tmp_path / "base")
    for name in ("kind", "strict"):
        judge = load_reward_model(tmp_path / "base", new_head=True)
        judge.add_adapter(
            LoraConfig(
                task_type="SEQ_CLS", modules_to_save=["score"], init_lora_weights=False, **LORA
            )
        )
        judge.save_pretrained(tmp_path / name)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path / "base", peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA)
    )
    batch = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
    }
    kind = RewardAdapter(policy, tmp_path / "kind")
    before = kind(**batch).logits

    def use():
        RewardAdapter(policy, tmp_path / "strict")
        torch.testing.assert_close(kind(**batch).logits, before)

    works_or_refused(outcome, use, "reward", "Each scores with its own weights.")


# --- data
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault("tokenize_answers with a tokenizer that has no EOS")
def test_answers_without_an_end(classifiers, outcome):
    tokenizer = AutoTokenizer.from_pretrained(classifiers[0])
    tokenizer.eos_token = None
    answers = datasets.Dataset.from_dict({"prompt": ["A film?"] * 2, "answer": ["Good.", "Bad."]})
    refused(outcome, lambda: tokenize_answers(answers, tokenizer, 64), "EOS|eos_token")


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.fault("a dataset folder that was written by save_to_disk")
def test_a_folder_of_save_to_disk(splits, tmp_path, outcome):
    rows = datasets.Dataset.from_dict({"text": ["bad", "good"], "label": [0, 1]})
    (datasets.DatasetDict(train=rows) if splits else rows).save_to_disk(tmp_path / "reviews")

    def use():
        assert load_reviews(tmp_path / "reviews", "train")["text"][:] == ["bad", "good"]

    works_or_refused(outcome, use, "(?i)parquet|json", "It is read.")


@pytest.mark.parametrize("script", ["train_sft", "train_reward_model"])
@pytest.mark.parametrize("line", ["output_dir: 2024", "output_dir: 2024-05-01"])
@pytest.mark.fault(
    "`output_dir: 2024`, a number or a date, in a file of options for `train_sft.py`"
)
def test_a_number_where_a_path_is_needed(script, line, tmp_path, outcome):
    (tmp_path / "my.yaml").write_text(f"{line}\nmax_length: 64\n")
    _, config, *_ = importlib.import_module(script).parse_arguments(
        ["--config", str(tmp_path / "my.yaml")]
    )
    assert config.output_dir == line.split()[1] and config.max_length == 64
    outcome("The run goes to a folder of that name.")


@pytest.mark.fault("IMDB as its archive is unpacked: train/pos/0_9.txt, train/neg/0_2.txt")
def test_a_folder_of_texts(tmp_path, outcome):
    for name, text in (("pos", "good"), ("neg", "bad")):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0_5.txt").write_text(f"A {text} film.\n")
    refused(outcome, lambda: load_reviews(tmp_path, "train"), "No column label")


# --- what a run leaves
# --------------------------------------------------------------------------------------------


@pytest.mark.fault("`RunCard.metric('score', nan)`")
def test_a_metric_of_nan(tmp_path, outcome):
    def use():
        card = RunCard("mine", "tiny", 0, tmp_path)
        card.metric("score", math.nan)
        card.finish()
        text = (tmp_path / "run_cards/mine.json").read_text()
        assert "NaN" not in text and json.loads(text)["metrics"] == {"score": None}

    works_or_refused(outcome, use, "score", "The card says null, which any reader of JSON takes.")


@pytest.mark.fault("over_text with more numbers than tokens")
def test_numbers_that_belong_to_no_token(outcome):
    refused(outcome, lambda: over_text(["a", "b", "c"], {"KL": [0.1] * 4}, n_query=1), "KL")
