"""Exercises of notebook 03."""

import torch

from engine import Set, normal, ragged

SET = Set("03_ppo_step_by_step", "PPO, one step taken apart")
check = SET.check


@SET.exercise(
    "A mask from lengths",
    1,
    5,
    "Compare `torch.arange(R)` with the lengths, one row each.",
)
def response_mask(ids, lengths, pad):
    """1.0 on response tokens, 0.0 on padding: ids (B, R), lengths (B,) → (B, R),
    float64.

    Padding is EOS here, as with GPT-2, and a policy may sample EOS as its last token.
    """
    return (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).double()


@response_mask.inputs
def _(dice):
    lengths, pad = torch.tensor([2, 5, 3]), 9
    ids = torch.randint(9, (3, 5), generator=dice)
    ids[torch.arange(5) >= lengths.unsqueeze(1)] = pad
    ids[0, 1] = pad  # a sampled EOS
    return ids, lengths, pad


@response_mask.mistake
def from_the_padding_token(ids, lengths, pad):
    """`ids != pad` drops the EOS that the policy *sampled*: it was its decision to
    stop, and must be learnt from.
    """
    return (ids != pad).double()


@response_mask.mistake
def one_too_many(ids, lengths, pad):
    """One token of padding counts in every row: a row of n tokens has the columns 0 to
    n − 1.
    """
    return (torch.arange(ids.shape[1]) <= lengths.unsqueeze(1)).double()


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
    "Count real tokens; padding may have any valid position.",
)
def position_ids(attention_mask):
    """Positions counted from the first real token, 0 on padding: (B, T) → (B, T).

    GPT-2 knows positions by number. Its first real token must be at 0, wherever it
    stands.
    """
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


@position_ids.inputs
def _(dice):
    return (ragged(dice, 3, 6).flip(1).long(),)


@position_ids.mistake
def by_column(attention_mask):
    """These are column numbers: a padded query would start in the middle of GPT-2's
    positions.
    """
    return torch.arange(attention_mask.shape[1]).expand_as(attention_mask)


@position_ids.mistake
def starts_at_one(attention_mask):
    """The first real token is at position 0, not 1."""
    return attention_mask.cumsum(1)


@position_ids.mistake
def negative_on_padding(attention_mask):
    """Padding has position −1, which no embedding table holds. `clamp` it."""
    return attention_mask.cumsum(1) - 1


@position_ids.alternative
def subtracting_the_start(attention_mask):
    start = attention_mask.argmax(1, keepdim=True)
    return (torch.arange(attention_mask.shape[1]) - start).clamp(min=0)


@SET.exercise(
    "Rewards per token",
    2,
    15,
    "`rewards[torch.arange(B), last] += scores` adds one number per row.",
)
def token_rewards(scores, kl, mask, beta):
    """Every token pays β·KL, and the score comes with the last one: (B,), (B, R), (B,
    R) → (B, R).

    Rows are padded on the right, and padding gets 0.
    """
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards


@token_rewards.inputs
def _(dice):
    return normal(dice, 4), normal(dice, 4, 6), ragged(dice, 4, 6), 0.2


@token_rewards.mistake
def pays_for_kl(scores, kl, mask, beta):
    """KL has the wrong sign: this policy is paid for leaving the reference."""
    rewards = beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards


@token_rewards.mistake
def score_in_the_last_column(scores, kl, mask, beta):
    """The score stands in the last *column*, which is padding in the shorter rows:
    nobody would learn from it.
    """
    rewards = -beta * kl * mask
    rewards[:, -1] += scores
    return rewards


@token_rewards.mistake
def score_on_every_token(scores, kl, mask, beta):
    """Every token gets the whole score, so long responses earn more. It comes once, at
    the end.
    """
    return (scores.unsqueeze(1) - beta * kl) * mask


@token_rewards.mistake
def score_replaces_kl(scores, kl, mask, beta):
    """The last token's KL is lost: the score is *added* there."""
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] = scores
    return rewards


@token_rewards.alternative
def with_a_second_mask(scores, kl, mask, beta):
    is_last = mask - torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return is_last * scores.unsqueeze(1) - beta * kl * mask


@SET.exercise(
    "Whitening with a mask",
    2,
    15,
    "Everything is a sum over real tokens divided by their number n, or n − 1.",
)
def whiten(x, mask):
    """Mean 0 and unbiased variance 1 over the tokens of the mask, 0 elsewhere: two (B,
    R) → (B, R).

    Use 1e-8 inside the square root: (x − mean) / sqrt(variance + 1e-8).
    """
    n = mask.sum()
    mean = (x * mask).sum() / n
    variance = ((x - mean) ** 2 * mask).sum() / (n - 1)
    return (x - mean) / (variance + 1e-8).sqrt() * mask


@whiten.inputs
def _(dice):
    return normal(dice, 3, 5) + 1, ragged(dice, 3, 5)


@whiten.mistake
def over_padding(x, mask):
    """Padding is in the mean and in the variance."""
    return (x - x.mean()) / (x.var() + 1e-8).sqrt() * mask


@whiten.mistake
def with_n(x, mask):
    """The variance is divided by n; the unbiased one by n − 1."""
    n = mask.sum()
    mean = (x * mask).sum() / n
    return (x - mean) / (((x - mean) ** 2 * mask).sum() / n + 1e-8).sqrt() * mask


@whiten.mistake
def padding_left_over(x, mask):
    """Padding is not 0 in the result: multiply by the mask at the end, too."""
    n = mask.sum()
    mean = (x * mask).sum() / n
    return (x - mean) / (((x - mean) ** 2 * mask).sum() / (n - 1) + 1e-8).sqrt()


