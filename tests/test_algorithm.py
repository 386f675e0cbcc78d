"""PPO's formulas on plain tensors."""

import numpy as np
import pytest
import torch
from builders import invalid

from rlhf_course import AdaptiveKLController, FixedKLController, LengthSampler
from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.algorithm import RunningMoments
from rlhf_course.ppo.rollout import label_logprobs

pytestmark = pytest.mark.quick


@pytest.fixture
def ragged():
    """Rewards, values and mask (4, 9) with lengths 9, 4, 1, 6."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(9) < torch.tensor([9, 4, 1, 6]).unsqueeze(1)).float()
    return (
        torch.randn(4, 9, generator=generator) * mask,
        torch.randn(4, 9, generator=generator),
        mask,
    )


def test_log_probabilities_and_entropies_of_labels_equal_the_textbook_with_their_gradient():
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.arange(7) % 5
    logprobs, entropy = label_logprobs(logits.clone(), labels)
    p = logits.log_softmax(-1)
    wanted = p[torch.arange(7), labels]
    torch.testing.assert_close(logprobs, wanted)
    torch.testing.assert_close(entropy, -(p.exp() * p).sum(-1))
    weights = torch.randn(7, dtype=torch.float64)
    gradients = [torch.autograd.grad((weights * x).sum(), logits)[0] for x in (logprobs, wanted)]
    torch.testing.assert_close(*gradients)
    assert not entropy.requires_grad


def test_forbidden_tokens_count_nothing():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprobs, entropy = label_logprobs(logits.clone(), torch.tensor([1]))
    assert entropy.item() == pytest.approx(np.log(2)) and logprobs.item() == pytest.approx(
        -np.log(2)
    )
    logprobs.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0)])
def test_gae_equals_the_double_sum(ragged, gamma, lam):
    rewards, values, mask = ragged
    advantages, returns = ppo.gae(rewards, values, mask, gamma, lam)
    for row, n in enumerate(mask.sum(1).int().tolist()):
        v = torch.cat([values[row, :n], torch.zeros(1)])
        deltas = rewards[row, :n] + gamma * v[1:] - v[:-1]
        for t in range(n):
            wanted = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n))
            assert advantages[row, t].item() == pytest.approx(wanted.item(), abs=1e-5)
            assert returns[row, t].item() == pytest.approx((wanted + v[t]).item(), abs=1e-5)


def test_returns_are_reward_to_go_when_lambda_and_gamma_are_one(ragged):
    rewards, values, mask = ragged
    _, returns = ppo.gae(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns * mask, rewards.flip(1).cumsum(1).flip(1) * mask)


def test_returns_bridge_a_hole_in_the_mask():
    """A mask may leave out a token in the middle; what comes later still counts before it."""
    given = [0.0, 0, 1], [0.5, 0.3, 0.9], [1.0, 0, 1]
    rewards, values, mask = (torch.tensor([row]) for row in given)
    _, returns = ppo.gae(rewards, values, mask, 1.0, 1.0)
    assert returns[0, [0, 2]].tolist() == pytest.approx([1.0, 1.0])


def test_values_and_rewards_outside_the_mask_do_not_matter(ragged):
    rewards, values, mask = ragged
    wild = [torch.where(mask > 0, x, torch.full_like(x, 1e6)) for x in (rewards, values)]
    for found, wanted in zip(ppo.gae(*wild, mask), ppo.gae(rewards, values, mask), strict=True):
        torch.testing.assert_close(found * mask, wanted * mask)


def test_whitening_gives_mean_zero_and_variance_one(ragged):
    _, values, mask = ragged
    white = ppo.masked_whiten(values, mask)
    assert ppo.masked_mean(white, mask).abs() < 1e-6
    assert ppo.masked_var(white, mask).item() == pytest.approx(1, abs=1e-5)
    assert white[mask == 0].abs().max() == 0
    kept = ppo.masked_whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(ppo.masked_mean(kept, mask), ppo.masked_mean(values, mask))


def test_whitening_a_single_token_says_why_not():
    with invalid("at least two response tokens.*batch_size"):
        ppo.masked_whiten(torch.ones(1, 3), torch.tensor([[1.0, 0, 0]]))


def test_rewards_put_the_score_on_the_last_token(ragged):
    _, kl, mask = ragged
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rewards, non_score = ppo.compute_rewards(scores, kl, mask, kl_coef=0.3)
    torch.testing.assert_close(non_score, -0.3 * kl * mask)
    added = rewards - non_score
    assert added.nonzero().tolist() == [[0, 8], [1, 3], [2, 0], [3, 5]]
    torch.testing.assert_close(added.sum(1), scores)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.5, 1.0, 0.0),  # gone far enough up
        (0.5, 1.0, -0.5),  # gone down, should come back
        (0.5, -1.0, 0.0),  # gone far enough down
        (1.5, -1.0, 1.5),  # gone up, should come back
        (1.0, 1.0, -1.0),
        (1.0, -1.0, 1.0),
    ],
)
def test_gradient_of_the_policy_loss_is_clipped_exactly_where_it_should_be(
    ratio, advantage, gradient
):
    logprob = torch.tensor([[np.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, found, clipped = ppo.policy_loss(
        logprob, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2
    )
    loss.sum().backward()
    assert found.item() == pytest.approx(ratio)
    assert logprob.grad.item() == pytest.approx(gradient)
    assert bool(clipped) == (gradient == 0)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [(0.1, -0.9), (0.5, 0.0), (-0.5, -1.5), (1.0, 0.0)],
)
def test_gradient_of_the_value_loss(value, gradient):
    """Old value 0, return 1, clip 0.2: beyond +0.2 towards the return there is no gradient; away
    from it there is.
    """
    values = torch.tensor([[value]], requires_grad=True)
    loss, clipped = ppo.value_loss(values, torch.zeros(1, 1), torch.ones(1, 1), 0.2)
    loss.sum().backward()
    assert values.grad.item() == pytest.approx(gradient)
    assert bool(clipped) == (gradient == 0)


def test_kl_estimators():
    p, q = torch.randn(2, 3, 7).log_softmax(-1), torch.randn(2, 3, 7).log_softmax(-1)
    full = ppo.kl_per_token(p, q, "full")
    assert full.shape == (2, 3) and (full > 0).all()
    a, b = p[..., 0], q[..., 0]
    torch.testing.assert_close(ppo.kl_per_token(a, b, "kl"), a - b)
    torch.testing.assert_close(ppo.kl_per_token(a, b, "abs"), (a - b).abs())
    torch.testing.assert_close(ppo.kl_per_token(a, b, "mse"), (a - b) ** 2 / 2)
    with invalid("choose kl, abs, mse or full"):
        ppo.kl_per_token(a, b, "jensen")


def test_adaptive_kl_controller_follows_the_table():
    low = AdaptiveKLController(0.2, 6, 10_000)
    for _ in range(194):
        low.update(4.7, 128)
    assert low.value == pytest.approx(0.1216, abs=5e-5)
    steady, high = AdaptiveKLController(0.2, 6, 10_000), AdaptiveKLController(0.2, 6, 10_000)
    steady.update(6, 128)
    high.update(100, 128)
    assert steady.value == 0.2
    assert high.value == pytest.approx(0.2 * (1 + 0.2 * 0.0128))
    fixed = FixedKLController(0.2)
    fixed.update(100, 128)
    assert fixed.value == 0.2


def test_running_moments_equal_those_of_all_scores():
    running, chunks = RunningMoments(), [torch.randn(n) * 3 + 1 for n in (5, 1, 17)]
    for chunk in chunks:
        running.update(chunk)
    everything = torch.cat(chunks).double()
    assert running.mean == pytest.approx(everything.mean().item())
    assert running.std == pytest.approx(everything.std().item())


def test_length_sampler_excludes_its_end():
    np.random.seed(0)
    assert {LengthSampler(2, 8)() for _ in range(300)} == {2, 3, 4, 5, 6, 7}
    with invalid("exclusive"):
        LengthSampler(4, 4)
