"""What the embedded world is made with: tokenizers, the cache."""

from pathlib import Path

import pytest
import torch
from builders import reviews

from rlhf_course.synthetic import cache, small_models


def test_tokenizer_round_trips_and_the_classifier_reads_the_same_tokens():
    texts = [review["text"] for review in reviews(300)]
    tokenizer = small_models.train_tokenizer(texts, 600)
    ids = tokenizer(texts[0][:100])["input_ids"]
    assert (
        tokenizer.decode(ids) == texts[0][:100] and tokenizer.pad_token_id == tokenizer.eos_token_id
    )


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
    assert (
        cache.cached("thing", works, size=1, log=log) == first
        and Path(log).read_text() == "failed built"
    )
    assert cache.cached("thing", works, size=2, log=log) != first
    assert torch.equal(state, torch.get_rng_state())
