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


@SET.exercise(
    "A group's advantages",
    1,
    10,
    (
        "To what do you compare a response, so that an easy prompt earns nothing?",
        "A row is a prompt. Keep the dimension that you average over.",
    ),
)
def group_advantages(rewards, divide):
    """GRPO's advantages: rewards (P, G) of G responses to P prompts → (P, G).

    Each reward minus its *group's* mean; with `divide`, the result is divided by the
    group's unbiased standard deviation plus 1e-4. Without the division this is Dr.
    GRPO.
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-4) if divide else centered


@group_advantages.inputs
def _(dice):
    p, g = pick(dice, (2, 3)), pick(dice, (4, 5))
    rewards = pick(dice, (0.1, 1)) * normal(dice, p, g) + normal(dice, p, 1)
    rewards[0] = 1.0  # all responses of a prompt are equal
    return rewards, bool(dice.initial_seed() % 2)


@group_advantages.mistake
def over_the_batch(rewards, divide):
    """You compare with the whole batch: every response to an easy prompt would look
    good. The group is the baseline, because its prompt is the same.
    """
    centered = rewards - rewards.mean()
    return centered / (rewards.std() + 1e-4) if divide else centered


@group_advantages.mistake
def always_divided(rewards, divide):
    """You divide in both cases. Without the division a group of nearly equal rewards
    keeps its small advantages, and β keeps its meaning.
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-4)


@group_advantages.mistake
def across_prompts(rewards, divide):
    """You average over prompts (dim 0). A group is a row."""
    centered = rewards - rewards.mean(0, keepdim=True)
    return centered / (rewards.std(0, keepdim=True) + 1e-4) if divide else centered


@group_advantages.mistake
def never_divided(rewards, divide):
    """You never divide: use `divide`."""
    return rewards - rewards.mean(1, keepdim=True)


@group_advantages.mistake
def wrong_way_round(rewards, divide):
    """`divide` is reversed in your code."""
    return group_advantages.solution(rewards, not divide)


@group_advantages.mistake
def biased_std(rewards, divide):
    """Your standard deviation divides by n; the unbiased one divides by n − 1."""
    centered = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1, keepdim=True, correction=0)
    return centered / (std + 1e-4) if divide else centered


@group_advantages.mistake
def no_small_number(rewards, divide):
    """A group whose rewards are all equal divides by 0 (or nearly): 1e-4 is missing, or
    you use a different number.
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / rewards.std(1, keepdim=True) if divide else centered


@group_advantages.mistake
def smaller_number(rewards, divide):
    """Add 1e-4 to the standard deviation, and no other number."""
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-8) if divide else centered


@group_advantages.mistake
def by_the_variance(rewards, divide):
    """You divide by the variance. Divide by its square root."""
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.var(1, keepdim=True) + 1e-4) if divide else centered


@group_advantages.mistake
def small_number_in_the_root(rewards, divide):
    """You add 1e-4 inside the root. Add it to the standard deviation itself."""
    centered = rewards - rewards.mean(1, keepdim=True)
    std = (rewards.var(1, keepdim=True) + 1e-4).sqrt()
    return centered / std if divide else centered


@group_advantages.mistake
def std_of_the_batch(rewards, divide):
    """You divide by the standard deviation of the whole batch. Each group has
    its own.
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std() + 1e-4) if divide else centered


@group_advantages.mistake
def not_centered(rewards, divide):
    """You do not subtract the mean."""
    return (
        rewards / (rewards.std(1, keepdim=True) + 1e-4) if divide else rewards.clone()
    )


@group_advantages.mistake
def leave_one_out(rewards, divide):
    """You compare with the mean of the *other* responses, as in RLOO. GRPO's mean
    includes all responses.
    """
    n = rewards.shape[1]
    centered = (rewards - rewards.mean(1, keepdim=True)) * n / (n - 1)
    return centered / (rewards.std(1, keepdim=True) + 1e-4) if divide else centered


@group_advantages.alternative
def row_by_row(rewards, divide):
    rows = []
    for row in rewards:
        rows.append((row - row.mean()) / (row.std() + 1e-4 if divide else 1.0))
    return torch.stack(rows)


