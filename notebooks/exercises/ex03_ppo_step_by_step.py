"""Exercises of notebook 03."""

import math

import torch

from engine import Set, normal, pick, ragged

SET = Set("03_ppo_step_by_step", "PPO, one step taken apart")
check = SET.check


@SET.exercise(
    "A mask from lengths",
    1,
    5,
    (
        "Which columns of a row with 3 tokens are real? Answer without looking at "
        "`ids`.",
        "Number the columns with `torch.arange` and compare these numbers with "
        "`lengths`.",
    ),
)
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


@response_mask.mistake
def from_the_padding_token(ids, lengths, pad):
    """You look for padding in `ids`, which drops the EOS that the policy *sampled*.
    This EOS was the policy's decision to stop, and the policy must learn from it.
    """
    return (ids != pad).double()


@response_mask.mistake
def one_too_many(ids, lengths, pad):
    """Your mask includes one padding token per row: a row of n tokens fills the columns
    0 to n − 1.
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
    """Your ones are at the right end of each row, but responses are padded on the
    right.
    """
    columns = torch.arange(ids.shape[1])
    return (columns >= ids.shape[1] - lengths.unsqueeze(1)).double()


@response_mask.mistake
def all_ones(ids, lengths, pad):
    """Your mask is 1 everywhere, so it includes padding."""
    return torch.ones(ids.shape, dtype=torch.float64)


@response_mask.mistake
def last_token_only(ids, lengths, pad):
    """You mark only each row's last token. Mark all tokens of the response."""
    return (torch.arange(ids.shape[1]) == lengths.unsqueeze(1) - 1).double()


@response_mask.mistake
def up_to_the_first_eos(ids, lengths, pad):
    """Your mask includes the first `pad` of every row. In a row without a sampled EOS,
    this token is padding.
    """
    return ((ids == pad).cumsum(1) - (ids == pad).long() < 1).double()


@response_mask.mistake
def rows_for_columns(ids, lengths, pad):
    """You compare lengths with row numbers. Compare them with column numbers."""
    rows = torch.arange(len(ids)).unsqueeze(1)
    return (rows < lengths.unsqueeze(1)).double().expand(ids.shape)


@response_mask.mistake
def masked_ids(ids, lengths, pad):
    """You return the ids, with zeros on padding. Return ones and zeros."""
    return ids * response_mask.solution(ids, lengths, pad)


@response_mask.mistake
def without_the_first(ids, lengths, pad):
    """Your mask omits the first token of every row, in column 0."""
    mask = response_mask.solution(ids, lengths, pad)
    mask[:, 0] = 0
    return mask


@response_mask.mistake
def columns_from_one(ids, lengths, pad):
    """Your ones start in column 1 and end one column too late."""
    columns = torch.arange(ids.shape[1])
    return ((columns > 0) & (columns <= lengths.unsqueeze(1))).double()


@response_mask.mistake
def first_padding_only(ids, lengths, pad):
    """You mark only the column after each row's last token."""
    return (torch.arange(ids.shape[1]) == lengths.unsqueeze(1)).double()


@response_mask.mistake
def additive(ids, lengths, pad):
    """You return a mask to *add* to attention scores: 0 or −∞. Return 1 or 0."""
    return response_mask.solution(ids, lengths, pad).log()


def _one_length(reduce):
    return lambda ids, lengths, pad: response_mask.solution(
        ids, reduce(lengths).expand(len(ids)), pad
    )


response_mask.say(
    "All rows of your mask are equal. Each row has its own length.",
    length_of_the_first=_one_length(lambda lengths: lengths[0]),
    length_of_the_last=_one_length(lambda lengths: lengths[-1]),
    longest=_one_length(torch.max),
    shortest=_one_length(torch.min),
)


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
        "A running count of real tokens is nearly right. What is this count on the "
        "padding?",
    ),
)
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


@position_ids.mistake
def by_column(attention_mask):
    """You return column numbers, so the positions of a padded query would not start at
    0.
    """
    return torch.arange(attention_mask.shape[1]).expand_as(attention_mask)


@position_ids.mistake
def starts_at_one(attention_mask):
    """You start at position 1. The first real token must be at position 0."""
    return attention_mask.cumsum(1)


@position_ids.mistake
def negative_on_padding(attention_mask):
    """You give padding the position −1, which no embedding table has."""
    return attention_mask.cumsum(1) - 1


@position_ids.mistake
def from_the_right(attention_mask):
    """You count from the right end. The first real token, not the last, must be at
    position 0.
    """
    return attention_mask.flip(1).cumsum(1).flip(1) - 1


@position_ids.mistake
def columns_of_real_tokens(attention_mask):
    """You return column numbers, with 0 on padding. Count real tokens, not columns."""
    return torch.arange(attention_mask.shape[1]) * attention_mask


@position_ids.mistake
def one_on_padding(attention_mask):
    """You give padding the position 1, as some code does. Here padding must have
    position 0.
    """
    return (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, 1)


@position_ids.mistake
def mask_itself(attention_mask):
    """You return the mask. Positions must count up: 0, 1, 2 and so on."""
    return attention_mask.clone()


@position_ids.mistake
def first_column_of_the_batch(attention_mask):
    """You subtract the same number in all rows, but each row's tokens start in its own
    column.
    """
    start = attention_mask.argmax(1).max()
    return (
        (torch.arange(attention_mask.shape[1]) - start)
        .clamp(min=0)
        .expand(attention_mask.shape)
    )


def _columns(mask):
    return torch.arange(mask.shape[1]).expand(mask.shape)


def _minus(start, real_only=False):
    """Return columns minus ``start(mask)``, with 0 where this is negative."""
    return lambda attention_mask: (
        (_columns(attention_mask) - start(attention_mask)).clamp(min=0)
        * (attention_mask if real_only else 1)
    )


