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
        "Which probability does the model give to the label? Say it in words first.",
        "`logsigmoid` is a stable logarithm of the sigmoid. What goes into it?",
    ),
    True,
)
def pairwise_loss(chosen, rejected):
    """Return Bradley and Terry's loss, averaged over pairs: two (B,) → a number.

    The loss is minus the log-probability that the chosen answer wins. This probability
    is the sigmoid of the difference of the scores. The loss stays finite even if scores
    differ by hundreds.
    """
    return -logsigmoid(chosen - rejected).mean()


@pairwise_loss.inputs
def _(generator):
    b, scale = pick(generator, range(1, 8)), pick(generator, [0.1, 1, 8, 2000])
    return scale * normal(generator, b), scale * normal(generator, b)


@pairwise_loss.mistake
def unstable(chosen, rejected):
    """The sigmoid of a very negative number is 0, and its logarithm −∞. `logsigmoid`
    computes both together.
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
    """You return minus the probability, not minus its logarithm: a pair that is badly
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
    """You apply the sigmoid to each score. Apply it only to the *difference*; a score
    has no zero of its own.
    """
    return (
        -(torch.sigmoid(chosen) / (torch.sigmoid(chosen) + torch.sigmoid(rejected)))
        .log()
        .mean()
    )


@pairwise_loss.mistake
def hinge(chosen, rejected):
    """This is a hinge loss: pairs beyond its margin have no gradient. Bradley and
    Terry's probability is smooth.
    """
    return (1 - (chosen - rejected)).clamp(min=0).mean()


@pairwise_loss.mistake
def of_the_mean_score(chosen, rejected):
    """You average too early. Compute the loss of each *pair*, and then the mean."""
    return -logsigmoid((chosen - rejected).mean())


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

    The reward head gives a score at every position, but the model has read everything
    only at the last real token. Padding may be on the right *or* on the left of a row,
    and one batch may have rows of both kinds.
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
    """The last column is padding in rows that are padded on the right."""
    return scores[:, -1]


@last_token_scores.mistake
def counted_tokens(scores, mask):
    """`mask.sum(1) - 1` is the last real token only if the padding is on the right.
    With padding on the left it is an earlier token.
    """
    return scores[torch.arange(len(scores)), mask.sum(1).long() - 1]


@last_token_scores.mistake
def averaged(scores, mask):
    """You average over tokens. The first tokens have not read the answer yet."""
    return (scores * mask).sum(1) / mask.sum(1)


@last_token_scores.mistake
def first_padding(scores, mask):
    """You read one token too far: the token after the last real one."""
    last = (torch.arange(mask.shape[1]) * mask).argmax(1)
    return scores[torch.arange(len(scores)), (last + 1).clamp(max=mask.shape[1] - 1)]


@last_token_scores.mistake
def first_real_token(scores, mask):
    """You return the score at the *first* real token, where nothing else was read."""
    return scores[torch.arange(len(scores)), mask.argmax(1)]


@last_token_scores.mistake
def largest(scores, mask):
    """You take the largest score of a row. Choose by position, not by score."""
    return scores.masked_fill(mask == 0, -torch.inf).amax(1)


@last_token_scores.mistake
def all_added(scores, mask):
    """You sum all tokens' scores; return the score at the last real token only."""
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
        "Take one pair: on which answer would you bet, and how often would you win?",
        "Bet on the larger utility, whichever answer has it.",
    ),
)
def ceiling(first, second):
    """Return the best expected accuracy from true utilities: two (N,) → a number.

    Labels are drawn: the first answer wins with probability σ(u_first − u_second). What
    accuracy does a judge reach who knows both utilities exactly?
    """
    return torch.sigmoid((first - second).abs()).mean()


@ceiling.inputs
def _(generator):
    n, scale = pick(generator, range(5, 50)), pick(generator, [0.3, 1, 5])
    first, second = scale * normal(generator, n) + 0.5, scale * normal(generator, n)
    ties = torch.rand(n, generator=generator) < 0.2
    return first, torch.where(ties, first, second)


@ceiling.mistake
def no_absolute_value(first, second):
    """You return how often the *first* answer wins. Bet on the better one, whichever it
    is.
    """
    return torch.sigmoid(first - second).mean()


