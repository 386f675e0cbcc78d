"""Exercises of notebook 03."""

import math

import torch

from engine import Set, normal, pick, ragged

SET = Set("03_ppo_step_by_step", "PPO, one step taken apart")
check = SET.check


@SET.exercise("A mask from lengths", 1, 5)
def response_mask(ids, lengths, pad):
    """Mark response tokens with 1.0 and padding with 0.0: ids (B, R), lengths (B,) →
    (B, R).

    The padding token is EOS here, as with GPT-2, and a policy may sample EOS as its
    last token.
    """
    return (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).double()


@response_mask.inputs
def _(generator):
    width, pad = pick(generator, range(4, 8)), pick(generator, [0, 9])
    lengths = torch.randint(1, width + 1, (4,), generator=generator)
    lengths[0] = 2
    ids = torch.randint(1, 9, (4, width), generator=generator)
    ids[torch.arange(width) >= lengths.unsqueeze(1)] = pad
    ids[0, 1] = pad  # a sampled EOS
    return ids, lengths, pad


def row_by_row(ids, lengths, pad):
    mask = torch.zeros(ids.shape, dtype=torch.float64)
    for row, n in enumerate(lengths.tolist()):
        mask[row, :n] = 1
    return mask


def columns(ids):
    return torch.arange(ids.shape[1])


response_mask.hints = (
    "Which columns of a row with 3 tokens are real? Answer without looking at `ids`.",
    "Number the columns with `torch.arange` and compare these numbers with `lengths`.",
)
response_mask.mistakes = {
    "from_the_padding_token": (
        "You look for padding in `ids`, which drops the EOS that the policy "
        "*sampled*. The policy must learn from its decision to stop.",
        lambda ids, lengths, pad: (ids != pad).double(),
    ),
    "one_too_many": (
        "Your mask includes one padding token per row: a row of n tokens fills the "
        "columns 0 to n − 1.",
        lambda ids, lengths, pad: (columns(ids) <= lengths[:, None]).double(),
    ),
    "one_too_few": (
        "Your mask omits the last token of every row, where the policy stops.",
        lambda ids, lengths, pad: (columns(ids) < lengths[:, None] - 1).double(),
    ),
    "one_length_for_all": (
        "All rows of your mask are equal. Each row has its own length.",
        lambda ids, lengths, pad: (columns(ids) < lengths[0]).double().expand_as(ids),
        lambda ids, lengths, pad: (
            (columns(ids) < lengths.max()).double().expand_as(ids)
        ),
    ),
}
response_mask.alternatives = [row_by_row]


@SET.exercise("Positions with padding on the left", 1, 10)
def position_ids(attention_mask):
    """Count positions from the first real token, with 0 on padding: (B, T) → (B, T).

    GPT-2 identifies positions by number. The first real token must be at position 0,
    whatever its column is. Padding is on the left, and it also gets position 0.
    """
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


@position_ids.inputs
def _(generator):
    b, t = pick(generator, range(3, 5)), pick(generator, range(5, 8))
    return (ragged(generator, b, t).flip(1).long(),)


def subtracting_the_start(attention_mask):
    start = attention_mask.argmax(1, keepdim=True)
    return (torch.arange(attention_mask.shape[1]) - start).clamp(min=0)


def column_numbers(mask):
    return torch.arange(mask.shape[1]).expand(mask.shape)


position_ids.hints = (
    "Write the positions of a row with two columns of padding by hand.",
    "A running count of real tokens is nearly right. What is this count on the "
    "padding?",
)
position_ids.mistakes = {
    "starts_elsewhere": (
        "You start at the wrong number. The first real token must be at position 0, "
        "and the second at position 1.",
        lambda mask: mask.cumsum(1),
        lambda mask: (mask.cumsum(1) - 2).clamp(min=0),
    ),
    "other_number_on_padding": (
        "You give padding a position other than 0. No embedding table has the position "
        "−1, and 1 is a real token's position.",
        lambda mask: mask.cumsum(1) - 1,
        lambda mask: (mask.cumsum(1) - 1).masked_fill(mask == 0, 1),
        lambda mask: column_numbers(mask) - mask.argmax(1, keepdim=True),
    ),
    "column_numbers": (
        "You return column numbers. Count real tokens, which are at the right end of "
        "each row.",
        lambda mask: column_numbers(mask) * mask,
        lambda mask: (
            column_numbers(mask) * (column_numbers(mask) < mask.sum(1, keepdim=True))
        ),
    ),
    "padding_of_another_row": (
        "You subtract the wrong number. In each row, subtract the number of columns "
        "before its own first real token.",
        lambda mask: (column_numbers(mask) - mask[0].argmax()).clamp(min=0),
        lambda mask: (column_numbers(mask) - mask[0].argmax()).clamp(min=0) * mask,
        lambda mask: (column_numbers(mask) - mask.sum(1, keepdim=True)).clamp(min=0),
        lambda mask: (
            (column_numbers(mask) - mask.sum(1, keepdim=True)).clamp(min=0) * mask
        ),
    ),
}
position_ids.alternatives = [subtracting_the_start]


