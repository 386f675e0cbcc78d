"""Exercises of notebook 02."""

import torch

from engine import Set, normal, pick

SET = Set("02_why_ppo", "Why PPO looks as it does")
check = SET.check


@SET.exercise(
    "Leave one out",
    1,
    10,
    (
        "Take three rewards, 0, 3 and 6, and compute the three baselines by hand.",
        "The sum of the others is the total minus the sample's own. How many are they?",
    ),
)
def leave_one_out(rewards):
    """Return each reward minus the mean of the others: (n,) → (n,).

    A baseline that contains a sample's own reward shrinks the gradient to 1 − 1/n of
    itself. The mean of the others does not.
    """
    n = len(rewards)
    return rewards - (rewards.sum() - rewards) / (n - 1)


@leave_one_out.inputs
def _(generator):
    n, scale = pick(generator, range(2, 7)), pick(generator, [0, 1, 1, 10])
    rewards = scale * normal(generator, n) + 2
    return (pick(generator, (rewards, rewards.round())),)  # some may be equal


@leave_one_out.mistake
def own_reward_included(rewards):
    """Each sample's own reward is in its baseline: the expected gradient is 1 − 1/n of
    the true one.
    """
    return rewards - rewards.mean()


@leave_one_out.mistake
def divided_by_n(rewards):
    """There are n − 1 other samples, not n."""
    return rewards - (rewards.sum() - rewards) / len(rewards)


@leave_one_out.mistake
def own_reward_not_subtracted(rewards):
    """You return only the baselines; return each reward minus its baseline."""
    return (rewards.sum() - rewards) / (len(rewards) - 1)


@leave_one_out.mistake
def sum_of_the_others(rewards):
    """You subtract the *sum* of the others; subtract their mean."""
    return rewards - (rewards.sum() - rewards)


@leave_one_out.mistake
def one_left_out_of_the_count_only(rewards):
    """Each sample's own reward is still in your sum; only your count leaves it out."""
    return rewards - rewards.sum() / (len(rewards) - 1)


@leave_one_out.mistake
def whitened(rewards):
    """You also divide by a standard deviation; the exercise does not ask for it."""
    n = len(rewards)
    return (rewards - (rewards.sum() - rewards) / (n - 1)) / (rewards.std() + 1e-8)


@leave_one_out.alternative
def stretched(rewards):
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


@SET.exercise(
    "Generalized advantage estimation",
    2,
    20,
    (
        "Write A for the last two tokens. Which quantity do you need twice?",
        "Each advantage needs the next one: which token must come first in a loop?",
    ),
)
def gae(rewards, values, gamma, lam):
    """Return the advantages of one response: rewards (T,), values (T,) → (T,).

    Use δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}. After the last token
    the response is over: V and A are 0.
    """
    advantages, running, following = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        running = delta + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages


@gae.inputs
def _(generator):
    t = pick(generator, range(3, 8))
    gamma, lam = (
        pick(generator, [1.0, 0.9, 0.5]),
        pick(generator, [0.0, 0.5, 0.95, 1.0]),
    )
    return normal(generator, t), normal(generator, t), gamma, lam


def _backwards(deltas, discount):
    sums, running = torch.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        running = deltas[t] + discount * running
        sums[t] = running
    return sums


@gae.mistake
def forgot_the_next_value(rewards, values, gamma, lam):
    """Your δ lacks γ·V of the next token: without this term every token loses the value
    of the tokens that follow.
    """
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] - values[t] + gamma * lam * running
        advantages[t] = running
    return advantages


@gae.mistake
def lambda_without_gamma(rewards, values, gamma, lam):
    """A_{t+1} is discounted by γ·λ, not only by λ. With γ = 1, the default, the mistake
    has no effect.
    """
    advantages, running, following = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * following - values[t] + lam * running
        advantages[t], following = running, values[t]
    return advantages


