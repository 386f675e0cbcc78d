"""Exercises of notebook 02."""

import functools

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
        "The sum of the other rewards is the total minus the sample's own reward. How "
        "many other samples are there?",
    ),
)
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


@leave_one_out.mistake
def own_reward_included(rewards):
    """Each sample's own reward is in its baseline: the expected gradient is 1 − 1/n
    times the true gradient.
    """
    return rewards - rewards.mean()


@leave_one_out.mistake
def divided_by_n(rewards):
    """You divide by n, but there are only n − 1 other samples."""
    return rewards - (rewards.sum() - rewards) / len(rewards)


@leave_one_out.mistake
def own_reward_not_subtracted(rewards):
    """You return only the baselines; return each reward minus its baseline."""
    return (rewards.sum() - rewards) / (len(rewards) - 1)


@leave_one_out.mistake
def sum_of_the_others(rewards):
    """You subtract the *sum* of the other rewards; subtract their mean."""
    return rewards - (rewards.sum() - rewards)


@leave_one_out.mistake
def one_left_out_of_the_count_only(rewards):
    """Each sample's own reward is still in your sum; only your count leaves it out."""
    return rewards - rewards.sum() / (len(rewards) - 1)


def _baselines(kept, average=torch.mean, empty=0.0):
    """Return a mistake whose baseline is an average of rewards[kept(i, rewards)]."""

    def wrong(rewards):
        rows = [rewards[kept(i, rewards)] for i in range(len(rewards))]
        means = [average(row) if len(row) else rewards.sum() * empty for row in rows]
        return rewards - torch.stack(means)

    return wrong


def _whitened(scale, small, correction):
    def wrong(rewards):
        deviation = rewards.std(correction=correction) + small
        return scale(len(rewards)) * (rewards - rewards.mean()) / deviation

    return wrong


def _others(i, rewards):
    return torch.arange(len(rewards)) != i


def _in_place(rewards):
    for i in range(len(rewards)):
        rewards[i] -= (rewards.sum() - rewards[i]) / (len(rewards) - 1)
    return rewards


