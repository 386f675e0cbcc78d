"""Exercises of notebook 07."""

import torch
from torch.nn.functional import logsigmoid

from engine import Set, normal

SET = Set(
    "07_after_ppo",
    "After PPO",
    "import torch\nfrom torch.nn.functional import logsigmoid",
)
check = SET.check


@SET.exercise("A group's advantages", 1, 10, "One row per prompt: mean over dim 1.")
def group_advantages(rewards, divide):
    """GRPO's advantages: rewards (P, G) of G responses to P prompts → (P, G).

    Each reward minus its *group's* mean; with `divide`, over the group's standard
    deviation plus 1e-4. Without, it is Dr. GRPO.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4) if divide else centred


@group_advantages.inputs
def _(dice):
    return normal(dice, 3, 4) + normal(dice, 3, 1), bool(dice.initial_seed() % 2)


@group_advantages.mistake
def over_the_batch(rewards, divide):
    """You compare with the whole batch: a response to an easy prompt would look good
    however it is. The group is the baseline, because its prompt is the same.
    """
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + 1e-4) if divide else centred


@group_advantages.mistake
def always_divided(rewards, divide):
    """You divide in either case. Without the division a group that is nearly equal
    keeps its small advantages, and β its meaning.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4)


@group_advantages.mistake
def across_prompts(rewards, divide):
    """You average over prompts (dim 0). A group is a row."""
    centred = rewards - rewards.mean(0, keepdim=True)
    return centred / (rewards.std(0, keepdim=True) + 1e-4) if divide else centred


@group_advantages.alternative
def row_by_row(rewards, divide):
    rows = []
    for row in rewards:
        rows.append((row - row.mean()) / (row.std() + 1e-4 if divide else 1.0))
    return torch.stack(rows)


@SET.exercise(
    "Best of n", 2, 15, "At most y: the probabilities of y and of all that score less."
)
def best_of_n(probabilities, n):
    """Probability to be the best of n draws: (N,), from worst to best → (N,).

    The responses are in the order of their rewards, all different. Response y is the
    best if all n draws score at most like it, but not all less: F(y)ⁿ − F(y−)ⁿ.
    """
    at_most = probabilities.cumsum(0)
    return at_most**n - (at_most - probabilities) ** n


@best_of_n.inputs
def _(dice):
    return normal(dice, 6).softmax(0), 3


@best_of_n.mistake
def drawn_once(probabilities, n):
    """That is the probability to be drawn at all among n. To be *kept* no better one
    may be among them.
    """
    return 1 - (1 - probabilities) ** n


@best_of_n.mistake
def at_most_alone(probabilities, n):
    """F(y)ⁿ is P(the best is *at most* y); subtract P(it is less)."""
    return probabilities.cumsum(0) ** n


@best_of_n.mistake
def worst_of_n(probabilities, n):
    """That is the worst of n: you summed from the other end."""
    at_least = probabilities.flip(0).cumsum(0).flip(0)
    return at_least**n - (at_least - probabilities) ** n


@best_of_n.alternative
def by_differences(probabilities, n):
    powers = probabilities.cumsum(0) ** n
    return torch.diff(powers, prepend=powers.new_zeros(1))


@SET.exercise(
    "DPO's loss", 2, 15, "β (log π − log π_ref) stands where the reward was.", True
)
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """DPO's loss over pairs, from log-probabilities of answers: four (B,) → one.

    The pairwise loss of notebook 01 with the implied reward β (log π − log π_ref). The
    reference's log-probabilities are numbers.
    """
    implied = beta * (chosen - ref_chosen.detach())
    against = beta * (rejected - ref_rejected.detach())
    return -logsigmoid(implied - against).mean()


@dpo_loss.inputs
def _(dice):
    return *(-10 * normal(dice, 5).abs() for _ in range(4)), 0.1


@dpo_loss.mistake
def no_reference(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The reference is missing, and with it KL: nothing keeps the policy near it."""
    return -logsigmoid(beta * (chosen - rejected)).mean()


@dpo_loss.mistake
def no_beta(chosen, rejected, ref_chosen, ref_rejected, beta):
    """β is missing. It is the reward that one nat costs."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return -logsigmoid(margin).mean()


@dpo_loss.mistake
def wrong_way_round(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The sign is wrong: this makes the rejected answer likelier."""
    margin = rejected - ref_rejected.detach() - chosen + ref_chosen.detach()
    return -logsigmoid(beta * margin).mean()


@dpo_loss.mistake
def reference_learns(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The value is right, but gradient flows into the reference. Detach it."""
    margin = chosen - ref_chosen - rejected + ref_rejected
    return -logsigmoid(beta * margin).mean()


@dpo_loss.alternative
def by_softplus(chosen, rejected, ref_chosen, ref_rejected, beta):
    wanted, unwanted = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    return torch.nn.functional.softplus(beta * (unwanted - wanted)).mean()


@SET.exercise(
    "An engine that samples", 2, 15, "A response has one weight, not a token.", True
)
def off_policy_loss(logprobs, engine, mask, advantages, most):
    """REINFORCE on responses that another policy sampled → one number.

    logprobs, engine, mask (bool): (B, T), advantages: (B,). Each response counts π/q
    times, q being the engine, at most `most` times; its weight is a number without a
    gradient. The loss is the mean over responses of −weight × advantage × log π.
    """
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.inputs
def _(dice):
    logprobs, mask = -normal(dice, 4, 5).abs(), torch.ones(4, 5, dtype=torch.bool)
    mask[1, 3:] = mask[2, 4:] = False
    engine = logprobs.detach() + 0.4 * normal(dice, 4, 5)
    return logprobs, engine, mask, normal(dice, 4), 1.5


@off_policy_loss.mistake
def upside_down(logprobs, engine, mask, advantages, most):
    """The weight is q/π. What the engine sampled too *often* must count less: π/q."""
    response = (logprobs * mask).sum(1)
    weight = ((engine * mask).sum(1) - response).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def untruncated(logprobs, engine, mask, advantages, most):
    """No weight may exceed `most`. One response that the engine hardly ever samples
    would outweigh the rest of the batch.
    """
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def weight_learns(logprobs, engine, mask, advantages, most):
    """The value is right, but gradient flows through the weight. Detach it."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most)
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def padding_counts(logprobs, engine, mask, advantages, most):
    """Padding is part of your sums. Multiply by the mask before adding up."""
    response = logprobs.sum(1)
    weight = (response - engine.sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.alternative
def response_by_response(logprobs, engine, mask, advantages, most):
    total = 0.0
    for logp, sampled, real, advantage in zip(logprobs, engine, mask, advantages):
        ours, theirs = logp[real], sampled[real]
        weight = (ours - theirs).detach().sum().exp().clamp(max=most)
        total = total - weight * advantage * sum(ours)
    return total / len(logprobs)
