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
        "The sum of the others is the whole sum without one's own. How many are they?",
    ),
)
def leave_one_out(rewards):
    """Each reward minus the mean of the others: (n,) → (n,).

    A baseline that holds a sample's own reward shrinks the gradient to 1 − 1/n of
    itself. This one does not.
    """
    n = len(rewards)
    return rewards - (rewards.sum() - rewards) / (n - 1)


@leave_one_out.inputs
def _(dice):
    n, scale = pick(dice, range(2, 7)), pick(dice, [0, 1, 1, 10])
    return (scale * normal(dice, n) + 2,)


@leave_one_out.mistake
def own_reward_included(rewards):
    """Each sample's own reward is in its baseline: the expected gradient is 1 − 1/n of
    the true one.
    """
    return rewards - rewards.mean()


@leave_one_out.mistake
def divided_by_n(rewards):
    """There are n − 1 others, not n."""
    return rewards - (rewards.sum() - rewards) / len(rewards)


@leave_one_out.mistake
def own_reward_not_subtracted(rewards):
    """These are only the baselines; each reward minus its own was asked for."""
    return (rewards.sum() - rewards) / (len(rewards) - 1)


@leave_one_out.mistake
def sum_of_the_others(rewards):
    """You subtract the *sum* of the others; their mean was asked for."""
    return rewards - (rewards.sum() - rewards)


@leave_one_out.mistake
def one_left_out_of_the_count_only(rewards):
    """Each sample's own reward is still in the sum: only the count leaves it out."""
    return rewards - rewards.sum() / (len(rewards) - 1)


@leave_one_out.mistake
def whitened(rewards):
    """You divide by a standard deviation as well; nothing of that was asked for."""
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
        "Write A for the last token and for the one before it. What do you need twice?",
        "Each advantage needs the next one: which token must come first in a loop?",
    ),
)
def gae(rewards, values, gamma, lam):
    """Advantages of one response: rewards (T,), values (T,) → (T,).

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}. After the last token there
    is nothing: V and A are 0.
    """
    advantages, running, following = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        running = delta + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages


@gae.inputs
def _(dice):
    t = pick(dice, range(3, 8))
    gamma, lam = pick(dice, [1.0, 0.9, 0.5]), pick(dice, [0.0, 0.5, 0.95, 1.0])
    return normal(dice, t), normal(dice, t), gamma, lam


def _backwards(deltas, discount):
    sums, running = torch.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        running = deltas[t] + discount * running
        sums[t] = running
    return sums


@gae.mistake
def forgot_the_next_value(rewards, values, gamma, lam):
    """δ lacks γ·V of the next token: without it the value of what follows is counted as
    a loss at every token.
    """
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] - values[t] + gamma * lam * running
        advantages[t] = running
    return advantages


@gae.mistake
def lambda_without_gamma(rewards, values, gamma, lam):
    """A_{t+1} is discounted by γ·λ, not only by λ. With γ = 1, the default, nobody
    notices.
    """
    advantages, running, following = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * following - values[t] + lam * running
        advantages[t], following = running, values[t]
    return advantages


@gae.mistake
def one_step_only(rewards, values, gamma, lam):
    """These are the δ: one step ahead, as if λ were 0."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    return rewards + gamma * following - values


@gae.mistake
def bootstraps_at_the_end(rewards, values, gamma, lam):
    """After the last token you go on with the last value. The response is over: nothing
    more is to be expected.
    """
    advantages, running, following = torch.zeros_like(rewards), 0.0, values[-1]
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages


@gae.mistake
def gamma_missing_at_the_value(rewards, values, gamma, lam):
    """In δ the next value comes without its γ. With γ = 1 nobody notices."""
    deltas = rewards + torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma * lam)


@gae.mistake
def gamma_for_gamma_lambda(rewards, values, gamma, lam):
    """A_{t+1} is discounted by γ·λ, not only by γ: yours works as if λ were 1."""
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma)


@gae.mistake
def returns(rewards, values, gamma, lam):
    """These are returns: the value of the token itself is not subtracted, or is added
    again at the end.
    """
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma * lam) + values


@gae.mistake
def previous_value(rewards, values, gamma, lam):
    """You use the value of the token *before*; δ looks at the next one."""
    before = torch.cat([values.new_zeros(1), values[:-1]])
    return _backwards(rewards + gamma * before - values, gamma * lam)


@gae.mistake
def values_of_the_loop_order(rewards, values, gamma, lam):
    """The advantages are right and in the order of the loop: turn them round."""
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    return _backwards(deltas, gamma * lam).flip(0)


@gae.mistake
def forwards(rewards, values, gamma, lam):
    """You go from the first token to the last. An advantage looks at what *follows*, so
    it must be the other way.
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
        "k1 is −log u. What has mean 0 and keeps k1 plus it from being negative?",
    ),
)
def kl_estimates(logprobs, ref_logprobs):
    """k1, k2 and k3 of samples from the policy: two (N,) → three (N,).

    Of the same samples: k1 is unbiased and noisy, k2 is half its square, k3 is k1 plus
    something whose mean is 0, which makes it never negative.
    """
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.inputs
def _(dice):
    n = pick(dice, range(4, 10))
    logprobs, ref_logprobs = -normal(dice, 2, n).abs()
    ref_logprobs[0] = logprobs[0]  # where all three are 0
    return logprobs, ref_logprobs