_DEVIATIONS = [(small, n) for small in (1e-8, 0.0, 1e-4) for n in (0, 1)]
leave_one_out.more(
    {
        "whitened": (
            "You also divide by a standard deviation, which the exercise does not ask "
            "for.",
            *(_whitened(lambda n: n / (n - 1), *x) for x in _DEVIATIONS),
        ),
        "standardized": (
            "Your result is the standardized rewards. Do not divide by a standard "
            "deviation, and keep each sample's own reward out of its baseline.",
            *(_whitened(lambda n: 1, *x) for x in _DEVIATIONS),
        ),
        "factor_upside_down": (
            "Your result equals (n − 1) / n times the difference between the reward "
            "and the mean of all rewards. That mean contains the sample's own reward. "
            "To correct for this, use the inverse factor.",
            lambda r: (r - r.mean()) * (len(r) - 1) / len(r),
        ),
        "not_divided": (
            "Your result is n − 1 times the expected one: the last division is "
            "missing.",
            lambda r: len(r) * r - r.sum(),
        ),
        "sum_of_all": (
            "You subtract the sum of all rewards; subtract the mean of the other "
            "samples' rewards.",
            lambda r: r - r.sum(),
        ),
        "another_count": (
            "You divide the sum of the other rewards by a number that is not their "
            "count.",
            lambda r: r - (r.sum() - r) / (len(r) + 1),
            *(lambda r, n=n: r - (r.sum() - r) / n for n in (2, 3, 4, 5)),
        ),
        "rounded_down": (
            "Your baselines are whole numbers: // drops the fraction of the mean.",
            lambda r: r - (r.sum() - r) // (len(r) - 1),
        ),
        "divided_by_the_baseline": (
            "You divide each reward by its baseline; subtract the baseline.",
            lambda r: r * (len(r) - 1) / (r.sum() - r),
        ),
        "best_or_worst": (
            "Your baseline is the largest or smallest of the other rewards; use their "
            "mean.",
            _baselines(_others, torch.max),
            _baselines(_others, torch.min),
        ),
        "median": (
            "Your baseline is a median of the other rewards; use their mean.",
            _baselines(_others, torch.median),
            _baselines(_others, lambda x: x.quantile(0.5)),
        ),
        "earlier_only": (
            "Your baselines use only the samples before each sample. Use all other "
            "samples, both earlier and later.",
            _baselines(lambda i, r: slice(i)),
            _baselines(lambda i, r: slice(i), empty=torch.nan),
        ),
        "later_only": (
            "Your baselines use only the samples after each sample. Use all other "
            "samples, both earlier and later.",
            _baselines(lambda i, r: slice(i + 1, None)),
            _baselines(lambda i, r: slice(i + 1, None), empty=torch.nan),
        ),
        "running_mean": (
            "Your baseline is a running mean, which includes the sample's own reward.",
            lambda r: r - r.cumsum(0) / torch.arange(1, len(r) + 1),
        ),
        "neighbor": (
            "Your baseline is one neighbor's reward; use the mean of all other "
            "rewards.",
            lambda r: r - r.roll(1),
            lambda r: r - r.roll(-1),
        ),
        "another_left_out": (
            "You leave out a neighbor's reward instead of the sample's own reward, "
            "which stays in the baseline.",
            lambda r: r - (r.sum() - r.roll(-1)) / (len(r) - 1),
            lambda r: r - (r.sum() - r.roll(1)) / (len(r) - 1),
        ),
        "same_left_out": (
            "Your baseline is the same for all samples: it leaves out the first or "
            "the last reward. Each baseline must leave out its own sample's reward.",
            lambda r: r - r[1:].mean(),
            lambda r: r - r[:-1].mean(),
        ),
        "one_sample_for_all": (
            "You subtract the same sample's reward from all rewards; use the mean of "
            "the other rewards.",
            lambda r: r - r[0],
            lambda r: r - r[-1],
            lambda r: r - r.max(),
            lambda r: r - r.min(),
        ),
        "two_left_out": (
            "You leave out two rewards: the sample's own and a neighbor's. Leave out "
            "only the sample's own.",
            *(
                _baselines(
                    lambda i, r, j=j: (
                        (torch.arange(len(r)) != i) & (torch.arange(len(r)) != i + j)
                    ),
                    empty=empty,
                )
                for j in (1, -1)
                for empty in (0.0, torch.nan)
            ),
        ),
        "equal_left_out": (
            "You leave out all rewards that equal the sample's own. Compare "
            "positions, not values: other samples with the same reward must count.",
            *(
                _baselines(lambda i, r: r != r[i], empty=empty)
                for empty in (0.0, torch.nan)
            ),
            lambda r: torch.stack(
                [x - r[r != x].mean() if (r != x).any() else 0 * x for x in r]
            ),
        ),
        "overwritten": (
            "You overwrite rewards in the loop, so later baselines contain results "
            "instead of rewards. Write to another tensor.",
            lambda r: _in_place(r.clone()),
        ),
    },
)


@leave_one_out.alternative
def stretched(rewards):
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


@SET.exercise(
    "Generalized advantage estimation",
    2,
    20,
    (
        "Write out A for the last two tokens. Which quantity do you need twice?",
        "Each advantage needs the next token's advantage. Which token must come first "
        "in a loop?",
    ),
)
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


def _backwards(deltas, discount):
    sums, running = torch.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        running = deltas[t] + discount * running
        sums[t] = running
    return sums


def _next(x):
    return torch.cat([x[1:], x.new_zeros(1)])


def _delta(rewards, values, gamma):
    return rewards + gamma * _next(values) - values


def _with_delta(delta):
    """Return a mistake with another δ, a function of rewards, values, γ, λ."""
    return lambda *given: _backwards(delta(*given), given[2] * given[3])


def _with_discount(discount):
    """Return a mistake that discounts A_{t+1} by another function of γ and λ."""
    return lambda r, v, *given: _backwards(_delta(r, v, given[0]), discount(*given))


def _changed(change):
    """Return a mistake that changes the right advantages A: change(A, V, γ, λ)."""
    return lambda r, v, *given: change(gae.solution(r, v, *given), v, *given)


def _set(x, i, value):
    x = x.clone()
    x[i] = value
    return x


