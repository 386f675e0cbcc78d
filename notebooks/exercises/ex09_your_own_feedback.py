"""Exercises of notebook 09."""

import math

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

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
        "A question is a small classification problem. What are its classes?",
        "Use one softmax per row.",
    ),
    True,
)
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


def _pairs(scores):
    return -logsigmoid(scores[:, :1] - scores[:, 1:])


def _against(other):
    """Return a mistake that compares the first text with one other score per row."""
    return lambda s: -logsigmoid(s[:, 0] - other(s)).mean()


def _one_against_all(s):
    first = torch.zeros_like(s)
    first[:, 0] = 1
    return binary_cross_entropy_with_logits(s, first)


question_loss.more(
    {
        "pairs": (
            "You compare the best text with every other text independently. A question "
            "has *one* answer, so use one softmax over all of its texts.",
            lambda s: _pairs(s).sum(1).mean(),
            lambda s: _pairs(s).mean(),
            lambda s: _pairs(s).sum(),
            lambda s: _pairs(s).sum(1).mean() / s.shape[1],
        ),
        "one_pair": (
            "You compare the best text with only one other text of each question. All "
            "texts of a question compete with each other.",
            _against(lambda s: s[:, 1:].amax(1)),
            _against(lambda s: s[:, 1:].amin(1)),
            _against(lambda s: s[:, 1]),
            _against(lambda s: s[:, -1]),
        ),
        "mean_of_the_others": (
            "You compare the best text with an average or a sum of scores. Each text "
            "competes separately, through its own score.",
            _against(lambda s: s[:, 1:].mean(1)),
            _against(lambda s: s.mean(1)),
            _against(lambda s: s[:, 1:].sum(1)),
        ),
        "each_text_for_itself": (
            "You judge each score on its own with a sigmoid, but the texts of a "
            "question compete with each other.",
            lambda s: -logsigmoid(s[:, 0]).mean(),
            _one_against_all,
            lambda s: s.shape[1] * _one_against_all(s),
        ),
        "over_the_questions": (
            "Your softmax runs over questions (dim 0). Texts compete within a "
            "question, which is a row.",
            lambda s: -s.log_softmax(0)[:, 0].mean(),
        ),
        "over_everything": (
            "Your softmax runs over the texts of all questions. Texts compete within "
            "a question, which is a row.",
            lambda s: (s.flatten().logsumexp(0) - s[:, 0]).mean(),
        ),
        "first_question": (
            "You take the first question (a row) instead of the first text of each "
            "question.",
            lambda s: -s.log_softmax(1)[0].mean(),
            lambda s: -s.log_softmax(1)[0].sum(),
            lambda s: -s.log_softmax(0)[0].mean(),
            lambda s: -s.log_softmax(1)[0, 0],
        ),
        "second_text": (
            "You take the second text of each question, but the best text comes first.",
            lambda s: -s.log_softmax(1)[:, 1].mean(),
        ),
        "highest_score": (
            "You take the text with the highest score as the best. The first text is "
            "the best, whatever its score.",
            lambda s: -s.log_softmax(1).amax(1).mean(),
        ),
        "row_number": (
            "You use the question's number as the position of its best text. The "
            "first text is the best in every row.",
            lambda s: (
                -s.log_softmax(1)[
                    torch.arange(len(s)), torch.arange(len(s)) % s.shape[1]
                ].mean()
            ),
        ),
        "all_texts": (
            "You average or sum over all texts, but only the first text was named the "
            "best.",
            lambda s: -s.log_softmax(1).mean(),
            lambda s: -s.log_softmax(1).sum(1).mean(),
        ),
        "full_ranking": (
            "You compute the loss of a full ranking of the texts. Only the best text "
            "is known; the other texts have no order.",
            lambda s: sum(
                -s[:, i:].log_softmax(1)[:, 0].mean() for i in range(s.shape[1])
            ),
        ),
        "entropy": (
            "You return the entropy of the softmax, which does not depend on which "
            "text was named the best.",
            lambda s: -(s.softmax(1) * s.log_softmax(1)).sum(1).mean(),
        ),
        "first_left_out": (
            "Your denominator leaves out the first text. The probabilities of *all* "
            "texts sum to 1.",
            lambda s: (s[:, 1:].logsumexp(1) - s[:, 0]).mean(),
        ),
        "not_normalized": (
            "You return minus the mean score of the first texts; the softmax is "
            "missing.",
            lambda s: -s[:, 0].mean(),
        ),
        "maximum": (
            "You use the highest score in place of the logarithm of a sum of "
            "exponentials.",
            lambda s: (s.amax(1) - s[:, 0]).mean(),
        ),
        "maximum_not_restored": (
            "You subtract the maximum in only one part of the formula. Subtract it "
            "from all scores or from none.",
            lambda s: (s.logsumexp(1) - s.amax(1) - s[:, 0]).mean(),
        ),
        "mean_in_the_denominator": (
            "Your denominator is a mean of the texts' exponentials; a softmax divides "
            "by their sum.",
            lambda s: (s.exp().mean(1).log() - s[:, 0]).mean(),
        ),
        "logarithm_of_the_mean": (
            "You average probabilities before the logarithm. Take the logarithm of "
            "each question's probability first.",
            lambda s: -s.softmax(1)[:, 0].mean().log(),
        ),
        "probability": (
            "You average probabilities. The loss is minus their *logarithm*.",
            lambda s: -s.softmax(1)[:, 0].mean(),
            lambda s: s.softmax(1)[:, 0].mean(),
            lambda s: 1 - s.softmax(1)[:, 0].mean(),
        ),
        "hinge": (
            "You return a hinge loss; use the logarithm of a softmax probability.",
            lambda s: (1 - s[:, :1] + s[:, 1:]).clamp(min=0).mean(),
            lambda s: (1 - s[:, :1] + s[:, 1:]).clamp(min=0).sum(1).mean(),
        ),
        "without_exponentials": (
            "You divide absolute scores by their sum; a softmax divides exponentials.",
            lambda s: -(s.abs()[:, 0] / s.abs().sum(1)).log().mean(),
        ),
    },
)


