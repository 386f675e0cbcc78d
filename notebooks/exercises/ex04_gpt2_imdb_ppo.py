"""Exercises of notebook 04."""

import math
from itertools import combinations

import torch

from engine import Set, normal, pick, ragged

SET = Set("04_gpt2_imdb_ppo", "GPT-2 on IMDB", "import math\n\nimport torch")
check = SET.check


@SET.exercise("The right logit", 1, 5)
def positive_logit(logits, id2label):
    """Return the raw logit of POSITIVE: (B, 2), a dict from column to label → (B,).

    The order of the labels differs from classifier to classifier. If a run rewards the
    wrong column, the policy learns to write negative reviews, and the reward curve
    still looks fine.
    """
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column]


@positive_logit.inputs
def _(generator):
    labels = ["NEGATIVE", "POSITIVE"]
    if generator.initial_seed() % 2:
        labels.reverse()
    columns = list(enumerate(labels))
    if torch.rand((), generator=generator) < 0.5:
        columns.reverse()  # a dict may be in any order
    return 3 * normal(generator, pick(generator, range(3, 7)), 2), dict(columns)


positive_logit.hints = (
    "What would your code do with a classifier whose columns are swapped?",
    "The dict maps a column to its label; you need the reverse mapping.",
)
positive_logit.mistakes = {
    "always_the_second": (
        "You take column 1, whatever its label is. In some classifiers, column 1 is "
        "NEGATIVE.",
        lambda logits, id2label: logits[:, 1],
    ),
    "order_of_the_dict": (
        "You use the label's position in the dict, or a fixed entry of the dict. The "
        "entries may be in any order; the dict's *key* is the column.",
        lambda logits, id2label: logits[:, list(id2label.values()).index("POSITIVE")],
        lambda logits, id2label: logits[:, list(id2label)[0]],
        lambda logits, id2label: logits[:, list(id2label)[-1]],
    ),
    "a_difference": (
        "You return the difference of the two logits. Return the raw logit of "
        "POSITIVE.",
        lambda logits, id2label: (
            2 * positive_logit.solution(logits, id2label) - logits.sum(1)
        ),
    ),
}
positive_logit.alternatives = [
    lambda logits, id2label: logits[
        :, [id2label[i] for i in range(2)].index("POSITIVE")
    ]
]


@SET.exercise("A mean with its interval", 1, 10)
def mean_ci(x):
    """Return the mean and the half-width of its 95 % interval: (n,) → two numbers.

    The scores before and after training are means over a few hundred prompts. How far
    may each mean be from the true mean? Use 1.96 standard errors, based on the
    unbiased standard deviation.
    """
    return x.mean(), 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.inputs
def _(generator):
    n, scale = pick(generator, range(3, 14)), pick(generator, [0.5, 1, 5])
    return (scale * normal(generator, n) + 1,)


mean_ci.hints = (
    "With four times as many texts, how much narrower should the interval be?",
    "A standard error is the standard deviation of single scores divided by a "
    "square root.",
)
mean_ci.mistakes = {
    "biased": (
        "Your standard deviation divides by n, or your standard error by √(n − 1). The "
        "deviation is that of a sample, and the *mean* is over n texts.",
        lambda x: (x.mean(), 1.96 * x.std(correction=0) / math.sqrt(len(x))),
        lambda x: (x.mean(), 1.96 * x.std() / math.sqrt(len(x) - 1)),
    ),
    "spread_of_single_texts": (
        "You do not divide the standard deviation by √n: the *mean* of n scores varies "
        "less than single scores do.",
        lambda x: (x.mean(), 1.96 * x.std()),
        lambda x: (x.mean(), 1.96 * x.std() / len(x)),
    ),
    "another_factor": (
        "You do not use 1.96 standard errors. One standard error gives roughly a 68 % "
        "interval, and 1.645 standard errors give a 90 % interval.",
        lambda x: (x.mean(), x.std() / math.sqrt(len(x))),
        lambda x: (x.mean(), 1.645 * x.std() / math.sqrt(len(x))),
        lambda x: (x.mean(), 2 * x.std() / math.sqrt(len(x))),
    ),
    "bounds": (
        "You return the two ends of the interval. Return the mean and the half-width.",
        lambda x: (
            x.mean() - 1.96 * x.std() / math.sqrt(len(x)),
            x.mean() + 1.96 * x.std() / math.sqrt(len(x)),
        ),
    ),
}
mean_ci.alternatives = [lambda x: (x.sum() / len(x), 1.96 * (x.var() / len(x)) ** 0.5)]


@SET.exercise("Perplexity of many responses", 2, 10)
def perplexity(logprobs, mask):
    """Return the perplexity per token of a batch: two (B, R) → a number.

    Perplexity is exp of minus the mean log-probability of a token. Long responses count
    more than short responses, because they have more tokens.
    [Two judges](../deeper/two_judges.ipynb), section 4, uses this perplexity.
    """
    return torch.exp(-(logprobs * mask).sum() / mask.sum())


@perplexity.inputs
def _(generator):
    b, r = pick(generator, range(3, 6)), pick(generator, range(6, 9))
    return -normal(generator, b, r).abs() * pick(generator, [0.5, 2]), ragged(
        generator, b, r
    )


def response_means(logprobs, mask):
    return (logprobs * mask).sum(1) / mask.sum(1)