@whiten.mistake
def row_by_row_means(x, mask):
    """You whiten each row by itself. Then a good response is no better than a bad one:
    the whole batch is compared.
    """
    n = mask.sum(1, keepdim=True)
    mean = (x * mask).sum(1, keepdim=True) / n
    return (
        (x - mean)
        / (((x - mean) ** 2 * mask).sum(1, keepdim=True) / (n - 1) + 1e-8).sqrt()
        * mask
    )


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
    "The larger of two losses is the pessimistic choice.",
    True,
)
def policy_loss(logprobs, old_logprobs, advantages, mask, epsilon):
    """PPO's clipped loss, a mean over the mask's tokens: four (B, R) → a number.

    Per token max(−A·ρ, −A·clip(ρ, 1 − ε, 1 + ε)) with ρ = exp(lp − old lp). Only
    `logprobs` gets a gradient: advantages and old log-probabilities are numbers.
    """
    ratio = torch.exp(logprobs - old_logprobs.detach())
    advantages = advantages.detach()
    loss = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - epsilon, 1 + epsilon)
    )
    return (loss * mask.detach()).sum() / mask.detach().sum()


@policy_loss.inputs
def _(dice):
    return (
        normal(dice, 4, 6) - 2,
        normal(dice, 4, 6) - 2,
        normal(dice, 4, 6),
        ragged(dice, 4, 6),
        0.2,
    )


def _mean(loss, mask):
    return (loss * mask.detach()).sum() / mask.detach().sum()


@policy_loss.mistake
def min_for_max(logprobs, old_logprobs, advantages, mask, epsilon):
    """min instead of max: of two *losses* the larger one is the cautious choice. With
    min the clip is no limit: whatever gains most goes through.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    return _mean(
        torch.minimum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon)), mask
    )


@policy_loss.mistake
def wrong_sign(logprobs, old_logprobs, advantages, mask, epsilon):
    """The sign is wrong: an optimizer *minimises*, so good tokens (A > 0) must lower
    the loss.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    return _mean(
        torch.maximum(a * ratio, a * ratio.clamp(1 - epsilon, 1 + epsilon)), mask
    )


@policy_loss.mistake
def clipped_only(logprobs, old_logprobs, advantages, mask, epsilon):
    """Only the clipped form is left: a token that has gone too far the *wrong* way gets
    no gradient that brings it back.
    """
    ratio = torch.exp(logprobs - old_logprobs.detach()).clamp(1 - epsilon, 1 + epsilon)
    return _mean(-advantages.detach() * ratio, mask)


@policy_loss.mistake
def no_detach(logprobs, old_logprobs, advantages, mask, epsilon):
    """The value is right, but gradient flows into the old log-probabilities or the
    advantages: detach them, or the loss also learns to change the past.
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
    """You divide by all columns, padding among them: the loss shrinks with every short
    response.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return (loss * mask.detach()).mean()


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
    "Clip the *value* around its old self, not the error.",
    True,
)
def value_loss(values, old_values, returns, epsilon):
    """Per token ½ max((v − R)², (v_clip − R)²): three (B, R) → (B, R).

    v_clip is v, kept within ε of the old value. Only `values` gets a gradient.
    """
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.inputs
def _(dice):
    return normal(dice, 3, 5), normal(dice, 3, 5), normal(dice, 3, 5), 0.2


@value_loss.mistake
def no_half(values, old_values, returns, epsilon):
    """The ½ is missing: every value and every gradient is twice what it should be."""
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def smaller_of_both(values, old_values, returns, epsilon):
    """min instead of max: the worse of the two errors counts, or the clip lets
    everything through.
    """
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return 0.5 * torch.minimum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def around_the_return(values, old_values, returns, epsilon):
    """You clip around the return. The value may not run away from its *old self*."""
    returns = returns.detach()
    near = torch.maximum(torch.minimum(values, returns + epsilon), returns - epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def gradient_into_the_past(values, old_values, returns, epsilon):
    """The value is right, but gradient flows into the returns or the old values. They
    are numbers: detach them.
    """
    near = torch.maximum(
        torch.minimum(values, old_values + epsilon), old_values - epsilon
    )
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.alternative
def by_clamping_the_move(values, old_values, returns, epsilon):
    old, returns = old_values.detach(), returns.detach()
    near = old + (values - old).clamp(-epsilon, epsilon)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


@SET.exercise(
    "The adaptive KL coefficient",
    1,
    10,
    "The relative error is clipped first, then scaled by n / horizon.",
)
def next_beta(beta, kl, target, n, horizon):
    """The coefficient after n samples with this mean KL: five numbers → a number.

    β ← β · (1 + clip(KL / target − 1, −0.2, 0.2) · n / horizon).
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * n / horizon)


@next_beta.inputs
def _(dice):
    kl = float(torch.rand((), generator=dice, dtype=torch.float64)) * 20 + 8
    return 0.2, kl, 6.0, 128, 1000


@next_beta.mistake
def not_clipped(beta, kl, target, n, horizon):
    """The error is not clipped: one odd batch would swing β."""
    return beta * (1 + (kl / target - 1) * n / horizon)


@next_beta.mistake
def wrong_direction(beta, kl, target, n, horizon):
    """The wrong way: when KL is above its target, the penalty must grow."""
    return beta * (1 - min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


@next_beta.mistake
def without_the_samples(beta, kl, target, n, horizon):
    """The horizon is counted in samples, so a step of n samples moves n times as far as
    one of a single sample.
    """
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) / horizon)


@next_beta.alternative
def with_torch(beta, kl, target, n, horizon):
    return (
        beta
        + beta
        * n
        / horizon
        * torch.tensor(kl / target - 1, dtype=torch.float64).clamp(-0.2, 0.2).item()
    )