position_ids.say(
    position_ids.mistakes["first_column_of_the_batch"].__doc__,
    first_rows_padding=_minus(lambda m: m[0].argmax()),
    first_rows_padding_masked=_minus(lambda m: m[0].argmax(), True),
)
position_ids.say(
    "You subtract the number of real tokens. In a row without padding, what must you "
    "subtract?",
    minus_real_tokens=_minus(lambda m: m.sum(1, keepdim=True)),
    minus_real_tokens_masked=_minus(lambda m: m.sum(1, keepdim=True), True),
)
position_ids.say(
    position_ids.mistakes["from_the_right"].__doc__,
    from_the_right_masked=lambda m: (m.flip(1).cumsum(1).flip(1) - 1) * m,
)
position_ids.say(
    "You subtract 1 once too often: your second real token is at position 0.",
    two_at_zero=lambda m: (m.cumsum(1) - 2).clamp(min=0),
    starts_at_minus_one=lambda m: m.cumsum(1) - 2,
    starts_at_minus_one_masked=lambda m: (m.cumsum(1) - 2) * m,
)
position_ids.say(
    "You count padding. Count real tokens, and give padding 0.",
    padding_counted=lambda m: ((1 - m).cumsum(1) - 1) * (1 - m),
    padding_counted_from_one=lambda m: (1 - m).cumsum(1) * (1 - m),
    running_count_of_padding=lambda m: (1 - m).cumsum(1),
)
position_ids.say(
    "Your count continues from row to row. It must restart at 0 in each row.",
    over_the_batch=lambda m: (m.flatten().cumsum(0).view_as(m) - 1) * m,
    over_the_batch_unmasked=lambda m: m.flatten().cumsum(0).view_as(m) - 1,
    over_the_batch_clamped=lambda m: (m.flatten().cumsum(0).view_as(m) - 1).clamp(
        min=0
    ),
)
position_ids.say(
    "You count along each column, across the batch. Count along each row.",
    down_the_batch=lambda m: m.cumsum(0) - 1,
    down_the_batch_masked=lambda m: (m.cumsum(0) - 1) * m,
)
position_ids.say(
    "You put the positions at the left end of each row, but the real tokens are at "
    "the right end.",
    moved_to_the_left=lambda m: _columns(m) * (_columns(m) < m.sum(1, keepdim=True)),
)
position_ids.say(
    "Your positions on padding are negative. No embedding table has negative "
    "positions.",
    negative_columns=lambda m: _columns(m) - m.argmax(1, keepdim=True),
)
position_ids.say(
    "Your real tokens have the right positions, but padding keeps its column numbers "
    "instead of 0.",
    columns_on_padding=lambda m: torch.where(m > 0, m.cumsum(1) - 1, _columns(m)),
)
position_ids.say(
    "You return only the real tokens' positions, without rows. Keep the shape (B, T).",
    real_tokens_only=lambda m: (m.cumsum(1) - 1)[m == 1],
)
position_ids.say(
    "You shift the running count by one column. Because roll wraps around, the last "
    "column's count ends up in the first column.",
    rolled=lambda m: m.cumsum(1).roll(1, 1),
)
position_ids.say(
    "You put the first real token at position 2, as in RoBERTa. Here it must be at "
    "position 0.",
    as_in_roberta=lambda m: m.cumsum(1) * m + 1,
)
position_ids.say(
    "You return column numbers counted from 1, with 0 on padding. Count real tokens, "
    "not columns.",
    columns_from_one=lambda m: (_columns(m) + 1) * m,
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
        "The reward has two parts: one part at every token, and one at a single token "
        "per row.",
        "How does the mask show where a row ends? Index one element of each row at "
        "that place.",
    ),
)
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


@token_rewards.mistake
def pays_for_kl(scores, kl, mask, beta):
    """Your KL term has the wrong sign: it rewards the policy for leaving the
    reference.
    """
    rewards = beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards


@token_rewards.mistake
def score_in_the_last_column(scores, kl, mask, beta):
    """You add the score in the last *column*, which is padding in the shorter rows: the
    policy would not learn from these rows' scores.
    """
    rewards = -beta * kl * mask
    rewards[:, -1] += scores
    return rewards


@token_rewards.mistake
def score_on_every_token(scores, kl, mask, beta):
    """You give every token the whole score, so long responses earn more than short
    responses. Add the score once, at the end.
    """
    return (scores.unsqueeze(1) - beta * kl) * mask


@token_rewards.mistake
def score_replaces_kl(scores, kl, mask, beta):
    """You overwrite the last token's KL term. *Add* the score to this term."""
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] = scores
    return rewards


@token_rewards.mistake
def score_at_the_first_token(scores, kl, mask, beta):
    """You add the score at the first token, but the score is known only after the last
    token.
    """
    rewards = -beta * kl * mask
    rewards[:, 0] += scores
    return rewards


@token_rewards.mistake
def score_without_sign(scores, kl, mask, beta):
    """You subtract the score, which rewards the policy for low scores."""
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
    """You divide the score among the tokens. Add the whole score once, at the last
    token.
    """
    share = scores / mask.sum(1)
    return (share.unsqueeze(1) - beta * kl) * mask


@token_rewards.mistake
def kl_on_padding(scores, kl, mask, beta):
    """You also give padding the KL penalty. Padding must get 0."""
    rewards = -beta * kl
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards


@token_rewards.mistake
def kl_at_the_end_only(scores, kl, mask, beta):
    """You give the last token the whole KL penalty. Each token must get its own
    penalty.
    """
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
    """You also multiply the score by β. β must scale only the KL."""
    rewards = -beta * kl * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += beta * scores
    return rewards


def _changed(scores=lambda s, *_: s, kl=lambda k, *_: k, last=lambda n: n - 1):
    """Return a mistake with changed scores, KL, or column of the score."""

    def mistake(scores_, kl_, mask, beta):
        rewards = -beta * kl(kl_, mask) * mask
        columns = last(mask.sum(1).long())
        rewards[torch.arange(len(mask)), columns] += scores(scores_, mask, beta)
        return rewards

    return mistake


def _row_sum(kl, mask):
    return (kl * mask).sum(1, keepdim=True)


def _row_mean(kl, mask):
    return _row_sum(kl, mask) / mask.sum(1, keepdim=True)


def _at_the_end(total):
    """Return a mistake that subtracts each row's whole KL penalty at its last token."""
    return lambda scores, kl, mask, beta: _changed(
        lambda s, *_: s - beta * total(kl, mask)[:, 0], lambda k, m: 0 * k
    )(scores, kl, mask, beta)


