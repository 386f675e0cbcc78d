"""Exercises of notebook 03."""

import torch

from engine import Set, normal, pick, ragged

SET = Set("03_ppo_step_by_step", "PPO, one step taken apart")
check = SET.check


@SET.exercise(
    "A mask from lengths",
    1,
    5,
    (
        "Which columns of a row with 3 tokens are real? Answer without looking at ids.",
        "Number the columns with `torch.arange` and compare the numbers with lengths.",
    ),
)
def response_mask(ids, lengths, pad):
    """Mark response tokens with 1.0, padding with 0.0: ids (B, R), lengths (B,) → (B,
    R).

    Padding is EOS here, as with GPT-2, and a policy may sample EOS as its last token.
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


@response_mask.mistake
def from_the_padding_token(ids, lengths, pad):
    """Looking for padding in `ids` drops the EOS that the policy *sampled*. This EOS
    was the policy's decision to stop, and the policy must learn from it.
    """
    return (ids != pad).double()


@response_mask.mistake
def one_too_many(ids, lengths, pad):
    """One padding token counts in every row: a row of n tokens has the columns 0 to n −
    1.
    """
    return (torch.arange(ids.shape[1]) <= lengths.unsqueeze(1)).double()


@response_mask.mistake
def inverted(ids, lengths, pad):
    """Your mask is 1 on padding and 0 on the response."""
    return (torch.arange(ids.shape[1]) >= lengths.unsqueeze(1)).double()


@response_mask.mistake
def one_too_few(ids, lengths, pad):
    """Your mask omits the last token of every row, where the policy stops."""
    return (torch.arange(ids.shape[1]) < lengths.unsqueeze(1) - 1).double()


@response_mask.mistake
def padded_on_the_left(ids, lengths, pad):
    """The ones are at the right end, but responses are padded on the right."""
    columns = torch.arange(ids.shape[1])
    return (columns >= ids.shape[1] - lengths.unsqueeze(1)).double()


@response_mask.mistake
def all_ones(ids, lengths, pad):
    """Padding counts: your mask is 1 everywhere."""
    return torch.ones(ids.shape, dtype=torch.float64)


@response_mask.mistake
def last_token_only(ids, lengths, pad):
    """You mark only each row's last token. Mark all of its tokens."""
    return (torch.arange(ids.shape[1]) == lengths.unsqueeze(1) - 1).double()


@response_mask.alternative
def row_by_row(ids, lengths, pad):
    mask = torch.zeros(ids.shape, dtype=torch.float64)
    for row, n in enumerate(lengths.tolist()):
        mask[row, :n] = 1
    return mask


@SET.exercise(
    "Positions with padding on the left",
    1,
    10,
    (
        "Write the positions of a row with two columns of padding by hand.",
        "A running count of real tokens is nearly right. What is it on the padding?",
    ),
)
def position_ids(attention_mask):
    """Count positions from the first real token, 0 on padding: (B, T) → (B, T).

    GPT-2 identifies positions by number. The first real token must be at position 0,
    whatever its column. Padding is on the left; it also gets 0.
    """
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


@position_ids.inputs
def _(generator):
    b, t = pick(generator, range(3, 5)), pick(generator, range(5, 8))
    return (ragged(generator, b, t).flip(1).long(),)


@position_ids.mistake
def by_column(attention_mask):
    """You return column numbers: a padded query would start in the middle of GPT-2's
    positions.
    """
    return torch.arange(attention_mask.shape[1]).expand_as(attention_mask)


@position_ids.mistake
def starts_at_one(attention_mask):
    """The first real token is at position 0, not 1."""
    return attention_mask.cumsum(1)


@position_ids.mistake
def negative_on_padding(attention_mask):
    """Padding has position −1, which no embedding table has."""
    return attention_mask.cumsum(1) - 1


@position_ids.mistake
def from_the_right(attention_mask):
    """You count from the right end. The first token must be at 0, not the last."""
    return attention_mask.flip(1).cumsum(1).flip(1) - 1