def _weights_from_the_start(r, v, gamma, lam):
    weights = (gamma * lam) ** torch.arange(len(r))
    return (weights * _delta(r, v, gamma)).flip(0).cumsum(0).flip(0)


def _without_the_last_delta(r, v, gamma, lam):
    delta = _delta(r, v, gamma)
    return _set(_backwards(_set(delta, -1, 0.0), gamma * lam), -1, delta[-1])


def _lambda_twice(r, v, gamma, lam):
    delta = r + lam * _next(v) - v
    return _backwards(delta, gamma)


gae.more(
    {
        "forgot_the_next_value": (
            "Your δ lacks γ times the next token's V. Without this term, δ ignores the "
            "rewards that the following tokens are expected to bring.",
            _with_delta(lambda r, v, gamma, lam: r - v),
        ),
        "lambda_without_gamma": (
            "You discount A_{t+1} only by λ; use γ·λ. With γ = 1, the default, this "
            "mistake has no effect.",
            _with_discount(lambda gamma, lam: lam),
        ),
        "gamma_for_gamma_lambda": (
            "You discount A_{t+1} only by γ; use γ·λ. Your code works as if λ were 1.",
            _with_discount(lambda gamma, lam: gamma),
        ),
        "not_discounted": (
            "You add A_{t+1} without a discount; multiply it by γ·λ.",
            _with_discount(lambda gamma, lam: 1.0),
        ),
        "one_step_only": (
            "You return the δ themselves, which look one step ahead, as if λ were 0.",
            lambda r, v, gamma, lam: _delta(r, v, gamma),
        ),
        "bootstraps_at_the_end": (
            "After the last token you continue with the last value. The response is "
            "over, so the value there is 0.",
            _with_delta(
                lambda r, v, gamma, lam: r + gamma * torch.cat([v[1:], v[-1:]]) - v
            ),
        ),
        "wraps_around": (
            "After the last token you continue with the value of the first token, as "
            "`roll` does. The response is over, so the value there is 0.",
            _with_delta(lambda r, v, gamma, lam: r + gamma * v.roll(-1) - v),
        ),
        "gamma_missing_at_the_value": (
            "Your δ does not multiply the next value by γ. With γ = 1 this mistake "
            "has no effect.",
            _with_delta(lambda r, v, gamma, lam: r + _next(v) - v),
        ),
        "lambda_at_the_value": (
            "Your δ contains λ. λ weights only A_{t+1}; the next value has the factor "
            "γ.",
            _with_delta(lambda r, v, gamma, lam: r + gamma * lam * _next(v) - v),
            _lambda_twice,
        ),
        "discounted_reward": (
            "You discount the token's own reward. In δ only the next value has the "
            "factor γ.",
            _with_delta(lambda r, v, gamma, lam: gamma * (r + _next(v)) - v),
        ),
        "own_value_discounted": (
            "You multiply the token's own value by γ. In δ only the next value has "
            "the factor γ.",
            _with_delta(lambda r, v, gamma, lam: r + gamma * (_next(v) - v)),
            _with_delta(lambda r, v, gamma, lam: r + _next(v) - gamma * v),
        ),
        "own_value_missing": (
            "Your δ does not subtract the token's own value.",
            _with_delta(lambda r, v, gamma, lam: r + gamma * _next(v)),
        ),
        "own_value_added": (
            "Your δ adds the token's own value; subtract it.",
            _with_delta(lambda r, v, gamma, lam: r + gamma * _next(v) + v),
        ),
        "next_value_subtracted": (
            "Your δ subtracts the next value; add it.",
            _with_delta(lambda r, v, gamma, lam: r - gamma * _next(v) - v),
        ),
        "values_mixed_up": (
            "You swap the two values. δ must add γ times the value of the next token "
            "and subtract the token's own value.",
            _with_delta(lambda r, v, gamma, lam: r + gamma * v - _next(v)),
            _with_delta(lambda r, v, gamma, lam: r + v - gamma * _next(v)),
        ),
        "own_value_twice": (
            "Both values in your δ are the token's own value. One of them must be the "
            "value of the next token.",
            _with_delta(lambda r, v, gamma, lam: r + gamma * v - v),
        ),
        "previous_value": (
            "You use the value of the *previous* token; δ uses the value of the next "
            "token.",
            _with_delta(
                lambda r, v, gamma, lam: r + gamma * _next(v.flip(0)).flip(0) - v
            ),
            _with_delta(
                lambda r, v, gamma, lam: r + gamma * v - _next(v.flip(0)).flip(0)
            ),
        ),
        "next_reward": (
            "Your δ uses the reward of the next token; use the token's own reward.",
            _with_delta(lambda r, v, gamma, lam: _delta(_next(r), v, gamma)),
        ),
        "last_value_not_subtracted": (
            "The δ of your last token is only its reward. Subtract the token's own "
            "value as well; only the *next* value is 0.",
            _with_delta(lambda r, v, gamma, lam: _set(_delta(r, v, gamma), -1, r[-1])),
        ),
        "last_skipped": (
            "Your last advantage is 0, and the last δ reaches no earlier token: your "
            "code skips the last token.",
            _with_delta(lambda r, v, gamma, lam: _set(_delta(r, v, gamma), -1, 0.0)),
        ),
        "last_delta_not_passed_on": (
            "Your last advantage is right, but the last δ reaches no earlier token.",
            _without_the_last_delta,
        ),
        "first_skipped": (
            "Your first advantage is always 0: your code skips the first token.",
            _changed(lambda a, v, gamma, lam: _set(a, 0, 0.0)),
        ),
        "two_steps": (
            "Each of your advantages contains only two δ: you add δ_{t+1} where "
            "A_{t+1} belongs.",
            lambda r, v, gamma, lam: (
                _delta(r, v, gamma) + gamma * lam * _next(_delta(r, v, gamma))
            ),
        ),
        "discounted_once_more": (
            "Your result is γ·λ times the expected one. Discount only A_{t+1}, not "
            "δ_t.",
            _changed(lambda a, v, gamma, lam: gamma * lam * a),
        ),
        "one_minus_lambda": (
            "Your result is 1 − λ times the expected one. δ_t has no such weight.",
            _changed(lambda a, v, gamma, lam: (1 - lam) * a),
        ),
        "weights_from_the_start": (
            "You weight each δ according to its distance from the start of the "
            "response. A_t weights each δ according to its distance from t.",
            _weights_from_the_start,
        ),
        "returns": (
            "Your results are returns, not advantages: you do not subtract the "
            "token's own value, or you add it again at the end.",
            _changed(lambda a, v, gamma, lam: a + v),
        ),
        "own_value_subtracted_again": (
            "You subtract the token's own value twice: δ already contains it.",
            _changed(lambda a, v, gamma, lam: a - v),
        ),
        "rewards_to_go": (
            "You return discounted sums of rewards. An advantage also uses the values "
            "and λ.",
            lambda r, v, gamma, lam: _backwards(r, gamma),
        ),
        "targets": (
            "You return one-step targets for the values: you do not subtract the "
            "token's own value, and later advantages are missing.",
            lambda r, v, gamma, lam: r + gamma * _next(v),
        ),
        "whitened": (
            "You also whiten the advantages (mean 0, standard deviation 1), which the "
            "exercise does not ask for.",
            _changed(lambda a, *_: (a - a.mean()) / (a.std() + 1e-8)),
            _changed(lambda a, *_: (a - a.mean()) / (a.std(correction=0) + 1e-8)),
        ),
        "values_of_the_loop_order": (
            "Your advantages are right, but they are in the order of the loop, from "
            "the last token to the first. Reverse them.",
            _changed(lambda a, *_: a.flip(0)),
        ),
        "forwards": (
            "You loop from the first token to the last. An advantage depends on the "
            "tokens that *follow*, so loop from the last to the first.",
            lambda r, v, gamma, lam: _backwards(
                _delta(r, v, gamma).flip(0), gamma * lam
            ).flip(0),
        ),
    },
)


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
        "k1 is −log u. Which term with mean 0 can you add so that the sum is never "
        "negative?",
    ),
)
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