@question_loss.alternative
def by_logsumexp(scores):
    return (scores.logsumexp(1) - scores[:, 0]).mean()


@SET.exercise(
    "Cohen's κ",
    2,
    15,
    (
        "First, count how often each person gives each answer.",
        "For agreement by chance, assume that the two people answer independently.",
    ),
)
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


def _equal(first, second):
    return (first == second).double().mean()


def _shares(first, second):
    kinds = torch.cat([first, second]).unique()
    return [(x[:, None] == kinds).double().mean(0) for x in (first, second)]


def _with_chance(chance):
    """Return a mistake with another e, a function of both shares and of N."""

    def wrong(first, second):
        e = chance(*_shares(first, second), len(first))
        return (_equal(first, second) - e) / (1 - e)

    return wrong


def _with_formula(formula):
    """Return a mistake with another formula of p, e and both shares."""

    def wrong(first, second):
        a, b = _shares(first, second)
        return formula(_equal(first, second), a @ b, a, b)

    return wrong


def _with_equal(equal):
    """Return a mistake with another p."""

    def wrong(first, second):
        e = torch.dot(*_shares(first, second))
        return (equal(first, second).double().mean() - e) / (1 - e)

    return wrong


def _for_one_answer(answer):
    def wrong(first, second):
        return kappa.solution((first == answer).long(), (second == answer).long())

    return wrong


def _chance_for_one_answer(answer):
    def wrong(first, second):
        shares = [(x == answer).double().mean() for x in (first, second)]
        e = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
        return (_equal(first, second) - e) / (1 - e)

    return wrong


def _weighted(power):
    def wrong(first, second):
        apart = (first - second).abs() ** power
        return (
            1
            - apart.double().mean()
            / ((first[:, None] - second).abs() ** power).double().mean()
        )

    return wrong