@SET.exercise("Rewards per token", 2, 15)
def token_rewards(scores, kl, mask, beta):
    """Give every token −β·KL, and add the score at the last token: (B,), (B, R), (B, R)
    → (B, R).

    Rows are padded on the right, and padding gets 0.
    """
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards


@token_rewards.inputs
def _(generator):
    b, r = pick(generator, range(3, 6)), pick(generator, range(6, 9))
    beta = pick(generator, [0.05, 0.2, 2.0])
    return normal(generator, b), normal(generator, b, r), ragged(generator, b, r), beta


def with_a_second_mask(scores, kl, mask, beta):
    is_last = mask - torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return is_last * scores.unsqueeze(1) - beta * kl * mask


def with_scores(rewards, scores, columns):
    """Return rewards with each row's score added in its own column."""
    rewards = rewards.clone()
    rewards[torch.arange(len(scores)), columns] += scores
    return rewards


def last_columns(mask):
    return mask.sum(1).long() - 1


token_rewards.hints = (
    "The reward has two parts: one part at every token, and one at a single token "
    "per row.",
    "How does the mask show where a row ends? Index one element of each row at "
    "that place.",
)
token_rewards.mistakes = {
    "score_in_another_column": (
        "You add the score in the wrong column. It belongs at the row's last real "
        "token, because it is known only after that token; padding gets no reward.",
        lambda s, kl, m, beta: with_scores(-beta * kl * m, s, -1),
        lambda s, kl, m, beta: with_scores(-beta * kl * m, s, 0),
        lambda s, kl, m, beta: with_scores(
            -beta * kl * m, s, (last_columns(m) - 1).clamp(min=0)
        ),
        lambda s, kl, m, beta: with_scores(
            -beta * kl * m, s, (last_columns(m) + 1).clamp(max=m.shape[1] - 1)
        ),
    ),
    "score_on_every_token": (
        "You give every token the score, or a part of it. Add the whole score once, at "
        "the last token.",
        lambda s, kl, m, beta: (s[:, None] - beta * kl) * m,
        lambda s, kl, m, beta: ((s / m.sum(1))[:, None] - beta * kl) * m,
    ),
    "score_replaces_kl": (
        "You overwrite the last token's KL term. *Add* the score to this term.",
        lambda s, kl, m, beta: with_scores(
            -beta * kl * m,
            s + beta * kl[range(len(s)), last_columns(m)],
            last_columns(m),
        ),
    ),
    "kl_on_padding": (
        "You also give padding the KL penalty. Padding must get 0.",
        lambda s, kl, m, beta: with_scores(-beta * kl, s, last_columns(m)),
    ),
    "kl_of_the_row": (
        "You use the row's KL, as a sum or a mean. Each token must get its own "
        "penalty.",
        lambda s, kl, m, beta: with_scores(
            0 * kl, s - beta * (kl * m).sum(1), last_columns(m)
        ),
        lambda s, kl, m, beta: with_scores(
            -beta * m * ((kl * m).sum(1) / m.sum(1))[:, None], s, last_columns(m)
        ),
    ),
}
token_rewards.alternatives = [with_a_second_mask]


@SET.exercise("Whitening with a mask", 2, 15)
def whiten(x, mask):
    """Scale x to mean 0 and unbiased variance 1 over the tokens that the mask marks,
    and set all other positions to 0: two (B, R) → (B, R).

    Use 1e-8 inside the square root: (x − mean) / sqrt(variance + 1e-8).
    """
    n = mask.sum()
    mean = (x * mask).sum() / n
    variance = ((x - mean) ** 2 * mask).sum() / (n - 1)
    return (x - mean) / (variance + 1e-8).sqrt() * mask


@whiten.inputs
def _(generator):
    b, r, scale = pick(generator, (3, 4)), pick(generator, range(5, 8)), [1, 0, 1e-4, 5]
    mask = ragged(generator, b, r)
    x = scale[generator.initial_seed() % 4] * normal(generator, b, r)
    return x + (x.abs().max() > 0.1) + (1 - mask) * normal(generator, b, r), mask