@position_ids.mistake
def columns_of_real_tokens(attention_mask):
    """You return column numbers, with 0 on padding. Count real tokens, not columns."""
    return torch.arange(attention_mask.shape[1]) * attention_mask


@position_ids.mistake
def one_on_padding(attention_mask):
    """Padding has position 1, as in some code. Here it must have position 0."""
    return (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, 1)


@position_ids.mistake
def mask_itself(attention_mask):
    """You return the mask. Positions must count up: 0, 1, 2 and so on."""
    return attention_mask.clone()


@position_ids.mistake
def first_column_of_the_batch(attention_mask):
    """You subtract the same number from all rows, but each starts in its own column."""
    start = attention_mask.argmax(1).max()
    return (
        (torch.arange(attention_mask.shape[1]) - start)
        .clamp(min=0)
        .expand(attention_mask.shape)
    )


@position_ids.alternative
def subtracting_the_start(attention_mask):
    start = attention_mask.argmax(1, keepdim=True)
    return (torch.arange(attention_mask.shape[1]) - start).clamp(min=0)


@SET.exercise(
    "Rewards per token",
    2,
    15,
    (
        "The reward has two parts: one at every token, the other at one token per row.",
        "How does the mask show where a row ends? Index one element of each row there.",
    ),
)
def token_rewards(scores, kl, mask, beta):
    """Give every token −β·KL, and add the score at the last one: (B,), (B, R), (B, R) →
    (B, R).

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


@token_rewards.mistake
def pays_for_kl(scores, kl, mask, beta):
    """KL has the wrong sign: the policy is rewarded for leaving the reference."""
    rewards = beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards


@token_rewards.mistake
def score_in_the_last_column(scores, kl, mask, beta):
    """The score is in the last *column*, which is padding in the shorter rows: the
    policy would not learn from it.
    """
    rewards = -beta * kl * mask
    rewards[:, -1] += scores
    return rewards


@token_rewards.mistake
def score_on_every_token(scores, kl, mask, beta):
    """Every token gets the whole score, so long responses earn more. Add the score
    once, at the end.
    """
    return (scores.unsqueeze(1) - beta * kl) * mask


@token_rewards.mistake
def score_replaces_kl(scores, kl, mask, beta):
    """The last token's KL is lost: *add* the score there."""
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] = scores
    return rewards


@token_rewards.mistake
def score_at_the_first_token(scores, kl, mask, beta):
    """You add the score at the first token, but it is known only after the last."""
    rewards = -beta * kl * mask
    rewards[:, 0] += scores
    return rewards


@token_rewards.mistake
def score_without_sign(scores, kl, mask, beta):
    """You subtract the score: the policy is rewarded for low scores."""
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] -= scores
    return rewards


@token_rewards.mistake
def one_past_the_end(scores, kl, mask, beta):
    """You add the score one token too late, on padding."""
    rewards = -beta * kl * mask
    last = mask.sum(1).long().clamp(max=mask.shape[1] - 1)
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


@token_rewards.mistake
def one_before_the_end(scores, kl, mask, beta):
    """You add the score one token too early."""
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 2] += scores
    return rewards


@token_rewards.mistake
def spread_over_the_tokens(scores, kl, mask, beta):
    """You divide the score among the tokens. Add it once, at the last token."""
    share = scores / mask.sum(1)
    return (share.unsqueeze(1) - beta * kl) * mask


@token_rewards.mistake
def kl_on_padding(scores, kl, mask, beta):
    """Padding also gets the KL penalty. It must get 0."""
    rewards = -beta * kl
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards


@token_rewards.mistake
def kl_at_the_end_only(scores, kl, mask, beta):
    """The last token gets the whole KL penalty. Each token must get its own."""
    rewards = torch.zeros_like(kl)
    paid = scores - beta * (kl * mask).sum(1)
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] = paid
    return rewards


@token_rewards.mistake
def no_kl(scores, kl, mask, beta):
    """Your rewards contain only the score, without a KL penalty."""
    rewards = torch.zeros_like(kl)
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] = scores
    return rewards