def _without(answer):
    """Return a mistake whose e leaves out an answer."""

    def wrong(first, second):
        left = answer(first, second)
        e = torch.dot(*_shares(first, second))
        e = e - (first == left).double().mean() * (second == left).double().mean()
        return (_equal(first, second) - e) / (1 - e)

    return wrong


def _both_give(first, second):
    kinds = torch.cat([first, second]).unique()[:, None]
    e = (((first == kinds) & (second == kinds)).double().mean(1) ** 2).sum()
    return (_equal(first, second) - e) / (1 - e)


def _top(first, second):
    return torch.maximum(first.max(), second.max())


kappa.more(
    {
        "agreement": (
            "You return the share of equal answers. Two people who always answer "
            '"left" would agree fully without sharing a taste.',
            _equal,
        ),
        "uniform_chance": (
            "Your e ignores how often each person gives each answer. People have "
            "habits: use each person's own frequencies.",
            _with_chance(lambda a, b, n: 1 / len(a)),
            _with_chance(lambda a, b, n: 1 / 2),
            _with_chance(lambda a, b, n: 1 / len(a) ** 2),
        ),
        "pooled": (
            "Your e uses the pooled answers of both people; use each person's own "
            "frequencies.",
            _with_chance(lambda a, b, n: ((a + b) ** 2).sum() / 4),
            _with_chance(
                lambda a, b, n: (
                    (n * (a + b) * (n * (a + b) - 1)).sum() / (2 * n * (2 * n - 1))
                )
            ),
            _with_chance(
                lambda a, b, n: ((a + b) * (2 - a - b)).sum() / 4 / (len(a) - 1)
            ),
        ),
        "one_person": (
            "Your e uses one person's frequencies twice; use both people's.",
            _with_chance(lambda a, b, n: a @ a),
            _with_chance(lambda a, b, n: b @ b),
        ),
        "joint_chance": (
            "Your e uses how often both people gave the same answer. For e, assume "
            "that their answers are independent.",
            _both_give,
        ),
        "averaged_chance": (
            "You average over the kinds of answers when you compute e. Sum over the "
            "kinds.",
            _with_chance(lambda a, b, n: (a * b).mean()),
        ),
        "divided_by_another_count": (
            "Your frequencies are not shares. Divide each person's counts by the "
            "number of that person's answers.",
            _with_chance(lambda a, b, n: n * (a @ b)),
            _with_chance(lambda a, b, n: n**2 * (a @ b)),
            _with_chance(lambda a, b, n: n**2 / (n - 1) ** 2 * (a @ b)),
        ),
        "sorted_frequencies": (
            "You multiply frequencies in sorted order. Multiply the two frequencies "
            "of the same answer.",
            _with_chance(lambda a, b, n: a.sort()[0] @ b.sort()[0]),
        ),
        "commonest_answer": (
            "Your e uses only the most common answers; sum over all answers.",
            _with_chance(lambda a, b, n: a.max() * b.max()),
            _with_chance(lambda a, b, n: torch.maximum(a.max(), b.max())),
        ),
        "answer_left_out": (
            "Your e leaves out the lowest or the highest answer. Check the range of "
            "the loop.",
            _without(_top),
            _without(lambda first, second: 0),
        ),
        "two_answers": (
            "You treat the answers as two kinds, such as 0 and not 0, but there may "
            "be more kinds.",
            _chance_for_one_answer(0),
            _chance_for_one_answer(1),
            _for_one_answer(0),
            _for_one_answer(1),
        ),
        "nonzero_agreement": (
            "Your p does not count pairs in which both people answer 0, but these "
            "pairs also agree.",
            _with_equal(lambda first, second: (first == second) & (first > 0)),
        ),
        "near_agreement": (
            "Your p counts answers that differ by 1 as equal.",
            _with_equal(lambda first, second: (first - second).abs() <= 1),
        ),
        "disagreement": (
            "Your p is the share of *different* answers. Use the share of equal "
            "answers.",
            _with_equal(lambda first, second: first != second),
        ),
        "undivided": (
            "You do not divide the difference p − e by its largest possible value, so "
            "full agreement would not give 1.",
            _with_formula(lambda p, e, a, b: p - e),
        ),
        "another_denominator": (
            "Divide p − e by its largest possible value, which full agreement reaches. "
            "Your denominator is a different number.",
            *map(
                _with_formula,
                (
                    lambda p, e, a, b: (p - e) / (1 + e),
                    lambda p, e, a, b: (p - e) / e,
                    lambda p, e, a, b: (p - e) / (1 - p),
                    lambda p, e, a, b: (p - e) / p,
                ),
            ),
        ),
        "parentheses": (
            "You divide only e; divide the whole difference p − e.",
            _with_formula(lambda p, e, a, b: p - e / (1 - e)),
        ),
        "no_difference": (
            "Your result does not contain the difference p − e.",
            _with_formula(lambda p, e, a, b: p / (1 - e)),
            _with_formula(lambda p, e, a, b: e),
            _with_formula(lambda p, e, a, b: p / e),
        ),
        "correlation": (
            "You return a correlation of the answers; κ counts equal answers.",
            _with_formula(
                lambda p, e, a, b: (p - e) / ((1 - a @ a) * (1 - b @ b)).sqrt()
            ),
            lambda *x: torch.corrcoef(torch.stack(x).double())[0, 1],
        ),
        "weighted": (
            "You return a weighted κ, in which the distance between answers matters. "
            "Here two answers are either equal or different.",
            _weighted(1),
            _weighted(2),
        ),
        "never_below_0": (
            "You cut κ off at 0. Two people who agree less often than by chance have "
            "a κ below 0.",
            lambda *x: kappa.solution(*x).clamp(min=0),
        ),
    },
)


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
        "Count the sequences of answers in which at least k prefer the new text.",
        "There are `math.comb(n, i)` sequences with i such answers, each with "
        "probability 0.5 ** n.",
    ),
)
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