@ceiling.mistake
def perfect(first, second):
    """Even a judge who knows the utilities is wrong if the worse answer was drawn as
    the winner. Labels are noisy.
    """
    return torch.ones((), dtype=first.dtype)


@ceiling.mistake
def of_the_mean(first, second):
    """Apply the sigmoid first, then the mean: the sigmoid of a mean difference is a
    different number.
    """
    return torch.sigmoid((first - second).abs().mean())


@ceiling.mistake
def mean_inside(first, second):
    """You take the mean before the absolute value: pairs of opposite sign cancel."""
    return torch.sigmoid((first - second).mean().abs())


@ceiling.mistake
def larger_than_one_half_counts(first, second):
    """You return how often the first answer is better. Labels are drawn at random, so
    the better answer does not always win.
    """
    return (first > second).to(first.dtype).mean()


@ceiling.mistake
def each_utility_alone(first, second):
    """You apply the sigmoid to each utility: only their difference decides who wins."""
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
        "There are three kinds of pairs. What does each kind add to the accuracy?",
        "In a tie a model can only guess, and a guess is right half of the time.",
    ),
)
def pair_accuracy(chosen, rejected):
    """Return the share of pairs in which the chosen answer scores higher: two (B,) → a
    number. A tie counts half.

    A reward model that gives everything 0 always ties. Which accuracy should it get?
    """
    return ((chosen > rejected).double() + 0.5 * (chosen == rejected).double()).mean()


pair_accuracy.reply = "One half, as a guess: all pairs tie, and each counts half."


@pair_accuracy.inputs
def _(generator):
    n, scale = pick(generator, range(5, 40)), pick(generator, [1e-6, 1, 100])
    chosen, rejected = (
        torch.randint(-1, 2, (2, n), generator=generator).double() * scale
    )
    return chosen, chosen.clone() if generator.initial_seed() % 6 == 5 else rejected


@pair_accuracy.mistake
def ties_win(chosen, rejected):
    """You count ties as right: a model that scores everything alike would have
    accuracy 1.
    """
    return (chosen >= rejected).double().mean()


@pair_accuracy.mistake
def ties_lose(chosen, rejected):
    """You count ties as wrong: a model that scores everything alike would look worse
    than a model that guesses.
    """
    return (chosen > rejected).double().mean()


@pair_accuracy.mistake
def ties_left_out(chosen, rejected):
    """You leave ties out of the mean. Each tie counts half, and it counts as a pair."""
    untied = chosen != rejected
    return (chosen > rejected)[untied].double().mean()


@pair_accuracy.mistake
def only_ties(chosen, rejected):
    """You count only the ties; count the wins as well."""
    return 0.5 * (chosen == rejected).double().mean()


@pair_accuracy.alternative
def by_sign(chosen, rejected):
    return ((chosen - rejected).sign().mean() + 1) / 2


@SET.exercise(
    "A probe of your own",
    2,
    10,
    (
        "Make one change after the other, and look at the result.",
        "Strings have a method for capitals, and one that replaces every occurrence.",
    ),
)
def shouting(answer):
    """Return the bad answer made from a normal one: str → str.

    A probe of the audit turns a normal answer into one that no reader would prefer, and
    lets the reward model score it. Write a probe that shouts: turn all letters into
    capitals, and every period into three exclamation marks.
    """
    return answer.upper().replace(".", "!!!")


@shouting.inputs
def _(generator):
    parts = ["Hold it low.", "Try v. 2.5, again!", "Really?", "Wait ...", "no café", ""]
    order = torch.randperm(len(parts), generator=generator)[
        : pick(generator, range(2, 5))
    ]
    return (" ".join(["It works.", *(parts[i] for i in order)]),)


@shouting.mistake
def only_capitals(answer):
    """The periods are still there: replace each by three exclamation marks."""
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
    """The capitals are missing."""
    return answer.replace(".", "!!!")


@shouting.mistake
def marks_besides(answer):
    """The periods are still there, before the exclamation marks."""
    return answer.upper().replace(".", ".!!!")


@shouting.mistake
def at_the_end(answer):
    """You add the marks only at the end, and the periods are still there."""
    return answer.upper() + "!!!"


@shouting.mistake
def one_mark(answer):
    """You write one exclamation mark per period; write three."""
    return answer.upper().replace(".", "!")


@shouting.alternative
def joined(answer):
    return "!!!".join(answer.split(".")).upper()