token_rewards.say(
    token_rewards.mistakes["one_before_the_end"].__doc__,
    one_before_the_end_if_any=_changed(last=lambda n: (n - 2).clamp(min=0)),
)
token_rewards.say(
    "You set negative KL terms to 0. A sampled token's KL term may be negative. Keep "
    "its sign.",
    kl_clamped=_changed(kl=lambda k, m: k.clamp(min=0)),
)
token_rewards.say(
    "You give all tokens of a row the same penalty. Each token must get its own "
    "penalty.",
    mean_kl_of_the_row=_changed(kl=_row_mean),
    total_kl_of_the_row=_changed(kl=_row_sum),
    mean_kl_of_the_batch=_changed(kl=lambda k, m: (k * m).sum() / m.sum()),
    mean_kl_with_padding=_changed(kl=lambda k, m: k.mean(1, keepdim=True)),
)
token_rewards.say(
    "You give the last token the whole KL penalty. Each token must get its own "
    "penalty.",
    mean_kl_at_the_end=_at_the_end(_row_mean),
    kl_and_padding_at_the_end=_at_the_end(lambda k, m: k.sum(1, keepdim=True)),
)
token_rewards.say(
    "You add all scores in one column, but each row ends in its own column.",
    length_of_the_first=_changed(last=lambda n: n[0] - 1),
    shortest_length=_changed(last=lambda n: n.min() - 1),
)
token_rewards.say(
    "You divide the score by the response's length. Add the whole score.",
    score_over_length=_changed(lambda s, m, b: s / m.sum(1)),
)
token_rewards.say(
    "You divide the KL by the response's length. Every token must get its full "
    "penalty.",
    kl_over_length=_changed(kl=lambda k, m: k / m.sum(1, keepdim=True)),
)
token_rewards.say(
    "You scale the score by 1 − β. Only the KL has a coefficient.",
    weighted_average=_changed(lambda s, m, b: (1 - b) * s),
)
token_rewards.say(
    "You accumulate the KL over tokens. A token's penalty must contain only its own "
    "KL.",
    running_kl=_changed(kl=lambda k, m: (k * m).cumsum(1)),
    kl_to_go=_changed(kl=lambda k, m: (k * m).flip(1).cumsum(1).flip(1)),
)
token_rewards.say(
    "You give each token the KL of a neighbor: your KL is shifted by one column.",
    next_kl=_changed(kl=lambda k, m: k.roll(-1, 1)),
    next_kl_without_wrap=_changed(
        kl=lambda k, m: torch.nn.functional.pad(k[:, 1:], (0, 1))
    ),
    previous_kl=_changed(kl=lambda k, m: k.roll(1, 1)),
    previous_kl_without_wrap=_changed(
        kl=lambda k, m: torch.nn.functional.pad(k[:, :-1], (1, 0))
    ),
)
token_rewards.say(
    "You add the score in every column, including padding. Add it once per row.",
    score_everywhere=lambda s, k, m, b: s.unsqueeze(1) - b * k * m,
    score_everywhere_without_mask=lambda s, k, m, b: s.unsqueeze(1) - b * k,
)
token_rewards.say(
    "You return sums of later rewards. Return the reward of each token.",
    returns=lambda *given: token_rewards.solution(*given).flip(1).cumsum(1).flip(1),
)
token_rewards.say(
    "`kl` already contains the KL term of each token. Do not square or exponentiate "
    "this term.",
    squared_kl=_changed(kl=lambda k, m: k**2),
    half_squared_kl=_changed(kl=lambda k, m: k**2 / 2),
    third_estimator=_changed(kl=lambda k, m: torch.expm1(-k) + k),
    third_estimator_of_minus_kl=_changed(kl=lambda k, m: torch.expm1(k) - k),
    exponential_kl=_changed(kl=lambda k, m: k.exp()),
)
token_rewards.say(
    "You center or whiten the scores first. Add them unchanged.",
    centered_scores=_changed(lambda s, *_: s - s.mean()),
    whitened_scores=_changed(lambda s, *_: (s - s.mean()) / s.std()),
)


def _all_columns(values):
    def mistake(scores, kl, mask, beta):
        rewards = -beta * kl * mask
        rewards[:, mask.sum(1).long() - 1] += values(scores)
        return rewards

    return mistake


token_rewards.say(
    "In each row you add scores in every column in which *any* row ends. Index rows "
    "and columns together.",
    own_score_in_all_columns=_all_columns(lambda s: s.unsqueeze(1)),
    all_scores_in_all_columns=_all_columns(lambda s: s),
)


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
        "Mean and variance are sums over real tokens. What is the divisor of each sum?",
    ),
)
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
    """You do not set padding to 0 in the result."""
    n = mask.sum()
    mean = (x * mask).sum() / n
    return (x - mean) / (((x - mean) ** 2 * mask).sum() / (n - 1) + 1e-8).sqrt()


@whiten.mistake
def row_by_row_means(x, mask):
    """You whiten each row separately, so a good response looks no better than a bad
    response. Whiten over the whole batch.
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
    """Your 1e-8 is outside the square root or missing. This changes the result for a
    nearly constant batch.
    """
    real = x[mask.bool()]
    return (x - real.mean()) / (real.std() + 1e-8) * mask


@whiten.mistake
def centered_only(x, mask):
    """You subtract the mean but do not divide, so the variance is not 1."""
    return (x - x[mask.bool()].mean()) * mask


@whiten.mistake
def padding_as_zeros(x, mask):
    """In your mean or variance, padding counts as zeros. Divide by the number of real
    tokens, and leave padding out.
    """
    y = x * mask
    return (y - y.mean()) / (y.var() + 1e-8).sqrt() * mask


@whiten.mistake
def squares_of_padding(x, mask):
    """Your mean is right, but your variance includes padding."""
    mean = x[mask.bool()].mean()
    variance = ((x - mean) ** 2).sum() / (mask.sum() - 1)
    return (x - mean) / (variance + 1e-8).sqrt() * mask


def _masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def _white(mean=_masked_mean, spread=None, epsilon=1e-8):
    """Return a mistake with a different mean, squared divisor, or small number."""

    def mistake(x, mask):
        m, n = mean(x, mask), mask.sum()
        if spread is None:
            variance = ((x - m) ** 2 * mask).sum() / (n - 1)
        else:
            variance = spread(x, mask, m, n)
        return (x - m) / (variance + epsilon).sqrt() * mask

    return mistake


def _divided(by):
    """Return a mistake that divides real tokens' sum of squares by a wrong number."""
    return _white(
        spread=lambda x, mask, m, n: ((x - m) ** 2 * mask).sum() / by(mask, n)
    )


def _real_variance(x, mask, m, n):
    return x[mask.bool()].var()


def _along(axis, divisor):
    """Return a mistake that whitens each row (axis 1) or each column (axis 0)."""

    def mean(x, mask):
        return (x * mask).sum(axis, True) / mask.sum(axis, True).clamp(min=1)

    def spread(x, mask, m, n):
        return ((x - m) ** 2 * mask).sum(axis, True) / divisor(mask.sum(axis, True))

    return _white(mean, spread)


