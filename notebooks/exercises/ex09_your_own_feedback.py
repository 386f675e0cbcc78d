"""Exercises of notebook 09."""

import math

import torch

from engine import Set, normal, pick

SET = Set(
    "09_your_own_feedback",
    "Your own feedback",
    "import math\n\nimport torch",
)
check = SET.check


@SET.exercise(
    "The loss of a question",
    1,
    10,
    (
        "A question is a small classification: what are its classes?",
        "One softmax per row.",
    ),
    True,
)
def question_loss(scores):
    """The loss of questions whose best text comes first: scores (N, k) → a number.

    A softmax over a question's scores gives each text's probability of being named the
    best. The loss is minus the log-probability of the first text, averaged over
    questions. With k = 2 it is Bradley and Terry's.
    """
    return -scores.log_softmax(1)[:, 0].mean()


@question_loss.inputs
def _(dice):
    return (normal(dice, 5, 4),)


@question_loss.mistake
def three_pairs(scores):
    """These are three independent comparisons, of the best text with each other text. A
    question has *one* answer, so use one softmax over all of its texts.
    """
    difference = scores[:, :1] - scores[:, 1:]
    return -torch.nn.functional.logsigmoid(difference).sum(1).mean()


@question_loss.mistake
def over_the_questions(scores):
    """Your softmax runs over questions (dim 0). Texts compete within a
    question, a row.
    """
    return -scores.log_softmax(0)[:, 0].mean()


@question_loss.mistake
def probability(scores):
    """You average probabilities. The loss is minus their *logarithm*."""
    return -scores.softmax(1)[:, 0].mean()


@question_loss.alternative
def by_logsumexp(scores):
    return (scores.logsumexp(1) - scores[:, 0]).mean()


@SET.exercise(
    "Cohen's κ",
    2,
    15,
    (
        "Count first how often each person gives each answer.",
        "Chance: both give the same answer independently.",
    ),
)
def kappa(first, second):
    """Agreement of two people beyond chance: two (N,) of whole numbers → a number.

    (p − e) / (1 − e): p is the share of equal answers, and e is the share that they
    would reach if each answered at random with their own frequencies.
    """
    p = (first == second).double().mean()
    kinds = torch.cat([first, second]).unique()
    shares = [(x[:, None] == kinds).double().mean(0) for x in (first, second)]
    chance = (shares[0] * shares[1]).sum()
    return (p - chance) / (1 - chance)


@kappa.inputs
def _(dice):
    first = torch.randint(3, (20,), generator=dice)
    other = torch.randint(2, (20,), generator=dice)
    kept = torch.rand(20, generator=dice) < 0.5
    # The second person often agrees, or often disagrees: κ is above 0 or below.
    return first, torch.where(kept, (first + pick(dice, (0, 1))) % 3, other)


@kappa.mistake
def agreement(first, second):
    """This is the share of equal answers. Two people who always answer "left" would
    agree fully without sharing a taste.
    """
    return (first == second).double().mean()


@kappa.mistake
def uniform_chance(first, second):
    """Your chance gives each answer the same probability. People have habits: use each
    person's own frequencies.
    """
    p = (first == second).double().mean()
    chance = 1 / len(torch.cat([first, second]).unique())
    return (p - chance) / (1 - chance)


@kappa.mistake
def undivided(first, second):
    """Divide by 1 − e, the largest possible value of p − e. Otherwise full agreement
    would not be 1.
    """
    p = (first == second).double().mean()
    kinds = torch.cat([first, second]).unique()
    shares = [(x[:, None] == kinds).double().mean(0) for x in (first, second)]
    return p - (shares[0] * shares[1]).sum()


@kappa.mistake
def never_below_0(first, second):
    """You cut κ off at 0. Two people who agree less than by chance have a κ below 0."""
    p = (first == second).double().mean()
    kinds = torch.cat([first, second]).unique()
    shares = [(x[:, None] == kinds).double().mean(0) for x in (first, second)]
    chance = (shares[0] * shares[1]).sum()
    return ((p - chance) / (1 - chance)).clamp(min=0)


@kappa.alternative
def by_table(first, second):
    size = int(torch.cat([first, second]).max()) + 1
    table = torch.zeros(size, size).double()
    for a, b in zip(first.tolist(), second.tolist()):
        table[a, b] += 1 / len(first)
    chance = table.sum(1) @ table.sum(0)
    return (table.trace() - chance) / (1 - chance)


@SET.exercise(
    "Could it be chance?",
    2,
    10,
    (
        "Count the sequences of answers that have at least k for the new text.",
        "There are `math.comb(n, i)` orders, each with probability 0.5 ** n.",
    ),
)
def by_chance(k, n):
    """The probability that k or more of n answers prefer the new text, if both texts
    are equally good: two whole numbers → a number.

    Each answer is then a fair coin toss.
    """
    return sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n


@by_chance.inputs
def _(dice):
    n = int(torch.randint(10, 30, (1,), generator=dice))
    return int(torch.randint(n + 1, (1,), generator=dice)), n


@by_chance.mistake
def exactly(k, n):
    """This is the probability of exactly k, which is small for every k if n is large.
    Count all results that are at least as extreme.
    """
    return math.comb(n, k) / 2**n


@by_chance.mistake
def more_than(k, n):
    """You leave out k itself. Return the probability of *k or more*."""
    return sum(math.comb(n, i) for i in range(k + 1, n + 1)) / 2**n


@by_chance.mistake
def one_order(k, n):
    """You count one order for each number. There are `math.comb(n, i)` orders."""
    return sum(1 for i in range(k, n + 1)) / 2**n


@by_chance.mistake
def larger_side(k, n):
    """You count from the larger of k and n − k. If few prefer the new text, k or more
    is likely by chance.
    """
    return sum(math.comb(n, i) for i in range(max(k, n - k), n + 1)) / 2**n


@by_chance.alternative
def from_below(k, n):
    return 1 - sum(math.comb(n, i) for i in range(k)) / 2**n