def by_selection(x, mask):
    real = x[mask.bool()]
    white = torch.zeros_like(x)
    white[mask.bool()] = (real - real.mean()) * torch.rsqrt(real.var() + 1e-8)
    return white


def whitened(x, mask, mean=None, variance=None):
    """Whiten x with a wrong mean or variance; None stands for the right one."""
    real = x[mask.bool()]
    mean = real.mean() if mean is None else mean
    variance = real.var() if variance is None else variance
    return (x - mean) / (variance + 1e-8).sqrt() * mask


def real_mean(x, mask):
    return x[mask.bool()].mean()


def real_var(x, mask):
    return x[mask.bool()].var()


whiten.hints = (
    "Which of the numbers in the formula would change if you added more padding?",
    "Mean and variance are sums over real tokens. What is the divisor of each sum?",
)
whiten.mistakes = {
    "padding_counts": (
        "Your mean or variance includes padding, perhaps as zeros. Leave padding out "
        "of both sums, and count only real tokens.",
        lambda x, m: whitened(x, m, x.mean(), x.var()),
        lambda x, m: whitened(x, m, (x * m).mean(), (x * m).var()),
        lambda x, m: whitened(x, m, variance=x.var()),
        lambda x, m: whitened(
            x, m, variance=((x * m - real_mean(x, m)) ** 2).sum() / (m.sum() - 1)
        ),
    ),
    "wrong_divisor": (
        "You divide the variance by the wrong number. The unbiased variance divides by "
        "n − 1, and n counts the real tokens.",
        lambda x, m: whitened(x, m, variance=x[m.bool()].var(correction=0)),
        lambda x, m: whitened(
            x, m, variance=real_var(x, m) * (m.sum() - 1) / (m.numel() - 1)
        ),
    ),
    "another_small_number": (
        "Your 1e-8 is not inside the square root. This changes the result for a nearly "
        "constant batch.",
        lambda x, m: (x - real_mean(x, m)) / (x[m.bool()].std() + 1e-8) * m,
    ),
    "mean_kept": (
        "You do not subtract the mean everywhere, or you add it again. The result must "
        "have mean 0, and the variance squares differences from the mean.",
        lambda x, m: whitened(x, m, mean=0.0),
        lambda x, m: (whiten.solution(x, m) + real_mean(x, m)) * m,
        lambda x, m: whitened(x, m, variance=(x**2 * m).sum() / (m.sum() - 1)),
    ),
    "padding_left_over": (
        "You do not set padding to 0 in the result.",
        lambda x, m: (x - real_mean(x, m)) / (real_var(x, m) + 1e-8).sqrt(),
    ),
}
whiten.alternatives = [by_selection]


@SET.exercise(
    "The clipped policy loss",
    3,
    20,
    gradient=("logprobs", "old_logprobs", "advantages"),
)
def policy_loss(logprobs, old_logprobs, advantages, mask, epsilon):
    """Average PPO's clipped loss over the tokens that the mask marks: four (B, R) → a
    number.

    The loss per token is max(−A·ρ, −A·clip(ρ, 1 − ε, 1 + ε)) with ρ = exp(lp − old lp).
    Sum it over the real tokens of all rows and divide by the number of real tokens.
    Return a tensor.
    Only `logprobs` gets a gradient: detach advantages and old log-probabilities.
    """
    ratio = torch.exp(logprobs - old_logprobs.detach())
    advantages = advantages.detach()
    loss = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - epsilon, 1 + epsilon)
    )
    return (loss * mask.detach()).sum() / mask.detach().sum()


@policy_loss.inputs
def _(generator):
    b, r = pick(generator, range(3, 6)), pick(generator, range(6, 9))
    old, move, advantages = normal(generator, 3, b, r)
    scale, epsilon = pick(generator, [0.1, 1, 1]), pick(generator, [0.1, 0.2, 0.4])
    return old - 2 + scale * move, old - 2, advantages, ragged(generator, b, r), epsilon


def by_cases(logprobs, old_logprobs, advantages, mask, epsilon):
    ratio, a = (logprobs - old_logprobs.detach()).exp(), advantages.detach()
    limit = torch.where(
        a > 0, ratio.clamp(max=1 + epsilon), ratio.clamp(min=1 - epsilon)
    )
    keep = mask.detach().bool()
    return -(a * limit)[keep].mean()


def mean(loss, mask):
    return (loss * mask).sum() / mask.sum()