_DIVISORS = {
    "n": lambda n: n.clamp(min=1),
    "n_minus_1": lambda n: n - 1,
    "n_minus_1_or_1": lambda n: (n - 1).clamp(min=1),
}
_MEANS = {
    "mean_over_all_places": (
        lambda x, m: (x * m).mean(),
        "divides by the number of all positions",
    ),
    "mean_of_padding_too": (lambda x, m: x.mean(), "includes padding"),
    "sum_of_padding_too": (lambda x, m: x.sum() / m.sum(), "has padding in its sum"),
    "mean_by_n_minus_1": (
        lambda x, m: (x * m).sum() / (m.sum() - 1),
        "divides by n − 1 (only the variance does)",
    ),
    "mean_of_row_means": (
        lambda x, m: ((x * m).sum(1) / m.sum(1)).mean(),
        "is a mean of the rows' means, so tokens of short rows count too much",
    ),
    "mean_over_rows": (
        lambda x, m: (x * m).sum() / len(x),
        "divides by the number of rows",
    ),
    "median": (lambda x, m: x[m.bool()].median(), "is a median"),
}
for _key, (_mean_of, _text) in _MEANS.items():
    _functions = {_key: _white(_mean_of)}
    _functions[f"{_key}_for_the_shift"] = _white(_mean_of, _real_variance)
    whiten.say(f"The mean that you subtract is wrong: it {_text}.", **_functions)
whiten.say(
    whiten.mistakes["row_by_row_means"].__doc__,
    rows_by_n=_along(1, _DIVISORS["n"]),
    rows_by_n_minus_1=_along(1, _DIVISORS["n_minus_1_or_1"]),
)
whiten.say(
    "You whiten each column separately. Whiten over all real tokens of the batch.",
    **{f"columns_{key}": _along(0, divisor) for key, divisor in _DIVISORS.items()},
)
whiten.say(
    "The divisor of your variance is larger than the number of real tokens.",
    variance_over_all_places=_divided(lambda mask, n: mask.numel()),
    variance_over_all_but_one=_divided(lambda mask, n: mask.numel() - 1),
    variance_by_n_plus_1=_divided(lambda mask, n: n + 1),
)
whiten.say(
    "The divisor of your variance comes from the number of rows. Count real tokens.",
    variance_over_rows=_divided(lambda mask, n: len(mask)),
    variance_over_rows_but_one=_divided(lambda mask, n: len(mask) - 1),
)
whiten.say(
    "Your variance is a sum: it is not divided by a number of tokens.",
    sum_of_squares=_divided(lambda mask, n: 1),
)
whiten.say(
    "Your variance is too small: the change from n to n − 1 must make the variance "
    "larger.",
    correction_inverted=_divided(lambda mask, n: n * n / (n - 1)),
)
whiten.say(
    "Your variance is too large: its divisor is smaller than n − 1.",
    correction_twice=_divided(lambda mask, n: (n - 1) ** 2 / n),
    variance_by_n_minus_2=_divided(lambda mask, n: n - 2),
)
whiten.say(
    "Your variance squares x itself. Subtract the mean before you square.",
    second_moment=_white(spread=lambda x, mask, m, n: (x**2 * mask).sum() / (n - 1)),
    second_moment_by_n=_white(spread=lambda x, mask, m, n: (x**2 * mask).sum() / n),
)
whiten.say(
    whiten.mistakes["squares_of_padding"].__doc__,
    variance_of_all_places=_white(spread=lambda x, mask, m, n: x.var()),
    variance_of_zeros_too=_white(spread=lambda x, mask, m, n: (x * mask).var()),
    squares_of_the_mean=_white(
        spread=lambda x, mask, m, n: ((x * mask - m) ** 2).sum() / (n - 1)
    ),
    squares_of_the_mean_by_n=_white(
        spread=lambda x, mask, m, n: ((x * mask - m) ** 2).sum() / n
    ),
    squares_of_padding_by_n=_white(
        spread=lambda x, mask, m, n: ((x - m) ** 2).sum() / n
    ),
    squares_of_padding_averaged=_white(
        spread=lambda x, mask, m, n: ((x - m) ** 2).mean()
    ),
)


def _deviation(divisor):
    def mistake(x, mask):
        centered = (x - _masked_mean(x, mask)) * mask
        return centered / (centered.abs().sum() / (mask.sum() - divisor) + 1e-8)

    return mistake


whiten.say(
    "You divide by a mean absolute deviation. Divide by the variance's square root.",
    absolute_deviation=_deviation(1),
    absolute_deviation_by_n=_deviation(0),
)
whiten.say(
    "You divide by the range from minimum to maximum. Divide by the variance's "
    "square root.",
    range_for_std=lambda x, mask: (
        (x - _masked_mean(x, mask))
        / (x[mask.bool()].max() - x[mask.bool()].min() + 1e-8)
        * mask
    ),
    minimum_to_maximum=lambda x, mask: (
        (x - x[mask.bool()].min())
        / (x[mask.bool()].max() - x[mask.bool()].min() + 1e-8)
        * mask
    ),
)
whiten.say(
    "You multiply by the standard deviation. Divide by it.",
    multiplied=lambda x, mask: (
        (x - _masked_mean(x, mask)) * (x[mask.bool()].var() + 1e-8).sqrt() * mask
    ),
)
whiten.say(
    "You add the mean again at the end. The result must have mean 0.",
    mean_restored=lambda x, mask: (
        (whiten.solution(x, mask) + _masked_mean(x, mask)) * mask
    ),
    mean_restored_on_padding=lambda x, mask: (
        whiten.solution(x, mask) + _masked_mean(x, mask)
    ),
)
whiten.say(
    "The small number inside your square root is missing or is not 1e-8. This changes "
    "the result for a nearly constant batch.",
    **{
        f"small_number_{value}": _white(epsilon=value)
        for value in (0, 1e-12, 1e-10, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1)
    },
    no_small_number=lambda x, mask: torch.where(
        mask.bool(), _white(epsilon=0)(x, mask), 0.0
    ),
)
whiten.say(
    "Your small number is outside the square root and is not 1e-8.",
    **{
        f"outside_{value}": lambda x, mask, value=value: (
            (x - _masked_mean(x, mask)) / (x[mask.bool()].std() + value) * mask
        )
        for value in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
    },
)
whiten.say(
    "You return only the real tokens, without rows. Keep the shape (B, R).",
    real_tokens_only=lambda x, mask: whiten.solution(x, mask)[mask.bool()],
)
whiten.say(
    "Padding is not 0 in your result: it keeps its value from `x`.",
    padding_unchanged=lambda x, mask: torch.where(
        mask.bool(), whiten.solution(x, mask), x
    ),
)
whiten.say(
    "Padding is not 0 in your result: you also subtract the mean there.",
    masked_before_the_mean=lambda x, mask: (
        (x * mask - _masked_mean(x, mask)) / (x[mask.bool()].var() + 1e-8).sqrt()
    ),
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
    (
        "Take A = 1 and ratios of 0.5, 1 and 2. What should the loss be for each "
        "ratio?",
        "For each token, keep the more pessimistic of two losses. Then average over "
        "real tokens.",
    ),
    ("logprobs", "old_logprobs", "advantages"),
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


def _mean(loss, mask):
    return (loss * mask.detach()).sum() / mask.detach().sum()


@policy_loss.mistake
def min_for_max(logprobs, old_logprobs, advantages, mask, epsilon):
    """You use min instead of max. The larger of two *losses* is the cautious choice.
    With min, the clip limits nothing, because the larger gain always counts.
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
    """You keep only the clipped loss: a token that has moved too far in the *wrong*
    direction gets no gradient that brings it back.
    """
    ratio = torch.exp(logprobs - old_logprobs.detach()).clamp(1 - epsilon, 1 + epsilon)
    return _mean(-advantages.detach() * ratio, mask)


@policy_loss.mistake
def no_detach(logprobs, old_logprobs, advantages, mask, epsilon):
    """The value is right, but gradient flows into the old log-probabilities or the
    advantages. Detach both: they are constants here.
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
    """You divide by the number of all positions, including padding, so short responses
    shrink the loss.
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
    """You clip nothing: one batch could move the policy without limit."""
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
    """You average over each row and then over rows, so a token of a short row counts
    more than a token of a long row. All real tokens must have the same weight.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@policy_loss.mistake
def sum_for_mean(logprobs, old_logprobs, advantages, mask, epsilon):
    """You sum over tokens, so the loss and its gradient grow with the batch. Take the
    mean.
    """
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return (loss * mask).sum()


@policy_loss.mistake
def mean_over_rows(logprobs, old_logprobs, advantages, mask, epsilon):
    """You divide by the number of rows. Divide by the number of real tokens."""
    ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon))
    return (loss * mask).sum() / len(mask)