@SET.exercise(
    "Best of n",
    2,
    15,
    (
        "When is the worst response of all the best of n draws?",
        "F(y) adds the probabilities of y and of all worse responses. And F(y−)?",
    ),
)
def best_of_n(probabilities, n):
    """Probability of being the best of n draws: (N,), from worst to best → (N,).

    The responses are ordered by their rewards, which are all different. Response y is
    the best if all n draws score at most as high as y, but not all lower: F(y)ⁿ −
    F(y−)ⁿ.
    """
    at_most = probabilities.cumsum(0)
    return at_most**n - (at_most - probabilities) ** n


@best_of_n.inputs
def _(dice):
    return normal(dice, pick(dice, range(4, 8))).softmax(0), pick(dice, (2, 3, 5))


@best_of_n.mistake
def drawn_once(probabilities, n):
    """This is the probability of being drawn at all in n draws. For y to be *kept*, no
    draw may be better.
    """
    return 1 - (1 - probabilities) ** n


@best_of_n.mistake
def at_most_alone(probabilities, n):
    """F(y)ⁿ is P(the best is *at most* y). Subtract P(the best is lower)."""
    return probabilities.cumsum(0) ** n


@best_of_n.mistake
def worst_of_n(probabilities, n):
    """This is the worst of n: you summed from the other end."""
    at_least = probabilities.flip(0).cumsum(0).flip(0)
    return at_least**n - (at_least - probabilities) ** n


@best_of_n.mistake
def power_of_each(probabilities, n):
    """This is the probability that all n draws are y. The other draws may
    score lower.
    """
    return probabilities**n


@best_of_n.mistake
def powers_normalized(probabilities, n):
    """You sharpen the distribution. A response is kept for its *rank*, so the
    probabilities of worse responses must enter.
    """
    return probabilities**n / (probabilities**n).sum()


@best_of_n.mistake
def less_alone(probabilities, n):
    """This is the probability that all draws score lower than y."""
    return (probabilities.cumsum(0) - probabilities) ** n


@best_of_n.mistake
def one_draw_times_n(probabilities, n):
    """You let any of the n draws be y and the others score at most as high. This
    counts a case several times if y is drawn more than once.
    """
    return n * probabilities * probabilities.cumsum(0) ** (n - 1)


@best_of_n.mistake
def others_less(probabilities, n):
    """You count only cases with exactly one draw of y. y may be drawn more
    than once.
    """
    return n * probabilities * (probabilities.cumsum(0) - probabilities) ** (n - 1)


@best_of_n.mistake
def first_lost(probabilities, n):
    """The worst response is missing, or has probability 0. Nothing scores lower, so its
    F(y−) is 0.
    """
    powers = probabilities.cumsum(0) ** n
    return torch.cat([powers.new_zeros(1), powers.diff()])


@best_of_n.mistake
def scaled(probabilities, n):
    """You multiply by n. Draws do not add up: only the best one counts."""
    return probabilities * n


@best_of_n.mistake
def unchanged(probabilities, n):
    """These are the probabilities of a single draw."""
    return probabilities.clone()


@best_of_n.alternative
def by_differences(probabilities, n):
    powers = probabilities.cumsum(0) ** n
    return torch.diff(powers, prepend=powers.new_zeros(1))


@SET.exercise(
    "DPO's loss",
    2,
    15,
    (
        "Start from the pairwise loss of notebook 01. What replaces a score?",
        "Compute both implied rewards, each from its own two log-probabilities.",
    ),
    True,
)
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """Return DPO's loss of pairs from log-probabilities: four (B,) → one number.

    The pairwise loss of notebook 01 with the implied reward β (log π − log π_ref),
    averaged over pairs. The reference does not learn: detach its log-probabilities.
    """
    implied = beta * (chosen - ref_chosen.detach())
    against = beta * (rejected - ref_rejected.detach())
    return -logsigmoid(implied - against).mean()


@dpo_loss.inputs
def _(dice):
    b, scale = pick(dice, range(3, 7)), pick(dice, (1, 10, 30))
    return *(-scale * normal(dice, 4, b).abs()), pick(dice, (0.05, 0.1, 0.5))