@gae.mistake
def one_step_only(rewards, values, gamma, lam):
    """You return the δ: these look one step ahead, as if λ were 0."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    return rewards + gamma * following - values


@gae.mistake
def bootstraps_at_the_end(rewards, values, gamma, lam):
    """After the last token you continue with the last value. The response is over: the
    value is 0.
    """
    advantages, running, following = torch.zeros_like(rewards), 0.0, values[-1]
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages


@gae.mistake
def gamma_missing_at_the_value(rewards, values, gamma, lam):
    """Your δ lacks the γ of the next value. With γ = 1 the mistake has no effect."""
    deltas = rewards + torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma * lam)


@gae.mistake
def gamma_for_gamma_lambda(rewards, values, gamma, lam):
    """A_{t+1} is discounted by γ·λ, not only by γ: your code works as if λ were 1."""
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma)


@gae.mistake
def returns(rewards, values, gamma, lam):
    """You return returns: you do not subtract the token's own value, or you add it
    again at the end.
    """
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma * lam) + values


@gae.mistake
def previous_value(rewards, values, gamma, lam):
    """You use the value of the *previous* token; δ uses the value of the next one."""
    before = torch.cat([values.new_zeros(1), values[:-1]])
    return _backwards(rewards + gamma * before - values, gamma * lam)


@gae.mistake
def values_of_the_loop_order(rewards, values, gamma, lam):
    """The advantages are right, but in the order of your loop: reverse them."""
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma * lam).flip(0)


@gae.mistake
def forwards(rewards, values, gamma, lam):
    """You loop from the first token to the last. An advantage depends on the tokens
    that *follow*, so loop from the last to the first.
    """
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in range(len(rewards)):
        running = deltas[t] + gamma * lam * running
        advantages[t] = running
    return advantages


@gae.alternative
def double_sum(rewards, values, gamma, lam):
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    n = len(rewards)
    return torch.stack(
        [
            sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n))
            for t in range(n)
        ]
    )


@SET.exercise(
    "Three estimates of KL",
    2,
    15,
    (
        "Write u = π_ref / π. What is the mean of u over samples from π?",
        "k1 is −log u. Which term with mean 0 do you add so that k1 is never negative?",
    ),
)
def kl_estimates(logprobs, ref_logprobs):
    """Return k1, k2 and k3 of samples from the policy: two (N,) → three (N,).

    All three use the same samples: k1 is unbiased and noisy, k2 is half the square of
    k1, and k3 is k1 plus a term whose mean is 0, so that k3 is never negative.
    """
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.inputs
def _(generator):
    n = pick(generator, range(4, 10))
    logprobs, ref_logprobs = -normal(generator, 2, n).abs()
    ref_logprobs[0] = logprobs[0]  # here all three estimates are 0
    return logprobs, ref_logprobs


@kl_estimates.mistake
def ratio_upside_down(logprobs, ref_logprobs):
    """Your ratio is inverted. Samples come from the policy, so u is reference over
    policy; your ratio estimates the other KL, with samples from the wrong model.
    """
    log_ratio = logprobs - ref_logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.mistake
def k3_with_the_wrong_sign(logprobs, ref_logprobs):
    """One part of your k3 has the wrong sign: k3 is k1 plus a term with mean 0."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 + log_ratio


@kl_estimates.mistake
def k2_without_the_half(logprobs, ref_logprobs):
    """Your k2 lacks its ½: it is twice the KL even for tiny differences."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.mistake
def k3_without_minus_one(logprobs, ref_logprobs):
    """Your k3 lacks its −1: k3 must be 0 where both models agree."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - log_ratio


