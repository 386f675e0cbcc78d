"""The page on the toy language's lessons: tables as the cards have them, and losses as named."""

import sys

import pytest
import torch
from make.record_lessons import BETA, SLOPES, VARIANTS, kl_in_loss

from rlhf_course.course.presets import ROOT
from rlhf_course.ppo.rollout import Rollout

sys.path.insert(0, str(ROOT / "site"))

import lessons

ESTIMATES = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x**2,
    "k3": lambda x: x.exp() - 1 - x,
}  # x = log π_ref/π of a response


def test_the_committed_page_is_that_of_its_cards():
    committed = lessons.PAGE.read_text(encoding="utf-8")
    assert committed == lessons.lessons_page(), "run python site/lessons.py"


def test_every_variant_has_a_name_and_its_own_cards():
    assert lessons.BETA == BETA
    cards = lessons.runs()
    assert set(cards) == set(VARIANTS) == set(lessons.NAMES)
    seeds = [card["seed"] for card in cards["ppo"]]
    for name, found in cards.items():
        assert [card["seed"] for card in found] == seeds
        assert all(card["change"] == VARIANTS[name] for card in found)


def make_rollout(logprobs, ref_logprobs, mask):
    tokens = [torch.arange(1, int(n) + 1) for n in mask.sum(1)]
    rollout = Rollout.from_lists([torch.tensor([1])] * 2, tokens, torch.zeros(2), 0)
    rollout.logprobs, rollout.ref_logprobs = logprobs, ref_logprobs
    rollout.values = torch.zeros_like(logprobs)
    rollout.returns = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, 0.0]])
    return rollout


@pytest.mark.parametrize("name", ESTIMATES)
def test_kl_in_the_loss_has_the_gradient_of_its_estimate(name):
    torch.manual_seed(0)
    old, ref = -torch.rand(2, 3), -torch.rand(2, 3)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    rollout = make_rollout(old, ref, mask)
    new = old.clone().requires_grad_()
    loss, ratio, clipped = kl_in_loss(SLOPES[name], rollout, new, old, torch.zeros(2, 3), 0.2)
    assert ratio.shape == clipped.shape == loss.shape
    found = torch.autograd.grad((loss * mask).sum(), new)[0]
    scale = BETA / (rollout.returns[mask > 0]).std()
    estimate = ESTIMATES[name](((ref - new) * mask).sum(1)).sum()
    expected = torch.autograd.grad(scale * estimate, new)[0]
    assert torch.allclose(found * mask, expected, atol=1e-5)
