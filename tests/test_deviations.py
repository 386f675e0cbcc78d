"""Where ``PPOTrainer`` differs from the classic one on purpose: a test per row, named after the
fault it mends.
"""

import copy
import warnings

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

from rlhf_course import PPOConfig
from rlhf_course.ppo.rollout import Samples, forward
from rlhf_course.ppo.update import make_experience, minibatch_loss, optimize

pytestmark = pytest.mark.quick


def test_deviation_rollouts_and_updates_run_without_dropout_and_restore_the_mode():
    policy = make_policy(dropout=0.5).train()
    reference = make_policy(dropout=0.5)
    trainer, samples = make_trainer(policy, reference, learning_rate=0.0), make_samples()
    stats = trainer.step(*samples)
    assert np.abs(stats["ppo/policy/ratio"] - 1).max() < 1e-5 and abs(stats["objective/kl"]) < 1e-5
    greedy = [
        trainer.generate(samples[0][0], do_sample=False, max_new_tokens=8).tolist()
        for _ in range(3)
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    assert policy.training and policy.v_head.dropout.training
    policy.eval()
    trainer.step(*samples)
    assert not any(module.training for module in policy.modules())


def test_deviation_gradient_norm_is_clipped_in_every_step():
    policy = make_policy()
    trainer = make_trainer(
        policy, make_policy(1), sgd(policy, 1.0), max_grad_norm=1e-3, ppo_epochs=1
    )
    for seed in range(3):
        before = snapshot(policy)
        trainer.step(*make_samples(seed=seed))
        moved = [
            (snapshot(policy)[n] - before[n]).square().sum()
            for n in before
            if not n.endswith("lm_head.weight")  # tied to the embeddings
        ]
        assert torch.stack(moved).sum().sqrt().item() == pytest.approx(1e-3, rel=1e-2)


def test_deviation_a_skipped_mini_batch_moves_neither_weights_nor_optimizer():
    policy = make_policy()
    trainer = make_trainer(policy, make_policy(1), learning_rate=1e-3, ppo_epochs=1)
    trainer.step(*make_samples())  # gives Adam a momentum
    trainer.config.ratio_threshold = 0.5  # every ratio is 1
    before, state = snapshot(policy), copy.deepcopy(trainer.optimizer.state_dict())
    with pytest.warns(UserWarning, match="moved no weight"):
        stats = trainer.step(*make_samples())
    assert difference(before, snapshot(policy)) == 0
    for key, entry in trainer.optimizer.state_dict()["state"].items():
        for name, tensor in entry.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(state["state"][key][name]))
    assert stats["ppo/loss/total"] == 0


def accumulate_over_eight():
    """A policy, its trainer with one optimizer step for eight mini-batches of one sample, eight
    samples and their experience.
    """
    config = {"mini_batch_size": 1, "gradient_accumulation_steps": 8, "ppo_epochs": 1}
    trainer = make_trainer(policy := make_policy(), make_policy(1), sgd(policy, 1.0), **config)
    queries, responses, scores = make_samples()
    samples = Samples.from_lists(queries, responses, torch.stack(scores), EOS)
    experience, _ = make_experience(
        samples, policy, trainer.reference, trainer.config, trainer.kl_ctl.value
    )
    return policy, trainer, samples, experience


