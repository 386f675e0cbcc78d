"""The models and data in models/: what loads them, what they can do, and what is not in them."""

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course.course.presets import ROOT
from rlhf_course.evaluation import unknown_words, words_of
from rlhf_course.rewards import NgramSentiment, SentimentReward

MODELS = ROOT / "models"
FOLDERS = sorted(path for path in MODELS.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def openings() -> pd.DataFrame:
    return pd.read_parquet(MODELS / "imdb-openings/test-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def judge() -> NgramSentiment:
    return NgramSentiment.from_pretrained(MODELS / "ngram-imdb-judge")


def test_they_are_small_and_hold_no_pickle():
    files = [path for path in MODELS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 38e6
    kinds = ".safetensors .json .jsonl .md .model .txt .parquet .yaml".split()
    assert {path.suffix for path in files} <= {*kinds}


def test_the_judges_guess_the_verdict_from_64_words_and_not_always_alike(openings, judge):
    truth = torch.tensor(openings["label"].tolist()) == 1
    classifier = SentimentReward(str(MODELS / "distilbert-imdb-mini"))
    logits = classifier.logits(openings["text"].tolist())
    first, second = logits.argmax(1) == classifier.index, judge(openings["text"].tolist()) > 0
    assert (first == truth).float().mean() > 0.72 and (second == truth).float().mean() > 0.72
    assert 0.75 < (first == second).float().mean() < 0.97


def test_the_policy_is_a_plain_gpt2_that_writes_words(openings):
    folder = MODELS / "gpt2-imdb-mini"
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    known = set((MODELS / "ngram-imdb-judge/words.txt").read_text().split())
    ids = torch.tensor([tokenizer("I saw this movie")["input_ids"]] * 64)
    torch.manual_seed(0)
    how = {"do_sample": True, "top_k": 0, "pad_token_id": tokenizer.eos_token_id}
    samples = model.generate(ids, max_new_tokens=20, **how)
    assert unknown_words(tokenizer.batch_decode(samples), known) < 0.025
    assert unknown_words(openings["text"], known) == 0


def test_the_linear_judge_counts_an_ngram_once(judge):
    once, twice, other = judge(
        ["a wonderful film", "a wonderful film a wonderful film", "an awful film"]
    )
    assert once > 0 > other
    places = {*judge.places("a wonderful film"), *judge.places("film a")}
    assert torch.isclose(twice, judge.weight[[*places]].sum() + judge.bias, atol=1e-5)
    assert judge([]).shape == (0,) and judge([""]).item() == judge.bias.item()


def test_unknown_words_leave_out_the_last():
    assert words_of("It's GOOD, 10/10") == ["it", "s", "good"]
    assert unknown_words(["a fine fil", "a jrac film"], {"a", "fine", "film"}) == 1 / 4


def test_the_model_of_sums_knows_both_manners_and_is_often_wrong():
    folder = MODELS / "sums-mini"
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    sums = [(100 + 7 * i, 999 - 3 * i) for i in range(120)]
    ids = tokenizer([f"{a}+{b}=" for a, b in sums], return_tensors="pt")
    torch.manual_seed(0)
    answers = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=32)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    ends = [text.split("=")[1].split(";")[-1] for text in texts]
    right = sum(end == str(a + b) for end, (a, b) in zip(ends, sums, strict=True))
    assert 20 < right < 80 and 5 < sum(";" in text for text in texts) < 60
    assert tokenizer.decode(tokenizer("145+267=412")["input_ids"]) == "145+267=412"
