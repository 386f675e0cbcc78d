"""Exercises of notebook 01."""

import re

import torch
from torch.nn.functional import logsigmoid

from engine import Set, normal, pick, ragged

SET = Set(
    "01_reward_modeling",
    "Reward modeling",
    "import torch\nfrom torch.nn.functional import logsigmoid",
)
check = SET.check


@SET.exercise(
    "The pairwise loss",
    1,
    5,
    (
        "What probability does the model assign to the label? First give the answer in "
        "words.",
        "`logsigmoid` is a stable logarithm of the sigmoid. What is its argument?",
    ),
    True,
)
def pairwise_loss(chosen, rejected):
    """Return Bradley and Terry's loss, averaged over pairs: two (B,) → a number.

    The loss is minus the log-probability that the chosen answer wins. This probability
    is the sigmoid of the difference between the scores. The loss must stay finite even
    if the two scores differ by hundreds.
    """
    return -logsigmoid(chosen - rejected).mean()


@pairwise_loss.inputs
def _(generator):
    b, scale = pick(generator, range(1, 8)), pick(generator, [0.1, 1, 8, 2000])
    return scale * normal(generator, b), scale * normal(generator, b)


@pairwise_loss.mistake
def unstable(chosen, rejected):
    """Your loss becomes infinite if a difference is very negative. In floating point,
    the sigmoid of this difference is 0, and exp of minus this difference is infinite.
    `logsigmoid` avoids both problems.
    """
    return -torch.log(torch.sigmoid(chosen - rejected)).mean()


@pairwise_loss.mistake
def wrong_way_round(chosen, rejected):
    """The difference has the wrong sign: this model learns to prefer the rejected
    answer.
    """
    return -logsigmoid(rejected - chosen).mean()


@pairwise_loss.mistake
def no_logarithm(chosen, rejected):
    """You return minus the probability instead of minus its logarithm: a pair that the
    model gets badly wrong would have almost no gradient.
    """
    return -torch.sigmoid(chosen - rejected).mean()


@pairwise_loss.mistake
def summed(chosen, rejected):
    """You sum over pairs, so the loss and its gradient grow with the batch. Take the
    mean.
    """
    return -logsigmoid(chosen - rejected).sum()


@pairwise_loss.mistake
def two_sigmoids(chosen, rejected):
    """You apply the sigmoid to each score. Apply it only to the *difference*: a single
    score has no natural zero.
    """
    return (
        -(torch.sigmoid(chosen) / (torch.sigmoid(chosen) + torch.sigmoid(rejected)))
        .log()
        .mean()
    )


@pairwise_loss.mistake
def hinge(chosen, rejected):
    """You compute a hinge loss: pairs beyond its margin have no gradient. Bradley and
    Terry's probability is smooth.
    """
    return (1 - (chosen - rejected)).clamp(min=0).mean()


@pairwise_loss.mistake
def of_the_mean_score(chosen, rejected):
    """You average too early. Compute the loss of each *pair*, and then the mean."""
    return -logsigmoid((chosen - rejected).mean())