@kl_estimates.mistake
def k3_without_k1(logprobs, ref_logprobs):
    """Your k3 is only the term with mean 0; add k1 to it."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1


@kl_estimates.mistake
def k3_of_the_other_ratio(logprobs, ref_logprobs):
    """Your k3 inverts the ratio: u is reference over policy in k3 as well."""
    k1 = logprobs - ref_logprobs
    return k1, k1**2 / 2, k1.exp() - 1 - k1


@kl_estimates.mistake
def k1_with_the_wrong_sign(logprobs, ref_logprobs):
    """Your k1 has the wrong sign: its mean must be positive for samples from the
    policy.
    """
    k1 = logprobs - ref_logprobs
    return -k1, k1**2 / 2, torch.expm1(-k1) + k1


@kl_estimates.mistake
def k2_is_absolute(logprobs, ref_logprobs):
    """Your k2 is not squared."""
    k1 = logprobs - ref_logprobs
    return k1, k1.abs() / 2, torch.expm1(-k1) + k1


@kl_estimates.mistake
def means(logprobs, ref_logprobs):
    """You return means over the samples; return one estimate per sample."""
    return tuple(x.mean() for x in with_expm1(logprobs, ref_logprobs))


@kl_estimates.alternative
def with_expm1(logprobs, ref_logprobs):
    k1 = logprobs - ref_logprobs
    return k1, 0.5 * k1 * k1, torch.expm1(-k1) + k1


@SET.exercise(
    "The optimum",
    2,
    15,
    (
        "Take the logarithm of the formula. Which number makes it a distribution?",
        "The constant is the same for all responses: torch has a function for it.",
    ),
)
def optimum(ref_logprobs, rewards, beta):
    """Return the best policy's log-probabilities of N responses: two (N,) → (N,).

    Of all policies, π* ∝ π_ref · exp(r / β) has the largest E[r] − β·KL. What happens
    to π* when β is huge, and when β is tiny? The result must be finite even for
    β = 0.001.
    """
    return (ref_logprobs + rewards / beta).log_softmax(0)


optimum.reply = (
    "A huge β makes r / β vanish: the optimum is the reference. A tiny β leaves only "
    "the response with the largest reward, if the reference can write it."
)


@optimum.inputs
def _(generator):
    n, beta = pick(generator, range(4, 9)), pick(generator, [0.001, 0.5, 2.0, 10.0])
    return normal(generator, n).log_softmax(0), normal(generator, n), beta


@optimum.mistake
def times_beta(ref_logprobs, rewards, beta):
    """Divide the reward by β: the higher β is, the less the reward moves the policy."""
    return (ref_logprobs + rewards * beta).log_softmax(0)


@optimum.mistake
def not_normalised(ref_logprobs, rewards, beta):
    """Your probabilities do not sum to 1: the constant is missing."""
    return ref_logprobs + rewards / beta


@optimum.mistake
def without_the_reference(ref_logprobs, rewards, beta):
    """The reference is missing: you return the optimum for entropy, not for KL to the
    reference.
    """
    return (rewards / beta).log_softmax(0)


@optimum.mistake
def probabilities(ref_logprobs, rewards, beta):
    """You return probabilities; return their logarithms."""
    return (ref_logprobs + rewards / beta).softmax(0)


@optimum.mistake
def reference_scaled_too(ref_logprobs, rewards, beta):
    """You divide the reference by β as well. Divide only the reward by β."""
    return ((ref_logprobs + rewards) / beta).log_softmax(0)


@optimum.mistake
def divided_by_the_sum(ref_logprobs, rewards, beta):
    """You divide logarithms by their sum. To normalize, divide probabilities by their
    sum, or subtract a constant from logarithms.
    """
    logits = ref_logprobs + rewards / beta
    return logits / logits.sum()


@optimum.mistake
def sum_subtracted(ref_logprobs, rewards, beta):
    """You subtract the sum of the logarithms; subtract the logarithm of a sum."""
    logits = ref_logprobs + rewards / beta
    return logits - logits.sum()


@optimum.mistake
def reference_as_a_probability(ref_logprobs, rewards, beta):
    """You add the reference's probability to the reward: add its logarithm instead."""
    return (ref_logprobs.exp() + rewards / beta).log_softmax(0)


@optimum.alternative
def by_hand(ref_logprobs, rewards, beta):
    logits = ref_logprobs + rewards / beta
    return logits - logits.max() - (logits - logits.max()).exp().sum().log()


@optimum.mistake
def overflows(ref_logprobs, rewards, beta):
    """The formula is right, but when β is tiny, exp(r / β) overflows or a share becomes
    0. Use logarithms throughout.
    """
    weights = ref_logprobs.exp() * (rewards / beta).exp()
    return (weights / weights.sum()).log()