@token_rewards.mistake
def beta_on_the_score(scores, kl, mask, beta):
    """β also scales the score. It must scale only the KL."""
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += beta * scores
    return rewards


@token_rewards.alternative
def with_a_second_mask(scores, kl, mask, beta):
    is_last = mask - torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return is_last * scores.unsqueeze(1) - beta * kl * mask


@SET.exercise(
    "Whitening with a mask",
    2,
    15,
    (
        "Which of the numbers in the formula would change if you added more padding?",
        "Mean and variance are sums over real tokens. What divides each sum?",
    ),
)
def whiten(x, mask):
    """Scale to mean 0 and unbiased variance 1 over the mask's tokens, 0 elsewhere: two
    (B, R) → (B, R).

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


@whiten.mistake
def over_padding(x, mask):
    """Your mean and variance include padding."""
    return (x - x.mean()) / (x.var() + 1e-8).sqrt() * mask


@whiten.mistake
def with_n(x, mask):
    """You divide the variance by n. The unbiased variance divides by n − 1."""
    n = mask.sum()
    mean = (x * mask).sum() / n
    return (x - mean) / (((x - mean) ** 2 * mask).sum() / n + 1e-8).sqrt() * mask


@whiten.mistake
def padding_left_over(x, mask):
    """Padding is not 0 in the result."""
    n = mask.sum()
    mean = (x * mask).sum() / n
    return (x - mean) / (((x - mean) ** 2 * mask).sum() / (n - 1) + 1e-8).sqrt()


@whiten.mistake
def row_by_row_means(x, mask):
    """You whiten each row separately, so a good response looks no better than a bad
    one. Whiten over the whole batch.
    """
    n = mask.sum(1, keepdim=True)
    mean = (x * mask).sum(1, keepdim=True) / n
    return (
        (x - mean)
        / (((x - mean) ** 2 * mask).sum(1, keepdim=True) / (n - 1) + 1e-8).sqrt()
        * mask
    )


@whiten.mistake
def mean_kept(x, mask):
    """You do not subtract the mean, so the result does not have mean 0."""
    return x / (x[mask.bool()].var() + 1e-8).sqrt() * mask


@whiten.mistake
def variance_for_std(x, mask):
    """You divide by the variance. Divide by its square root."""
    real = x[mask.bool()]
    return (x - real.mean()) / (real.var() + 1e-8) * mask


@whiten.mistake
def small_number_outside(x, mask):
    """1e-8 is outside the root, or missing, which changes the result for a nearly
    constant batch.
    """
    real = x[mask.bool()]
    return (x - real.mean()) / (real.std() + 1e-8) * mask


@whiten.mistake
def centered_only(x, mask):
    """You subtract the mean but do not divide, so the variance is not 1."""
    return (x - x[mask.bool()].mean()) * mask


@whiten.mistake
def padding_as_zeros(x, mask):
    """Padding enters the mean or the variance as zeros. Divide by the number of real
    tokens, and leave padding out.
    """
    y = x * mask
    return (y - y.mean()) / (y.var() + 1e-8).sqrt() * mask


@whiten.mistake
def squares_of_padding(x, mask):
    """The mean is right, but the variance includes padding."""
    mean = x[mask.bool()].mean()
    variance = ((x - mean) ** 2).sum() / (mask.sum() - 1)
    return (x - mean) / (variance + 1e-8).sqrt() * mask


@whiten.alternative
def by_selection(x, mask):
    real = x[mask.bool()]
    white = torch.zeros_like(x)
    white[mask.bool()] = (real - real.mean()) * torch.rsqrt(real.var() + 1e-8)
    return white


@SET.exercise(
    "The clipped policy loss",
    3,
    20,
    (
        "Take A = 1 and ratios of 0.5, 1 and 2: what should the loss be for each?",
        "Keep the more pessimistic of two losses per token. Then average real tokens.",
    ),
    ("logprobs", "old_logprobs", "advantages"),
)
def policy_loss(logprobs, old_logprobs, advantages, mask, epsilon):
    """Average PPO's clipped loss over the mask's tokens: four (B, R) → a number.

    The loss per token is max(−A·ρ, −A·clip(ρ, 1 − ε, 1 + ε)) with ρ = exp(lp − old lp).
    Sum it over the real tokens of all rows and divide by their number. Return a tensor.
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


