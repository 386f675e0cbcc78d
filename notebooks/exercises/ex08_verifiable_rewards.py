"""Exercises of notebook 08."""

import math
import re

import torch

from engine import Set, normal, pick

SET = Set("08_verifiable_rewards", "Verifiable rewards", "import math\n\nimport torch")
check = SET.check


@SET.exercise(
    "A strict verifier",
    1,
    10,
    (
        "Suppose that your function is the reward of a policy that does not know the "
        "sum. Which texts would the policy write?",
        "Split at semicolons, and compare the last part.",
    ),
)
def strict_rewards(texts, answer):
    """Return rewards (B,): 1 if a text's last part is exactly the answer, else 0.

    The last part is the text after the last semicolon, or the whole text if it has no
    semicolon. The last part may contain nothing except the answer: no space, sign or
    line break.
    """
    return torch.tensor([float(text.split(";")[-1] == answer) for text in texts])


@strict_rewards.inputs
def _(dice):
    a = pick(dice, ("412", "57", "1003"))
    texts = [a, f"5+7:2,4+6c:1,1+2c:4;{a}", "5+7:2;411", f"1{a}", f"{a};400"]
    texts += [f"400;{a}", f"{a}3", "", f"2:{a},1:3;7", f"7;{a};8", f"7;8;{a}"]
    texts += [f"{a};", f";{a}", f" {a}", f"7; {a}", f"{a}\n", f"+{a}", f"0{a}"]
    texts += [f"5+7:2\n;{a}", f"7;8\n{a}"]
    texts += [f"{a};7;8"]
    order = torch.randperm(len(texts), generator=dice).tolist()
    return [texts[place] for place in order], a


def _accept(message, **tests):
    """Register verifiers that reward a text if a test of text and answer holds."""
    for name, test in tests.items():

        def code(texts, answer, test=test):
            return torch.tensor([float(test(text, answer)) for text in texts])

        strict_rewards.say(message, **{name: code})


def _last(text):
    return text.split(";")[-1]


def _numbers(text):
    return re.findall(r"\d+", text)


def _digits(text):
    return text.isdigit() and int(text)


