"""Exercises of notebook 02."""

import torch

from engine import Set, normal, pick

SET = Set("02_why_ppo", "Why PPO looks as it does")
check = SET.check


@SET.exercise("Leave one out", 1, 10)
def leave_one_out(rewards):
    """Return each reward minus the mean of the other rewards: (n,) → (n,).

    If the baseline is the mean of all rewards, including the sample's own, the expected
    gradient is scaled by 1 − 1/n. The mean of the other rewards does not
    scale the gradient.
    """
    n = len(rewards)
    return rewards - (rewards.sum() - rewards) / (n - 1)


@leave_one_out.inputs
def _(generator):
    n, scale = pick(generator, range(2, 7)), pick(generator, [0, 1, 1, 10])
    rewards = scale * normal(generator, n) + 2
    return (pick(generator, (rewards, rewards.round())),)  # some may be equal


def baselines(rewards, of_others):
    """Return ``of_others(rewards without i)`` for each sample i."""
    others = [torch.cat([rewards[:i], rewards[i + 1 :]]) for i in range(len(rewards))]
    return torch.stack([of_others(x) for x in others])


leave_one_out.hints = (
    "Take three rewards, 0, 3 and 6, and compute the three baselines by hand.",
    "The sum of the other rewards is the total minus the sample's own reward. How "
    "many other samples are there?",
)
leave_one_out.mistakes = {
    "own_reward_included": (
        "Each sample's own reward is in its baseline: the expected gradient is not the "
        "true gradient.",
        lambda r: r - r.mean(),
        lambda r: r - r.sum() / (len(r) - 1),
        lambda r: (r - r.mean()) * (len(r) - 1) / len(r),
    ),
    "divided_by_n": (
        "You divide by n, but there are only n − 1 other samples.",
        lambda r: r - (r.sum() - r) / len(r),
    ),
    "own_reward_not_subtracted": (
        "You return only the baselines; return each reward minus its baseline.",
        lambda r: (r.sum() - r) / (len(r) - 1),
    ),
    "another_statistic": (
        "Your baseline is a median or an extreme of the other rewards; use their mean.",
        lambda r: r - baselines(r, torch.median),
        lambda r: r - baselines(r, torch.max),
    ),
    "some_of_the_others": (
        "Your baseline uses only some of the other rewards, or leaves out the same "
        "reward for all samples. Use all rewards except the sample's own.",
        lambda r: r - r.roll(1),
        lambda r: r - r[1:].mean(),
        lambda r: r - r[:-1].mean(),
    ),
}
leave_one_out.alternatives = [
    lambda rewards: (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)
]


