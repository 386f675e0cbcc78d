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
        "Which texts would a policy write if it had your function but not the sum?",
        "Split at semicolons, and compare the last part.",
    ),
)
def strict_rewards(texts, answer):
    """Rewards (B,) of texts: 1 if the last part is exactly the answer, else 0.

    The last part is the text after the last semicolon, or the whole text if it has no
    semicolon. It counts only if it contains nothing else: no space, sign or line break.
    """
    return torch.tensor([float(text.split(";")[-1] == answer) for text in texts])


@strict_rewards.inputs
def _(dice):
    a = pick(dice, ("412", "57", "1003"))
    texts = [a, f"5+7:2,4+6c:1,1+2c:4;{a}", "5+7:2;411", f"1{a}", f"{a};400"]
    texts += [f"400;{a}", f"{a}3", "", f"2:{a},1:3;7", f"7;{a};8", f"7;8;{a}"]
    texts += [f"{a};", f";{a}", f" {a}", f"7; {a}", f"{a}\n", f"+{a}", f"0{a}"]
    order = torch.randperm(len(texts), generator=dice).tolist()
    return [texts[place] for place in order], a


@strict_rewards.mistake
def anywhere(texts, answer):
    """You search for the answer anywhere. A policy learns to write many numbers, one of
    which is right. Compare only the last part.
    """
    return torch.tensor([float(answer in text) for text in texts])


@strict_rewards.mistake
def at_the_end(texts, answer):
    """You test whether the text ends with the answer: 1412 also ends with 412. Compare
    the whole last part.
    """
    return torch.tensor([float(text.endswith(answer)) for text in texts])


@strict_rewards.mistake
def any_part(texts, answer):
    """You accept the answer in any part. A policy can then offer several answers, with
    semicolons between them.
    """
    return torch.tensor([float(answer in text.split(";")) for text in texts])


@strict_rewards.mistake
def steps_only(texts, answer):
    """You require a semicolon. An answer without steps is also right, and the verifier
    does not reward steps.
    """
    marked = (";" in text and text.split(";")[-1] == answer for text in texts)
    return torch.tensor([float(right) for right in marked])


@strict_rewards.mistake
def around(texts, answer):
    """You remove spaces or line breaks. A strict verifier compares the whole text."""
    return torch.tensor([float(x.split(";")[-1].strip() == answer) for x in texts])


@strict_rewards.mistake
def last_number(texts, answer):
    """You read a number out of the last part. It may then contain other text, such as a
    second answer.
    """
    numbers = (re.findall(r"\d+", text.split(";")[-1]) for text in texts)
    return torch.tensor([float([answer] == found[-1:]) for found in numbers])


@strict_rewards.mistake
def last_full_part(texts, answer):
    """You skip an empty last part. A text that ends with a semicolon has no answer."""
    parts = ([x for x in text.split(";") if x] for text in texts)
    return torch.tensor([float([answer] == found[-1:]) for found in parts])


@strict_rewards.mistake
def first_semicolon(texts, answer):
    """You split at the first semicolon. The last part begins after the last one."""
    return torch.tensor([float(x.split(";", 1)[-1] == answer) for x in texts])


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
    ("In which two ways can all rewards be equal?", "All right, or all wrong."),
)
def dead_share(p, G):
    """Expected share of dead groups: pass rates p (P,) of P problems → one number.

    A group of G answers is dead if all of them get the same reward, 0 or 1. Each
    problem gives one group.
    """
    return (p**G + (1 - p) ** G).mean()


@dead_share.inputs
def _(dice):
    return normal(dice, 6).sigmoid(), 2 + int(torch.randint(7, (), generator=dice))


@dead_share.mistake
def all_wrong(p, G):
    """A group whose answers are all *right* is also dead."""
    return ((1 - p) ** G).mean()


@dead_share.mistake
def live_share(p, G):
    """This is the share of live groups. Return the share of dead groups."""
    return (1 - p**G - (1 - p) ** G).mean()


@dead_share.mistake
def of_the_mean(p, G):
    """You average the pass rates first. Problems differ: if half of them are always
    solved and the other half never, every group is dead at a mean of one half.
    """
    return p.mean() ** G + (1 - p.mean()) ** G


@dead_share.alternative
def by_logarithms(p, G):
    right, wrong = (G * p.log()).exp(), (G * (1 - p).log()).exp()
    return (right + wrong).sum() / len(p)


@SET.exercise(
    "pass@k",
    2,
    15,
    (
        "It is easier to count the choices that fail.",
        "Of the C(n, k) choices, how many contain no right answer?",
    ),
)
def pass_at_k(c, n, k):
    """pass@k without bias: c (P,) right answers among n to each problem → (P,).

    The probability that k of the n answers, drawn without replacement, contain at least
    one right answer: 1 − C(n − c, k) / C(n, k).
    """
    none = [math.comb(n - int(right), k) / math.comb(n, k) for right in c]
    return 1 - torch.tensor(none, dtype=torch.float64)


@pass_at_k.inputs
def _(dice):
    n = pick(dice, (6, 8, 11))
    right = torch.randint(n + 1, (6,), generator=dice).double()
    right[:2] = torch.tensor([0, 2])  # neither extreme hides n or k
    return right, n, pick(dice, (2, 3, 4))


@pass_at_k.mistake
def plugged_in(c, n, k):
    """You raise the estimated rate to a power, as if the k answers were drawn with
    replacement. This estimate is too low on average.
    """
    return 1 - (1 - c.double() / n) ** k


@pass_at_k.mistake
def all_right(c, n, k):
    """This is the probability that all k are right."""
    some = [math.comb(int(right), k) / math.comb(n, k) for right in c]
    return torch.tensor(some, dtype=torch.float64)


@pass_at_k.mistake
def none_right(c, n, k):
    """This is the probability that none of the k is right. Subtract it from 1."""
    none = [math.comb(n - int(right), k) / math.comb(n, k) for right in c]
    return torch.tensor(none, dtype=torch.float64)


@pass_at_k.alternative
def one_after_the_other(c, n, k):
    missed = torch.ones(len(c), dtype=torch.float64)
    for drawn in range(k):
        missed *= (n - c - drawn).clamp(min=0) / (n - drawn)
    return 1 - missed