def _counts(kept, weight=lambda i, k, n: math.comb(n, i) / 2**n):
    """Return a mistake that sums wrong counts or uses wrong weights."""
    return lambda k, n: sum(weight(i, k, n) for i in kept(k, n))


def _or_more(k, n):
    return range(k, n + 1)


def _tail(z):
    return math.erfc(z / math.sqrt(2)) / 2


def _z(k, n):
    return (2 * k - n) / math.sqrt(n)


def _farther(k, n):
    return (i for i in range(n + 1) if abs(2 * i - n) >= abs(2 * k - n))


by_chance.more(
    {
        "exactly": (
            "You return the probability of exactly k answers for the new text, which "
            "is small for every k if n is large. Include all larger counts.",
            _counts(lambda k, n: [k]),
        ),
        "more_than": (
            "You leave out the case of exactly k. Return the probability of *k or "
            "more*.",
            _counts(lambda k, n: range(k + 1, n + 1)),
        ),
        "half_of_k": (
            "You include only half of the probability of exactly k. Return the "
            "probability of *k or more*.",
            lambda k, n: by_chance.solution(k, n) - math.comb(n, k) / 2 ** (n + 1),
        ),
        "at_most": (
            "You return the probability of k or *fewer*; return the probability of k "
            "or more.",
            _counts(lambda k, n: range(k + 1)),
        ),
        "without_n": (
            "You leave out the case of exactly n: a range ends before its second "
            "number.",
            _counts(range),
        ),
        "one_sequence_less": (
            "You divide by the number of all sequences minus 1. The sequence in which "
            "no answer prefers the new text is also possible.",
            _counts(
                lambda k, n: range(max(k, 1), n + 1),
                lambda i, k, n: math.comb(n, i) / (2**n - 1),
            ),
        ),
        "two_sided": (
            "Your result is two-sided: it also includes outcomes in favor of the old "
            "text. The exercise asks for only one side.",
            lambda k, n: min(1.0, 2 * by_chance.solution(k, n)),
            _counts(_farther),
        ),
        "one_order": (
            "You count only one sequence for each number i of answers for the new "
            "text. There are `math.comb(n, i)` such sequences.",
            _counts(_or_more, lambda i, k, n: 1 / 2**n),
        ),
        "one_sequence": (
            "You return the probability of one sequence of answers. Count all "
            "sequences with k or more answers for the new text.",
            lambda k, n: 1 / 2**n,
            lambda k, n: 1 / 2**k,
        ),
        "equally_likely_counts": (
            "You treat all counts from 0 to n as equally likely. The *sequences* are "
            "equally likely, but the counts are not.",
            lambda k, n: (n - k + 1) / (n + 1),
            lambda k, n: (n - k) / n,
        ),
        "not_divided": (
            "You return a number of sequences; divide it to get a probability.",
            _counts(_or_more, lambda i, k, n: math.comb(n, i)),
        ),
        "another_number_of_sequences": (
            "You count the right sequences, but you do not divide by the number of "
            "all sequences of n answers.",
            _counts(_or_more, lambda i, k, n: math.comb(n, i) / 2**k),
            _counts(_or_more, lambda i, k, n: math.comb(n, i) / (2 * n)),
            _counts(_or_more, lambda i, k, n: math.comb(n, i) / n**2),
            _counts(_or_more, lambda i, k, n: math.comb(n, i) / math.factorial(n)),
        ),
        "power_of_the_count": (
            "Your exponent of ½ changes with the count. All sequences of n answers "
            "have the same probability.",
            _counts(_or_more, lambda i, k, n: math.comb(n, i) / 2**i),
            _counts(_or_more, lambda i, k, n: math.comb(n, i) / 2 ** (n - i)),
        ),
        "ordered_choices": (
            "You count ordered choices (perm); the order of choosing does not matter.",
            _counts(_or_more, lambda i, k, n: math.perm(n, i) / 2**n),
        ),
        "another_choice": (
            "You use the wrong binomial coefficients. Choose i of n answers.",
            _counts(_or_more, lambda i, k, n: math.comb(i, k) / 2**n),
            _counts(_or_more, lambda i, k, n: math.comb(n, k) / 2**n),
        ),
        "observed_share": (
            "You toss a coin whose probability of heads is the observed share. If both "
            "texts are equally good, the coin is fair.",
            _counts(
                _or_more,
                lambda i, k, n: math.comb(n, i) * (k / n) ** i * (1 - k / n) ** (n - i),
            ),
        ),
        "only_the_share": (
            "You return the observed share. Return the probability of a share that is "
            "at least as large.",
            lambda k, n: k / n,
        ),
        "normal_approximation": (
            "You use a normal approximation, or return its z. Count sequences: the "
            "exact probability is a short sum.",
            lambda k, n: _tail(_z(k, n)),
            lambda k, n: _tail(_z(k - 0.5, n)),
            lambda k, n: _tail(_z(k + 0.5, n)),
            lambda k, n: min(1.0, 2 * _tail(abs(_z(k, n)))),
            _z,
        ),
        "bits": (
            "You return a logarithm of the probability; return the probability.",
            lambda k, n: math.log2(by_chance.solution(k, n)),
        ),
        "larger_side": (
            "You count from the larger of k and n − k. If few answers prefer the new "
            "text, k or more such answers are likely by chance.",
            _counts(lambda k, n: range(max(k, n - k), n + 1)),
        ),
        "smaller_side": (
            "You count from the smaller of k and n − k; count from k.",
            _counts(lambda k, n: range(min(k, n - k), n + 1)),
        ),
    },
)


@by_chance.alternative
def from_below(k, n):
    return 1 - sum(math.comb(n, i) for i in range(k)) / 2**n