def losses(ratio, advantages, low, high):
    """Return each token's loss; the ratio is clipped to the interval."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))


def interval(low, high):
    """Return a mistake that clips the ratio to another interval."""
    return lambda new, old, a, m, e: mean(
        losses((new - old.detach()).exp(), a.detach(), low(e), high(e)), m
    )


def ratio(of):
    """Return a mistake with another ratio, of(new, old, mask)."""
    return lambda new, old, a, m, e: mean(
        losses(of(new, old.detach(), m), a.detach(), 1 - e, 1 + e), m
    )


def reduced(last):
    """Return a mistake with another last step, last(losses, mask)."""
    return lambda new, old, a, m, e: last(
        losses((new - old.detach()).exp(), a.detach(), 1 - e, 1 + e), m
    )


policy_loss.hints = (
    "Take A = 1 and ratios of 0.5, 1 and 2. What should the loss be for each ratio?",
    "For each token, keep the more pessimistic of two losses. Then average over "
    "real tokens.",
)
policy_loss.mistakes = {
    "min_for_max": (
        "You use min instead of max. The larger of two *losses* is the cautious "
        "choice. With min, the clip limits nothing.",
        lambda new, old, a, m, e: mean(
            -losses((new - old.detach()).exp(), -a.detach(), 1 - e, 1 + e), m
        ),
    ),
    "clipped_only": (
        "You keep only the clipped loss: a token that has moved too far in the *wrong* "
        "direction gets no gradient that brings it back.",
        lambda new, old, a, m, e: mean(
            -a.detach() * (new - old.detach()).exp().clamp(1 - e, 1 + e), m
        ),
    ),
    "another_interval": (
        "You clip the ratio on one side only, or to the wrong interval. Before any "
        "update the ratio is 1, and it may move by ε in both directions.",
        interval(lambda e: None, lambda e: 1 + e),
        interval(lambda e: 1 - e, lambda e: None),
        interval(lambda e: -e, lambda e: e),
        interval(lambda e: math.exp(-e), lambda e: math.exp(e)),
    ),
    "another_ratio": (
        "Your ratio is wrong. It belongs to one token, and it is the new probability "
        "over the old one.",
        ratio(lambda new, old, m: (old - new).exp()),
        ratio(lambda new, old, m: new - old),
        ratio(lambda new, old, m: new / old),
        ratio(lambda new, old, m: ((new - old) * m).sum(1, True).exp()),
    ),
    "another_mean": (
        "You do not average over the real tokens of all rows, which must all have the "
        "same weight. Neither padding nor the number of rows matters.",
        reduced(lambda loss, m: (loss * m).mean()),
        reduced(lambda loss, m: ((loss * m).sum(1) / m.sum(1)).mean()),
        reduced(lambda loss, m: (loss * m).sum() / len(m)),
        reduced(lambda loss, m: loss.sum() / m.sum()),
    ),
}
policy_loss.alternatives = [by_cases]


@SET.exercise(
    "The clipped value loss", 2, 15, gradient=("values", "old_values", "returns")
)
def value_loss(values, old_values, returns, epsilon):
    """Return ½ max((v − R)², (v_clip − R)²) per token: three (B, R) → (B, R).

    v_clip is v, clipped to within ε of the old value. Return a tensor. Only `values`
    gets a gradient: detach old values and returns.
    """
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.inputs
def _(generator):
    b, r, epsilon = (
        pick(generator, (2, 3)),
        pick(generator, (4, 5, 6)),
        pick(generator, (0.1, 0.2, 1.0)),
    )
    return *normal(generator, 3, b, r), epsilon


def by_clamping_the_move(values, old_values, returns, epsilon):
    old, returns = old_values.detach(), returns.detach()
    near = old + (values - old).clamp(-epsilon, epsilon)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


def by_clamping_the_return(values, old_values, returns, epsilon):
    """Compute the same loss as the solution: the larger error is at least the return's
    distance from the interval.
    """
    old, returns = old_values.detach(), returns.detach()
    near = old + (returns - old).clamp(-epsilon, epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def near(clipped):
    """Return a mistake with another clipped value, clipped(value, old value, ε)."""

    def wrong(values, old_values, returns, epsilon):
        close, returns = clipped(values, old_values.detach(), epsilon), returns.detach()
        return 0.5 * torch.maximum((values - returns) ** 2, (close - returns) ** 2)

    return wrong


def combined(errors):
    """Return a mistake that combines the plain and the clipped error differently."""

    def wrong(values, old_values, returns, epsilon):
        old, returns = old_values.detach(), returns.detach()
        close = old + (values - old).clamp(-epsilon, epsilon)
        return errors(values - returns, close - returns)

    return wrong


value_loss.hints = (
    "Draw a number line with the old value, the new value, and the return.",
    "Clip the new *value* so that it stays near the old value; do not clip the "
    "error. Then compare two errors.",
)
value_loss.mistakes = {
    "smaller_of_both": (
        "You use min instead of max. The larger of the two errors must count; "
        "otherwise the clip limits nothing.",
        combined(lambda plain, clipped: 0.5 * torch.minimum(plain**2, clipped**2)),
    ),
    "clipped_only": (
        "You keep only the clipped error. The larger of the two errors must count.",
        combined(lambda plain, clipped: 0.5 * clipped**2),
    ),
    "limited_on_one_side": (
        "You limit the value on one side only. It may move by ε up or down.",
        near(lambda v, old, e: torch.minimum(v, old + e)),
        near(lambda v, old, e: torch.maximum(v, old - e)),
    ),
    "not_near_the_old_value": (
        "Your clipped value is wrong: it must be the new value, moved to within ε of "
        "the *old* value. Neither a ratio nor the error is clipped.",
        near(lambda v, old, e: old * (v / old).clamp(1 - e, 1 + e)),
        near(lambda v, old, e: (v - old).clamp(-e, e)),
        near(lambda v, old, e: old - (v - old).clamp(-e, e)),
        near(lambda v, old, e: v + (old - v).clamp(-e, e)),
    ),
}
value_loss.alternatives = [by_clamping_the_move, by_clamping_the_return]


@SET.exercise("The adaptive KL coefficient", 1, 10)
def next_beta(beta, kl, target, n, horizon):
    """Return the coefficient after n samples whose mean KL is `kl`: five numbers → a
    number.

    β ← β · (1 + clip(KL / target − 1, −0.2, 0.2) · n / horizon).
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * n / horizon)


