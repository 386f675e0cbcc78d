"""Exercises of notebook 02."""

import torch

from engine import Set, normal

SET = Set("02_why_ppo", "Why PPO looks as it does")
check = SET.check


@SET.exercise(
    "Leave one out", 1, 10, "The sum of the others is the whole sum without one's own."
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
    return (normal(dice, 5) + 2,)


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


@leave_one_out.alternative
def stretched(rewards):
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


@SET.exercise(
    "Generalised advantage estimation",
    2,
    20,
    "Go from the last token to the first; what follows the last one is 0.",
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
    return normal(dice, 6), normal(dice, 6), 0.9, 0.8


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
    """A_{t+1} is discounted by γ·λ, not by λ alone. With γ = 1, the default, nobody
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
    "With u = π_ref / π: k1 = −log u, and u − 1 has mean 0.",
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
    return -normal(dice, 8).abs(), -normal(dice, 8).abs()


@kl_estimates.mistake
def ratio_upside_down(logprobs, ref_logprobs):
    """The ratio is upside down. Samples come from the policy, so u is reference over
    policy; this would estimate the other KL, with samples from the wrong model.
    """
    log_ratio = logprobs - ref_logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.mistake
def k3_with_the_wrong_sign(logprobs, ref_logprobs):
    """k3 has +log u where −log u is k1: it is (u − 1) − log u."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 + log_ratio


@kl_estimates.mistake
def k2_without_the_half(logprobs, ref_logprobs):
    """k2 lacks its ½: it would be twice the KL even for tiny differences."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.alternative
def with_expm1(logprobs, ref_logprobs):
    k1 = logprobs - ref_logprobs
    return k1, 0.5 * k1 * k1, torch.expm1(-k1) + k1


@SET.exercise(
    "The optimum",
    2,
    15,
    "log π* = log π_ref + r/β − log Z, and Z makes the probabilities sum to 1.",
)
def optimum(ref_logprobs, rewards, beta):
    """Log-probabilities of the best policy over N responses: two (N,) → (N,).

    Of all policies, π* ∝ π_ref · exp(r / β) has the largest E[r] − β·KL. What becomes
    of it when β is huge, or tiny?
    """
    return (ref_logprobs + rewards / beta).log_softmax(0)


@optimum.inputs
def _(dice):
    return normal(dice, 7).log_softmax(0), normal(dice, 7), 0.5


@optimum.mistake
def times_beta(ref_logprobs, rewards, beta):
    """The reward is divided by β: the dearer KL is, the less the reward may move."""
    return (ref_logprobs + rewards * beta).log_softmax(0)


@optimum.mistake
def not_normalised(ref_logprobs, rewards, beta):
    """These do not sum to 1: subtract the logarithm of their sum."""
    return ref_logprobs + rewards / beta


@optimum.mistake
def without_the_reference(ref_logprobs, rewards, beta):
    """The reference is missing: this is the optimum for entropy, not for KL to the
    reference.
    """
    return (rewards / beta).log_softmax(0)


@optimum.alternative
def by_hand(ref_logprobs, rewards, beta):
    weights = ref_logprobs.exp() * (rewards / beta).exp()
    return (weights / weights.sum()).log()