def test_deviation_in_accumulation_a_skipped_mini_batch_takes_no_part_and_the_others_count():
    """The old log-probabilities of sample 3 are made so small that its ratio is e³."""
    policy, trainer, samples, experience = accumulate_over_eight()
    experience.logprobs[3] -= 3 * samples.mask[3]
    wanted = 0.0
    for row in (0, 1, 2, 4, 5, 6, 7):
        part = samples.select(torch.tensor([row]))
        learned = experience.select(torch.tensor([row]), part.mask.shape[1])
        loss, _ = minibatch_loss(learned, forward(policy, part), trainer.config)
        wanted = wanted + loss * part.mask.sum() / samples.mask.sum()
    gradients = torch.autograd.grad(wanted, [*policy.parameters()])
    expected = [p.detach() - g for p, g in zip(policy.parameters(), gradients, strict=True)]
    with pytest.warns(UserWarning, match="moved no weight") as caught:
        optimize(
            policy, trainer.optimizer, trainer.accelerator, samples, experience, trainer.config
        )
    assert len(caught) == 1
    for found, right in zip(policy.parameters(), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_deviation_in_accumulation_one_loss_that_is_not_finite_stops_the_step_of_all(bad):
    policy, trainer, samples, experience = accumulate_over_eight()
    experience.returns[3, 0] = bad
    before = snapshot(policy)
    with pytest.raises(FloatingPointError, match="Step 1: the loss is"):
        optimize(
            policy, trainer.optimizer, trainer.accelerator, samples, experience, trainer.config
        )
    assert difference(before, snapshot(policy)) == 0


def test_deviation_an_empty_answer_in_a_mini_batch_of_its_own_gives_no_nan():
    """Whitening is over the batch, never over one mini-batch (TRL up to 0.4.7): one token alone has
    no variance.
    """
    queries, responses, scores = make_samples()
    responses[4] = torch.tensor([EOS])
    trainer = make_trainer(mini_batch_size=1)
    trainer.step(queries, responses, scores)
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    alone = make_trainer(batch_size=1, mini_batch_size=1)
    before = snapshot(alone.model)
    with invalid("at least two response tokens.*begin_suppress_tokens"):
        alone.step(queries[4:5], responses[4:5], scores[4:5])
    assert difference(before, snapshot(alone.model)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_deviation_a_score_that_is_not_finite_is_named(bad):
    queries, responses, scores = make_samples()
    scores[5] = torch.tensor(bad)
    trainer = make_trainer()
    before = snapshot(trainer.model)
    with pytest.raises(FloatingPointError, match="Step 1: the score of sample 5"):
        trainer.step(queries, responses, scores)
    assert difference(before, snapshot(trainer.model)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("who", ["policy", "reference"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_deviation_logits_that_are_not_finite_are_named(who, bad, chunk):
    models = {"policy": make_policy(), "reference": make_policy(1)}
    with torch.no_grad():
        models[who].pretrained_model.transformer.ln_f.bias[0] = bad
    trainer = make_trainer(**models, logprob_chunk_size=chunk)
    before = snapshot(models["policy"])
    with pytest.raises(FloatingPointError, match=f"the {who}'s logits for sample 0"):
        trainer.step(*make_samples())
    assert all(
        torch.equal(before[n].nan_to_num(), w.nan_to_num())
        for n, w in snapshot(models["policy"]).items()
    )


def test_deviation_nothing_is_sampled_from_nan():
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.pretrained_model.transformer.ln_f.bias[0] = torch.nan
    with pytest.raises(FloatingPointError, match="nothing can be sampled"):
        trainer.generate(make_samples()[0], **SAMPLING, max_new_tokens=3)


def test_deviation_score_scaling_works():
    trainer = make_trainer(use_score_scaling=True, use_score_norm=True)
    queries, responses, _ = make_samples()
    scores = torch.tensor([3.0, 5, 7, 9, 11, 13, 15, 17])
    stats = trainer.step(queries, responses, list(scores))
    assert stats["ppo/mean_scores"] == pytest.approx(0, abs=1e-5) and stats[
        "ppo/std_scores"
    ] == pytest.approx(1)
    stats = trainer.step(queries, responses, list(scores + 100))
    both = torch.cat([scores, scores + 100])
    assert stats["ppo/mean_scores"] == pytest.approx(
        ((scores + 100).mean() - both.mean()).item() / both.std().item()
    )


def test_deviation_score_scaling_alone_keeps_the_mean():
    scores = torch.tensor([3.0, 5, 7, 9, 11, 13, 15, 17])
    stats = make_trainer(use_score_scaling=True).step(*make_samples()[:2], list(scores))
    assert stats["ppo/mean_scores"] == pytest.approx(
        (scores.mean() / scores.std()).item(), rel=1e-5
    )
    assert stats["ppo/std_scores"] == pytest.approx(1, rel=1e-5)


def test_deviation_whitened_rewards_do_not_leak_into_padding():
    """Variance 1 around the mean they had, over response tokens; nothing in the padding, nor in the
    returns.
    """
    policy, reference = make_policy(), make_policy(1)
    trainer = make_trainer(policy, reference, whiten_rewards=True, batch_size=2, mini_batch_size=2)
    samples = Samples.from_lists(
        [torch.tensor([1, 2])] * 2, [torch.tensor([3, 4]), torch.arange(9)], torch.ones(2), EOS
    )
    experience, plain = (
        make_experience(samples, policy, trainer.reference, config, trainer.kl_ctl.value)[0]
        for config in (trainer.config, PPOConfig())
    )
    plain, tokens = plain.rewards, samples.mask > 0
    assert plain[tokens].var().item() != pytest.approx(1, abs=0.1)
    assert experience.rewards[tokens].var().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(experience.rewards[tokens].mean(), plain[tokens].mean())
    assert experience.rewards[0, 2:].abs().max() == 0 and experience.returns[0, 2:].abs().max() == 0


def test_deviation_left_padding_keeps_positions():
    policy, query = make_policy(), torch.tensor([1, 2, 3])
    alone = Samples.from_lists([query], [query], torch.zeros(1), EOS)
    padded = Samples.from_lists([query, torch.arange(30)], [query, query], torch.zeros(2), EOS)
    torch.testing.assert_close(
        forward(policy, padded)[0][0], forward(policy, alone)[0][0], atol=1e-5, rtol=0
    )
    greedy = {"do_sample": False, "max_new_tokens": 6, "return_prompt": False}
    trainer = make_trainer(policy)
    both, one = (
        trainer.generate([query, torch.arange(30)], **greedy),
        trainer.generate(query, **greedy),
    )
    assert both[0].tolist() == one[0].tolist()


def test_deviation_an_empty_response_is_a_clear_error_and_prompts_keep_their_eos():
    queries, responses, scores = make_samples()
    trainer = make_trainer()
    with invalid("response 3 is empty.*sample at least one token"):
        trainer.step(
            queries, [*responses[:3], torch.tensor([], dtype=torch.long), *responses[4:]], scores
        )
    prompt = torch.tensor([1, EOS, 2])
    whole = trainer.generate([prompt] * 4, **SAMPLING, max_new_tokens=3)
    assert all(w[:3].tolist() == prompt.tolist() for w in whole)


@pytest.mark.parametrize(
    "setting",
    [{}, {"top_k": 50}, {"top_k": 0, "temperature": 0.7}, {"top_k": 0, "repetition_penalty": 1.2}],
)
def test_deviation_sampling_from_another_distribution_warns(setting):
    trainer, (queries, _, _) = make_trainer(), make_samples()
    with pytest.warns(UserWarning) as caught:
        trainer.generate(queries, do_sample=True, max_new_tokens=2, **setting)
    name = list(setting)[-1] if setting else "top_k"
    said = [str(warning.message) for warning in caught]
    assert any(f"Sampling with {name}=" in words and f"Pass {name}=" in words for words in said)


def test_plain_sampling_does_not_warn():
    trainer, (queries, _, _) = make_trainer(), make_samples()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.generate(
            queries, do_sample=True, max_new_tokens=2, top_k=0.0, top_p=1.0, min_length=-1
        )
    assert not caught
