"""The embedded world: reviews, gold sentiment, tokenizers, the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_course.worlds import cache, small_models
from rlhf_course.worlds.reviews import gold_sentiment, make_reviews


@pytest.fixture(scope="module")
def reviews():
    return make_reviews(1500, seed=0)


def test_reviews_are_deterministic_and_a_prefix_of_longer_lists(reviews):
    assert make_reviews(40, seed=0) == reviews[:40]
    assert make_reviews(40, seed=1) != reviews[:40]


def test_reviews_are_varied_balanced_and_long_enough(reviews):
    labels = np.array([r.label for r in reviews])
    assert 0.45 < labels.mean() < 0.55
    assert np.mean([len(r.text) > 200 for r in reviews]) > 0.9
    assert len({r.text for r in reviews}) == len(reviews)
    assert all(r.text[0].isupper() and r.text.rstrip()[-1] in ".!?" and "  " not in r.text for r in reviews)


def test_gold_agrees_with_the_label(reviews):
    assert np.mean([(r.gold > 0) == r.label for r in reviews]) >= 0.97


def test_gold_counts_distinct_opinions_flips_negated_ones_and_punishes_repetition():
    assert gold_sentiment("") == gold_sentiment("the camera and the harbour") == 0
    assert gold_sentiment("a superb film") > 0 > gold_sentiment("a dull film")
    assert gold_sentiment("not a dull film") > 0 > gold_sentiment("never superb")
    once = gold_sentiment("superb")
    assert gold_sentiment("superb, and again superb") == once
    assert gold_sentiment("superb superb superb") < once
    assert gold_sentiment("superb and witty") > once


def test_tokenizer_round_trips_and_the_classifier_reads_the_same_tokens(reviews):
    texts = [r.text for r in reviews[:300]]
    tokenizer = small_models.train_tokenizer(texts, 600)
    ids = tokenizer(texts[0][:100])["input_ids"]
    assert tokenizer.decode(ids) == texts[0][:100] and tokenizer.pad_token_id == tokenizer.eos_token_id
    reader = small_models.classifier_tokenizer(tokenizer)
    assert reader(texts[0][:100])["input_ids"] == [reader.cls_token_id, *ids]
    assert reader.pad_token_id not in (tokenizer.eos_token_id, reader.cls_token_id)


def fails(folder, size, log):
    Path(log).write_text("failed")
    (folder / "half").write_text("x")
    raise KeyboardInterrupt


def works(folder, size, log):
    with open(log, "a") as file:
        file.write(" built")
    (folder / "whole").write_text("x")


def test_cache_builds_once_and_keeps_nothing_half_built(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "cache"))
    log = str(tmp_path / "log")
    with pytest.raises(KeyboardInterrupt):
        cache.cached("thing", fails, size=1, log=log)
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())
    state = torch.get_rng_state()
    first = cache.cached("thing", works, size=1, log=log)
    assert cache.cached("thing", works, size=1, log=log) == first and Path(log).read_text() == "failed built"
    assert cache.cached("thing", works, size=2, log=log) != first
    assert torch.equal(state, torch.get_rng_state())
