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


@SET.exercise("The pairwise loss", 1, 5, gradient=True)
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


pairwise_loss.hints = (
    "What probability does the model assign to the label? First give the answer in "
    "words.",
    "`logsigmoid` is a stable logarithm of the sigmoid. What is its argument?",
)
pairwise_loss.mistakes = {
    "unstable": (
        "Your loss becomes infinite if a difference is very negative: in floating "
        "point, its sigmoid is 0. `logsigmoid` avoids this problem.",
        lambda c, r: -torch.log(torch.sigmoid(c - r)).mean(),
        lambda c, r: -torch.log(torch.sigmoid((c - r).float())).mean(),
    ),
    "no_logarithm": (
        "You average probabilities without a logarithm: a pair that the model gets "
        "badly wrong would have almost no gradient.",
        lambda c, r: -torch.sigmoid(c - r).mean(),
        lambda c, r: torch.sigmoid(r - c).mean(),
    ),
    "averaged_too_early": (
        "You average too early. Compute the loss of each *pair*, and then the mean.",
        lambda c, r: -logsigmoid((c - r).mean()),
        lambda c, r: -torch.sigmoid(c - r).mean().log(),
    ),
    "each_score_alone": (
        "You apply the sigmoid to each score. Apply it only to the *difference*: a "
        "single score has no natural zero.",
        lambda c, r: -(logsigmoid(c) + logsigmoid(-r)).mean(),
        lambda c, r: (logsigmoid(r) - logsigmoid(c)).mean(),
    ),
    "hinge": (
        "You compute a hinge loss: pairs beyond its margin have no gradient. Bradley "
        "and Terry's probability is smooth.",
        lambda c, r: (1 - (c - r)).clamp(min=0).mean(),
    ),
}
pairwise_loss.alternatives = [
    lambda chosen, rejected: torch.nn.functional.softplus(rejected - chosen).mean()
]


@SET.exercise("The score at the last token", 2, 10, gradient=True)
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


def flipped(scores, mask):
    distance = mask.flip(1).argmax(1, keepdim=True)
    return scores.flip(1).gather(1, distance).squeeze(1)


def at(scores, positions):
    return scores[torch.arange(len(scores)), positions]


def last_real(mask):
    return (torch.arange(mask.shape[1]) * mask).argmax(1)


def last_counted(mask):
    return mask.sum(1).long() - 1


last_token_scores.hints = (
    "How do you recognize the last real token if the padding is on the left?",
    "Find the largest of all positions at which the mask is 1.",
)
last_token_scores.mistakes = {
    "counted_tokens": (
        "You assume that all rows are padded on the right, or all on the same side. "
        "One batch may contain rows of both kinds.",
        lambda s, m: at(s, last_counted(m)),
        lambda s, m: s[:, -1] if m[0, -1] else at(s, last_counted(m)),
        lambda s, m: s[:, -1] if m[:, -1].all() else at(s, last_counted(m)),
    ),
    "one_token_off": (
        "You are off by one: you read the token before or after the last real one.",
        lambda s, m: at(s, (last_real(m) + 1).clamp(max=m.shape[1] - 1)),
        lambda s, m: at(s, last_real(m) - 1),
    ),
    "first_real_token": (
        "You return the score at the *first* real token, where the model has read "
        "nothing else.",
        lambda s, m: at(s, m.argmax(1)),
    ),
    "all_tokens": (
        "You average or sum over tokens, or take the largest score. Choose one token, "
        "by its position: at earlier tokens, the model has not read the whole answer.",
        lambda s, m: (s * m).sum(1) / m.sum(1),
        lambda s, m: (s * m).sum(1),
        lambda s, m: s.masked_fill(m == 0, -torch.inf).max(1).values,
    ),
    "every_pair_of_rows": (
        "You read every row at every row's position. Index rows and columns together.",
        lambda s, m: s[:, last_real(m)],
    ),
}
last_token_scores.alternatives = [flipped]


@SET.exercise("The ceiling of accuracy", 2, 10)
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


ceiling.hints = (
    "Take one pair. On which answer would you bet, and how often would you win?",
    "Bet on the larger utility, whichever answer has it.",
)
ceiling.mistakes = {
    "no_absolute_value": (
        "You count or bet on only one side, such as the *first* answer. In each pair, "
        "bet on the better answer, whether it is the first or the second.",
        lambda a, b: torch.sigmoid(a - b).mean(),
        lambda a, b: torch.sigmoid((a - b).clamp(min=0)).mean(),
        lambda a, b: (torch.sigmoid(a - b) * (a > b)).mean(),
        lambda a, b: torch.maximum(
            torch.sigmoid(a - b).mean(), torch.sigmoid(b - a).mean()
        ),
    ),
    "of_the_mean": (
        "You average before the sigmoid. The sigmoid of a mean difference is not the "
        "mean of the sigmoids.",
        lambda a, b: torch.sigmoid((a - b).abs().mean()),
    ),
    "without_noise": (
        "You count how often an answer has the larger utility. Labels are drawn at "
        "random, so the better answer does not always win.",
        lambda a, b: (a > b).double().mean(),
    ),
    "each_utility_alone": (
        "You apply the sigmoid or the absolute value to each utility, but only the "
        "difference between the two utilities decides which answer wins.",
        lambda a, b: torch.maximum(torch.sigmoid(a), torch.sigmoid(b)).mean(),
        lambda a, b: (torch.sigmoid(a) - torch.sigmoid(b)).abs().mean(),
        lambda a, b: torch.sigmoid(a.abs() - b.abs()).mean(),
    ),
}
ceiling.alternatives = [
    lambda first, second: torch.maximum(
        torch.sigmoid(first - second), torch.sigmoid(second - first)
    ).mean()
]