pairwise_loss.more(
    {
        "overflow": (
            "You exponentiate the scores, and in floating point the exponential of a "
            "large number is ∞. `logsigmoid` avoids this.",
            lambda c, r: -(c.exp() / (c.exp() + r.exp())).log().mean(),
            lambda c, r: ((c.exp() + r.exp()).log() - c).mean(),
        ),
        "infinite": (
            unstable.__doc__,
            lambda c, r: -torch.log(torch.sigmoid((c - r).float())).mean(),
        ),
        "unstable_bits": (
            "Your result is in bits instead of nats, and it is ∞ where the sigmoid is "
            "0.",
            lambda c, r: -torch.log2(torch.sigmoid(c - r)).mean(),
        ),
        "cut_off": (
            "You bound the loss or the difference, for example by adding a number "
            "inside the logarithm. Pairs that the model gets badly wrong then lose "
            "their gradient.",
            *(
                lambda c, r, tiny=tiny: -(torch.sigmoid(c - r) + tiny).log().mean()
                for tiny in (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
            ),
            *(
                lambda c, r, most=most: -logsigmoid((c - r).clamp(-most, most)).mean()
                for most in (1, 5, 10, 20, 50, 100)
            ),
        ),
        "complement": (
            "You return the probability that the rejected answer wins, without a "
            "logarithm.",
            lambda c, r: torch.sigmoid(r - c).mean(),
        ),
        "logarithm_of_the_mean": (
            "You average probabilities, then take the logarithm. Take the logarithm of "
            "each pair's probability first.",
            lambda c, r: -torch.sigmoid(c - r).mean().log(),
        ),
        "two_labels": (
            "You classify each answer on its own, as good or bad. The label describes "
            "only the difference between the two scores.",
            lambda c, r: -(logsigmoid(c) + logsigmoid(-r)).mean(),
            lambda c, r: -(logsigmoid(c) + logsigmoid(-r)).mean() / 2,
        ),
        "sigmoid_of_each": (
            "You apply the sigmoid to each score, then subtract. Subtract first.",
            lambda c, r: (logsigmoid(r) - logsigmoid(c)).mean(),
            lambda c, r: (torch.sigmoid(r) - torch.sigmoid(c)).mean(),
            lambda c, r: -logsigmoid(torch.sigmoid(c) - torch.sigmoid(r)).mean(),
        ),
        "all_pairs": (
            "You compare every chosen answer with every rejected one. The labels "
            "compare only the two answers of a pair.",
            lambda c, r: -logsigmoid(c[:, None] - r).mean(),
        ),
        "margin": (
            "Your differences are shifted by a constant, but the exercise's loss has "
            "no margin.",
            lambda c, r: -logsigmoid(c - r - 1).mean(),
            lambda c, r: -logsigmoid(c - r + 1).mean(),
        ),
        "over_the_batch": (
            "You apply a softmax over the batch: the two answers of a pair compete, "
            "but different pairs do not.",
            lambda c, r: -(c - r).log_softmax(0).mean(),
            lambda c, r: -c.log_softmax(0).mean(),
        ),
        "absolute": (
            "You lose the sign of the difference: a pair in the wrong order has the "
            "same loss as a pair in the right order.",
            lambda c, r: -logsigmoid((c - r).abs()).mean(),
        ),
        "both_orders": (
            "You average the losses of both orders: this loss prefers equal scores, "
            "and the label has no effect.",
            lambda c, r: -(logsigmoid(c - r) + logsigmoid(r - c)).mean() / 2,
            lambda c, r: -(logsigmoid(c - r) + logsigmoid(r - c)).mean(),
        ),
        "ratio": (
            "You divide the scores; a preference depends on their difference.",
            lambda c, r: -logsigmoid(c / r).mean(),
        ),
        "sigmoid_twice": (
            "You apply two sigmoids (or softmaxes) in sequence: `logsigmoid` already "
            "contains a sigmoid, and `cross_entropy` already contains a softmax.",
            lambda c, r: -logsigmoid(torch.sigmoid(c - r)).mean(),
            lambda c, r: -logsigmoid(torch.tanh((c - r) / 2)).mean(),
        ),
        "scores_only": (
            "You return minus the mean difference. Without a sigmoid, this loss has no "
            "lower bound.",
            lambda c, r: (r - c).mean(),
        ),
        "other_losses": (
            "You return another ranking loss, which grows linearly, quadratically, or "
            "exponentially. Bradley and Terry's loss is minus a log-probability.",
            lambda c, r: (r - c).clamp(min=0).mean(),
            lambda c, r: (1 - (c - r)).clamp(min=0).square().mean(),
            lambda c, r: (1 - (c - r)).square().mean(),
            lambda c, r: (r - c).exp().mean(),
        ),
        "normal_distribution": (
            "You use the normal distribution instead of the sigmoid.",
            lambda c, r: -torch.special.log_ndtr(c - r).mean(),
        ),
        "summed_wrong_way_round": (
            "The difference has the wrong sign, and you sum over pairs.",
            lambda c, r: -logsigmoid(r - c).sum(),
        ),
        "no_minus_summed": (
            "The minus sign is missing, and you sum over pairs.",
            lambda c, r: logsigmoid(c - r).sum(),
        ),
    },
)


@pairwise_loss.alternative
def softplus(chosen, rejected):
    return torch.nn.functional.softplus(rejected - chosen).mean()


@SET.exercise(
    "The score at the last token",
    2,
    10,
    (
        "How do you recognize the last real token if the padding is on the left?",
        "Find the largest of all positions at which the mask is 1.",
    ),
    True,
)
def last_token_scores(scores, mask):
    """Return the score at each row's last real token: (B, T), mask (B, T) → (B,).

    The reward head gives a score at every position, but only at the last real token has
    the model read the whole text. Padding may be on the right *or* on the left of a
    row, and one batch may contain rows of both kinds.
    """
    last = (torch.arange(mask.shape[1]) * mask).argmax(1)
    return scores[torch.arange(len(scores)), last]


@last_token_scores.inputs
def _(generator):
    b, t = pick(generator, range(3, 6)), pick(generator, range(6, 9))
    mask = ragged(generator, b, t)
    if (kind := generator.initial_seed() % 3) == 1:
        mask = mask.flip(1)
    elif kind == 2:  # on the right in the first row, on the left in the others
        mask = torch.cat(
            [ragged(generator, 1, t - 1)[:, [0, *range(t - 1)]], mask.flip(1)]
        )
        mask[0, -1] = 0
    scores = normal(generator, len(mask), t)
    return scores * (torch.rand(scores.shape, generator=generator) < 0.7), mask


@last_token_scores.mistake
def last_column(scores, mask):
    """You read the last column, which is padding in rows padded on the right."""
    return scores[:, -1]


@last_token_scores.mistake
def counted_tokens(scores, mask):
    """You read position `mask.sum(1) - 1`. The last real token is there only if the
    padding is on the right. With padding on the left, the last real token is further
    right.
    """
    return scores[torch.arange(len(scores)), mask.sum(1).long() - 1]


@last_token_scores.mistake
def averaged(scores, mask):
    """You average over tokens. At the first tokens, the model has not read the answer
    yet.
    """
    return (scores * mask).sum(1) / mask.sum(1)


@last_token_scores.mistake
def first_padding(scores, mask):
    """You read one token too far: the token after the last real one."""
    last = (torch.arange(mask.shape[1]) * mask).argmax(1)
    return scores[torch.arange(len(scores)), (last + 1).clamp(max=mask.shape[1] - 1)]


@last_token_scores.mistake
def first_real_token(scores, mask):
    """You return the score at the *first* real token, where the model has read nothing
    else.
    """
    return scores[torch.arange(len(scores)), mask.argmax(1)]


@last_token_scores.mistake
def largest(scores, mask):
    """You take the largest score of a row. Choose by position, not by score."""
    return scores.masked_fill(mask == 0, -torch.inf).amax(1)


@last_token_scores.mistake
def all_added(scores, mask):
    """You sum all tokens' scores; return the score at the last real token only."""
    return (scores * mask).sum(1)


def at(scores, positions):
    return scores[torch.arange(len(scores)), positions]


def last_real(mask):
    return (torch.arange(mask.shape[1]) * mask).argmax(1)


def until_padding(start):
    """Return a mistake that stops at the first padding from column ``start`` on."""

    def mistake(scores, mask):
        stops = (mask[:, start:] == 0).int()
        length = torch.where(stops.any(1), stops.argmax(1) + start, mask.shape[1])
        return at(scores, (length - 1).clamp(min=0))

    return mistake


def one_side(is_left):
    """Return a mistake that chooses a side once per batch."""
    return lambda scores, mask: (
        last_column(scores, mask) if is_left(mask) else counted_tokens(scores, mask)
    )


last_token_scores.more(
    {
        "largest_of_equals": (
            largest.__doc__,
            lambda s, m: s.masked_fill(m == 0, -torch.inf).max(1).values,
        ),
        "largest_of_all": (
            "You take the largest score of a row, including padding. Choose by "
            "position, not by score.",
            lambda s, m: s.max(1).values,
            lambda s, m: s.amax(1),
            lambda s, m: (s * m).max(1).values,
            lambda s, m: (s * m).amax(1),
        ),
        "averaged_with_padding": (
            "You average over all tokens, including padding. Return the score at one "
            "position.",
            lambda s, m: s.mean(1),
            lambda s, m: (s * m).mean(1),
        ),
        "added_with_padding": (
            "You sum over all tokens, including padding. Return the score at one "
            "position.",
            lambda s, m: s.sum(1),
        ),
        "masked_last_column": (
            "You return 0 for rows that are padded on the right: their last real token "
            "is not in the last column.",
            lambda s, m: (s * m)[:, -1],
        ),
        "first_column": (
            "You return the first column: the model has read only one token there.",
            lambda s, m: s[:, 0],
        ),
        "one_side_per_batch": (
            "You choose the padding's side once per batch, but one batch may contain "
            "rows of both kinds.",
            one_side(lambda m: m[0, -1] == 1),
            one_side(lambda m: m[:, -1].all()),
            one_side(lambda m: m[0, 0] == 0),
            one_side(lambda m: (m[:, 0] == 0).any()),
        ),
        "one_position_for_all": (
            "You use the same position for all rows, but each row has its own last "
            "token.",
            lambda s, m: s[:, last_real(m)[0]],
            lambda s, m: s[:, last_real(m)[-1]],
            lambda s, m: s[:, int(m[0].sum()) - 1],
        ),
        "every_pair_of_rows": (
            "You read every row at every row's position. Index rows and columns "
            "together.",
            lambda s, m: s[:, last_real(m)],
            lambda s, m: s[:, m.sum(1).long() - 1],
        ),
        "until_padding": (
            "You stop at padding on the left, although real tokens follow it.",
            until_padding(0),
            until_padding(1),
        ),
        "one_token_early": (
            "You read one token too early: the token before the last real one.",
            lambda s, m: at(s, last_real(m) - 1),
            lambda s, m: at(s, (last_real(m) - 1).clamp(min=0)),
            lambda s, m: torch.stack(
                [x[k.bool()][max(int(k.sum()) - 2, 0)] for x, k in zip(s, m)]
            ),
        ),
        "counted_one_less": (
            "Your position depends only on the number of real tokens, and with padding "
            "on the right you read one token too early.",
            lambda s, m: at(s, m.sum(1).long() - 2),
        ),
        "counted_one_more": (
            "Your position depends only on the number of real tokens, and with padding "
            "on the right you read one token too far.",
            lambda s, m: at(s, m.sum(1).long().clamp(max=m.shape[1] - 1)),
        ),
        "along_the_batch": (
            "You search along the batch (dim 0). Find one position per row.",
            lambda s, m: s[
                (m * torch.arange(m.shape[1])).argmax(0), torch.arange(m.shape[1])
            ],
        ),
        "nonzero_score": (
            "You skip real tokens with score 0. Search the mask, not the scores.",
            lambda s, m: at(s * m, last_real(((s * m) != 0).double())),
            lambda s, m: torch.stack(
                [x[x.nonzero()[-1, 0]] if x.any() else x[-1] for x in s * m]
            ),
        ),
        "distance_from_the_end": (
            "You use the number of padding tokens, or a distance from the end, as a "
            "position.",
            lambda s, m: at(
                s, (m.shape[1] - m.sum(1).long()).clamp(max=m.shape[1] - 1)
            ),
            lambda s, m: at(s, m.flip(1).argmax(1)),
            lambda s, m: at(s, (m == 0).sum(1) - 1),
        ),
        "one_for_the_batch": (
            "You flatten the batch. Return one score per row.",
            lambda s, m: s[m.bool()],
            lambda s, m: s[m.bool()][-1],
        ),
        "whole_rows": (
            "You mask the scores but keep all columns. Return one score per row.",
            lambda s, m: s * m,
        ),
    },
)


@last_token_scores.alternative
def flipped(scores, mask):
    distance = mask.flip(1).argmax(1, keepdim=True)
    return scores.flip(1).gather(1, distance).squeeze(1)


@SET.exercise(
    "The ceiling of accuracy",
    2,
    10,
    (
        "Take one pair. On which answer would you bet, and how often would you win?",
        "Bet on the larger utility, whichever answer has it.",
    ),
)
def ceiling(first, second):
    """Return the best expected accuracy, given true utilities: two (N,) → a number.

    Labels are drawn: the first answer wins with probability σ(u_first − u_second). What
    accuracy can a judge reach who knows the exact utilities of both answers?
    """
    return torch.sigmoid((first - second).abs()).mean()


@ceiling.inputs
def _(generator):
    n, scale = pick(generator, range(5, 50)), pick(generator, [0.3, 1, 5])
    first, second = scale * normal(generator, n), scale * normal(generator, n)
    first = first + pick(generator, [0.5, -0.5])
    ties = torch.rand(n, generator=generator) < 0.2
    return first, torch.where(ties, first, second)


@ceiling.mistake
def no_absolute_value(first, second):
    """You return how often the *first* answer wins. Bet on the better answer, whether
    it is the first or the second.
    """
    return torch.sigmoid(first - second).mean()


@ceiling.mistake
def perfect(first, second):
    """Your judge is always right (except perhaps in ties). Labels are noisy: even a
    judge who knows the utilities is wrong if the worse answer was drawn as the winner.
    """
    return torch.ones((), dtype=first.dtype)


@ceiling.mistake
def of_the_mean(first, second):
    """You average before the sigmoid. The sigmoid of a mean difference is not the mean
    of the sigmoids.
    """
    return torch.sigmoid((first - second).abs().mean())


@ceiling.mistake
def mean_inside(first, second):
    """You take the mean before the absolute value, so differences of opposite sign
    cancel.
    """
    return torch.sigmoid((first - second).mean().abs())


@ceiling.mistake
def larger_than_one_half_counts(first, second):
    """You count how often the first answer has the larger utility. Labels are drawn at
    random, so the better answer does not always win.
    """
    return (first > second).to(first.dtype).mean()


@ceiling.mistake
def each_utility_alone(first, second):
    """You apply the sigmoid to each utility, but only the difference between the two
    utilities decides which answer wins.
    """
    return torch.maximum(torch.sigmoid(first), torch.sigmoid(second)).mean()


def gap(first, second):
    return (first - second).abs()


ceiling.more(
    {
        "draws_as_well": (
            "Your judge also draws its answer at random. Its accuracy is higher if it "
            "always bets on the more likely winner.",
            lambda a, b: (
                torch.sigmoid(a - b).square() + torch.sigmoid(b - a).square()
            ).mean(),
        ),
        "advantage_over_chance": (
            "You return a probability's distance from one half (perhaps doubled). This "
            "distance is 0 for a tie, but a judge is right in half of the ties.",
            lambda a, b: torch.tanh(gap(a, b) / 2).mean(),
            lambda a, b: (torch.sigmoid(gap(a, b)) - 0.5).mean(),
        ),
        "uncertainty": (
            "You return the variance or entropy of a label, not an accuracy.",
            lambda a, b: (torch.sigmoid(a - b) * torch.sigmoid(b - a)).mean(),
            lambda a, b: (
                -(
                    torch.sigmoid(a - b) * logsigmoid(a - b)
                    + torch.sigmoid(b - a) * logsigmoid(b - a)
                ).mean()
            ),
        ),
        "best_pair": (
            "You return the accuracy of a single pair. Average over pairs.",
            lambda a, b: torch.sigmoid(gap(a, b)).max(),
            lambda a, b: torch.sigmoid(gap(a, b)).min(),
        ),
        "median": (
            "You return a median over pairs; return the mean.",
            lambda a, b: torch.sigmoid(gap(a, b)).median(),
            lambda a, b: torch.sigmoid(gap(a, b)).quantile(0.5),
        ),
        "absolute_utilities": (
            "You take absolute values of the utilities, but a utility may be negative. "
            "Only the difference between the utilities matters.",
            lambda a, b: torch.sigmoid(a.abs() - b.abs()).mean(),
            lambda a, b: torch.sigmoid((a.abs() - b.abs()).abs()).mean(),
        ),
        "one_side_clamped": (
            "Pairs in which the second answer is better count as coin flips in your "
            "code. Bet on the second answer in these pairs.",
            lambda a, b: torch.sigmoid((a - b).clamp(min=0)).mean(),
        ),
        "one_side_only": (
            "You count only pairs in which the first answer is better. Bet on the "
            "second answer in the other pairs.",
            lambda a, b: (torch.sigmoid(a - b) * (a > b)).mean(),
            lambda a, b: (torch.sigmoid(a - b) * (a >= b)).mean(),
            lambda a, b: torch.sigmoid(a - b)[a > b].mean(),
            lambda a, b: torch.sigmoid(a - b)[a >= b].mean(),
        ),
        "one_side_for_all": (
            "Your judge bets on the same side in all pairs. Choose a side per pair.",
            lambda a, b: torch.maximum(
                torch.sigmoid(a - b).mean(), torch.sigmoid(b - a).mean()
            ),
        ),
        "logarithms": (
            "You average log-probabilities. An accuracy is a mean of probabilities.",
            lambda a, b: logsigmoid(gap(a, b)).mean(),
            lambda a, b: -logsigmoid(gap(a, b)).mean(),
            lambda a, b: logsigmoid(gap(a, b)).mean().exp(),
        ),
        "normal_distribution": (
            "You use the normal distribution instead of the sigmoid.",
            lambda a, b: torch.special.ndtr(gap(a, b)).mean(),
        ),
        "scaled": (
            "Your differences are doubled, halved, or squared before the sigmoid.",
            lambda a, b: torch.sigmoid(2 * gap(a, b)).mean(),
            lambda a, b: torch.sigmoid(gap(a, b) / 2).mean(),
            lambda a, b: torch.sigmoid(gap(a, b) ** 2).mean(),
        ),
        "sigmoid_twice": (
            "You apply two sigmoids in sequence.",
            lambda a, b: torch.sigmoid(torch.sigmoid(gap(a, b))).mean(),
        ),
        "ties_left_out": (
            "You leave ties out of the mean, but a judge can guess half of them "
            "correctly.",
            lambda a, b: torch.sigmoid(gap(a, b))[a != b].mean(),
        ),
        "ties_lose": (
            "Ties count as 0 in your code, but a judge can guess half of them "
            "correctly.",
            lambda a, b: (torch.sigmoid(gap(a, b)) * (a != b)).mean(),
        ),
        "ties_win": (
            "Ties count as 1 in your code, but a judge can only guess their winners.",
            lambda a, b: torch.sigmoid(gap(a, b)).where(a != b, 1.0).mean(),
        ),
        "perfect_except_for_ties": (
            perfect.__doc__,
            lambda a, b: ((a != b).double() + 0.5 * (a == b)).mean(),
            lambda a, b: (a != b).double().mean(),
        ),
        "at_least_as_good": (
            larger_than_one_half_counts.__doc__,
            lambda a, b: (a >= b).double().mean(),
            lambda a, b: ((a > b).double() + 0.5 * (a == b)).mean(),
        ),
        "over_pairs": (
            "You apply a softmax over pairs, but the two answers of one pair compete.",
            lambda a, b: torch.stack([a, b], 1).softmax(0).amax(1).mean(),
        ),
        "ratio": (
            "You divide utilities, which may be negative. A probability depends on "
            "their difference.",
            lambda a, b: (torch.maximum(a, b) / (a + b)).mean(),
            lambda a, b: (a / (a + b)).mean(),
        ),
        "ratio_of_sigmoids": (
            each_utility_alone.__doc__,
            lambda a, b: (
                torch.maximum(torch.sigmoid(a), torch.sigmoid(b))
                / (torch.sigmoid(a) + torch.sigmoid(b))
            ).mean(),
            lambda a, b: (torch.sigmoid(a) - torch.sigmoid(b)).abs().mean(),
            lambda a, b: torch.sigmoid(
                (torch.sigmoid(a) - torch.sigmoid(b)).abs()
            ).mean(),
        ),
        "not_a_probability": (
            "Your result is not a mean of probabilities. Use the probability that an "
            "answer wins, which the exercise gives.",
            lambda a, b: (-gap(a, b)).exp().mean(),
            lambda a, b: gap(a, b).exp().mean(),
            lambda a, b: gap(a, b).mean(),
        ),
    },
)


@ceiling.alternative
def larger_of_both(first, second):
    return torch.maximum(
        torch.sigmoid(first - second), torch.sigmoid(second - first)
    ).mean()


@SET.exercise(
    "Accuracy, with ties",
    1,
    5,
    (
        "There are three kinds of pairs. What does each kind add to the accuracy?",
        "In a tie, a model can only guess, and a guess is right half of the time.",
    ),
)
def pair_accuracy(chosen, rejected):
    """Return the share of pairs in which the chosen answer scores higher: two (B,) → a
    number. A tie counts half.

    Suppose that a reward model gives every answer the score 0, so that all pairs tie.
    What accuracy should the model get?
    """
    return ((chosen > rejected).double() + 0.5 * (chosen == rejected).double()).mean()


pair_accuracy.reply = (
    "One half, like random guessing: all pairs tie, and each counts half."
)


@pair_accuracy.inputs
def _(generator):
    n, scale = (
        pick(generator, range(5, 40)),
        [1e-6, 0.3, 100][generator.initial_seed() % 3],
    )
    chosen, rejected = (
        torch.randint(-1, 2, (2, n), generator=generator).double() * scale
    )
    return chosen, chosen.clone() if generator.initial_seed() % 6 == 5 else rejected


@pair_accuracy.mistake
def ties_win(chosen, rejected):
    """You count ties as right: a model that gives all answers the same score would have
    accuracy 1.
    """
    return (chosen >= rejected).double().mean()


@pair_accuracy.mistake
def ties_lose(chosen, rejected):
    """You count ties as wrong: a model that gives all answers the same score would look
    worse than a model that guesses.
    """
    return (chosen > rejected).double().mean()


@pair_accuracy.mistake
def ties_left_out(chosen, rejected):
    """You leave ties out of the mean. Each tie is also a pair, and it counts half."""
    untied = chosen != rejected
    return (chosen > rejected)[untied].double().mean()


@pair_accuracy.mistake
def only_ties(chosen, rejected):
    """You count only the ties; count the wins as well."""
    return 0.5 * (chosen == rejected).double().mean()


def tied(chosen, rejected, tie, change=lambda x: x):
    """Return the mean over pairs; each tie counts as ``tie``."""
    x, y = change(chosen), change(rejected)
    return ((x > y).double() + tie * (x == y)).mean()


def decided(chosen, rejected):
    return (chosen != rejected).sum()


SIGN = (
    "You average numbers from −1 to 1. A wrong pair must count as 0, and a tie as half."
)
pair_accuracy.more(
    {
        "ties_left_out_or": (
            ties_left_out.__doc__,
            *(
                lambda c, r, value=value: (
                    ties_left_out(c, r) if decided(c, r) else torch.tensor(value)
                )
                for value in (0.5, 0.0, 1.0)
            ),
        ),
        "divided_by_decided_pairs": (
            "You divide by the number of pairs that do not tie. Divide by the number "
            "of all pairs.",
            *(
                lambda c, r, half=half: (
                    half(c, r) + (c > r).sum() / decided(c, r).clamp(min=1)
                )
                for half in (
                    lambda c, r: 0.5 * (c == r).sum() / decided(c, r).clamp(min=1),
                    lambda c, r: 0.5 * (c == r).double().mean(),
                )
            ),
            lambda c, r: ((c > r).sum() + 0.5 * (c == r).sum()) / decided(c, r),
        ),
        "only_if_all_tie": (
            "Your ties count half only if all pairs tie, and 0 or 1 otherwise.",
            lambda c, r: tied(c, r, 0.0 if decided(c, r) else 0.5),
            lambda c, r: tied(c, r, 1.0 if decided(c, r) else 0.5),
        ),
        "other_weight": (
            "Each tie has the wrong weight in your result: it counts neither 0, nor "
            "1, nor half.",
            *(
                lambda c, r, tie=tie: tied(c, r, tie)
                for tie in (1.5, 0.25, -0.5, 0.75, 2)
            ),
        ),
        "half_once": (
            "You add one half once; add it for each tie.",
            lambda c, r: ((c > r).sum() + 0.5 * (c == r).any()) / len(c),
        ),
        "half_lost": (
            "You lose half a pair if the number of ties is odd: // drops the half.",
            lambda c, r: ((c > r).sum() + (c == r).sum() // 2) / len(c),
        ),
        "tolerance": (
            "You count small differences as ties. Any difference decides a pair.",
            lambda c, r: tied(c, r, 0.5, lambda x: (x * 10).round()),
        ),
        "tolerance_without_half": (
            "You compare rounded scores, or ignore small differences, and ties do not "
            "count half.",
            lambda c, r: tied(c, r, 0.0, lambda x: (x * 10).round()),
            lambda c, r: tied(c, r, 1.0, lambda x: (x * 10).round()),
        ),
        "part_of_a_win": (
            "You average margins. Every win must count as 1, whatever its margin is.",
            lambda c, r: (c - r).clamp(0, 1).mean(),
            lambda c, r: (0.5 + (c - r) / 2).clamp(0, 1).mean(),
        ),
        "probability": (
            "You average the probabilities that the chosen answer wins. Accuracy "
            "depends only on which score is higher.",
            lambda c, r: torch.sigmoid(c - r).mean(),
        ),
        "sign": (
            SIGN,
            lambda c, r: (c - r).sign().mean(),
        ),
        "difference": (
            "You average differences of scores; return a share of pairs.",
            lambda c, r: (c - r).mean(),
        ),
        "means_compared": (
            "You compare mean scores. Compare the scores of each pair.",
            lambda c, r: ((c.mean() - r.mean()).sign() + 1) / 2,
            lambda c, r: (c.mean() > r.mean()).double(),
            lambda c, r: (c.mean() >= r.mean()).double(),
        ),
        "all_pairs": (
            "You compare every chosen answer with every rejected one. Compare only the "
            "two answers of each pair.",
            *(
                lambda c, r, tie=tie: tied(c[:, None], r[None], tie)
                for tie in (0.5, 0.0, 1.0)
            ),
        ),
        "ties_at_zero": (
            "Only ties at score 0 count half in your code. Equal scores always tie.",
            lambda c, r: ((c > r) + 0.5 * ((c == 0) & (r == 0))).mean(),
        ),
        "absolute": (
            "You compare absolute values, but a negative score is lower than 0.",
            *(
                lambda c, r, tie=tie: tied(c, r, tie, torch.abs)
                for tie in (0.5, 0.0, 1.0)
            ),
        ),
        "sorted": (
            "You sort the scores, so you compare answers from different pairs.",
            lambda c, r: tied(c, r, 0.5, lambda x: x.sort().values),
        ),
        "swapped_without_half": (
            "You count pairs in which the *rejected* answer scores higher (or at least "
            "as high), and ties do not count half.",
            lambda c, r: (r > c).double().mean(),
            lambda c, r: (r >= c).double().mean(),
        ),
        "positive_chosen": (
            "You use only the chosen answers' scores. Compare them with the rejected "
            "answers' scores.",
            lambda c, r: (c > 0).double().mean(),
            lambda c, r: (c >= 0).double().mean(),
        ),
        "counted": (
            "You return a number of pairs, and ties do not count half; return a share.",
            lambda c, r: (c > r).double().sum(),
            lambda c, r: (c >= r).double().sum(),
        ),
    },
)


@pair_accuracy.alternative
def by_sign(chosen, rejected):
    return ((chosen - rejected).sign().mean() + 1) / 2


@SET.exercise(
    "A probe of your own",
    2,
    10,
    (
        "Make one change at a time, and look at the result.",
        "One string method returns the text in capitals, and another replaces every "
        "occurrence of a string.",
    ),
)
def shouting(answer):
    """Turn a normal answer into a bad answer: str → str.

    A probe in the audit turns a normal answer into an answer that no reader would
    prefer, and the reward model scores both. Write a probe that shouts: turn all
    letters into capitals and every period into three exclamation marks.
    """
    return answer.upper().replace(".", "!!!")


@shouting.inputs
def _(generator):
    parts = [
        *("Hold it low.", "Try v. 2.5, again!", "Really?", "Wait ...", "no café", ""),
        *("so  far", "TWO\nlines.", "(x; y.)"),
    ]
    order = torch.randperm(len(parts), generator=generator)[
        : pick(generator, range(3, 6))
    ]
    text = " ".join(["It works.", *(parts[i] for i in order)])
    return (pick(generator, ["", " "]) + text,)


@shouting.mistake
def only_capitals(answer):
    """You keep the periods. Replace each of them with three exclamation marks."""
    return answer.upper()


@shouting.mistake
def only_the_last(answer):
    """You replace only the last period."""
    return "!!!".join(answer.upper().rsplit(".", 1))


@shouting.mistake
def only_the_first(answer):
    """You replace only the first period."""
    return answer.upper().replace(".", "!!!", 1)


@shouting.mistake
def only_the_marks(answer):
    """You do not turn the letters into capitals."""
    return answer.replace(".", "!!!")


@shouting.mistake
def marks_besides(answer):
    """You add the marks after the periods instead of replacing the periods."""
    return answer.upper().replace(".", ".!!!")


@shouting.mistake
def at_the_end(answer):
    """You add the marks only at the end of the text and keep the periods."""
    return answer.upper() + "!!!"


@shouting.mistake
def one_mark(answer):
    """You write one exclamation mark per period; write three."""
    return answer.upper().replace(".", "!")


CAPITALS = "Your capitals are wrong: every letter must become a capital."
NOT_ALL = "You replace only some of the periods. Replace all of them."
MORE = "You replace other characters as well, not only periods."
LOST = "You change or drop characters that are neither letters nor periods."


def with_marks(change, marks="!!!"):
    return lambda answer: change(answer).replace(".", marks)


def replaced(pattern, marks="!!!", count=0):
    return lambda answer: re.sub(pattern, marks, answer.upper(), count=count)


shouting.more(
    {
        "other_capitals": (
            CAPITALS,
            with_marks(str.capitalize),
            with_marks(str.title),
            with_marks(str.swapcase),
            with_marks(str.lower),
        ),
        "ascii_only": (
            "You miss letters with accents. A string method turns these letters into "
            "capitals as well.",
            with_marks(lambda x: re.sub("[a-z]", lambda m: m[0].upper(), x)),
        ),
        "number_of_marks": (
            "You write the wrong number of exclamation marks per period; write three.",
            *(with_marks(str.upper, marks) for marks in ("", "!!", "!!!!", "! ! !")),
        ),
        "every_character": (
            "You replace every character: in a regular expression a period matches any "
            "character.",
            replaced("."),
            replaced("(?s)."),
        ),
        "one_for_all_characters": (
            "You replace whole lines: in a regular expression a period matches any "
            "character.",
            replaced(".+"),
            replaced("(?s).+"),
        ),
        "some_periods": (
            NOT_ALL,
            replaced(r"\.$"),
            replaced(r"\.(?=\s|$)"),
            replaced(r"\.(?= )"),
            replaced(r"\.", count=2),
            replaced(r"(?<=\w)\.(?!\w)"),
            replaced(r"(?<=\w)\."),
            replaced(r"\.\.\."),
        ),
        "runs": (
            "You replace several neighboring periods together. Replace each of them.",
            replaced(r"\.+"),
        ),
        "space_after_a_period": (
            "You change the spaces next to periods. Keep all spaces.",
            replaced(r"\. "),
            replaced(r"\. ?"),
            replaced(r"\.\s*"),
            replaced(r"\s*\.\s*"),
            replaced(r"\.", "!!! "),
            replaced(r"\. ?", "!!! "),
        ),
        "other_marks": (
            MORE,
            *(replaced(f"[{marks}]") for marks in (".!", ".?", ".!?", ".,", ".,!?")),
            *(replaced(f"[{marks}]") for marks in (".,;", ".,;!?")),
            replaced(r"[^\w\s]"),
        ),
        "commas": (
            "You replace commas; replace periods.",
            replaced(","),
        ),
        "spaces_lost": (
            "You drop or replace spaces or line breaks. Keep them unchanged.",
            with_marks(lambda x: " ".join(x.upper().split())),
            with_marks(lambda x: " ".join(x.upper().split(" ")).replace("\n", " ")),
            with_marks(lambda x: x.strip().upper()),
            with_marks(lambda x: x.rstrip().upper()),
            with_marks(lambda x: x.lstrip().upper()),
            with_marks(lambda x: "".join(x.upper().split())),
        ),
        "letters_only": (
            LOST,
            with_marks(
                lambda x: "".join(y for y in x if y.isalpha() or y in " .").upper()
            ),
            with_marks(
                lambda x: "".join(y for y in x if y.isalpha() or y in " \n.").upper()
            ),
            with_marks(
                lambda x: "".join(y for y in x if y.isalpha() or y == ".").upper()
            ),
        ),
        "last_character_lost": (
            "You lose the last character.",
            with_marks(lambda x: x[:-1].upper()),
        ),
        "last_periods": (
            "You replace all periods at the end together. Replace each of them.",
            lambda answer: re.sub(r"\.+$", "!!!", answer.upper()).replace(".", "!!!"),
        ),
        "more_at_the_end": (
            "You add exclamation marks at the end, where there may be no period.",
            lambda answer: answer.upper().rstrip(".").replace(".", "!!!") + "!!!",
            lambda answer: answer.upper().replace(".", "!!!") + "!!!",
            lambda answer: answer.upper().replace(".", "") + "!!!",
        ),
        "joined_without_spaces": (
            "You lose the spaces next to periods. Keep all spaces.",
            lambda answer: "!!!".join(x.strip() for x in answer.upper().split(".")),
        ),
        "neither_all_nor_capitals": (
            "The capitals are missing, and you replace only some periods or write the "
            "wrong number of marks.",
            lambda answer: answer.replace(".", "!!!", 1),
            lambda answer: answer.replace(".", "!"),
            lambda answer: answer + "!!!",
        ),
    },
)


@shouting.alternative
def joined(answer):
    return "!!!".join(answer.split(".")).upper()