def _larger_loss(ratio, advantages, low, high):
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))


def _within(low, high):
    """Return a mistake that clips the ratio to another interval."""

    def mistake(logprobs, old_logprobs, advantages, mask, epsilon):
        ratio = torch.exp(logprobs - old_logprobs.detach())
        return _mean(
            _larger_loss(ratio, advantages.detach(), low(epsilon), high(epsilon)), mask
        )

    return mistake


def _with_ratio(change):
    """Return a mistake with another ratio, ``change(log-ratio, mask, logprobs)``."""

    def mistake(logprobs, old_logprobs, advantages, mask, epsilon):
        ratio = change(logprobs - old_logprobs.detach(), mask, logprobs)
        return _mean(
            _larger_loss(ratio, advantages.detach(), 1 - epsilon, 1 + epsilon), mask
        )

    return mistake


def _with_advantages(change):
    """Return a mistake with other advantages, ``change(advantages, mask)``."""

    def mistake(logprobs, old_logprobs, advantages, mask, epsilon):
        return policy_loss.solution(
            logprobs, old_logprobs, change(advantages.detach(), mask), mask, epsilon
        )

    return mistake


def _reduced(change):
    """Return a mistake with another last step, ``change(plain, clipped, mask)``."""

    def mistake(logprobs, old_logprobs, advantages, mask, epsilon):
        ratio, a = torch.exp(logprobs - old_logprobs.detach()), advantages.detach()
        return change(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon), mask)

    return mistake


policy_loss.say(
    "You clip only from below: a good token could be pushed up without limit.",
    clipped_below_only=_within(lambda e: 1 - e, lambda e: None),
)
policy_loss.say(
    "One end of your interval is 1. The ratio may move by ε in both directions.",
    from_below_to_one=_within(lambda e: 1 - e, lambda e: 1),
    from_one_to_above=_within(lambda e: 1, lambda e: 1 + e),
)
policy_loss.say(
    "Your interval is centered at 0. What is the ratio before any update?",
    around_zero=_within(lambda e: -e, lambda e: e),
)
policy_loss.say(
    "Your interval has the wrong width. The ratio may move by ε in each direction.",
    half_the_width=_within(lambda e: 1 - e / 2, lambda e: 1 + e / 2),
    twice_the_width=_within(lambda e: 1 - 2 * e, lambda e: 1 + 2 * e),
    squared_width=_within(lambda e: 1 - e * e, lambda e: 1 + e * e),
)
policy_loss.say(
    "Your interval is symmetric for the log-ratio. It must be symmetric for the ratio.",
    log_ratio_clipped=_within(lambda e: math.exp(-e), lambda e: math.exp(e)),
    upper_end_by_division=_within(lambda e: 1 - e, lambda e: 1 / (1 - e)),
    lower_end_by_division=_within(lambda e: 1 / (1 + e), lambda e: 1 + e),
)
policy_loss.say(
    "Your ratio lacks an exponential: adding 1 to the difference of log-probabilities "
    "is accurate only for small changes.",
    linear_ratio=_with_ratio(lambda d, mask, _: 1 + d),
)
policy_loss.say(
    "You subtract 1 from the ratio. What is the ratio before any update?",
    ratio_minus_one=_with_ratio(lambda d, mask, _: torch.expm1(d)),
)
policy_loss.say(
    "You use the new probability itself. Divide it by the old probability.",
    probability_for_ratio=_with_ratio(lambda d, mask, new: new.exp()),
)
policy_loss.say(
    "You subtract probabilities. Divide them.",
    difference_of_probabilities=_with_ratio(
        lambda d, mask, new: new.exp() - (new.detach() - d.detach()).exp()
    ),
)
policy_loss.say(
    "You use one ratio per response. Each token must have its own ratio.",
    ratio_of_responses=_with_ratio(lambda d, mask, _: (d * mask).sum(1, True).exp()),
    ratio_of_rows=_with_ratio(lambda d, mask, _: d.sum(1, True).exp()),
    geometric_mean=_with_ratio(
        lambda d, mask, _: ((d * mask).sum(1, True) / mask.sum(1, True)).exp()
    ),
    mean_ratio=_with_ratio(
        lambda d, mask, _: (d.exp() * mask).sum(1, True) / mask.sum(1, True)
    ),
)
policy_loss.say(
    "Each of your ratios includes all earlier tokens of the row. A ratio must belong "
    "to one token.",
    running_ratio=_with_ratio(lambda d, mask, _: (d * mask).cumsum(1).exp()),
)


def _standard(correction, keep):
    """Return a function that whitens across real tokens or across all positions."""

    def change(a, mask):
        real = a[mask.bool()] if keep else a
        return (a - real.mean()) / (real.std(correction=correction) + 1e-8)

    return change


