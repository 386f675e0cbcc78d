"""Exercises of notebook 09."""

import math

import torch
from torch.nn.functional import logsigmoid

from engine import Set, normal, pick

SET = Set(
    "09_your_own_feedback",
    "Your own feedback",
    "import math\n\nimport torch",
)
check = SET.check


@SET.exercise("The loss of a question", 1, 10, gradient=True)
def question_loss(scores):
    """Return the loss on questions whose best text comes first: scores (N, k) → a
    number.

    A softmax over a question's scores gives each text's probability of being named the
    best. The loss is minus the log-probability of the first text, averaged over
    questions. For k = 2, it is Bradley and Terry's loss.
    """
    return -scores.log_softmax(1)[:, 0].mean()


@question_loss.inputs
def _(dice):
    return (normal(dice, pick(dice, range(3, 7)), pick(dice, (2, 3, 4, 5))),)


question_loss.hints = (
    "A question is a small classification problem. What are its classes?",
    "Use one softmax per row.",
)
question_loss.mistakes = {
    "pairs": (
        "You compare the best text with other texts one by one, or with only one of "
        "them. A question has *one* answer, so use one softmax over all of its texts.",
        lambda s: -logsigmoid(s[:, :1] - s[:, 1:]).sum(1).mean(),
        lambda s: -logsigmoid(s[:, :1] - s[:, 1:]).mean(),
        lambda s: -logsigmoid(s[:, 0] - s[:, 1]).mean(),
        lambda s: -logsigmoid(s[:, 0] - s[:, 1:].amax(1)).mean(),
    ),
    "over_the_questions": (
        "Your softmax runs over questions. Texts compete within a question, which is a "
        "row.",
        lambda s: -s.log_softmax(0)[:, 0].mean(),
        lambda s: -s.flatten().log_softmax(0).view_as(s)[:, 0].mean(),
    ),
    "averaged_too_early": (
        "You average probabilities. Take the logarithm of each question's probability "
        "first.",
        lambda s: -s.softmax(1)[:, 0].mean(),
        lambda s: -s.softmax(1)[:, 0].mean().log(),
    ),
    "another_text": (
        "You take another text, or all texts, as the best. The first text is the best, "
        "whatever its score is.",
        lambda s: -s.log_softmax(1)[:, 1].mean(),
        lambda s: -s.log_softmax(1).amax(1).mean(),
        lambda s: -s.log_softmax(1).mean(),
    ),
}
question_loss.alternatives = [
    lambda scores: (scores.logsumexp(1) - scores[:, 0]).mean()
]


@SET.exercise("Cohen's κ", 2, 15)
def kappa(first, second):
    """Return the agreement of two people beyond chance: two (N,) of whole numbers → a
    number.

    κ is (p − e) / (1 − e), where p is the share of equal answers. e is the share that
    would be expected if both people answered at random, each with their own
    frequencies.
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


def by_table(first, second):
    size = int(torch.cat([first, second]).max()) + 1
    table = torch.zeros(size, size).double()
    for a, b in zip(first.tolist(), second.tolist()):
        table[a, b] += 1 / len(first)
    chance = table.sum(1) @ table.sum(0)
    return (table.trace() - chance) / (1 - chance)


def shares(first, second):
    """Return each person's share of each answer, from 0 to the largest answer."""
    kinds = torch.arange(int(torch.cat([first, second]).max()) + 1)
    return [(x[:, None] == kinds).double().mean(0) for x in (first, second)]


def agreement(first, second):
    return (first == second).double().mean()


def with_chance(chance):
    """Return a mistake with another e, chance(first's shares, second's shares)."""

    def wrong(first, second):
        e = chance(*shares(first, second))
        return (agreement(first, second) - e) / (1 - e)

    return wrong


def with_denominator(denominator):
    """Return a mistake that divides p − e by another number, denominator(p, e)."""

    def wrong(first, second):
        p, e = agreement(first, second), torch.dot(*shares(first, second))
        return (p - e) / denominator(p, e)

    return wrong


