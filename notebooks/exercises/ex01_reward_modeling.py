"""Exercises of notebook 01."""

import torch
from torch.nn.functional import logsigmoid

from engine import Set, normal, ragged

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
    "`torch.nn.functional.logsigmoid` is stable; `log(sigmoid(…))` is not.",
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
    return normal(dice, 6), normal(dice, 6)


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


@pairwise_loss.alternative
def softplus(chosen, rejected):
    return torch.nn.functional.softplus(rejected - chosen).mean()


@SET.exercise(
    "The score at the last token",
    2,
    10,
    "Positions times mask; the largest one is the last real token.",
    True,
)
def last_token_scores(scores, mask):
    """The score at each row's last real token: (B, T), mask (B, T) → (B,).

    The reward head gives a score at every position, but only at the last real token has
    the model read everything. Padding may stand on the right *or* on the left.
    """
    last = (torch.arange(mask.shape[1]) * mask).argmax(1)
    return scores[torch.arange(len(scores)), last]


@last_token_scores.inputs
def _(dice):
    mask = ragged(dice, 4, 6)
    return normal(dice, 4, 6), mask if torch.rand(
        (), generator=dice
    ) < 0.5 else mask.flip(1)


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


@last_token_scores.alternative
def flipped(scores, mask):
    distance = mask.flip(1).argmax(1, keepdim=True)
    return scores.flip(1).gather(1, distance).squeeze(1)


@SET.exercise(
    "The ceiling of accuracy",
    2,
    10,
    "Whoever knows both utilities bets on the larger one. How often is that right?",
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
    return normal(dice, 50), normal(dice, 50)


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


@ceiling.alternative
def larger_of_both(first, second):
    return torch.maximum(
        torch.sigmoid(first - second), torch.sigmoid(second - first)
    ).mean()


@SET.exercise("Accuracy, with ties", 1, 5, "A tie is a guess: half right.")
def pair_accuracy(chosen, rejected):
    """Share of pairs in which the chosen answer scores higher; a tie counts half: two
    (B,) → a number.

    A reward model that says 0 to everything ties always. Which accuracy should it get?
    """
    return ((chosen > rejected).double() + 0.5 * (chosen == rejected).double()).mean()


@pair_accuracy.inputs
def _(dice):
    return torch.randint(3, (40,), generator=dice).double(), torch.randint(
        3, (40,), generator=dice
    ).double()


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


@pair_accuracy.alternative
def by_sign(chosen, rejected):
    return ((chosen - rejected).sign().mean() + 1) / 2


@SET.exercise(
    "A probe of your own",
    2,
    10,
    "Keep the words, and change what makes them good.",
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
    start = ["Hold it low", "Try again", "Take your time"][
        int(torch.randint(3, (), generator=dice))
    ]
    return (f"{start}. It will work. Ask me again.",)


@shouting.mistake
def only_capitals(answer):
    """The full stops are still there: the probe says less than it was meant to."""
    return answer.upper()


@shouting.mistake
def only_the_last(answer):
    """Only the last full stop was replaced."""
    return answer.upper()[:-1] + "!!!"


@shouting.mistake
def one_mark(answer):
    """One exclamation mark is enthusiasm; three were asked for."""
    return answer.upper().replace(".", "!")


@shouting.alternative
def joined(answer):
    return "!!!".join(answer.split(".")).upper()
