"""Exercises of notebook 01."""

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
        "Say in words what probability the model gives to the label, then write that.",
        "`logsigmoid` is a stable logarithm of the sigmoid. What goes into it?",
    ),
    True,
)
def pairwise_loss(chosen, rejected):
    """Bradley and Terry's loss, averaged over pairs: two (B,) → a number.

    Minus the log-probability that the chosen answer wins, where that probability is the
    sigmoid of the difference of scores.
    """
    return -logsigmoid(chosen - rejected).mean()


@pairwise_loss.inputs
def _(dice):
    b, scale = pick(dice, range(1, 8)), pick(dice, [0.1, 1, 8])
    return scale * normal(dice, b), scale * normal(dice, b)


@pairwise_loss.mistake
def wrong_way_round(chosen, rejected):
    """The difference has the wrong sign: this model learns to prefer the rejected
    answer.
    """
    return -logsigmoid(rejected - chosen).mean()


@pairwise_loss.mistake
def no_logarithm(chosen, rejected):
    """That is minus the probability, not minus its logarithm: a pair that is badly
    wrong would have no gradient left.
    """
    return -torch.sigmoid(chosen - rejected).mean()


@pairwise_loss.mistake
def summed(chosen, rejected):
    """You sum over pairs, so the loss (and the step) grows with the batch. Take the
    mean.
    """
    return -logsigmoid(chosen - rejected).sum()


@pairwise_loss.mistake
def two_sigmoids(chosen, rejected):
    """You squash each score by itself. Only the *difference* goes through the sigmoid;
    a score has no zero of its own.
    """
    return (
        -(torch.sigmoid(chosen) / (torch.sigmoid(chosen) + torch.sigmoid(rejected)))
        .log()
        .mean()
    )


@pairwise_loss.mistake
def hinge(chosen, rejected):
    """That is a hinge: pairs beyond its margin have no gradient. Bradley and Terry's
    probability is smooth.
    """
    return (1 - (chosen - rejected)).clamp(min=0).mean()


@pairwise_loss.mistake
def of_the_mean_score(chosen, rejected):
    """You average first. Each *pair* has its own loss, and then comes the mean."""
    return -logsigmoid((chosen - rejected).mean())


@pairwise_loss.alternative
def softplus(chosen, rejected):
    return torch.nn.functional.softplus(rejected - chosen).mean()


@SET.exercise(
    "The score at the last token",
    2,
    10,
    (
        "How do you recognize the last real token where padding stands on the left?",
        "Of all positions at which the mask is 1, the largest one is wanted.",
    ),
    True,
)
def last_token_scores(scores, mask):
    """The score at each row's last real token: (B, T), mask (B, T) → (B,).

    The reward head gives a score at every position, but only at the last real token has
    the model read everything. Padding may be on the right *or* on the left of a row,
    and one batch may have rows of both kinds.
    """
    last = (torch.arange(mask.shape[1]) * mask).argmax(1)
    return scores[torch.arange(len(scores)), last]


@last_token_scores.inputs
def _(dice):
    b, t = pick(dice, range(3, 6)), pick(dice, range(6, 9))
    mask = ragged(dice, b, t)
    if (kind := dice.initial_seed() % 3) == 1:
        mask = mask.flip(1)
    elif kind == 2:  # on the right in the first row, on the left in the others
        mask = torch.cat([ragged(dice, 1, t - 1)[:, [0, *range(t - 1)]], mask.flip(1)])
        mask[0, -1] = 0
    return normal(dice, len(mask), t), mask


@last_token_scores.mistake
def last_column(scores, mask):
    """The last column is padding where padding stands on the right."""
    return scores[:, -1]


@last_token_scores.mistake
def counted_tokens(scores, mask):
    """`mask.sum(1) - 1` is the last real token only if padding stands on the right. On
    the left it is somewhere inside.
    """
    return scores[torch.arange(len(scores)), mask.sum(1).long() - 1]


@last_token_scores.mistake
def averaged(scores, mask):
    """You average over tokens. The first of them have not read the answer yet."""
    return (scores * mask).sum(1) / mask.sum(1)


@last_token_scores.mistake
def first_padding(scores, mask):
    """You read one token too far: the token after the last real one."""
    last = (torch.arange(mask.shape[1]) * mask).argmax(1)
    return scores[torch.arange(len(scores)), (last + 1).clamp(max=mask.shape[1] - 1)]


@last_token_scores.mistake
def first_real_token(scores, mask):
    """That is the score at the *first* real token, which has read nothing yet."""
    return scores[torch.arange(len(scores)), mask.argmax(1)]


@last_token_scores.mistake
def largest(scores, mask):
    """You take the largest score of a row. The position decides, not the score."""
    return scores.masked_fill(mask == 0, -torch.inf).amax(1)


@last_token_scores.mistake
def all_added(scores, mask):
    """You add up all tokens' scores; one position has read everything."""
    return (scores * mask).sum(1)


@last_token_scores.alternative
def flipped(scores, mask):
    distance = mask.flip(1).argmax(1, keepdim=True)
    return scores.flip(1).gather(1, distance).squeeze(1)


@SET.exercise(
    "The ceiling of accuracy",
    2,
    10,
    (
        "Take one pair first: on which answer would you bet, and how often do you win?",
        "The bet is on the larger utility, whichever answer has it.",
    ),
)
def ceiling(first, second):
    """The best accuracy to be expected from true utilities of two answers: two (N,) → a
    number.

    Labels are drawn with probability σ(u_first − u_second) that the first wins. What
    accuracy does somebody reach who knows both utilities exactly?
    """
    return torch.sigmoid((first - second).abs()).mean()