@SET.exercise("Accuracy, with ties", 1, 5)
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


pair_accuracy.hints = (
    "There are three kinds of pairs. What does each kind add to the accuracy?",
    "In a tie, a model can only guess, and a guess is right half of the time.",
)
pair_accuracy.mistakes = {
    "ties_win": (
        "You count ties as right: a model that gives all answers the same score would "
        "have accuracy 1.",
        lambda c, r: (c >= r).double().mean(),
    ),
    "ties_lose": (
        "You count ties as wrong: a model that gives all answers the same score would "
        "look worse than a model that guesses.",
        lambda c, r: (c > r).double().mean(),
    ),
    "ties_left_out": (
        "You leave ties out of the mean. Each tie is also a pair, and it counts half.",
        lambda c, r: (c > r)[c != r].double().mean() if (c != r).any() else c.sum() * 0,
        lambda c, r: (
            (c > r).sum() / (c != r).sum().clamp(min=1) + (c == r).double().mean() / 2
        ),
        lambda c, r: (
            ((c > r).sum() + 0.5 * (c == r).sum()) / (c != r).sum().clamp(min=1)
        ),
    ),
    "margins": (
        "You average differences, their signs, or probabilities. A pair counts 1, half "
        "or 0, whatever the difference between its scores is.",
        lambda c, r: torch.sigmoid(c - r).mean(),
        lambda c, r: (c - r).sign().mean(),
    ),
    "other_pairs": (
        "You compare mean scores, or every chosen answer with every rejected one. "
        "Compare only the two answers of each pair.",
        lambda c, r: pair_accuracy.solution(c[:, None], r),
        lambda c, r: ((c.mean() - r.mean()).sign() + 1) / 2,
    ),
}
pair_accuracy.alternatives = [
    lambda chosen, rejected: ((chosen - rejected).sign().mean() + 1) / 2
]


@SET.exercise("A probe of your own", 2, 10)
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


shouting.hints = (
    "Make one change at a time, and look at the result.",
    "One string method returns the text in capitals, and another replaces every "
    "occurrence of a string.",
)
shouting.mistakes = {
    "other_capitals": (
        "Your capitals are wrong: every letter must become a capital, and letters with "
        "accents are also letters.",
        lambda x: x.replace(".", "!!!"),
        lambda x: x.lower().replace(".", "!!!"),
        lambda x: x.title().replace(".", "!!!"),
        lambda x: x.capitalize().replace(".", "!!!"),
        lambda x: x.swapcase().replace(".", "!!!"),
        lambda x: re.sub("[a-z]", lambda m: m[0].upper(), x).replace(".", "!!!"),
    ),
    "some_periods": (
        "You replace only some of the periods, or none. Replace all of them.",
        lambda x: x.upper(),
        lambda x: x.upper().replace(".", "!!!", 1),
        lambda x: re.sub(r"\.$", "!!!", x.upper()),
        lambda x: re.sub(r"\.(?=\s|$)", "!!!", x.upper()),
        lambda x: re.sub(r"\.(?= )", "!!!", x.upper()),
    ),
    "more_than_periods": (
        "You replace other characters as well, or several periods together. Replace "
        "each period, and only periods.",
        lambda x: re.sub(".", "!!!", x.upper()),
        lambda x: re.sub(r"\.+", "!!!", x.upper()),
        lambda x: re.sub("[.!?]", "!!!", x.upper()),
        lambda x: re.sub("[.,!?]", "!!!", x.upper()),
    ),
    "number_of_marks": (
        "You write the wrong number of exclamation marks, or keep the periods. Each "
        "period becomes exactly three exclamation marks.",
        lambda x: x.upper().replace(".", "!"),
        lambda x: x.upper().replace(".", "!!"),
        lambda x: x.upper().replace(".", ".!!!"),
    ),
    "spaces_lost": (
        "You drop or replace spaces or line breaks. Keep them unchanged.",
        lambda x: " ".join(x.upper().split()).replace(".", "!!!"),
        lambda x: x.strip().upper().replace(".", "!!!"),
    ),
}
shouting.alternatives = [lambda answer: "!!!".join(answer.split(".")).upper()]