@kl_estimates.mistake
def ratio_upside_down(logprobs, ref_logprobs):
    """The ratio is upside down. Samples come from the policy, so u is reference over
    policy; this would estimate the other KL, with samples from the wrong model.
    """
    log_ratio = logprobs - ref_logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.mistake
def k3_with_the_wrong_sign(logprobs, ref_logprobs):
    """One part of your k3 has the wrong sign: k3 is k1 plus something with mean 0."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 + log_ratio


@kl_estimates.mistake
def k2_without_the_half(logprobs, ref_logprobs):
    """k2 lacks its ½: it would be twice the KL even for tiny differences."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.mistake
def k3_without_minus_one(logprobs, ref_logprobs):
    """k3 lacks its −1: where both models agree it must be 0."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - log_ratio


@kl_estimates.mistake
def k3_without_k1(logprobs, ref_logprobs):
    """Your k3 is only the part with mean 0; k1 is missing from it."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1


@kl_estimates.mistake
def k3_of_the_other_ratio(logprobs, ref_logprobs):
    """Your k3 has the ratio upside down: u is reference over policy there as well."""
    k1 = logprobs - ref_logprobs
    return k1, k1**2 / 2, k1.exp() - 1 - k1


@kl_estimates.mistake
def k1_with_the_wrong_sign(logprobs, ref_logprobs):
    """Your k1 has the wrong sign: its mean must be positive for samples of the
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
    """These are means over the samples; each sample's own estimate was asked for."""
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
        "The constant is the same for all responses: torch has a function for that.",
    ),
)
def optimum(ref_logprobs, rewards, beta):
    """Log-probabilities of the best policy over N responses: two (N,) → (N,).

    Of all policies, π* ∝ π_ref · exp(r / β) has the largest E[r] − β·KL. What happens
    to it when β is huge, and when β is tiny? The result must be finite even for
    β = 0.001.
    """
    return (ref_logprobs + rewards / beta).log_softmax(0)


optimum.reply = (
    "A huge β makes r / β vanish: the optimum is the reference. A tiny β leaves only "
    "the response with the largest reward, if the reference can write it."
)


@optimum.inputs
def _(dice):
    n, beta = pick(dice, range(4, 9)), pick(dice, [0.001, 0.5, 2.0, 10.0])
    return normal(dice, n).log_softmax(0), normal(dice, n), beta


@optimum.mistake
def times_beta(ref_logprobs, rewards, beta):
    """The reward is divided by β: the higher β is, the less the reward may move."""
    return (ref_logprobs + rewards * beta).log_softmax(0)


@optimum.mistake
def not_normalised(ref_logprobs, rewards, beta):
    """As probabilities these do not sum to 1: the constant is missing."""
    return ref_logprobs + rewards / beta


@optimum.mistake
def without_the_reference(ref_logprobs, rewards, beta):
    """The reference is missing: this is the optimum for entropy, not for KL to the
    reference.
    """
    return (rewards / beta).log_softmax(0)


@optimum.mistake
def probabilities(ref_logprobs, rewards, beta):
    """These are probabilities: their logarithms were asked for."""
    return (ref_logprobs + rewards / beta).softmax(0)


@optimum.mistake
def reference_scaled_too(ref_logprobs, rewards, beta):
    """β divides the reference as well. Only the reward is measured in units of β."""
    return ((ref_logprobs + rewards) / beta).log_softmax(0)


@optimum.mistake
def divided_by_the_sum(ref_logprobs, rewards, beta):
    """You divide logarithms by their sum. Probabilities are divided by theirs, so from
    logarithms something is subtracted.
    """
    logits = ref_logprobs + rewards / beta
    return logits / logits.sum()


@optimum.mistake
def sum_subtracted(ref_logprobs, rewards, beta):
    """You subtract the sum of the logarithms, and it must be the logarithm of a sum."""
    logits = ref_logprobs + rewards / beta
    return logits - logits.sum()


@optimum.mistake
def reference_as_a_probability(ref_logprobs, rewards, beta):
    """You add a probability of the reference to a reward: add its logarithm."""
    return (ref_logprobs.exp() + rewards / beta).log_softmax(0)


@optimum.alternative
def by_hand(ref_logprobs, rewards, beta):
    logits = ref_logprobs + rewards / beta
    return logits - logits.max() - (logits - logits.max()).exp().sum().log()


@optimum.mistake
def overflows(ref_logprobs, rewards, beta):
    """The formula is right, and exp(r / β) is too large for a number when β is tiny.
    Stay with logarithms.
    """
    weights = ref_logprobs.exp() * (rewards / beta).exp()
    return (weights / weights.sum()).log()
