"""The page on the toy language's lessons: tables as the cards have them, and losses as named."""

import pytest
import torch

from dev.records.record_lessons import BETA, SLOPES, VARIANTS, kl_in_loss
from docs._ext import lessons
from rlhf_course.ppo.update import Experience

ESTIMATES = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x**2,
    "k3": lambda x: x.exp() - 1 - x,
}  # x = log π_ref/π of a response


def test_the_committed_page_is_that_of_its_cards():
    committed = lessons.PAGE.read_text(encoding="utf-8")
    assert committed == lessons.lessons_page(), "run python docs/_ext/lessons.py"


def test_every_variant_has_a_name_and_its_own_cards():
    assert lessons.BETA == BETA
    cards = lessons.runs()
    assert set(cards) == set(VARIANTS) == set(lessons.NAMES)
    seeds = [card["seed"] for card in cards["ppo"]]
    for name, found in cards.items():
        assert [card["seed"] for card in found] == seeds
        assert all(card["change"] == VARIANTS[name] for card in found)


def test_the_page_names_the_signs_that_toy_and_cards_have():
    lower = {"abs", "mse", "full", "lam-0", "epochs-1", "epochs-16-no-clip"}
    for variant, column, _, found, _ in lessons.toy():
        expected = -int(variant in lower) if column == "J" else 1
        assert found == expected, (variant, column)
    cards = lessons.runs()
    claims = {(kind, "J"): -1 for kind in ("abs", "mse", "lam-0", "epochs-1-step-4", "k1")}
    claims |= {(name, "KL"): 1 for name in ("abs", "mse", "full", "k1")}
    claims |= {("lam-0", "score"): -1, ("epochs-1", "score"): -1, ("epochs-1", "KL"): -1}
    claims |= {("no-whitening", "score"): -1, ("no-whitening", "KL"): -1}
    undecided = ("full", "epochs-1", "epochs-16-no-clip", "k3", "lam-1", "no-clip", "no-whitening")
    claims |= {(name, "J"): 0 for name in (*undecided, "k2")} | {("k3", "KL"): 0}
    for (name, column), expected in claims.items():
        found = lessons.sign(*lessons.difference(cards, name, column))
        assert found == expected, (name, column)
    for k1, base in zip(cards["k1"], cards["kl"], strict=True):
        assert lessons.change(k1, "KL") > 10 * lessons.change(base, "KL")
    decided = {key for key, (_, found) in lessons.verdicts(cards).items() if found}
    assert decided == {("abs", "J"), ("epochs-1-step-4", "J")}
    for name, found in cards.items():
        rises = lessons.mean(lessons.change(card, "J") for card in found) > 0
        assert rises == (name in ("ppo", "lam-1", "no-whitening", "epochs-1")), name
        assert lessons.mean(lessons.change(card, "score") for card in found) > 0, name


def test_the_p_value_is_that_of_students_t():
    """At 95 % the interval's end is 0, so the p-value is 0.05."""
    cards = lessons.runs()
    for key in (("abs", "J"), ("k3", "KL"), ("lam-0", "score")):
        gap, width = lessons.difference(cards, *key)
        p = lessons.p_value(cards, *key)
        assert (p < 0.05) == (abs(gap) > width)
        t = 4.3027 * abs(gap) / width
        assert p == pytest.approx(1 - t / (t**2 + 2) ** 0.5, abs=1e-4)  # two degrees of freedom


def test_holm_stops_at_the_first_that_is_not_significant():
    assert lessons.holm({"a": 0.001, "b": 0.04, "c": 0.02}) == {"a", "b", "c"}
    assert lessons.holm({"a": 0.001, "b": 0.04, "c": 0.03}) == {"a"}


def make_experience(logprobs, ref_logprobs, mask):
    unused = dict.fromkeys(("kl", "rewards", "non_score_rewards", "advantages"))
    return Experience(
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=torch.zeros_like(logprobs),
        returns=torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, 0.0]]),
        **unused,
    )


@pytest.mark.parametrize("name", ESTIMATES)
def test_kl_in_the_loss_has_the_gradient_of_its_estimate(name):
    torch.manual_seed(0)
    old, ref = -torch.rand(2, 3), -torch.rand(2, 3)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    experience = make_experience(old, ref, mask)
    new = old.clone().requires_grad_()
    loss, ratio, clipped = kl_in_loss(SLOPES[name], experience, new, old, torch.zeros(2, 3), 0.2)
    assert ratio.shape == clipped.shape == loss.shape
    found = torch.autograd.grad((loss * mask).sum(), new)[0]
    scale = BETA / (experience.returns[mask > 0]).std()
    estimate = ESTIMATES[name](((ref - new) * mask).sum(1)).sum()
    expected = torch.autograd.grad(scale * estimate, new)[0]
    assert torch.allclose(found * mask, expected, atol=1e-5)