def _one_wrong(i, change):
    """Return a mistake in which only estimate i is wrong: change(k1, u, π, π_ref)."""

    def wrong(logprobs, ref_logprobs):
        found, k1 = (
            list(with_expm1(logprobs, ref_logprobs)),
            logprobs - ref_logprobs,
        )
        found[i] = change(k1, (-k1).exp(), logprobs.exp(), ref_logprobs.exp())
        return tuple(found)

    return wrong


def _of_difference(difference):
    """Return a mistake that uses difference(log π, log π_ref) as k1 everywhere."""
    return lambda *given: with_expm1(difference(*given), 0 * given[0])


def _weighted(weight):
    return lambda *given: tuple(weight(*given) * x for x in with_expm1(*given))


def _sign_inherited(logprobs, ref_logprobs):
    k1, k2, k3 = with_expm1(logprobs, ref_logprobs)
    return -k1, k2, k3 - 2 * k1


def _bits(logprobs, ref_logprobs):
    k1, _, k3 = with_expm1(logprobs, ref_logprobs)
    bits = k1 / torch.tensor(2.0).log()
    return bits, bits**2 / 2, k3 - k1 + bits


kl_estimates.more(
    {
        "ratio_upside_down": (
            "Your ratio is inverted. The samples come from the policy, so u must be "
            "reference over policy; with these samples your ratio does not estimate a "
            "KL.",
            _of_difference(lambda p, q: q - p),
        ),
        "order": (
            "Your estimates are right, but their order is wrong. Return k1, k2, k3.",
            *(
                lambda *given, order=order: tuple(with_expm1(*given)[i] for i in order)
                for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))
            ),
        ),
        "k3_with_the_wrong_sign": (
            "One part of your k3 has the wrong sign: k3 is k1 plus a term with mean 0.",
            _one_wrong(2, lambda k1, u, p, q: u - 1 - k1),
            _one_wrong(2, lambda k1, u, p, q: k1 - (u - 1)),
            _one_wrong(2, lambda k1, u, p, q: 1 - u - k1),
        ),
        "k3_without_minus_one": (
            "Your k3 lacks its −1: k3 must be 0 where the two models agree.",
            _one_wrong(2, lambda k1, u, p, q: u + k1),
        ),
        "k3_with_plus_one": (
            "Your k3 is 2 where the two models agree, but it must be 0: one sign is "
            "wrong.",
            _one_wrong(2, lambda k1, u, p, q: u + k1 + 1),
        ),
        "k3_without_k1": (
            "Your k3 is only the term with mean 0; add k1 to it.",
            _one_wrong(2, lambda k1, u, p, q: u - 1),
        ),
        "k3_without_exp": (
            "Your k3 is constant: the term with mean 0 uses u, not log u.",
            _one_wrong(2, lambda k1, u, p, q: 0 * k1 - 1),
            _one_wrong(2, lambda k1, u, p, q: 0 * k1),
        ),
        "k3_of_the_other_ratio": (
            "Your k3 inverts the ratio: in k3, too, u is reference over policy.",
            _one_wrong(2, lambda k1, u, p, q: 1 / u - 1 - k1),
            _one_wrong(2, lambda k1, u, p, q: 1 / u - 1 + k1),
        ),
        "k3_for_the_other_kl": (
            "Your k3 estimates the KL in the other direction, because you multiply k1 "
            "by a ratio.",
            _one_wrong(2, lambda k1, u, p, q: 1 - u - u * k1),
            _one_wrong(2, lambda k1, u, p, q: -u * k1),
        ),
        "k3_cut_off": (
            "You keep k3 from being negative by clipping k1 at 0 or taking its "
            "absolute value. This makes k3 biased. Add a term with mean 0 instead.",
            _one_wrong(2, lambda k1, u, p, q: k1.clamp(min=0)),
            _one_wrong(2, lambda k1, u, p, q: k1.abs()),
        ),
        "k3_as_a_series": (
            "Your k3 is a truncated series, which is accurate only for small "
            "differences.",
            _one_wrong(2, lambda k1, u, p, q: k1**2 / 2),
            _one_wrong(2, lambda k1, u, p, q: k1**2 / 2 - k1**3 / 6),
        ),
        "k3_clipped": (
            "You clip the log-ratio in k3. Do not clip it: large differences must "
            "count in full.",
            *(
                _one_wrong(
                    2,
                    lambda k1, u, p, q, c=c: (
                        k1.clamp(-c, c).neg().expm1() + k1.clamp(-c, c)
                    ),
                )
                for c in (0.2, 1.0)
            ),
        ),
        "k3_centered": (
            "Your k3 uses the average of u over these samples. The expected value of "
            "u is known, so use that number.",
            _one_wrong(2, lambda k1, u, p, q: k1 + u - u.mean()),
        ),
        "k3_with_a_difference": (
            "Your k3 uses a difference of probabilities; u is their ratio.",
            _one_wrong(2, lambda k1, u, p, q: k1 + q - p),
            _one_wrong(2, lambda k1, u, p, q: k1 + q - p - 1),
        ),
        "k3_with_a_ratio_of_logarithms": (
            "Your k3 divides log-probabilities; u is the ratio of the probabilities.",
            _one_wrong(2, lambda k1, u, p, q: k1 + q.log() / p.log() - 1),
        ),
        "k2_without_the_half": (
            "Your k2 lacks its ½: for tiny differences its mean is twice the KL.",
            _one_wrong(1, lambda k1, u, p, q: k1**2),
        ),
        "k2_halved_first": (
            "Your k2 is a quarter of the square of k1: square first, then halve.",
            _one_wrong(1, lambda k1, u, p, q: k1**2 / 4),
        ),
        "k2_is_absolute": (
            "Your k2 is not squared.",
            _one_wrong(1, lambda k1, u, p, q: k1.abs() / 2),
            _one_wrong(1, lambda k1, u, p, q: k1 / 2),
            _one_wrong(1, lambda k1, u, p, q: -k1 / 2),
        ),
        "k2_negative": (
            "Your k2 has the wrong sign: half a square is never negative.",
            _one_wrong(1, lambda k1, u, p, q: -(k1**2) / 2),
        ),
        "k2_of_ratios": (
            "Your k2 squares u or u − 1; square the logarithm of u.",
            _one_wrong(1, lambda k1, u, p, q: (u - 1) ** 2 / 2),
            _one_wrong(1, lambda k1, u, p, q: (1 / u - 1) ** 2 / 2),
            _one_wrong(1, lambda k1, u, p, q: u**2 / 2),
        ),
        "k1_with_the_wrong_sign": (
            "Your k1 has the wrong sign: its mean must be positive for samples from "
            "the policy.",
            _one_wrong(0, lambda k1, u, p, q: -k1),
        ),
        "sign_inherited": (
            "Your k1 has the wrong sign, and k3 inherits it: the mean of k1 must be "
            "positive for samples from the policy.",
            _sign_inherited,
        ),
        "k1_of_ratios": (
            "Your k1 is a ratio: its logarithm is missing.",
            _one_wrong(0, lambda k1, u, p, q: u),
            _one_wrong(0, lambda k1, u, p, q: 1 / u),
        ),
        "k1_of_probabilities": (
            "Your k1 is a difference of probabilities; use the log-probabilities.",
            _one_wrong(0, lambda k1, u, p, q: p - q),
        ),
        "differences_of_probabilities": (
            "Your estimates are built from differences of probabilities; use the "
            "log-probabilities.",
            _of_difference(lambda p, q: p.exp() - q.exp()),
        ),
        "ratios_of_logarithms": (
            "You divide log-probabilities: the log of a ratio is a difference.",
            _of_difference(lambda p, q: p / q),
            _of_difference(lambda p, q: (p / q).log()),
        ),
        "weighted": (
            "You weight samples by a probability. The samples come from the policy, so "
            "likely samples already occur more often.",
            _weighted(lambda p, q: p.exp()),
            _weighted(lambda p, q: q.exp()),
            _weighted(lambda p, q: p.softmax(0)),
            _one_wrong(0, lambda k1, u, p, q: p * k1),
        ),
        "weighted_by_the_ratio": (
            "You weight samples by a ratio of the models' probabilities. The samples "
            "already come from the policy, so do not weight them.",
            _weighted(lambda p, q: (q - p).exp()),
            _weighted(lambda p, q: (p - q).exp()),
        ),
        "in_bits": (
            "Your k1 is in bits (logarithms to base 2); use natural logarithms.",
            _bits,
            _one_wrong(0, lambda k1, u, p, q: k1 / torch.tensor(2.0).log()),
        ),
        "means": (
            "You return means over the samples; return one estimate per sample.",
            lambda *given: tuple(x.mean() for x in with_expm1(*given)),
        ),
    },
)