_accept(
    "You search for the answer anywhere. A policy would learn to write many numbers, "
    "one of which is right. Compare only the last part.",
    anywhere=lambda text, answer: answer in text,
    any_number=lambda text, answer: answer in _numbers(text),
)
_accept(
    "You test whether the text ends with the answer, but 1412 also ends with 412. "
    "Compare the whole last part.",
    at_the_end=lambda text, answer: text.endswith(answer),
)
_accept(
    "You accept the answer in any part. A policy can then offer several answers, with "
    "semicolons between them.",
    any_part=lambda text, answer: answer in text.split(";"),
    any_stripped_part=lambda text, answer: (
        answer in [part.strip() for part in text.split(";")]
    ),
)
_accept(
    "You require a semicolon. An answer without steps is also right, and the verifier "
    "does not reward steps.",
    steps_only=lambda text, answer: ";" in text and _last(text) == answer,
    steps_only_stripped=lambda text, answer: (
        ";" in text and _last(text).strip() == answer
    ),
)
_accept(
    "You remove spaces or line breaks, or ignore them. A strict verifier compares "
    "every character of the last part.",
    around=lambda text, answer: _last(text).strip() == answer,
    around_the_text=lambda text, answer: _last(text.strip()) == answer,
    spaces=lambda text, answer: _last(text).strip(" ") == answer,
)
_accept(
    "You accept a line break after the answer. Methods such as rstrip() remove it, and "
    "$ in a regular expression ignores it.",
    line_break=lambda text, answer: _last(text).rstrip() == answer,
)
_accept(
    "You extract a number from the last part, so the last part may contain other "
    "text, such as a second answer.",
    last_number=lambda text, answer: _numbers(_last(text))[-1:] == [answer],
)
_accept(
    "You read the last number of the text, so the last part may contain other text or "
    "no number.",
    last_number_of_all=lambda text, answer: _numbers(text)[-1:] == [answer],
)
_accept(
    "You read the first number of the text. Compare the last part.",
    first_number=lambda text, answer: _numbers(text)[:1] == [answer],
)
_accept(
    "You skip an empty last part. A text that ends with a semicolon has no answer.",
    last_full_part=lambda text, answer: (
        [part for part in text.split(";") if part][-1:] == [answer]
    ),
    last_full_part_stripped=lambda text, answer: (
        [part.strip() for part in text.split(";") if part.strip()][-1:] == [answer]
    ),
)
_accept(
    "You split at the first semicolon. The last part begins after the last semicolon.",
    first_semicolon=lambda text, answer: text.split(";", 1)[-1] == answer,
)
_accept(
    "You compare the second part. If a text has three parts, the last part is the "
    "third.",
    second_part=lambda text, answer: text.split(";")[:2][-1] == answer,
)
_accept(
    "You accept a last part that contains the answer and other text, such as more "
    "digits.",
    inside_the_last=lambda text, answer: answer in _last(text),
    start_of_the_last=lambda text, answer: _last(text).startswith(answer),
)
_accept(
    "You compare a part before the last semicolon. The last part comes after it.",
    first_part=lambda text, answer: text.split(";")[0] == answer,
    before_the_last=lambda text, answer: text.rpartition(";")[0] == answer,
    without_the_last=lambda text, answer: text.rsplit(";", 1)[0] == answer,
    second_to_last=lambda text, answer: text.split(";")[-2:-1] == [answer],
    second_to_last_or_only=lambda text, answer: text.split(";")[-2:][0] == answer,
)
_accept(
    "You accept only a text that is nothing but the answer. A semicolon separates the "
    "answer from earlier steps.",
    whole_text=lambda text, answer: text == answer,
    whole_text_stripped=lambda text, answer: text.strip() == answer,
)
_accept(
    "You accept a text that begins with the answer. Compare the last part.",
    start=lambda text, answer: text.startswith(answer),
)
_accept(
    "You compare numbers, or remove characters: your code accepts a last part with a "
    "sign, a leading zero, or a space. Compare the last part as text.",
    numbers=lambda text, answer: (
        re.fullmatch(rf"\s*\+?0*{answer}\s*", _last(text)) is not None
    ),
    numbers_without_a_sign=lambda text, answer: _digits(_last(text)) == int(answer),
    sign=lambda text, answer: _last(text).lstrip("+-") == answer,
    sign_or_zero=lambda text, answer: _last(text).lstrip("+-0") == answer,
    stripped_digits=lambda text, answer: _digits(_last(text).strip()) == int(answer),
)
_accept(
    "You overlook a semicolon at the start of a text, where its position is 0.",
    semicolon_at_the_start=lambda text, answer: (
        (text[text.rfind(";") + 1 :] if text.rfind(";") > 0 else text) == answer
    ),
)
strict_rewards.say(
    "You give a wrong answer the reward −1. Give it 0.",
    minus_one=lambda texts, answer: 2 * strict_rewards.solution(texts, answer) - 1,
)


@strict_rewards.alternative
def from_the_right(texts, answer):
    rewards = torch.zeros(len(texts))
    for row, text in enumerate(texts):
        rewards[row] = text.rpartition(";")[2] == answer
    return rewards


@SET.exercise(
    "Dead groups",
    1,
    10,
    (
        "In which two ways can all rewards be equal?",
        "All answers of a group may be right, or all may be wrong.",
    ),
)
def dead_share(p, G):
    """Return the expected share of dead groups: pass rates p (P,) of P problems → one
    number.

    A group of G answers is dead if all of them get the same reward, 0 or 1. Each
    problem gives one group.
    """
    return (p**G + (1 - p) ** G).mean()


@dead_share.inputs
def _(dice):
    return normal(dice, 6).sigmoid(), 2 + int(torch.randint(7, (), generator=dice))