@dpo_loss.mistake
def no_reference(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The reference is missing, and with it KL: nothing keeps the policy near the
    reference.
    """
    return -logsigmoid(beta * (chosen - rejected)).mean()


@dpo_loss.mistake
def no_beta(chosen, rejected, ref_chosen, ref_rejected, beta):
    """β is missing. β is the reward that one nat costs."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return -logsigmoid(margin).mean()


@dpo_loss.mistake
def wrong_way_round(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The sign is wrong: this makes the rejected answer more likely."""
    margin = rejected - ref_rejected.detach() - chosen + ref_chosen.detach()
    return -logsigmoid(beta * margin).mean()


@dpo_loss.mistake
def reference_learns(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The value is right, but gradient flows into the reference. Detach its
    log-probabilities.
    """
    margin = chosen - ref_chosen - rejected + ref_rejected
    return -logsigmoid(beta * margin).mean()


@dpo_loss.mistake
def summed(chosen, rejected, ref_chosen, ref_rejected, beta):
    """You add up the pairs, so the step grows with the batch. Take the mean."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return -logsigmoid(beta * margin).sum()


@dpo_loss.mistake
def divided_by_beta(chosen, rejected, ref_chosen, ref_rejected, beta):
    """You divide by β. The implied reward is β *times* the log-ratio."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return -logsigmoid(margin / beta).mean()


@dpo_loss.mistake
def beta_outside(chosen, rejected, ref_chosen, ref_rejected, beta):
    """Your β is outside the sigmoid. It belongs to the implied reward, inside."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return -beta * logsigmoid(margin).mean()


@dpo_loss.mistake
def no_logarithm(chosen, rejected, ref_chosen, ref_rejected, beta):
    """This is minus a probability: its logarithm is missing."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return -torch.sigmoid(beta * margin).mean()


@dpo_loss.mistake
def references_added(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The reference has the wrong sign, or each answer uses the other answer's
    reference. The implied reward is a *difference* from the reference's own value.
    """
    margin = chosen + ref_chosen.detach() - rejected - ref_rejected.detach()
    return -logsigmoid(beta * margin).mean()


@dpo_loss.mistake
def positive(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The minus sign is missing: an optimizer would make these pairs less likely."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return logsigmoid(beta * margin).mean()


@dpo_loss.mistake
def mean_inside(chosen, rejected, ref_chosen, ref_rejected, beta):
    """You average the margins first. Compute a loss for each pair, and then take the
    mean.
    """
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return -logsigmoid(beta * margin.mean())


@dpo_loss.mistake
def each_answer_alone(chosen, rejected, ref_chosen, ref_rejected, beta):
    """Each answer goes through its own sigmoid. Only the *difference* of the implied
    rewards goes through one.
    """
    won, lost = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    return -(logsigmoid(beta * won) + logsigmoid(-beta * lost)).mean()


@dpo_loss.mistake
def ratio_of_logarithms(chosen, rejected, ref_chosen, ref_rejected, beta):
    """You divide log-probabilities by one another. Subtract them."""
    margin = chosen / ref_chosen.detach() - rejected / ref_rejected.detach()
    return -logsigmoid(beta * margin).mean()


@dpo_loss.mistake
def squared(chosen, rejected, ref_chosen, ref_rejected, beta):
    """This is the squared loss of IPO. DPO has a sigmoid."""
    margin = chosen - ref_chosen.detach() - rejected + ref_rejected.detach()
    return (margin - 1 / (2 * beta)).square().mean()


@dpo_loss.mistake
def rejected_left_out(chosen, rejected, ref_chosen, ref_rejected, beta):
    """The rejected answer is missing."""
    return -logsigmoid(beta * (chosen - ref_chosen.detach())).mean()


@dpo_loss.alternative
def by_softplus(chosen, rejected, ref_chosen, ref_rejected, beta):
    wanted, unwanted = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    return torch.nn.functional.softplus(beta * (unwanted - wanted)).mean()


@SET.exercise(
    "An engine that samples",
    2,
    15,
    (
        "Given each token's log-probability, what is the whole response's?",
        "A response has one weight: two sums first, then their ratio, then the limit.",
    ),
    ("logprobs",),
)
def off_policy_loss(logprobs, engine, mask, advantages, most):
    """REINFORCE on responses that another policy sampled → one number.

    `logprobs` (log π of the policy) and `engine` (log q of the sampler) are (B, T),
    like the bool `mask`; `advantages` is (B,). π and q of a response are products over
    its real tokens. Its weight is π/q, at most `most`, and has no gradient. The loss is
    the mean over responses of −weight × advantage × log π of the whole response.
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


@off_policy_loss.mistake
def upside_down(logprobs, engine, mask, advantages, most):
    """Your weight is q/π. A response that the engine samples too *often* must count
    less: use π/q.
    """
    response = (logprobs * mask).sum(1)
    weight = ((engine * mask).sum(1) - response).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def untruncated(logprobs, engine, mask, advantages, most):
    """No weight may exceed `most`. One response that the engine rarely samples would
    outweigh the rest of the batch.
    """
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def weight_learns(logprobs, engine, mask, advantages, most):
    """The value is right, but gradient flows through the weight. Detach the weight."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most)
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def padding_counts(logprobs, engine, mask, advantages, most):
    """Padding is part of your sums. Multiply by the mask before adding up."""
    response = logprobs.sum(1)
    weight = (response - engine.sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def no_weight(logprobs, engine, mask, advantages, most):
    """The weight is missing: the engine sampled these responses, not this policy."""
    return -(advantages * (logprobs * mask).sum(1)).mean()


@off_policy_loss.mistake
def wrong_sign(logprobs, engine, mask, advantages, most):
    """The sign is wrong: an optimizer *minimizes*."""
    return -off_policy_loss.solution(logprobs, engine, mask, advantages, most)


@off_policy_loss.mistake
def weight_per_token(logprobs, engine, mask, advantages, most):
    """Each token has its own weight in your code. A *response* has one weight."""
    weight = (logprobs - engine).exp().clamp(max=most).detach()
    return -((weight * logprobs * mask).sum(1) * advantages).mean()


@off_policy_loss.mistake
def clamped_from_below(logprobs, engine, mask, advantages, most):
    """`most` is an upper limit. You use it as a lower limit."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(min=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def limit_on_the_logarithm(logprobs, engine, mask, advantages, most):
    """You limit the logarithm of the weight. Limit the weight itself to `most`."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).clamp(max=most).exp().detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def logarithm_for_weight(logprobs, engine, mask, advantages, most):
    """Your weight is a difference of logarithms. π/q is its exponential."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def summed(logprobs, engine, mask, advantages, most):
    """You add up the responses. Take their mean."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).sum()


@off_policy_loss.mistake
def mean_over_tokens(logprobs, engine, mask, advantages, most):
    """You divide by the number of tokens. The mean is over responses."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).sum() / mask.sum()


@off_policy_loss.mistake
def mean_log_ratio(logprobs, engine, mask, advantages, most):
    """You average over a response's tokens (as GSPO does). Use the product."""
    response, n = (logprobs * mask).sum(1), mask.sum(1)
    weight = ((response - (engine * mask).sum(1)) / n).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.mistake
def mean_per_response(logprobs, engine, mask, advantages, most):
    """Your log π is an average over tokens. The log π of the whole response
    is a sum.
    """
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response / mask.sum(1)).mean()


@off_policy_loss.mistake
def normalized_weights(logprobs, engine, mask, advantages, most):
    """You divide by the sum of the weights. The mean is over responses."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).sum() / weight.sum()


@off_policy_loss.mistake
def log_of_the_engine(logprobs, engine, mask, advantages, most):
    """You use the engine's log-probability where the policy's should learn."""
    response, sampled = (logprobs * mask).sum(1), (engine * mask).sum(1)
    weight = (response - sampled).exp().clamp(max=most).detach()
    return -(weight * advantages * sampled).mean() + 0 * response.sum()


@off_policy_loss.mistake
def ratio_is_the_loss(logprobs, engine, mask, advantages, most):
    """log π is missing: the loss is weight × advantage × log π."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most)
    return -(weight * advantages).mean()


@off_policy_loss.mistake
def clipped_like_ppo(logprobs, engine, mask, advantages, most):
    """You also limit the weight from below. Cut only large weights."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(1 / most, most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.alternative
def response_by_response(logprobs, engine, mask, advantages, most):
    total = 0.0
    for logp, sampled, real, advantage in zip(logprobs, engine, mask, advantages):
        logp, sampled = logp[real], sampled[real]
        weight = (logp - sampled).detach().sum().exp().clamp(max=most)
        total = total - weight * advantage * sum(logp)
    return total / len(logprobs)