@next_beta.inputs
def _(generator):
    beta, target = pick(generator, (0.05, 0.2, 1.0)), pick(generator, (0.5, 2.0, 6.0))
    times = (0.1, 0.5, 0.9, 1.0, 1.1, 3.0)[
        generator.initial_seed() % 6
    ]  # below, at, above
    n, horizon = pick(generator, (64, 500, 2000)), pick(generator, (1000, 10_000))
    return beta, times * target, target, n, horizon


def clip(x):
    return min(max(x, -0.2), 0.2)


def with_error(error):
    """Return a mistake with another error, error(kl / target)."""
    return lambda beta, kl, target, n, horizon: (
        beta * (1 + error(kl / target) * n / horizon)
    )


def with_step(step):
    """Return a mistake with another last step, step(beta, error, n / horizon)."""
    return lambda beta, kl, target, n, horizon: step(
        beta, clip(kl / target - 1), n / horizon
    )


next_beta.hints = (
    "Suppose that KL is twice its target. Should β grow or shrink, and by how much "
    "at most?",
    "There are three steps: compute the relative error, clip it, and scale it by "
    "the share of the horizon.",
)
next_beta.mistakes = {
    "not_clipped": (
        "You do not clip the error, or clip it on one side only: one unusual batch "
        "would change β too much.",
        with_error(lambda ratio: ratio - 1),
        with_error(lambda ratio: min(ratio - 1, 0.2)),
        with_error(lambda ratio: max(ratio - 1, -0.2)),
    ),
    "clipped_too_late": (
        "You clip after scaling by n / horizon. Clip the error itself.",
        lambda beta, kl, target, n, horizon: (
            beta * (1 + clip((kl / target - 1) * n / horizon))
        ),
    ),
    "another_error": (
        "Your error is not the ratio of KL to its target minus 1. A KL at its target "
        "must leave β unchanged.",
        with_error(clip),
        with_error(lambda ratio: clip(1 - 1 / ratio)),
        lambda beta, kl, target, n, horizon: (
            beta * (1 + clip(kl - target) * n / horizon)
        ),
    ),
    "not_the_new_beta": (
        "You do not multiply β by 1 plus a small number: you add this number, return "
        "only the change, or scale all of β by n / horizon.",
        with_step(lambda beta, error, share: beta + error * share),
        with_step(lambda beta, error, share: beta * error * share),
        with_step(lambda beta, error, share: beta * (1 + error) * share),
    ),
}
next_beta.alternatives = [
    lambda beta, kl, target, n, horizon: (
        beta
        + beta
        * n
        / horizon
        * torch.tensor(kl / target - 1, dtype=torch.float64).clamp(-0.2, 0.2).item()
    )
]