def _mean(loss, mask):
    return (loss * mask.detach()).sum() / mask.detach().sum()


@policy_loss.mistake
def min_for_max(logprobs, old_logprobs, advantages, mask, epsilon):
    """You use min instead of max. Of two *losses* the larger one is the cautious
    choice. With min the clip limits nothing: the larger gain always counts.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    return _mean(
        torch.minimum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon)), mask
    )


@policy_loss.mistake
def wrong_sign(logprobs, old_logprobs, advantages, mask, epsilon):
    """The sign is wrong: an optimizer *minimizes*, so good tokens (A > 0) must lower
    the loss.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    return _mean(
        torch.maximum(a * ratio, a * ratio.clamp(1 - epsilon, 1 + epsilon)), mask
    )


@policy_loss.mistake
def clipped_only(logprobs, old_logprobs, advantages, mask, epsilon):
    """You keep only the clipped form: a token that has moved too far the *wrong* way
    gets no gradient that brings it back.
    """
    ratio = torch.exp(logprobs - old_logprobs.detach()).clamp(1 - epsilon, 1 + epsilon)
    return _mean(-advantages.detach() * ratio, mask)


@policy_loss.mistake
def no_detach(logprobs, old_logprobs, advantages, mask, epsilon):
    """The value is right, but gradient flows into the old log-probabilities or the
    advantages. Detach them, or the loss also learns to change the past.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return _mean(
        torch.maximum(
            -advantages * ratio, -advantages * ratio.clamp(1 - epsilon, 1 + epsilon)
        ),
        mask,
    )


@policy_loss.mistake
def mean_over_padding(logprobs, old_logprobs, advantages, mask, epsilon):
    """You divide by all columns, including padding, so the loss shrinks with every
    short response.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return (loss * mask.detach()).mean()


@policy_loss.mistake
def ratio_upside_down(logprobs, old_logprobs, advantages, mask, epsilon):
    """Your ratio is inverted: it must be new over old."""
    ratio, a = torch.exp(old_logprobs.detach() - logprobs), advantages.detach()
    return _mean(
        torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon)), mask
    )


@policy_loss.mistake
def not_clipped(logprobs, old_logprobs, advantages, mask, epsilon):
    """Nothing is clipped: one batch could move the policy without limit."""
    ratio = torch.exp(logprobs - old_logprobs.detach())
    return _mean(-advantages.detach() * ratio, mask)


@policy_loss.mistake
def difference_for_ratio(logprobs, old_logprobs, advantages, mask, epsilon):
    """You use the difference of log-probabilities, not the ratio of probabilities."""
    ratio, a = logprobs - old_logprobs.detach(), advantages.detach()
    return _mean(
        torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon)), mask
    )


@policy_loss.mistake
def ratio_of_logarithms(logprobs, old_logprobs, advantages, mask, epsilon):
    """You divide log-probabilities. Subtract them, then exponentiate."""
    ratio, a = logprobs / old_logprobs.detach(), advantages.detach()
    return _mean(
        torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon)), mask
    )


@policy_loss.mistake
def clipped_above_only(logprobs, old_logprobs, advantages, mask, epsilon):
    """You clip the ratio only from above: a bad token could be pushed down without
    limit.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    return _mean(torch.maximum(-a * ratio, -a * ratio.clamp(max=1 + epsilon)), mask)


@policy_loss.mistake
def mean_of_row_means(logprobs, old_logprobs, advantages, mask, epsilon):
    """You average each row and then the rows, so a token of a short row counts more.
    All real tokens must weigh the same.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@policy_loss.mistake
