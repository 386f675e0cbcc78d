"""Exercises of notebook 08."""

import math

import torch

from engine import Set, normal, pick

SET = Set("08_verifiable_rewards", "Verifiable rewards", "import math\n\nimport torch")
check = SET.check


@SET.exercise("A strict verifier", 1, 10)
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


def from_the_right(texts, answer):
    rewards = torch.zeros(len(texts))
    for row, text in enumerate(texts):
        rewards[row] = text.rpartition(";")[2] == answer
    return rewards


def accepted(test):
    """Return a mistake that tests each text differently, test(text, answer)."""
    return lambda texts, answer: torch.tensor([float(test(x, answer)) for x in texts])


strict_rewards.hints = (
    "Suppose that your function is the reward of a policy that does not know the "
    "sum. Which texts would the policy write?",
    "Split at semicolons, and compare the last part.",
)
strict_rewards.mistakes = {
    "spaces": (
        "You remove or ignore spaces or line breaks. A strict verifier compares every "
        "character of the last part.",
        accepted(lambda text, a: text.split(";")[-1].strip() == a),
        accepted(lambda text, a: text.split(";")[-1].strip(" ") == a),
        accepted(lambda text, a: text.split(";")[-1].rstrip() == a),
    ),
    "contains_the_answer": (
        "You accept a text or a last part that contains the answer and more, such as "
        "other digits: 1412 also ends with 412. Compare the whole last part.",
        accepted(lambda text, a: a in text),
        accepted(lambda text, a: text.endswith(a)),
        accepted(lambda text, a: a in text.split(";")[-1]),
        accepted(lambda text, a: text.split(";")[-1].startswith(a)),
    ),
    "another_part": (
        "You compare the wrong part. The last part begins after the last semicolon, "
        "even if nothing follows it.",
        accepted(lambda text, a: text.split(";")[0] == a),
        accepted(lambda text, a: a in text.split(";")),
        accepted(lambda text, a: [x for x in text.split(";") if x][-1:] == [a]),
    ),
    "numbers": (
        "You compare numbers, or remove characters: your code accepts a last part with "
        "a sign, a leading zero, or a space. Compare the last part as text.",
        accepted(lambda text, a: text.split(";")[-1].strip().lstrip("+0") == a),
        accepted(lambda text, a: text.split(";")[-1].lstrip("+") == a),
    ),
}
strict_rewards.alternatives = [from_the_right]


@SET.exercise("Dead groups", 1, 10)
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


def by_logarithms(p, G):
    right, wrong = (G * p.log()).exp(), (G * (1 - p).log()).exp()
    return (right + wrong).sum() / len(p)


dead_share.hints = (
    "In which two ways can all rewards be equal?",
    "All answers of a group may be right, or all may be wrong.",
)
dead_share.mistakes = {
    "of_the_mean": (
        "You average the pass rates first. If half of the problems are always solved "
        "and the others never, every group is dead.",
        lambda p, G: p.mean() ** G + (1 - p.mean()) ** G,
    ),
    "one_way_only": (
        "You count only one of the two ways to be dead. Both ways count for each "
        "problem: all answers right, and all answers wrong.",
        lambda p, G: (p**G).mean(),
        lambda p, G: ((1 - p) ** G).mean(),
        lambda p, G: torch.maximum(p, 1 - p).pow(G).mean(),
    ),
    "not_exclusive": (
        "You multiply the probabilities of the two ways to be dead, or subtract their "
        "overlap. No group is both all right and all wrong.",
        lambda p, G: (p * (1 - p)).pow(G).mean(),
        lambda p, G: (p**G + (1 - p) ** G - (p * (1 - p)) ** G).mean(),
    ),
}
dead_share.alternatives = [by_logarithms]


@SET.exercise("pass@k", 2, 15)
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


def one_after_the_other(c, n, k):
    missed = torch.ones(len(c), dtype=torch.float64)
    for drawn in range(k):
        missed *= (n - c - drawn).clamp(min=0) / (n - drawn)
    return 1 - missed


def for_each(formula):
    """Return a mistake that applies formula(c, n, k) to each problem."""
    return lambda c, n, k: torch.tensor(
        [float(formula(int(right), n, k)) for right in c], dtype=torch.float64
    )


def right_for(c, n, k):
    return 1 - math.comb(n - c, k) / math.comb(n, k)


pass_at_k.hints = (
    "It is easier to count the choices that fail than the choices that succeed.",
    "Of the C(n, k) choices, how many contain no right answer?",
)
pass_at_k.mistakes = {
    "with_replacement": (
        "You raise the estimated pass rate to a power, as if the k answers were drawn "
        "with replacement. This estimate is too low on average.",
        for_each(lambda c, n, k: 1 - (1 - c / n) ** k),
    ),
    "other_choices": (
        "You count the wrong choices: those with only right answers, exactly one right "
        "answer, or a wrong answer. Which answers does a failing choice contain?",
        for_each(lambda c, n, k: math.comb(c, k) / math.comb(n, k)),
        for_each(lambda c, n, k: 1 - math.comb(c, k) / math.comb(n, k)),
        for_each(lambda c, n, k: c * math.comb(n - c, k - 1) / math.comb(n, k)),
    ),
    "another_total": (
        "Your denominator does not count the choices of k of all n answers.",
        for_each(lambda c, n, k: 1 - math.comb(n - c, k) / math.comb(n, c)),
        for_each(lambda c, n, k: 1 - math.comb(n - c, k) / math.comb(n - 1, k)),
    ),
    "special_case": (
        "Your result is wrong where few answers are wrong, or where many are right. "
        "If fewer than k are wrong, each choice contains a right answer.",
        for_each(lambda c, n, k: 0 if n - c < k else right_for(c, n, k)),
        for_each(lambda c, n, k: 1 if n - c <= k else right_for(c, n, k)),
        for_each(lambda c, n, k: 1 if c >= k else right_for(c, n, k)),
    ),
}
pass_at_k.alternatives = [one_after_the_other]