policy_loss.say(
    "You whiten or center the advantages. Use them unchanged.",
    **{
        f"whitened_{correction}_{keep}": _with_advantages(_standard(correction, keep))
        for correction in (0, 1)
        for keep in (True, False)
    },
    centered=_with_advantages(lambda a, mask: a - a[mask.bool()].mean()),
    centered_with_padding=_with_advantages(lambda a, mask: a - a.mean()),
)
policy_loss.say(
    "You give all tokens of a row the same advantage, a mean. Each token has its own "
    "advantage.",
    mean_advantage=_with_advantages(
        lambda a, mask: (a * mask).sum(1, True) / mask.sum(1, True)
    ),
)
policy_loss.say(
    "Your sum includes padding, but your number of tokens does not.",
    sum_with_padding=_reduced(
        lambda p, c, mask: torch.maximum(p, c).sum() / mask.sum()
    ),
)
policy_loss.say(
    "You compare two means. Take the larger loss of each token first, and then the "
    "mean.",
    maximum_of_means=_reduced(
        lambda p, c, mask: torch.maximum(_mean(p, mask), _mean(c, mask))
    ),
)
policy_loss.say(
    "You return one loss per token. Return one number for the batch.",
    loss_per_token=_reduced(lambda p, c, mask: torch.maximum(p, c) * mask),
    loss_per_token_unmasked=_reduced(lambda p, c, mask: torch.maximum(p, c)),
)
policy_loss.say(
    "You return one loss per row. Return one number for the batch.",
    mean_per_row=_reduced(
        lambda p, c, mask: (torch.maximum(p, c) * mask).sum(1) / mask.sum(1)
    ),
    sum_per_row=_reduced(lambda p, c, mask: (torch.maximum(p, c) * mask).sum(1)),
)
policy_loss.say(
    "You sum the means of the rows. All real tokens must have the same weight.",
    sum_of_row_means=_reduced(
        lambda p, c, mask: ((torch.maximum(p, c) * mask).sum(1) / mask.sum(1)).sum()
    ),
)
policy_loss.say(
    "You sum or average the two losses of a token. Only the larger loss must count.",
    sum_of_both=_reduced(lambda p, c, mask: _mean(p + c, mask)),
    mean_of_both=_reduced(lambda p, c, mask: _mean(p + c, mask) / 2),
)


def _product_clipped(sign):
    def mistake(logprobs, old_logprobs, advantages, mask, epsilon):
        gain = torch.exp(logprobs - old_logprobs.detach()) * advantages.detach()
        clipped = -sign * (sign * gain).clamp(1 - epsilon, 1 + epsilon)
        return _mean(torch.maximum(-gain, clipped), mask)

    return mistake


policy_loss.say(
    "You clip the product of ratio and advantage. Clip the ratio first, and then "
    "multiply.",
    product_clipped=_product_clipped(1),
    loss_clipped=_product_clipped(-1),
)


@policy_loss.mistake
def no_ratio(logprobs, old_logprobs, advantages, mask, epsilon):
    """You weight log-probabilities by advantages, as REINFORCE does. Weight the ratios
    instead.
    """
    return _mean(-advantages.detach() * logprobs, mask)


@policy_loss.mistake
def log_ratio_only(logprobs, old_logprobs, advantages, mask, epsilon):
    """You weight the log-ratio by advantages. Use the ratio, and clip it."""
    return _mean(-advantages.detach() * (logprobs - old_logprobs.detach()), mask)


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
        "Draw a number line with the old value, the new value, and the return.",
        "Clip the new *value* so that it stays near the old value; do not clip the "
        "error. Then compare two errors.",
    ),
    ("values", "old_values", "returns"),
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


