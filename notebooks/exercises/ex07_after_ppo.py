"""Exercises of notebook 07."""

import torch
from torch.nn.functional import logsigmoid

from engine import Set, normal, pick, ragged

SET = Set(
    "07_after_ppo",
    "After PPO",
    "import torch\nfrom torch.nn.functional import logsigmoid",
)
check = SET.check


@SET.exercise("A group's advantages", 1, 10)
def group_advantages(rewards, divide):
    """Return GRPO's advantages from the rewards of G responses to each of P prompts:
    (P, G) → (P, G).

    An advantage is the reward minus its *group's* mean. If `divide` is True, divide
    this difference by the group's unbiased standard deviation plus 1e-4. Without the
    division, the advantages are those of Dr. GRPO.
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-4) if divide else centered


@group_advantages.inputs
def _(dice):
    p, g = pick(dice, (2, 3)), pick(dice, (4, 5))
    rewards = pick(dice, (0.5, 1)) * normal(dice, p, g) + normal(dice, p, 1)
    rewards[0] = 1.0  # all rewards of this prompt are equal
    return rewards, bool(dice.initial_seed() % 2)


def row_by_row(rewards, divide):
    rows = []
    for row in rewards:
        rows.append((row - row.mean()) / (row.std() + 1e-4 if divide else 1.0))
    return torch.stack(rows)


def row_mean(rewards):
    return rewards.mean(1, keepdim=True)


def row_std(rewards):
    return rewards.std(1, keepdim=True)


def if_divided(advantages):
    """Return a mistake that is wrong only if ``divide`` is True."""
    return lambda rewards, divide: (
        advantages(rewards) if divide else rewards - row_mean(rewards)
    )


group_advantages.hints = (
    "Which responses must you compare a response with, so that an easy prompt "
    "alone does not favor it?",
    "Each row belongs to one prompt. Keep the dimension that you average over.",
)
group_advantages.mistakes = {
    "another_small_number": (
        "You do not add 1e-4 to the standard deviation itself. This matters for a "
        "group whose rewards are all equal.",
        if_divided(lambda r: (r - row_mean(r)) / row_std(r)),
        if_divided(lambda r: (r - row_mean(r)) / row_std(r) + 1e-4),
        if_divided(lambda r: (r - row_mean(r)) / (row_std(r) + 1e-8)),
        if_divided(lambda r: (r - row_mean(r)) / (row_std(r) ** 2 + 1e-4).sqrt()),
    ),
    "biased": (
        "Your standard deviation divides by n. To make it unbiased, divide by n − 1.",
        if_divided(
            lambda r: (r - row_mean(r)) / (r.std(1, keepdim=True, correction=0) + 1e-4)
        ),
    ),
    "of_the_batch": (
        "You use the whole batch, so every response to an easy prompt would look "
        "good. Compare each response only with its own group.",
        lambda r, divide: (r - r.mean()) / (row_std(r) + 1e-4 if divide else 1),
        lambda r, divide: (r - r.mean()) / (r.std() + 1e-4 if divide else 1),
        if_divided(lambda r: (r - row_mean(r)) / (r.std() + 1e-4)),
    ),
    "parentheses": (
        "You divide only the mean or only the reward. Divide the difference between "
        "the two. Check the parentheses.",
        if_divided(lambda r: r - row_mean(r) / (row_std(r) + 1e-4)),
        if_divided(lambda r: r / (row_std(r) + 1e-4) - row_mean(r)),
    ),
}
group_advantages.alternatives = [row_by_row]


@SET.exercise("Best of n", 2, 15)
def best_of_n(probabilities, n):
    """Return each response's probability of being the best of n draws: (N,), from worst
    to best → (N,).

    The responses are ordered by their rewards, which are all different. Response y is
    the best draw if all n draws score at most as high as y, but not all of them score
    lower. The probability of this event is F(y)ⁿ − F(y−)ⁿ.
    """
    at_most = probabilities.cumsum(0)
    return at_most**n - (at_most - probabilities) ** n


@best_of_n.inputs
def _(dice):
    return normal(dice, pick(dice, range(4, 8))).softmax(0), pick(dice, (2, 3, 5))


def by_differences(probabilities, n):
    powers = probabilities.cumsum(0) ** n
    return torch.diff(powers, prepend=powers.new_zeros(1))


best_of_n.hints = (
    "When is the worst of all responses the best of n draws?",
    "F(y) adds up the probabilities of y and of all worse responses. What does "
    "F(y−) add up?",
)
best_of_n.mistakes = {
    "power_of_each": (
        "You raise each probability to a power: all n draws would have to be y. Some "
        "draws may score lower.",
        lambda p, n: p**n,
        lambda p, n: p**n / (p**n).sum(),
    ),
    "one_draw_times_n": (
        "You add one probability for each draw. A case in which y is drawn more than "
        "once then counts several times.",
        lambda p, n: n * p * p.cumsum(0) ** (n - 1),
    ),
    "drawn_once": (
        "You return the probability that y is drawn at all in n draws. For y to be "
        "*kept*, no draw may be better.",
        lambda p, n: 1 - (1 - p) ** n,
    ),
    "worst_response": (
        "Your result for the worst response is wrong. Its F(y−) is 0, and its F(y) is "
        "its own probability. Raise both to the power n.",
        lambda p, n: p.cumsum(0) ** n - p.cumsum(0).roll(1) ** n,
        lambda p, n: torch.cat([p[:1], (p.cumsum(0) ** n).diff()]),
        lambda p, n: torch.cat([0 * p[:1], (p.cumsum(0) ** n).diff()]),
        lambda p, n: (p.cumsum(0) ** n).diff(),
    ),
}
best_of_n.alternatives = [by_differences]


@SET.exercise("DPO's loss", 2, 15, gradient=True)
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """Return DPO's loss for pairs, from log-probabilities: four (B,) → one number.

    It is notebook 01's pairwise loss, with the implied reward β (log π − log π_ref)
    as the score, averaged over pairs. The reference does not learn: detach its
    log-probabilities.
    """
    implied = beta * (chosen - ref_chosen.detach())
    against = beta * (rejected - ref_rejected.detach())
    return -logsigmoid(implied - against).mean()


@dpo_loss.inputs
def _(dice):
    b, scale = pick(dice, range(3, 7)), pick(dice, (1, 10, 30))
    return *(-scale * normal(dice, 4, b).abs()), pick(dice, (0.05, 0.1, 0.5))


def by_softplus(chosen, rejected, ref_chosen, ref_rejected, beta):
    wanted, unwanted = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    return torch.nn.functional.softplus(beta * (unwanted - wanted)).mean()


def detached(loss):
    """Return a mistake in which the reference does not learn."""
    return lambda c, r, ref_c, ref_r, beta: loss(
        c, r, ref_c.detach(), ref_r.detach(), beta
    )


dpo_loss.hints = (
    "Start from the pairwise loss of notebook 01. What replaces a score?",
    "Compute both implied rewards, each from its answer's two log-probabilities.",
)
dpo_loss.mistakes = {
    "no_reference": (
        "The reference is missing: nothing keeps the policy near the reference.",
        lambda c, r, ref_c, ref_r, beta: -logsigmoid(beta * (c - r)).mean(),
    ),
    "another_beta": (
        "β is not a factor of each whole log-ratio, inside the sigmoid.",
        detached(lambda c, r, c0, r0, b: -b * logsigmoid(c - r - c0 + r0).mean()),
        detached(lambda c, r, c0, r0, b: -logsigmoid(b * (c - r) - c0 + r0).mean()),
        detached(lambda c, r, c0, r0, b: -logsigmoid(c - r - b * (c0 - r0)).mean()),
    ),
    "averaged_too_early": (
        "You average probabilities, or you average before the logarithm. Compute a "
        "loss for each pair, and then take the mean.",
        detached(lambda c, r, c0, r0, b: -(b * (c - r - c0 + r0)).sigmoid().mean()),
        detached(lambda c, r, c0, r0, b: -logsigmoid(b * (c - r - c0 + r0).mean())),
    ),
    "each_answer_alone": (
        "You apply a sigmoid to each answer's implied reward. Apply a sigmoid only to "
        "the *difference* of the implied rewards.",
        detached(
            lambda c, r, c0, r0, b: (
                logsigmoid(b * (r - r0)) - logsigmoid(b * (c - c0))
            ).mean()
        ),
    ),
}
dpo_loss.alternatives = [by_softplus]


@SET.exercise("An engine that samples", 2, 15, gradient=("logprobs",))
def off_policy_loss(logprobs, engine, mask, advantages, most):
    """Return REINFORCE's loss on responses that another policy sampled → one number.

    `logprobs` (log π of the policy) and `engine` (log q of the sampler) are (B, T),
    like the bool `mask`; `advantages` is (B,). π and q of a response are products over
    its real tokens. The weight is π/q, capped at `most`, and it has no
    gradient. For each response, compute −weight × advantage × log π of the whole
    response. The loss is the mean over responses.
    """
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.inputs
def _(dice):
    b, t = pick(dice, (4, 5)), pick(dice, (6, 7))
    logprobs, mask = -normal(dice, b, t).abs(), ragged(dice, b, t).bool()
    engine = logprobs + 0.4 * normal(dice, b, t)
    return logprobs, engine, mask, normal(dice, b), pick(dice, (0.8, 1.5, 3.0))


def response_by_response(logprobs, engine, mask, advantages, most):
    total = 0.0
    for logp, sampled, real, advantage in zip(logprobs, engine, mask, advantages):
        logp, sampled = logp[real], sampled[real]
        weight = (logp - sampled).detach().sum().exp().clamp(max=most)
        total = total - weight * advantage * sum(logp)
    return total / len(logprobs)


def weighted(weight):
    """Return a mistake with another weight, weight(log-ratio, mask, most)."""

    def wrong(logprobs, engine, mask, advantages, most):
        log_ratio = (logprobs.detach() - engine) * mask
        response = (logprobs * mask).sum(1)
        return -(weight(log_ratio, mask, most) * advantages * response).mean()

    return wrong


def per_token(logprobs, engine, mask, advantages, most):
    weight = (logprobs - engine).exp().clamp(max=most).detach()
    return -((weight * logprobs * mask).sum(1) * advantages).mean()


def product_limited(logprobs, engine, mask, advantages, most):
    weight = ((logprobs - engine) * mask).sum(1).exp().detach()
    limited = (weight * advantages).clamp(max=most)
    return -(limited * (logprobs * mask).sum(1)).mean()


off_policy_loss.hints = (
    "Given each token's log-probability, what is the log-probability of the whole "
    "response?",
    "A response has one weight. Compute two sums first, then the ratio of "
    "probabilities; then apply the limit.",
)
off_policy_loss.mistakes = {
    "weight_per_token": (
        "You give each token its own weight. A *response* has one weight.",
        per_token,
    ),
    "averaged_over_tokens": (
        "You average over a response's tokens. π and q of a response are products over "
        "its tokens, so their logarithms are sums.",
        weighted(lambda d, mask, most: (d.sum(1) / mask.sum(1)).exp().clamp(max=most)),
        weighted(lambda d, mask, most: d.sum(1).exp().clamp(max=most) / mask.sum(1)),
    ),
    "another_limit": (
        "You do not limit the weight itself from above to `most`. Keep smaller weights "
        "and all responses, and do not limit the logarithm or the product.",
        weighted(lambda d, mask, most: d.sum(1).exp().clamp(1 / most, most)),
        weighted(lambda d, mask, most: d.sum(1).exp().clamp(min=most)),
        weighted(lambda d, mask, most: d.sum(1).clamp(max=most).exp()),
        weighted(lambda d, mask, most: d.sum(1).exp() * (d.sum(1).exp() <= most)),
        product_limited,
    ),
    "upside_down": (
        "Your weight is q/π. A response that the engine samples too *often* must get a "
        "smaller weight.",
        weighted(lambda d, mask, most: (-d.sum(1)).exp().clamp(max=most)),
    ),
}
off_policy_loss.alternatives = [response_by_response]