kappa.hints = (
    "First, count how often each person gives each answer.",
    "For agreement by chance, assume that the two people answer independently.",
)
kappa.mistakes = {
    "agreement": (
        'You return the share of equal answers. Two people who always answer "left" '
        "would agree fully without sharing a taste.",
        agreement,
    ),
    "another_chance": (
        "Your e is not the chance that two people with these frequencies agree. Use "
        "each person's own frequencies, and assume that the answers are independent.",
        with_chance(lambda a, b: 1 / (a + b > 0).sum()),
        with_chance(lambda a, b: ((a + b) / 2).square().sum()),
        with_chance(lambda a, b: a @ a),
        with_chance(lambda a, b: b @ b),
    ),
    "answer_left_out": (
        "Your e leaves out the lowest or the highest answer. Check the range of the "
        "loop.",
        with_chance(lambda a, b: a[1:] @ b[1:]),
        with_chance(lambda a, b: a[:-1] @ b[:-1]),
    ),
    "another_denominator": (
        "Divide p − e by its largest possible value, which full agreement reaches. "
        "Your denominator is a different number.",
        with_denominator(lambda p, e: 1.0),
        with_denominator(lambda p, e: e),
        with_denominator(lambda p, e: 1 - p),
    ),
    "counts_for_shares": (
        "Your frequencies are not shares. Divide each person's counts by the number of "
        "that person's answers.",
        lambda first, second: with_chance(lambda a, b: a @ b * len(first))(
            first, second
        ),
    ),
}
kappa.alternatives = [by_table]


@SET.exercise("Could it be chance?", 2, 10)
def by_chance(k, n):
    """Return the probability that k or more of n answers prefer the new text if both
    texts are equally good: two whole numbers → a number.

    Each answer is then a fair coin toss.
    """
    return sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n


@by_chance.inputs
def _(dice):
    n = int(torch.randint(10, 30, (1,), generator=dice))
    return int(torch.randint(n + 1, (1,), generator=dice)), n


def tail(z):
    """Return the normal distribution's probability above z."""
    return math.erfc(z / math.sqrt(2)) / 2


by_chance.hints = (
    "Count the sequences of answers in which at least k prefer the new text.",
    "There are `math.comb(n, i)` sequences with i such answers, each with "
    "probability 0.5 ** n.",
)
by_chance.mistakes = {
    "other_counts": (
        "You include the wrong counts. Include k, n, and all counts between them.",
        lambda k, n: math.comb(n, k) / 2**n,
        lambda k, n: sum(math.comb(n, i) for i in range(k + 1)) / 2**n,
        lambda k, n: sum(math.comb(n, i) for i in range(k, n)) / 2**n,
    ),
    "two_sided": (
        "Your result is two-sided: it also includes outcomes in favor of the old text. "
        "The exercise asks for only one side.",
        lambda k, n: min(1.0, 2 * by_chance.solution(k, n)),
        lambda k, n: by_chance.solution(max(k, n - k), n),
    ),
    "normal_approximation": (
        "You use a normal approximation. Count sequences: the exact probability is a "
        "short sum.",
        lambda k, n: tail((k - n / 2) / (math.sqrt(n) / 2)),
        lambda k, n: tail((k - 0.5 - n / 2) / (math.sqrt(n) / 2)),
    ),
    "wrong_weights": (
        "You weight the counts wrongly. There are C(n, i) sequences with i answers for "
        "the new text, and all sequences of n answers have the same probability.",
        lambda k, n: sum(math.comb(n, i) / 2**i for i in range(k, n + 1)),
        lambda k, n: sum(math.perm(n, i) for i in range(k, n + 1)) / 2**n,
        lambda k, n: (n + 1 - k) / (n + 1),
    ),
}
by_chance.alternatives = [
    lambda k, n: 1 - sum(math.comb(n, i) for i in range(k)) / 2**n
]