@value_loss.mistake
def no_half(values, old_values, returns, epsilon):
    """The ½ is missing: your loss and its gradient are twice as large as expected."""
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def smaller_of_both(values, old_values, returns, epsilon):
    """You use min instead of max. The larger of the two errors must count; otherwise
    the clip limits nothing.
    """
    old, returns = old_values.detach(), returns.detach()
    near = torch.maximum(torch.minimum(values, old + epsilon), old - epsilon)
    return 0.5 * torch.minimum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def around_the_return(values, old_values, returns, epsilon):
    """Your clip has no effect: you clip nothing, or you do not clip around the *old*
    value. The new value must stay near the old value.
    """
    returns = returns.detach()
    near = torch.maximum(torch.minimum(values, returns + epsilon), returns - epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def gradient_into_the_past(values, old_values, returns, epsilon):
    """The value is right, but gradient flows into the returns or the old values. Both
    are constants: detach them.
    """
    near = torch.maximum(
        torch.minimum(values, old_values + epsilon), old_values - epsilon
    )
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def clipped_only(values, old_values, returns, epsilon):
    """You keep only the clipped error. The larger of the two errors must count."""
    old = old_values.detach()
    near = old + (values - old).clamp(-epsilon, epsilon)
    return 0.5 * (near - returns.detach()) ** 2


@value_loss.mistake
def clipped_around_zero(values, old_values, returns, epsilon):
    """You clip the value itself to ±ε. A value may be any number, but it must stay near
    the old value.
    """
    returns = returns.detach()
    near = values.clamp(-epsilon, epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@value_loss.mistake
def clipped_like_a_ratio(values, old_values, returns, epsilon):
    """You clip a ratio of values. Values are not probabilities. Clip the difference
    between the new and the old value.
    """
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
    """You average over tokens. Return one number per token."""
    return by_clamping_the_move(values, old_values, returns, epsilon).mean()


@value_loss.mistake
def old_value_counts(values, old_values, returns, epsilon):
    """Your second error is the error of the old value. It must be the error of the new
    value after clipping.
    """
    old, returns = old_values.detach(), returns.detach()
    return 0.5 * torch.maximum((values - returns) ** 2, (old - returns) ** 2)


def _near(change):
    """Return a mistake whose clipped value is ``change(values, old, returns, ε)``."""

    def mistake(values, old_values, returns, epsilon):
        old, returns = old_values.detach(), returns.detach()
        near = change(values, old, returns, epsilon)
        return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)

    return mistake


def _combined(change):
    """Return a mistake that combines errors by ``change(error, clipped error)``."""

    def mistake(values, old_values, returns, epsilon):
        old, returns = old_values.detach(), returns.detach()
        near = old + (values - old).clamp(-epsilon, epsilon)
        return change(values - returns, near - returns)

    return mistake


value_loss.say(
    value_loss.mistakes["clipped_like_a_ratio"].__doc__,
    ratio_clipped=_near(lambda v, old, _, e: old * (v / old).clamp(1 - e, 1 + e)),
    relative_limits=_near(
        lambda v, old, _, e: torch.minimum(
            torch.maximum(v, old * (1 - e)), old * (1 + e)
        )
    ),
)
value_loss.say(
    "Your clipped value moves away from the new value: its step has the wrong sign.",
    moves_away=_near(lambda v, old, _, e: old + (old - v).clamp(-e, e)),
)
value_loss.say(
    "You start at the new value and move toward the old one. Near which of these two "
    "values must the clipped value stay?",
    old_near_new=_near(lambda v, old, _, e: v + (old - v).clamp(-e, e)),
)
value_loss.say(
    "You limit the value on one side only. It may move by ε up or down.",
    limited_above=_near(lambda v, old, _, e: torch.minimum(v, old + e)),
    limited_below=_near(lambda v, old, _, e: torch.maximum(v, old - e)),
    only_upwards=_near(lambda v, old, _, e: old + (v - old).clamp(0, e)),
    only_downwards=_near(lambda v, old, _, e: old + (v - old).clamp(-e, 0)),
)
value_loss.say(
    "Your interval has the wrong width. The value may move by ε up or down.",
    half_the_width=_near(lambda v, old, _, e: old + (v - old).clamp(-e / 2, e / 2)),
    twice_the_width=_near(lambda v, old, _, e: old + (v - old).clamp(-2 * e, 2 * e)),
)
value_loss.say(
    "Your clipped value is only the clipped change. From which value does this change "
    "start?",
    move_only=_near(lambda v, old, _, e: (v - old).clamp(-e, e)),
)
value_loss.say(
    "Your second error does not compare the clipped new value with the return. You "
    "clip the return, or subtract something else from the value.",
    other_second_error=lambda v, old, r, e: (
        0.5
        * torch.maximum(
            (v - r.detach()) ** 2,
            (v - old.detach() - (r - old).detach().clamp(-e, e)) ** 2,
        )
    ),
)
value_loss.say(
    "One of your two errors lacks the ½. Both errors must have it.",
    half_on_the_plain=_combined(lambda d, c: torch.maximum(d**2 / 2, c**2)),
    half_on_the_clipped=_combined(lambda d, c: torch.maximum(d**2, c**2 / 2)),
)
value_loss.say(
    "You compare the errors before you square them, so a large negative error does "
    "not count. Compare squares.",
    maximum_before_the_square=_combined(lambda d, c: 0.5 * torch.maximum(d, c) ** 2),
    maximum_of_negatives=_combined(lambda d, c: 0.5 * torch.minimum(d, c) ** 2),
)
value_loss.say(
    "You sum or average the two errors. Only the larger error must count.",
    sum_of_both=_combined(lambda d, c: 0.5 * (d**2 + c**2)),
    mean_of_both=_combined(lambda d, c: 0.25 * (d**2 + c**2)),
    sum_of_both_without_half=_combined(lambda d, c: d**2 + c**2),
)
value_loss.say(
    "You return the plain squared error: the ½ is missing, and the clip has no effect.",
    plain_square=_combined(lambda d, c: d**2),
)
value_loss.say(
    "The ½ is missing, and you keep only the clipped error.",
    clipped_without_half=_combined(lambda d, c: c**2),
)
value_loss.say(
    "The ½ is missing, and you use min instead of max.",
    smaller_without_half=_combined(lambda d, c: torch.minimum(d**2, c**2)),
)
value_loss.say(
    "You use absolute errors. Use squared errors.",
    absolute_without_half=_combined(lambda d, c: torch.maximum(d.abs(), c.abs())),
)
value_loss.say(
    "You give all tokens of a row the row's largest error. Return each token's own "
    "error.",
    largest_of_the_row=_combined(
        lambda d, c: 0.5 * torch.maximum(d**2, c**2).amax(1, keepdim=True).expand_as(d)
    ),
)
value_loss.say(
    "You compare two means or sums. Take the larger of each token's two errors.",
    maximum_of_means=_combined(
        lambda d, c: 0.5 * torch.maximum((d**2).mean(), (c**2).mean())
    ),
    maximum_of_sums=_combined(
        lambda d, c: 0.5 * torch.maximum((d**2).sum(), (c**2).sum())
    ),
)
value_loss.say(
    "You clip the distance from the return. Clip the move from the old value.",
    error_clipped=lambda v, old, r, e: 0.5 * (v - r.detach()).clamp(-e, e) ** 2,
)


@value_loss.alternative
def by_clamping_the_move(values, old_values, returns, epsilon):
    old, returns = old_values.detach(), returns.detach()
    near = old + (values - old).clamp(-epsilon, epsilon)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


@value_loss.alternative
def by_clamping_the_return(values, old_values, returns, epsilon):
    """Compute the same loss as the solution: the larger error is at least the return's
    distance from the interval.
    """
    old, returns = old_values.detach(), returns.detach()
    near = old + (returns - old).clamp(-epsilon, epsilon)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@SET.exercise(
    "The adaptive KL coefficient",
    1,
    10,
    (
        "Suppose that KL is twice its target. Should β grow or shrink, and by how much "
        "at most?",
        "There are three steps: compute the relative error, clip it, and scale it by "
        "the share of the horizon.",
    ),
)
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


@next_beta.mistake
def not_clipped(beta, kl, target, n, horizon):
    """You do not clip the error: one unusual batch would change β too much."""
    return beta * (1 + (kl / target - 1) * n / horizon)


@next_beta.mistake
def wrong_direction(beta, kl, target, n, horizon):
    """Your β moves in the wrong direction: when KL is above its target, the penalty
    must grow.
    """
    return beta * (1 - min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


@next_beta.mistake
def without_the_samples(beta, kl, target, n, horizon):
    """Your step ignores n. The horizon counts samples, so n samples must change β by n
    times as much as one sample does.
    """
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) / horizon)


@next_beta.mistake
def clipped_too_late(beta, kl, target, n, horizon):
    """You clip after scaling by n / horizon. Clip the error itself."""
    return beta * (1 + min(max((kl / target - 1) * n / horizon, -0.2), 0.2))


@next_beta.mistake
def absolute_error(beta, kl, target, n, horizon):
    """Your error is not relative. Use the ratio of KL to its target."""
    return beta * (1 + min(max(kl - target, -0.2), 0.2) * n / horizon)


@next_beta.mistake
def added(beta, kl, target, n, horizon):
    """You add the change to β. Multiply β by a factor, so that β stays positive and
    keeps its scale.
    """
    return beta + min(max(kl / target - 1, -0.2), 0.2) * n / horizon