@ceiling.inputs
def _(dice):
    n, scale = pick(dice, range(5, 50)), pick(dice, [0.3, 1, 5])
    return scale * normal(dice, n) + 0.5, scale * normal(dice, n)


@ceiling.mistake
def no_absolute_value(first, second):
    """That is how often the *first* answer wins. Bet on the better one, whichever it
    is.
    """
    return torch.sigmoid(first - second).mean()


@ceiling.mistake
def perfect(first, second):
    """Even who knows the utilities is wrong where the worse answer was drawn as the
    winner. Labels are noisy.
    """
    return torch.ones((), dtype=first.dtype)


@ceiling.mistake
def of_the_mean(first, second):
    """First the sigmoid, then the mean: the sigmoid of a mean difference is another
    number.
    """
    return torch.sigmoid((first - second).abs().mean())


@ceiling.mistake
def mean_inside(first, second):
    """You take the mean before the size: pairs of opposite sign cancel."""
    return torch.sigmoid((first - second).mean().abs())


@ceiling.mistake
def larger_than_one_half_counts(first, second):
    """That is how often the first answer is better. Labels are drawn, so being better
    does not always win.
    """
    return (first > second).to(first.dtype).mean()


@ceiling.mistake
def each_utility_alone(first, second):
    """You squash each utility separately: only a difference decides who wins."""
    return torch.maximum(torch.sigmoid(first), torch.sigmoid(second)).mean()


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
        "There are three kinds of pairs. What does each of them add?",
        "In a tie a model can only guess, and a guess is right half of the time.",
    ),
)
def pair_accuracy(chosen, rejected):
    """Share of pairs in which the chosen answer scores higher; a tie counts half: two
    (B,) → a number.

    A reward model that says 0 to everything ties always. Which accuracy should it get?
    """
    return ((chosen > rejected).double() + 0.5 * (chosen == rejected).double()).mean()


pair_accuracy.reply = "One half, as a guess: all pairs tie, and each counts half."


@pair_accuracy.inputs
def _(dice):
    n, scale = pick(dice, range(5, 40)), pick(dice, [0.01, 1, 100])
    chosen, rejected = torch.randint(-1, 2, (2, n), generator=dice).double() * scale
    return chosen, chosen.clone() if dice.initial_seed() % 6 == 5 else rejected


@pair_accuracy.mistake
def ties_win(chosen, rejected):
    """Ties count as right here: a model that says the same to everything would have
    accuracy 1.
    """
    return (chosen >= rejected).double().mean()


@pair_accuracy.mistake
def ties_lose(chosen, rejected):
    """Ties count as wrong here: a model that says the same to everything would look
    worse than one that guesses.
    """
    return (chosen > rejected).double().mean()


@pair_accuracy.mistake
def ties_left_out(chosen, rejected):
    """You leave ties out of the mean. They count half, and they count as pairs."""
    untied = chosen != rejected
    return (chosen > rejected)[untied].double().mean()


@pair_accuracy.mistake
def only_ties(chosen, rejected):
    """You count the ties, and lose the wins."""
    return 0.5 * (chosen == rejected).double().mean()


@pair_accuracy.alternative
def by_sign(chosen, rejected):
    return ((chosen - rejected).sign().mean() + 1) / 2


@SET.exercise(
    "A probe of your own",
    2,
    10,
    (
        "Two things are asked for: do one after the other, and look at the result.",
        "Strings have a method for capitals, and one that replaces every occurrence.",
    ),
)
def shouting(answer):
    """The bad answer made from a normal one: str → str.

    A probe of the audit makes, from a normal answer, one that no reader would prefer,
    and asks the reward model. Write one that shouts: all capitals, and every full stop
    turned into three exclamation marks.
    """
    return answer.upper().replace(".", "!!!")


@shouting.inputs
def _(dice):
    parts = ["Hold it low.", "Try v. 2.5, again!", "Really?", "Wait ...", "no café", ""]
    order = torch.randperm(len(parts), generator=dice)[: pick(dice, range(2, 5))]
    return (" ".join(["It works.", *(parts[i] for i in order)]),)


@shouting.mistake
def only_capitals(answer):
    """The full stops are still there: the probe says less than it was meant to."""
    return answer.upper()


@shouting.mistake
def only_the_last(answer):
    """Only the last full stop was replaced."""
    return "!!!".join(answer.upper().rsplit(".", 1))


@shouting.mistake
def only_the_first(answer):
    """Only the first full stop was replaced."""
    return answer.upper().replace(".", "!!!", 1)


@shouting.mistake
def only_the_marks(answer):
    """The capitals are missing: this answer whispers."""
    return answer.replace(".", "!!!")


@shouting.mistake
def marks_besides(answer):
    """The full stops are still there, before the exclamation marks."""
    return answer.upper().replace(".", ".!!!")


@shouting.mistake
def at_the_end(answer):
    """The marks stand at the end of the answer, and the full stops are still there."""
    return answer.upper() + "!!!"


@shouting.mistake
def one_mark(answer):
    """One exclamation mark is enthusiasm; three were asked for."""
    return answer.upper().replace(".", "!")


@shouting.alternative
def joined(answer):
    return "!!!".join(answer.split(".")).upper()