dead_share.say(
    "You leave out groups whose answers are all *right*. These are also dead.",
    all_wrong=lambda p, G: ((1 - p) ** G).mean(),
)
dead_share.say(
    "You leave out groups whose answers are all *wrong*. These are also dead.",
    all_right=lambda p, G: (p**G).mean(),
)
dead_share.say(
    "You return the share of live groups. Return the share of dead groups.",
    live_share=lambda p, G: (1 - p**G - (1 - p) ** G).mean(),
)
dead_share.say(
    "You return the share of groups with at least one right answer. Some of these "
    "groups are not dead, and groups with only wrong answers are missing.",
    some_right=lambda p, G: (1 - (1 - p) ** G).mean(),
)
dead_share.say(
    "You return the share of groups with at least one wrong answer. Some of these "
    "groups are not dead, and groups with only right answers are missing.",
    some_wrong=lambda p, G: (1 - p**G).mean(),
)
dead_share.say(
    "You average the pass rates first. Problems differ: if half of them are always "
    "solved and the other half are never solved, every group is dead although the "
    "mean rate is one half.",
    of_the_mean=lambda p, G: p.mean() ** G + (1 - p.mean()) ** G,
    wrong_of_the_mean=lambda p, G: (p**G).mean() + (1 - p.mean()) ** G,
    right_of_the_mean=lambda p, G: p.mean() ** G + ((1 - p) ** G).mean(),
    all_wrong_of_the_mean=lambda p, G: (1 - p.mean()) ** G,
    all_right_of_the_mean=lambda p, G: p.mean() ** G,
)
dead_share.say(
    "You multiply the probabilities of the two ways to be dead. A group cannot be dead "
    "in both ways: the two events are mutually exclusive.",
    multiplied=lambda p, G: (p * (1 - p)).pow(G).mean(),
)
dead_share.say(
    "You subtract an overlap of the two ways to be dead. No group is both all right "
    "and all wrong.",
    overlap=lambda p, G: (p**G + (1 - p) ** G - (p * (1 - p)) ** G).mean(),
    overlap_twice=lambda p, G: (p**G + (1 - p) ** G - 2 * (p * (1 - p)) ** G).mean(),
)
dead_share.say(
    "You count only the more probable, or only the less probable, of the two ways to "
    "be dead. Both ways count for each problem.",
    larger=lambda p, G: torch.maximum(p, 1 - p).pow(G).mean(),
    smaller=lambda p, G: torch.minimum(p, 1 - p).pow(G).mean(),
)
dead_share.say(
    "You count one of the two ways to be dead twice, and the other way not at all.",
    wrong_twice=lambda p, G: 2 * ((1 - p) ** G).mean(),
    right_twice=lambda p, G: 2 * (p**G).mean(),
)
dead_share.say(
    "You subtract the probability of one way to be dead from that of the other. A "
    "group counts if it is dead in either way.",
    right_minus_wrong=lambda p, G: (p**G - (1 - p) ** G).mean(),
    wrong_minus_right=lambda p, G: ((1 - p) ** G - p**G).mean(),
    absolute=lambda p, G: (p**G - (1 - p) ** G).abs().mean(),
)
dead_share.say(
    "You use the probability that two answers agree, as if comparisons of different "
    "pairs were independent. All G answers must get the same reward.",
    pairs=lambda p, G: (p**2 + (1 - p) ** 2).pow(G).mean(),
    neighbors=lambda p, G: (p**2 + (1 - p) ** 2).pow(G - 1).mean(),
    all_pairs=lambda p, G: (p**2 + (1 - p) ** 2).pow(G * (G - 1) // 2).mean(),
)
dead_share.say(
    "You divide by G. The average is over problems.",
    over_answers=lambda p, G: (p**G + (1 - p) ** G).sum() / G,
    over_both=lambda p, G: (p**G + (1 - p) ** G).mean() / G,
)
dead_share.say(
    "You multiply the probabilities of different problems. The expected share is their "
    "arithmetic mean.",
    all_dead=lambda p, G: (p**G + (1 - p) ** G).prod(),
    geometric=lambda p, G: (p**G + (1 - p) ** G).log().mean().exp(),
    some_dead=lambda p, G: 1 - (1 - p**G - (1 - p) ** G).prod(),
)
dead_share.say(
    "Your exponent G acts on only one of the two terms. In either way to be dead, all "
    "G answers must agree.",
    power_of_right=lambda p, G: (p**G + 1 - p).mean(),
    power_of_wrong=lambda p, G: (p + (1 - p) ** G).mean(),
)
dead_share.say(
    "You multiply a rate by G. The probabilities of G independent answers multiply.",
    times_right=lambda p, G: (G * p).mean(),
    times_wrong=lambda p, G: (G * (1 - p)).mean(),
)
dead_share.say(
    "You take the median over problems. The expected share is the mean.",
    median=lambda p, G: (p**G + (1 - p) ** G).median(),
    middle=lambda p, G: (p**G + (1 - p) ** G).quantile(0.5),
)
dead_share.say(
    "You return the mean variance of single rewards, p (1 − p). This variance does not "
    "depend on the group's size, but the probability of a dead group does.",
    variance=lambda p, G: (p * (1 - p)).mean(),
)
dead_share.say(
    "You return the probability of exactly one right or exactly one wrong answer. "
    "Such a group is not dead: its rewards differ.",
    one_right=lambda p, G: (G * p * (1 - p) ** (G - 1)).mean(),
    one_wrong=lambda p, G: (G * (1 - p) * p ** (G - 1)).mean(),
)


@dead_share.alternative
def by_logarithms(p, G):
    right, wrong = (G * p.log()).exp(), (G * (1 - p).log()).exp()
    return (right + wrong).sum() / len(p)


@SET.exercise(
    "pass@k",
    2,
    15,
    (
        "It is easier to count the choices that fail than the choices that succeed.",
        "Of the C(n, k) choices, how many contain no right answer?",
    ),
)
def pass_at_k(c, n, k):
    """Return the unbiased pass@k: c (P,) right answers among n answers to each problem
    → (P,).

    pass@k is the probability that k of the n answers, drawn without replacement,
    contain at least one right answer: 1 − C(n − c, k) / C(n, k).
    """
    none = [math.comb(n - int(right), k) / math.comb(n, k) for right in c]
    return 1 - torch.tensor(none, dtype=torch.float64)


@pass_at_k.inputs
def _(dice):
    n = pick(dice, (6, 8, 11))
    right = torch.randint(n + 1, (6,), generator=dice)
    right[:2] = torch.tensor([0, 2])  # for c = 2 the result depends on n and k
    right = right if dice.initial_seed() % 2 else right.double()  # either type
    return right, n, pick(dice, (2, 3, 4))


def _each(message, **formulas):
    """Register formulas of one problem's c, n and k."""
    for name, formula in formulas.items():

        def code(c, n, k, formula=formula):
            values = [float(formula(int(right), n, k)) for right in c]
            return torch.tensor(values, dtype=torch.float64)

        pass_at_k.say(message, **{name: code})


def _missed(c, n, k):
    return math.comb(n - c, k) / math.comb(n, k)


def _product(factors):
    return math.prod(max(above, 0) / below for above, below in factors)


_each(
    "You raise the estimated pass rate to a power, as if the k answers were drawn with "
    "replacement. This estimate is too low on average.",
    plugged_in=lambda c, n, k: 1 - (1 - c / n) ** k,
)
_each(
    "You raise a rate to a power, as if the k answers were drawn with replacement. "
    "Moreover, your result is not the probability of at least one right answer.",
    power_all_right=lambda c, n, k: (c / n) ** k,
    power_none_right=lambda c, n, k: (1 - c / n) ** k,
    power_some_wrong=lambda c, n, k: 1 - (c / n) ** k,
)
_each(
    "You return the probability that all k answers are right.",
    all_right=lambda c, n, k: math.comb(c, k) / math.comb(n, k),
)
_each(
    "You return the probability that none of the k answers is right. Subtract it from "
    "1.",
    none_right=_missed,
)
_each(
    "You return the probability that at least one of the k answers is *wrong*. Which "
    "answers does a failing choice contain?",
    some_wrong=lambda c, n, k: 1 - math.comb(c, k) / math.comb(n, k),
)
_each(
    "Your result is 0 if fewer than k answers are wrong. In this case each choice "
    "contains a right answer.",
    zero_if_few_wrong=lambda c, n, k: 0 if n - c < k else 1 - _missed(c, n, k),
)
_each(
    "Your result is 1 if exactly k answers are wrong. In this case one choice "
    "contains no right answer.",
    one_if_k_wrong=lambda c, n, k: 1 if n - c <= k else 1 - _missed(c, n, k),
)
_each(
    "Your result is 1 if c exceeds k, and perhaps also if c equals k. A choice may "
    "still contain only wrong answers. Look at n − c.",
    one_if_k_right=lambda c, n, k: 1 if c >= k else 1 - _missed(c, n, k),
    one_if_more_right=lambda c, n, k: 1 if c > k else 1 - _missed(c, n, k),
)
_each(
    "Your result is 0 if c is less than k. A choice may contain fewer than k right "
    "answers and succeed.",
    zero_if_few_right=lambda c, n, k: 0 if c < k else 1 - _missed(c, n, k),
)
_each(
    "You count only choices with exactly one right answer. Choices with more right "
    "answers also count.",
    one_right=lambda c, n, k: c * math.comb(n - c, k - 1) / math.comb(n, k),
)
_each(
    "You require at least two right answers among the k answers. One right answer "
    "suffices.",
    two_right=lambda c, n, k: (
        1 - _missed(c, n, k) - c * math.comb(n - c, k - 1) / math.comb(n, k)
    ),
)
_each(
    "You count ordered choices in one term and unordered choices in the other term. "
    "Count the same kind of choices in both terms.",
    orders_above=lambda c, n, k: 1 - math.perm(n - c, k) / math.comb(n, k),
    orders_below=lambda c, n, k: 1 - math.comb(n - c, k) / math.perm(n, k),
)
_each(
    "Your denominator does not count the choices of k of all n answers.",
    choices_of_c=lambda c, n, k: 1 - math.comb(n - c, k) / math.comb(n, c),
    one_answer_less=lambda c, n, k: 1 - math.comb(n - c, k) / math.comb(n - 1, k),
    one_draw_less=lambda c, n, k: 1 - math.comb(n - c, k) / math.comb(n, k - 1),
    powers_below=lambda c, n, k: 1 - math.comb(n - c, k) / n**k,
)
_each(
    "Your numerator does not count the choices of k wrong answers.",
    without_c=lambda c, n, k: 1 - math.comb(n - k, c) / math.comb(n, k),
    one_draw_less_above=lambda c, n, k: 1 - math.comb(n - c, k - 1) / math.comb(n, k),
)
_each(
    "You add up the probabilities of k draws, so a choice with several right answers "
    "counts several times.",
    added=lambda c, n, k: k * c / n,
    added_up_to_one=lambda c, n, k: min(1, k * c / n),
)
_each(
    "Your result equals a product in which one of two counts does not shrink. Drawing "
    "a wrong answer leaves one fewer wrong answer, and one fewer answer in total.",
    fixed_denominator=lambda c, n, k: 1 - _product((n - c - i, n) for i in range(k)),
    fixed_numerator=lambda c, n, k: 1 - _product((n - c, n - i) for i in range(k)),
    fixed_numerator_limited=lambda c, n, k: (
        1 - min(1, _product((n - c, n - i) for i in range(k)))
    ),
)
_each(
    "Your result would be right if one fewer answer were wrong. n − c answers are "
    "wrong. If you use a loop or a range, check where it starts and ends.",
    one_wrong_less=lambda c, n, k: (
        1 - _product((n - c - 1 - i, n - i) for i in range(k))
    ),
)
_each(
    "Your result would be right if one more answer were wrong. n − c answers are "
    "wrong. If you use a loop or a range, check where it starts and ends.",
    one_wrong_more=lambda c, n, k: 1 - math.comb(n - c + 1, k) / math.comb(n, k),
)
_each(
    "Your result equals a product with a wrong range. Check the product's first and "
    "last factors.",
    late_by_one=lambda c, n, k: 1 - _product((n - c - i, n - i) for i in range(1, k)),
    shifted=lambda c, n, k: 1 - _product((n - c - i, n - i) for i in range(1, k + 1)),
    short_range=lambda c, n, k: (
        1 if n - c < k else 1 - math.prod(1 - k / m for m in range(n - c + 1, n))
    ),
)
_each(
    "Your result is 1 for every problem with a right answer. A choice of k answers may "
    "still contain no right answer.",
    any_right=lambda c, n, k: c > 0,
)
_each(
    "You divide the number of right answers by k and limit the result to 1. Return a "
    "probability over choices of k answers.",
    share_of_k=lambda c, n, k: min(1, c / k),
)


@pass_at_k.alternative
def one_after_the_other(c, n, k):
    missed = torch.ones(len(c), dtype=torch.float64)
    for drawn in range(k):
        missed *= (n - c - drawn).clamp(min=0) / (n - drawn)
    return 1 - missed