@kl_estimates.alternative
def with_expm1(logprobs, ref_logprobs):
    k1 = logprobs - ref_logprobs
    return k1, 0.5 * k1 * k1, torch.expm1(-k1) + k1


@SET.exercise(
    "The optimum",
    2,
    15,
    (
        "Take the logarithm of the formula. Which constant makes the probabilities "
        "sum to 1?",
        "The constant is the same for all responses, and torch has a function for it.",
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
    "With a huge β, r / β vanishes and the optimum is the reference. With a tiny β, "
    "only the response with the largest reward is left, provided that the reference "
    "can write it."
)


@optimum.inputs
def _(generator):
    n, beta = pick(generator, range(4, 9)), pick(generator, [0.001, 0.5, 2.0, 10.0])
    return normal(generator, n).log_softmax(0), normal(generator, n), beta


@optimum.mistake
def times_beta(ref_logprobs, rewards, beta):
    """You multiply the reward by β; divide it by β. The higher β is, the less the
    reward moves the policy.
    """
    return (ref_logprobs + rewards * beta).log_softmax(0)


@optimum.mistake
def not_normalised(ref_logprobs, rewards, beta):
    """Your probabilities do not sum to 1: the normalizing constant is missing."""
    return ref_logprobs + rewards / beta


@optimum.mistake
def without_the_reference(ref_logprobs, rewards, beta):
    """The reference is missing: you return the optimum for an entropy bonus, not for a
    KL penalty to the reference.
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
    """You divide logarithms by their sum. Either divide *probabilities* by their sum,
    or subtract a constant from logarithms.
    """
    logits = ref_logprobs + rewards / beta
    return logits / logits.sum()


@optimum.mistake
def sum_subtracted(ref_logprobs, rewards, beta):
    """You subtract the sum of logarithms; subtract the logarithm of a sum."""
    logits = ref_logprobs + rewards / beta
    return logits - logits.sum()


@optimum.mistake
def reference_as_a_probability(ref_logprobs, rewards, beta):
    """You add the reference's probability to the reward; add its logarithm instead."""
    return (ref_logprobs.exp() + rewards / beta).log_softmax(0)


def _logits(*given):
    """Return mistakes that normalize wrong functions of log π_ref, r and β."""
    return [lambda *x, f=f: f(*x).log_softmax(0) for f in given]


def _constants(*given):
    """Return mistakes that subtract wrong functions of the logits, r / β and N."""

    def subtract(constant, ref, r, beta):
        logits = ref + r / beta
        return logits - constant(logits, r / beta, torch.tensor(float(len(r))))

    return [functools.partial(subtract, constant) for constant in given]


def _best_only(ref_logprobs, rewards, beta):
    return torch.where(rewards == rewards.max(), 0.0, -torch.inf)


_ADDED = (1e-6, 1e-8, 1e-9, 1e-10, 1e-12, 1e-20, 1e-30)
_LOWEST = (1e-6, 2.0**-126, 1e-300, 2.0**-1022)
optimum.more(
    {
        "constant_without_the_reference": (
            "You compute the constant only from the rewards. Include the reference, so "
            "that the probabilities sum to 1.",
            *_constants(
                lambda x, r, n: r.logsumexp(0), lambda x, r, n: r.logsumexp(0) - n.log()
            ),
        ),
        "mean_in_the_constant": (
            "Your probabilities sum to N: the constant needs a sum over responses, not "
            "a mean.",
            *_constants(lambda x, r, n: x.logsumexp(0) - n.log()),
        ),
        "maximum_subtracted": (
            "You subtract the maximum, so your largest probability is 1. The "
            "probabilities must sum to 1.",
            *_constants(lambda x, r, n: x.max()),
        ),
        "constant_added": (
            "You add the constant; subtract it, so that the probabilities sum to 1.",
            *_constants(lambda x, r, n: -x.logsumexp(0)),
        ),
        "weights": (
            "You return unnormalized weights. Normalize them, and return logarithms.",
            lambda ref, r, beta: (ref + r / beta).exp(),
        ),
        "multiplied_by_beta": (
            "Your code multiplies the reference by β. β must scale only the reward.",
            *_logits(
                lambda ref, r, beta: beta * ref + r,
                lambda ref, r, beta: beta * (ref + r),
                lambda ref, r, beta: beta * ref + r / beta,
            ),
        ),
        "one_minus_beta": (
            "You mix reference and reward with weights β and 1 − β. Only the reward "
            "has a factor; the reference has none.",
            *_logits(
                lambda ref, r, beta: beta * ref + (1 - beta) * r,
                lambda ref, r, beta: (1 - beta) * ref + beta * r,
            ),
        ),
        "multiplied_logarithms": (
            "You multiply the reference's logarithms by the reward's factor. "
            "Multiplying probabilities means adding logarithms.",
            *_logits(
                lambda ref, r, beta: ref * r / beta,
                lambda ref, r, beta: ref * (r / beta).exp(),
            ),
            lambda ref, r, beta: (
                ref * (r / beta).exp() / (ref * (r / beta).exp()).sum()
            ).log(),
        ),
        "exp_of_the_reward_added": (
            "You add exp(r / β) to the logarithms; add the logarithm of this factor.",
            *_logits(lambda ref, r, beta: ref + (r / beta).exp()),
        ),
        "rewards_standardized": (
            "You divide the rewards by their standard deviation; use them unchanged, "
            "because β already sets their scale.",
            *_logits(
                lambda ref, r, beta: ref + r / r.std() / beta,
                lambda ref, r, beta: ref + r / r.std(correction=0) / beta,
            ),
        ),
        "rewards_rescaled": (
            "You divide the rewards by their range or largest value; use them "
            "unchanged.",
            *_logits(
                lambda ref, r, beta: ref + r / (r.max() - r.min()) / beta,
                lambda ref, r, beta: ref + r / r.abs().max() / beta,
                lambda ref, r, beta: ref + r / r.max() / beta,
            ),
        ),
        "beta_changed": (
            "You replace a tiny β with a larger number. Use β unchanged: logarithms "
            "do not overflow.",
            *_logits(
                *(
                    lambda ref, r, beta, low=low: ref + r / max(beta, low)
                    for low in (0.01, 0.02, 0.05, 0.1, 0.5)
                ),
                *(
                    lambda ref, r, beta, small=small: ref + r / (beta + small)
                    for small in (1e-6, 1e-5, 1e-4, 1e-3)
                ),
            ),
        ),
        "clipped": (
            "You limit r / β to avoid overflow, but the limit changes the result when "
            "β is tiny. If you compute with logarithms, nothing overflows.",
            *_logits(
                *(
                    lambda ref, r, beta, c=c, low=low: ref + (r / beta).clamp(low, c)
                    for c in (10, 20, 30, 50, 80, 100)
                    for low in (-c, -torch.inf)
                ),
            ),
        ),
        "underflow_hidden": (
            "You add a small number to the probabilities, or bound them from below. "
            "When β is tiny, your change hides probabilities that have become 0. Use "
            "logarithms throughout.",
            *(
                lambda *x, small=small: (optimum.solution(*x).exp() + small).log()
                for small in _ADDED
            ),
            *(
                lambda *x, small=small: optimum.solution(*x).exp().clamp(small).log()
                for small in _LOWEST
            ),
        ),
        "best_only": (
            "Your policy writes only the response with the largest reward, whatever β "
            "is.",
            _best_only,
        ),
    },
)


@optimum.alternative
def by_hand(ref_logprobs, rewards, beta):
    logits = ref_logprobs + rewards / beta
    return logits - logits.max() - (logits - logits.max()).exp().sum().log()


@optimum.mistake
def overflows(ref_logprobs, rewards, beta):
    """Your formula is right, but when β is tiny, exp(r / β) overflows or a probability
    becomes 0. Use logarithms throughout.
    """
    weights = ref_logprobs.exp() * (rewards / beta).exp()
    return (weights / weights.sum()).log()