@SET.exercise("Generalized advantage estimation", 2, 20)
def gae(rewards, values, gamma, lam):
    """Return the advantages of one response: rewards (T,), values (T,) → (T,).

    Use δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}. After the last token,
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


def double_sum(rewards, values, gamma, lam):
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    n = len(rewards)
    return torch.stack(
        [
            sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n))
            for t in range(n)
        ]
    )


def following(x):
    return torch.cat([x[1:], x.new_zeros(1)])


def discounted(deltas, discount):
    return gae.solution(deltas, torch.zeros_like(deltas), discount, 1.0)


def deltas(rewards, values, gamma):
    return rewards + gamma * following(values) - values


gae.hints = (
    "Write out A for the last two tokens. Which quantity do you need twice?",
    "Each advantage needs the next token's advantage. Which token must come first "
    "in a loop?",
)
gae.mistakes = {
    "wrong_delta": (
        "Your δ is wrong. It adds γ times the value of the *next* token and subtracts "
        "the token's own value, and it contains no λ.",
        lambda r, v, gamma, lam: discounted(r + following(v) - v, gamma * lam),
        lambda r, v, gamma, lam: discounted(
            r + gamma * lam * following(v) - v, gamma * lam
        ),
        lambda r, v, gamma, lam: discounted(r + gamma * following(v), gamma * lam),
        lambda r, v, gamma, lam: discounted(r + gamma * following(v) + v, gamma * lam),
        lambda r, v, gamma, lam: discounted(r + gamma * v - following(v), gamma * lam),
    ),
    "value_after_the_end": (
        "After the last token you continue with a value, the last or the first one. "
        "The response is over, so the value there is 0.",
        lambda r, v, gamma, lam: discounted(
            r + gamma * torch.cat([v[1:], v[-1:]]) - v, gamma * lam
        ),
        lambda r, v, gamma, lam: discounted(r + gamma * v.roll(-1) - v, gamma * lam),
    ),
    "wrong_discount": (
        "You do not discount A_{t+1} by γ·λ. With γ = 1, the default, λ has the same "
        "effect as γ·λ.",
        lambda r, v, gamma, lam: discounted(deltas(r, v, gamma), lam),
        lambda r, v, gamma, lam: discounted(deltas(r, v, gamma), gamma),
    ),
    "forwards": (
        "You loop from the first token to the last. An advantage depends on the tokens "
        "that *follow*, so loop from the last to the first.",
        lambda r, v, gamma, lam: discounted(
            deltas(r, v, gamma).flip(0), gamma * lam
        ).flip(0),
    ),
    "returns": (
        "Your results are returns, not advantages: you do not subtract the token's own "
        "value, or you add it again at the end.",
        lambda r, v, gamma, lam: gae.solution(r, v, gamma, lam) + v,
    ),
}
gae.alternatives = [double_sum]


@SET.exercise("Three estimates of KL", 2, 15)
def kl_estimates(logprobs, ref_logprobs):
    """Return k1, k2 and k3 for samples from the policy: two (N,) → three (N,).

    All three use the same samples. k1 is unbiased and noisy, and k2 is half the square
    of k1. k3 is k1 plus a term whose mean is 0; this term keeps k3 from being negative.
    """
    log_ratio = ref_logprobs - logprobs
    return -log_ratio, log_ratio**2 / 2, log_ratio.exp() - 1 - log_ratio


@kl_estimates.inputs
def _(generator):
    n = pick(generator, range(4, 10))
    logprobs, ref_logprobs = -normal(generator, 2, n).abs()
    ref_logprobs[0] = logprobs[0]  # all three estimates are 0 here
    return logprobs, ref_logprobs


def with_expm1(logprobs, ref_logprobs):
    k1 = logprobs - ref_logprobs
    return k1, 0.5 * k1 * k1, torch.expm1(-k1) + k1


def with_k3(k3):
    """Return a mistake in which only the third estimate, k3(k1, u), is wrong."""

    def wrong(logprobs, ref_logprobs):
        k1, k2, _ = kl_estimates.solution(logprobs, ref_logprobs)
        return k1, k2, k3(k1, (-k1).exp())

    return wrong


kl_estimates.hints = (
    "Write u = π_ref / π. What is the mean of u over samples from π?",
    "k1 is −log u. Which term with mean 0 can you add so that the sum is never "
    "negative?",
)
kl_estimates.mistakes = {
    "k3_of_the_other_ratio": (
        "Your k3 inverts the ratio: in k3, too, u is reference over policy.",
        with_k3(lambda k1, u: 1 / u - 1 - k1),
        with_k3(lambda k1, u: 1 / u - 1 + k1),
    ),
    "k3_with_a_wrong_term": (
        "Your k3 lacks a term, or a term has the wrong sign. k3 is k1 plus a term with "
        "mean 0, and it must be 0 where the two models agree.",
        with_k3(lambda k1, u: u - 1),
        with_k3(lambda k1, u: u + k1),
        with_k3(lambda k1, u: u - 1 - k1),
        with_k3(lambda k1, u: k1 - (u - 1)),
        with_k3(lambda k1, u: u + k1 + 1),
    ),
    "k3_cut_off": (
        "You keep k3 from being negative by clipping k1 at 0 or taking its absolute "
        "value. This makes k3 biased. Add a term with mean 0 instead.",
        with_k3(lambda k1, u: k1.clamp(min=0)),
        with_k3(lambda k1, u: k1.abs()),
    ),
    "k3_centered": (
        "Your k3 uses the average of u over these samples. The expected value of u is "
        "known, so use that number.",
        with_k3(lambda k1, u: k1 + u - u.mean()),
    ),
}
kl_estimates.alternatives = [with_expm1]


@SET.exercise("The optimum", 2, 15)
def optimum(ref_logprobs, rewards, beta):
    """Return the best policy's log-probabilities of N responses: two (N,) → (N,).

    Of all policies, π* ∝ π_ref · exp(r / β) has the largest E[r] − β·KL. What happens
    to π* when β is huge, and when β is tiny? The result must be finite even for
    β = 0.001.
    """
    return (ref_logprobs + rewards / beta).log_softmax(0)


optimum.reply = (
    "With a huge β, r / β vanishes and the optimum is the reference. With a tiny β, "
    "only the response with the largest reward is left, provided that the reference "
    "can write it."
)


@optimum.inputs
def _(generator):
    n, beta = pick(generator, range(4, 9)), pick(generator, [0.001, 0.5, 2.0, 10.0])
    return normal(generator, n).log_softmax(0), normal(generator, n), beta


def by_hand(ref_logprobs, rewards, beta):
    logits = ref_logprobs + rewards / beta
    return logits - logits.max() - (logits - logits.max()).exp().sum().log()


optimum.hints = (
    "Take the logarithm of the formula. Which constant makes the probabilities "
    "sum to 1?",
    "The constant is the same for all responses, and torch has a function for it.",
)
optimum.mistakes = {
    "times_beta": (
        "You multiply the reward by β; divide it by β. The higher β is, the less the "
        "reward moves the policy.",
        lambda ref, r, beta: (ref + r * beta).log_softmax(0),
    ),
    "not_normalized": (
        "Your probabilities do not sum to 1: the normalizing constant is missing, or "
        "it lacks the reference.",
        lambda ref, r, beta: ref + r / beta,
        lambda ref, r, beta: ref + r / beta - (r / beta).logsumexp(0),
        lambda ref, r, beta: ref + r / beta - (ref + r / beta).max(),
    ),
    "reference_scaled_too": (
        "You divide or multiply the reference by β as well. β must scale only the "
        "reward.",
        lambda ref, r, beta: ((ref + r) / beta).log_softmax(0),
        lambda ref, r, beta: (beta * ref + r).log_softmax(0),
    ),
    "overflows": (
        "Your formula is right, but when β is tiny, exp(r / β) overflows or a "
        "probability becomes 0. Use logarithms throughout.",
        lambda ref, r, beta: (
            ref.exp() * (r / beta).exp() / (ref.exp() * (r / beta).exp()).sum()
        ).log(),
    ),
}
optimum.alternatives = [by_hand]