def sum_for_mean(logprobs, old_logprobs, advantages, mask, epsilon):
    """You add up the tokens, so the step grows with the batch. Take the mean."""
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return (loss * mask).sum()


@policy_loss.mistake
def mean_over_rows(logprobs, old_logprobs, advantages, mask, epsilon):
    """You divide by the number of rows. Divide by the number of real tokens."""
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return (loss * mask).sum() / len(mask)


@policy_loss.alternative
def by_cases(logprobs, old_logprobs, advantages, mask, epsilon):
    ratio, a = (logprobs - old_logprobs.detach()).exp(), advantages.detach()
    limit = torch.where(
        a > 0, ratio.clamp(max=1 + epsilon), ratio.clamp(min=1 - epsilon)
    )
    keep = mask.detach().bool()
    return -(a * limit)[keep].mean()


@SET.exercise(
    "The clipped value loss",
    2,
    15,
    (
        "Draw a number line with the old value, the new one, and the return.",
        "Keep the *value* near the old value, not its error. Then compare two errors.",
    ),
    ("values", "old_values", "returns"),
)
def value_loss(values, old_values, returns, epsilon):
    """Return ½ max((v − R)², (v_clip − R)²) per token: three (B, R) → (B, R).

    v_clip is v, kept within ε of the old value. Return a tensor. Only `values` gets a
    gradient: detach old values and returns.
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


@value_loss.mistake
def no_half(values, old_values, returns, epsilon):
    """The ½ is missing: every value and every gradient is twice what it should be."""
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def smaller_of_both(values, old_values, returns, epsilon):
    """You use min instead of max. The larger of the two errors must count, or the clip
    limits nothing.
    """
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return 0.5 * torch.minimum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def around_the_return(values, old_values, returns, epsilon):
    """The clip has no effect: you clip nothing, or not around the *old* value. The
    value must not move far from the old one.
    """
    returns = returns.detach()
    near = torch.maximum(torch.minimum(values, returns + epsilon), returns - epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def gradient_into_the_past(values, old_values, returns, epsilon):
    """The value is right, but gradient flows into the returns or the old values. They
    are constants: detach them.
    """
    near = torch.maximum(
        torch.minimum(values, old_values + epsilon), old_values - epsilon
    )
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def clipped_only(values, old_values, returns, epsilon):
    """You keep only the clipped error. The larger of two errors must count."""
    old = old_values.detach()
    near = old + (values - old).clamp(-epsilon, epsilon)
    return 0.5 * (near - returns.detach()) ** 2


@value_loss.mistake
def clipped_around_zero(values, old_values, returns, epsilon):
    """You clip the value itself to ±ε. It may be any number, but must stay near the old
    value.
    """
    returns = returns.detach()
    near = values.clamp(-epsilon, epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def clipped_like_a_ratio(values, old_values, returns, epsilon):
    """You clip a ratio of values. Values are not probabilities: clip a distance."""
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(
        torch.minimum(values, old * (1 + epsilon)), old * (1 - epsilon)
    )
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def absolute_error(values, old_values, returns, epsilon):
    """You use absolute errors. Use squared errors."""
    old, returns = old_values.detach(), returns.detach()
    near = old + (values - old).clamp(-epsilon, epsilon)
    return 0.5 * torch.maximum((values - returns).abs(), (near - returns).abs())


@value_loss.mistake
def averaged(values, old_values, returns, epsilon):
    """You average. Return one number per token."""
    return by_clamping_the_move(values, old_values, returns, epsilon).mean()


@value_loss.mistake
def old_value_counts(values, old_values, returns, epsilon):
    """Your second error is that of the old value. It must be that of the new value,
    kept near the old one.
    """
    old, returns = old_values.detach(), returns.detach()
    return 0.5 * torch.maximum((values - returns) ** 2, (old - returns) ** 2)


@value_loss.alternative
def by_clamping_the_move(values, old_values, returns, epsilon):
    old, returns = old_values.detach(), returns.detach()
    near = old + (values - old).clamp(-epsilon, epsilon)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


@SET.exercise(
    "The adaptive KL coefficient",
    1,
    10,
    (
        "KL is twice its target: should β grow or shrink, and by how much at most?",
        "Three steps: the relative error, its clip, and the share of the horizon.",
    ),
)
def next_beta(beta, kl, target, n, horizon):
    """Return the coefficient after n samples with this mean KL: five numbers → a
    number.

    β ← β · (1 + clip(KL / target − 1, −0.2, 0.2) · n / horizon).
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * n / horizon)