@next_beta.mistake
def only_upwards(beta, kl, target, n, horizon):
    """Your β only grows. Below the target it must shrink."""
    return beta * (1 + min(max(kl / target - 1, 0.0), 0.2) * n / horizon)


@next_beta.mistake
def clipped_above_only(beta, kl, target, n, horizon):
    """You clip the error only from above: with a KL near 0, the error falls below
    −0.2.
    """
    return beta * (1 + min(kl / target - 1, 0.2) * n / horizon)


@next_beta.mistake
def clipped_below_only(beta, kl, target, n, horizon):
    """You clip the error only from below: a large KL would change β too much."""
    return beta * (1 + max(kl / target - 1, -0.2) * n / horizon)


@next_beta.mistake
def factor_alone(beta, kl, target, n, horizon):
    """You return only the factor. Multiply β by it."""
    return 1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon


@next_beta.mistake
def target_over_kl(beta, kl, target, n, horizon):
    """Your ratio is inverted: it must be KL over its target."""
    return beta * (1 + min(max(target / kl - 1, -0.2), 0.2) * n / horizon)


@next_beta.mistake
def ratio_clipped(beta, kl, target, n, horizon):
    """You do not subtract 1 from the ratio: a KL at its target must leave β
    unchanged.
    """
    return beta * (1 + min(max(kl / target, -0.2), 0.2) * n / horizon)


def _error(change):
    """Return a mistake with another error, ``change(kl / target − 1)``."""
    return lambda beta, kl, target, n, horizon: (
        beta * (1 + change(kl / target - 1) * n / horizon)
    )


def _clip(x, bound=0.2):
    return min(max(x, -bound), bound)


def _step(change):
    """Return a mistake with another last step, ``change(β, error, n, horizon)``."""
    return lambda beta, kl, target, n, horizon: change(
        beta, _clip(kl / target - 1), n, horizon
    )


for _bound in (0.02, 0.05, 0.1, 0.15, 0.25, 0.3, 0.4, 0.5, 1.0):
    next_beta.say(
        f"Your code works as if the limits of the error were ±{_bound}.",
        **{f"bound_{_bound}": _error(lambda x, bound=_bound: _clip(x, bound))},
    )
next_beta.say(
    "You return only the absolute or relative change of β. Return the new β.",
    change_only=_step(lambda b, x, n, h: b * x * n / h),
    relative_change_only=_step(lambda b, x, n, h: x * n / h),
)
next_beta.say(
    "You round n / horizon down: // or int() gives 0 if n is below the horizon.",
    whole_horizons=_step(lambda b, x, n, h: b * (1 + x * (n // h))),
)
next_beta.say(
    "Your β changes exponentially with n. One update must be linear in n.",
    exponential=_step(lambda b, x, n, h: b * math.exp(x * n / h)),
    compounded=_step(lambda b, x, n, h: b * (1 + x / h) ** n),
    power=_step(lambda b, x, n, h: b * (1 + x) ** (n / h)),
)
next_beta.say(
    "You do not subtract 1 from the ratio: a KL at its target must leave β unchanged.",
    ratio_near_one=_error(lambda x: 1 + _clip(x)),
    ratio_not_clipped=_error(lambda x: 1 + x),
)
next_beta.say(
    "You multiply all of β by n / horizon. This share must scale only the error: a KL "
    "at its target must leave β unchanged.",
    all_scaled=_step(lambda b, x, n, h: b * (1 + x) * n / h),
)
next_beta.say(
    "The share of the horizon is missing: n samples must move β by n / horizon of a "
    "full step.",
    full_step=_step(lambda b, x, n, h: b * (1 + x)),
)
next_beta.say(
    "You limit n / horizon to 1. A batch may be larger than the horizon.",
    share_limited=_step(lambda b, x, n, h: b * (1 + x * min(1, n / h))),
)
next_beta.say(
    "Your step uses only the sign of the error. Within the limits, a smaller error "
    "must move β less than a larger error does.",
    sign_only=_error(lambda x: 0.2 if x > 0 else -0.2),
    sign_or_up=_error(lambda x: 0.2 if x >= 0 else -0.2),
    sign_or_nothing=_error(lambda x: 0.2 * ((x > 0) - (x < 0))),
)
next_beta.say(
    "Your clipped error is always at the same limit, whatever the KL is. Check min "
    "and max.",
    always_up=_error(lambda x: 0.2),
    always_down=_error(lambda x: -0.2),
)
next_beta.say(
    "You ignore small errors. The clip limits large errors and keeps small errors.",
    dead_zone=_error(lambda x: 0 if abs(x) <= 0.2 else math.copysign(0.2, x)),
    dead_zone_not_clipped=_error(lambda x: 0 if abs(x) <= 0.2 else x),
)
next_beta.say(
    "You ignore large errors. Limit large errors, but do not drop them.",
    large_ignored=_error(lambda x: x if abs(x) <= 0.2 else 0),
)
next_beta.say(
    "You divide β by a factor. Multiply β instead.",
    divided=_step(lambda b, x, n, h: b / (1 + x * n / h)),
    divided_by_less=_step(lambda b, x, n, h: b / (1 - x * n / h)),
)
next_beta.say(
    "Your error is relative to the KL. It must be relative to the target.",
    relative_to_kl=_error(lambda x: _clip(x / (1 + x))),
)
next_beta.say(
    "Your error is a logarithm of the ratio. Use the ratio minus 1.",
    logarithm=_error(lambda x: _clip(math.log1p(x))),
)
next_beta.say(
    "Your β only grows: you lose the sign of the error.",
    absolute_value=_error(lambda x: abs(_clip(x))),
)
next_beta.say(
    "You square the error. Use the error itself.",
    squared_error=_error(lambda x: _clip(x * x)),
    square_of_the_clipped=_error(lambda x: _clip(x) ** 2),
)
next_beta.say(
    "Your β only shrinks. Above the target it must grow.",
    only_downwards=_error(lambda x: min(max(x, -0.2), 0.0)),
)
next_beta.say(
    "You double or halve β, as the PPO paper does. Here β's step depends on the error.",
    doubled_or_halved=lambda beta, kl, target, n, horizon: (
        beta * (2 if kl > 1.5 * target else 0.5 if kl < target / 1.5 else 1)
    ),
)


@next_beta.alternative
def with_torch(beta, kl, target, n, horizon):
    return (
        beta
        + beta
        * n
        / horizon
        * torch.tensor(kl / target - 1, dtype=torch.float64).clamp(-0.2, 0.2).item()
    )
