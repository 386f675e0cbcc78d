"""What makes an update fast or small changes no number; tests/on_gpu counts its waits."""

import functools

import numpy as np
import pytest
import torch
from builders import (
    EOS,
    SAMPLING,
    difference,
    invalid,
    make_policy,
    make_samples,
    make_trainer,
    sgd,
    snapshot,
)

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig
from rlhf_course.ppo import sampling
from rlhf_course.ppo.rollout import label_logprobs


@pytest.mark.parametrize("mini_batch_size", [8, 4])
@pytest.mark.parametrize(
    "way",
    [{"fast": False}] + [{"logprob_chunk_size": size} for size in (1, 7, 1000)],
)
def test_every_way_gives_the_same_numbers(way, mini_batch_size):
    """Statistics and weights after two steps on given responses, with EOS ruled out first."""
    found = []
    for options in ({}, way):
        policy = make_policy()
        options = options | {"mini_batch_size": mini_batch_size, "begin_suppress_tokens": [EOS]}
        trainer = make_trainer(policy, make_policy(1), sgd(policy), **options)
        np.random.seed(0)
        stats = [trainer.step(*make_samples(seed=seed)) for seed in range(2)][-1]
        numbers = {k: v for k, v in stats.items() if isinstance(v, float) and "time" not in k}
        found.append((numbers, snapshot(policy)))
    (stats, weights), (others, other_weights) = found
    assert others == pytest.approx(stats, abs=1e-5) and difference(weights, other_weights) < 1e-6


@pytest.mark.parametrize("cap, spread", [(5, 0.2), (30, 0.02)])
def test_chunks_need_logits_that_are_a_projection_and_no_full_kl(cap, spread):
    """Also where the logits are still so small that a cap changes them hardly."""
    with invalid("kl_penalty 'full' needs logprob_chunk_size=None"):
        PPOConfig(logprob_chunk_size=4, kl_penalty="full")
    network = make_policy(initializer_range=spread).pretrained_model
    plain = network.forward

    @functools.wraps(plain)  # a signature without position_ids would fail the self-test
    def capped(*arguments, **keywords):
        output = plain(*arguments, **keywords)
        output.logits = cap * torch.tanh(output.logits / cap)
        return output

    network.forward = capped
    trainer = make_trainer(
        AutoModelForCausalLMWithValueHead(network), make_policy(1), logprob_chunk_size=4
    )
    with invalid("changes its logits after the projection; set logprob"):
        trainer.step(*make_samples())


def test_a_large_vocabulary_is_looked_up_in_pieces():
    """More numbers than a piece holds, a shorter last piece, and one forbidden token."""
    torch.manual_seed(0)
    logits, labels = torch.randn(20, 70_000, dtype=torch.float64), torch.randint(1, 70_000, (20,))
    assert 2**19 < logits.numel() and 20 % (2**19 // 70_000)
    logits[:, 0] = torch.finfo(torch.float32).min
    logits.requires_grad_()
    weights = torch.randn(20, dtype=torch.float64)
    expected = logits.log_softmax(-1).gather(-1, labels.unsqueeze(1)).squeeze(1)
    found, entropy = label_logprobs(logits.clone(), labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, torch.special.entr(logits.softmax(-1)).sum(-1).detach())
    gradients = [
        torch.autograd.grad((weights * logprobs).sum(), logits)[0] for logprobs in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_without_fast_transformers_samples(monkeypatch):
    policy, called = make_policy(), []
    plain = policy.generate
    monkeypatch.setattr(
        policy, "generate", lambda **options: called.append(options) or plain(**options)
    )
    for fast in (True, False):
        trainer = make_trainer(policy, fast=fast)
        responses = trainer.generate(
            make_samples()[0], return_prompt=False, **SAMPLING, max_new_tokens=4
        )
        assert len(called) == (not fast) and all(1 <= len(response) <= 4 for response in responses)


def test_padding_on_the_left_changes_no_logit(monkeypatch):
    """Short and long queries go on with the distribution that each has alone."""
    policy, queries, seen = make_policy(), make_samples()[0], []
    plain = sampling.draw
    monkeypatch.setattr(
        sampling, "draw", lambda logits, rest: seen.append(logits.clone()) or plain(logits, rest)
    )
    assert len({len(query) for query in queries}) > 1
    make_trainer(policy).generate(queries, **SAMPLING, max_new_tokens=1)
    for query, logits in zip(queries, seen[0], strict=True):
        torch.testing.assert_close(logits, policy(query.unsqueeze(0))[0][0, -1])


@pytest.mark.parametrize(("mini_batch_size", "passes"), [(4, 1 + 3), (8, 3)])
def test_how_often_each_sample_runs_through_the_policy(mini_batch_size, passes, monkeypatch):
    """As docs/diagnosis.md says: once before the update, once per epoch."""
    trainer = make_trainer(ppo_epochs=3, mini_batch_size=mini_batch_size)
    tokens = []
    plain = trainer.model.forward

    def count(ids, select, **rest):
        tokens.append(int(select.sum()))
        return plain(ids, select=select, **rest)

    monkeypatch.setattr(trainer.model, "forward", count)
    queries, responses, scores = make_samples()
    trainer.step(queries, responses, scores)
    assert sum(tokens) == passes * sum(len(response) for response in responses)