@next_beta.inputs
def _(generator):
    beta, target = pick(generator, (0.05, 0.2, 1.0)), pick(generator, (0.5, 2.0, 6.0))
    times = (0.0, 0.5, 0.9, 1.0, 1.1, 3.0)[
        generator.initial_seed() % 6
    ]  # below, at, above
    n, horizon = pick(generator, (64, 500, 2000)), pick(generator, (1000, 10_000))
    return beta, times * target, target, n, horizon


@next_beta.mistake
def not_clipped(beta, kl, target, n, horizon):
    """You do not clip the error: one unusual batch would swing β."""
    return beta * (1 + (kl / target - 1) * n / horizon)


@next_beta.mistake
def wrong_direction(beta, kl, target, n, horizon):
    """β moves the wrong way: when KL is above its target, the penalty must grow."""
    return beta * (1 - min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


@next_beta.mistake
def without_the_samples(beta, kl, target, n, horizon):
    """The horizon counts samples, so a step of n samples must move β n times as far as
    a step of one sample.
    """
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) / horizon)


@next_beta.mistake
def clipped_too_late(beta, kl, target, n, horizon):
    """You clip after scaling by n / horizon. Clip the error itself."""
    return beta * (1 + min(max((kl / target - 1) * n / horizon, -0.2), 0.2))


@next_beta.mistake
def absolute_error(beta, kl, target, n, horizon):
    """Your error is not relative. Compare KL with its target by a ratio."""
    return beta * (1 + min(max(kl - target, -0.2), 0.2) * n / horizon)


@next_beta.mistake
def added(beta, kl, target, n, horizon):
    """You add to β. Multiply it, so that it stays positive and keeps its scale."""
    return beta + min(max(kl / target - 1, -0.2), 0.2) * n / horizon


@next_beta.mistake
def only_upwards(beta, kl, target, n, horizon):
    """Your β only grows. Below the target it must shrink."""
    return beta * (1 + min(max(kl / target - 1, 0.0), 0.2) * n / horizon)


@next_beta.mistake
def clipped_above_only(beta, kl, target, n, horizon):
    """You clip the error only from above: with a KL of 0 it falls below −0.2."""
    return beta * (1 + min(kl / target - 1, 0.2) * n / horizon)


@next_beta.mistake
def clipped_below_only(beta, kl, target, n, horizon):
    """You clip the error only from below: a large KL would swing β."""
    return beta * (1 + max(kl / target - 1, -0.2) * n / horizon)


@next_beta.mistake
def factor_alone(beta, kl, target, n, horizon):
    """You return only the factor. Multiply β by it."""
    return 1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon


@next_beta.mistake
def target_over_kl(beta, kl, target, n, horizon):
    """Your ratio is inverted: it must be KL over its target."""
    return beta * (1 + min(max(target / max(kl, 1e-9) - 1, -0.2), 0.2) * n / horizon)


@next_beta.mistake
def ratio_clipped(beta, kl, target, n, horizon):
    """You forgot to subtract 1: a KL at its target must leave β unchanged."""
    return beta * (1 + min(max(kl / target, -0.2), 0.2) * n / horizon)


@next_beta.alternative
def with_torch(beta, kl, target, n, horizon):
    return (
        beta
        + beta
        * n
        / horizon
        * torch.tensor(kl / target - 1, dtype=torch.float64).clamp(-0.2, 0.2).item()
    )