perplexity.hints = (
    "Two responses have 1 and 9 tokens. How much should each response count?",
    "Take one mean over all *tokens* first. Only then undo the logarithm.",
)
perplexity.mistakes = {
    "zeros_count": (
        "Your divisor counts padding, although padding adds nothing to the sum.",
        lambda x, m: torch.exp(-(x * m).mean()),
    ),
    "response_by_response": (
        "You compute one number per response first, so a token of a short response "
        "counts more than a token of a long one. Take one mean over all tokens.",
        lambda x, m: (-response_means(x, m).mean()).exp(),
        lambda x, m: (-response_means(x, m)).exp().mean(),
        lambda x, m: (-response_means(x, m)).exp(),
    ),
    "per_response": (
        "You divide by the number of responses. Return the perplexity per *token*.",
        lambda x, m: torch.exp(-(x * m).sum() / len(x)),
    ),
    "averaged_too_late": (
        "You average probabilities or the tokens' perplexities. Average logarithms, "
        "and exponentiate once, at the end.",
        lambda x, m: 1 / ((x.exp() * m).sum() / m.sum()),
        lambda x, m: ((-x).exp() * m).sum() / m.sum(),
    ),
}
perplexity.alternatives = [
    lambda logprobs, mask: 1 / logprobs[mask.bool()].mean().exp()
]


@SET.exercise("Distinct word pairs", 1, 10)
def distinct_2(texts):
    """Return the share of distinct word pairs among all word pairs of all texts: list
    of str → a number.

    The share drops when a policy repeats itself, within a text or from text to text. A
    pair consists of two neighboring words of one text, in order; words are separated by
    spaces. Return 0 if there are no pairs.
    """
    pairs = [pair for text in texts for pair in zip(text.split(), text.split()[1:])]
    return len(set(pairs)) / max(1, len(pairs))


@distinct_2.inputs
def _(generator):
    words = "a great film and a great cast in a film no where now here".split()
    order = torch.randint(len(words), (3, 6), generator=generator).tolist()
    texts = [
        " ".join(words[i] for i in row[: pick(generator, (4, 6))]) for row in order
    ]
    texts = [
        "a great film a great film",
        *texts,
        "film",
        "great a film",
        "no-where, no where",
        "",
        "no where",
    ]
    if generator.initial_seed() % 5 == 4:  # no pairs
        return (["film", ""],)
    return ([*texts, texts[1], "now here"],)  # one text comes twice


def with_indices(texts):
    seen, total = set(), 0
    for words in map(str.split, texts):
        for i in range(len(words) - 1):
            seen.add(" ".join(words[i : i + 2]))
            total += 1
    return len(seen) / total if total else 0.0


def pairs_of(words):
    return list(zip(words, words[1:]))


def all_pairs(texts):
    return [pair for text in texts for pair in pairs_of(text.split())]


def share(items, total=None):
    """Return distinct items as a share of all items, or of another total."""
    return len(set(items)) / max(1, len(items) if total is None else total)


distinct_2.hints = (
    "How many pairs does a text of five words have, and a text of one word?",
    "Each text has its own pairs. If a pair occurs in several texts, how many "
    "times does it count as a distinct pair?",
)
distinct_2.mistakes = {
    "wrong_total": (
        "You divide by the wrong number of pairs. There are fewer pairs than words: "
        "check texts of one word, empty texts, and the boundaries between texts.",
        lambda texts: share(all_pairs(texts), len(" ".join(texts).split())),
        lambda texts: share(all_pairs(texts), len(" ".join(texts).split()) - 1),
        lambda texts: share(
            all_pairs(texts), sum(len(text.split()) - 1 for text in texts)
        ),
        lambda texts: share(all_pairs(texts), len(texts)),
        lambda texts: len(set(all_pairs(texts))),
    ),
    "not_pairs_of_words": (
        "You count single words (distinct-1) or pairs of characters. Count pairs of "
        "words.",
        lambda texts: share(" ".join(texts).split()),
        lambda texts: share([pair for text in texts for pair in pairs_of(text)]),
    ),
    "order_forgotten": (
        "You ignore word order, but *great film* and *film great* are different pairs.",
        lambda texts: share([tuple(sorted(pair)) for pair in all_pairs(texts)]),
        lambda texts: share([frozenset(pair) for pair in all_pairs(texts)]),
    ),
    "not_neighbors": (
        "You pair words that are not neighbors in one text, or you skip pairs. Each "
        "word of a text, except the last, begins one pair.",
        lambda texts: share(pairs_of(" ".join(texts).split())),
        lambda texts: share(
            [pair for text in texts for pair in combinations(text.split(), 2)]
        ),
        lambda texts: share(
            [pair for text in texts for pair in pairs_of(text.split())[::2]]
        ),
    ),
    "text_by_text": (
        "You work on each text separately. A pair that occurs again in *another* text "
        "is not distinct: a policy may write the *same* text to every prompt.",
        lambda texts: (
            sum(share(all_pairs([text])) for text in texts)
            / max(1, sum(len(text.split()) > 1 for text in texts))
        ),
        lambda texts: (
            sum(len(set(all_pairs([text]))) for text in texts)
            / max(1, len(all_pairs(texts)))
        ),
    ),
}
distinct_2.alternatives = [with_indices]
