"""Exercises of notebook 04."""

import math

import torch

from engine import Set, normal, ragged

SET = Set("04_gpt2_imdb_ppo", "GPT-2 on IMDB", "import math\n\nimport torch")
check = SET.check


@SET.exercise(
    "The right logit",
    1,
    5,
    "Look the column up by its *name*; a model's config maps numbers to labels.",
)
def positive_logit(logits, id2label):
    """The raw logit of POSITIVE: (B, 2), a dict from column to label → (B,).

    Classifiers order their labels as they like. A run that rewards the wrong column
    learns to write slatings, and its reward curve looks fine.
    """
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column]


@positive_logit.inputs
def _(dice):
    labels = ["NEGATIVE", "POSITIVE"]
    if torch.rand((), generator=dice) < 0.5:
        labels.reverse()
    return normal(dice, 5, 2), dict(enumerate(labels))


@positive_logit.mistake
def always_the_second(logits, id2label):
    """You take column 1 whatever it is called: for some classifiers it is NEGATIVE."""
    return logits[:, 1]


@positive_logit.mistake
def the_larger_one(logits, id2label):
    """You take the larger logit: a text that is surely negative would be rewarded as
    highly as one that is surely positive.
    """
    return logits.max(1).values


@positive_logit.mistake
def a_probability(logits, id2label):
    """That is a probability: everything the classifier is sure of is squeezed into 0.99
    … 1. The raw logit was asked for.
    """
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits.softmax(1)[:, column]


@positive_logit.alternative
def by_list(logits, id2label):
    return logits[:, [id2label[i] for i in range(2)].index("POSITIVE")]


@SET.exercise(
    "A mean with its interval",
    1,
    10,
    "The standard error is std / √n, with n − 1 inside the std.",
)
def mean_ci(x):
    """Mean and half-width of its 95 % interval: (n,) → two numbers.

    Before and after are means over some hundred prompts. How far may each be off? Use
    1.96 standard errors.
    """
    return x.mean(), 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.inputs
def _(dice):
    return (normal(dice, 12),)


@mean_ci.mistake
def spread_of_single_texts(x):
    """That is how far single texts scatter. The *mean* of n texts scatters √n times
    less.
    """
    return x.mean(), 1.96 * x.std()


@mean_ci.mistake
def divided_by_n(x):
    """The standard error has √n under it, not n."""
    return x.mean(), 1.96 * x.std() / len(x)


@mean_ci.mistake
def biased_std(x):
    """The standard deviation is divided by n; from a sample it is n − 1."""
    return x.mean(), 1.96 * x.std(correction=0) / math.sqrt(len(x))


@mean_ci.mistake
def forgot_the_factor(x):
    """One standard error covers about 68 %; for 95 % it takes 1.96 of them."""
    return x.mean(), x.std() / math.sqrt(len(x))


@mean_ci.alternative
def by_variance(x):
    return x.sum() / len(x), 1.96 * (x.var() / len(x)) ** 0.5


@SET.exercise(
    "Perplexity of many responses",
    2,
    10,
    "Average the log-probabilities over all *tokens*, then exponentiate.",
)
def perplexity(logprobs, mask):
    """Perplexity per token of a batch of responses: two (B, R) → a number.

    exp of minus the mean log-probability of a token. Long responses weigh more than
    short ones, because they have more tokens.
    """
    return torch.exp(-(logprobs * mask).sum() / mask.sum())


@perplexity.inputs
def _(dice):
    return -normal(dice, 4, 6).abs() * 3, ragged(dice, 4, 6)


@perplexity.mistake
def padding_counts(logprobs, mask):
    """Padding is in the mean."""
    return torch.exp(-logprobs.mean())


@perplexity.mistake
def mean_of_perplexities(logprobs, mask):
    """You average the responses' perplexities. A single odd one would dominate: average
    logarithms, over tokens.
    """
    return torch.exp(-(logprobs * mask).sum(1) / mask.sum(1)).mean()


@perplexity.mistake
def mean_of_means(logprobs, mask):
    """Each response weighs the same here, so a token of a short one counts more. Divide
    the whole sum by all tokens.
    """
    return torch.exp(-((logprobs * mask).sum(1) / mask.sum(1)).mean())


@perplexity.mistake
def wrong_sign(logprobs, mask):
    """The minus is missing: this is at most 1, and better models would have *more*."""
    return torch.exp((logprobs * mask).sum() / mask.sum())


@perplexity.alternative
def by_selection(logprobs, mask):
    return 1 / logprobs[mask.bool()].mean().exp()


@SET.exercise(
    "Different word pairs",
    1,
    10,
    "Pairs are made within a text; the set is over all texts together.",
)
def distinct_2(texts):
    """Share of different word pairs among all word pairs of all texts: list of str → a
    number.

    It drops when a policy repeats itself, within a text or from text to text.
    """
    pairs = [pair for text in texts for pair in zip(text.split(), text.split()[1:])]
    return len(set(pairs)) / max(1, len(pairs))


@distinct_2.inputs
def _(dice):
    words = "a great film and a great cast in a film".split()
    order = torch.randint(len(words), (3, 6), generator=dice).tolist()
    return (
        [" ".join(words[i] for i in row) for row in order]
        + ["a great film a great film"],
    )


@distinct_2.mistake
def within_each_text(texts):
    """You count repetitions within each text only. A policy that writes the *same* text
    to every query would look diverse.
    """
    shares = []
    for text in texts:
        pairs = list(zip(text.split(), text.split()[1:]))
        shares.append(len(set(pairs)) / len(pairs))
    return sum(shares) / len(shares)


@distinct_2.mistake
def across_texts(texts):
    """You join the texts first, so the last word of one and the first of the next make
    a pair that nobody wrote.
    """
    words = " ".join(texts).split()
    pairs = list(zip(words, words[1:]))
    return len(set(pairs)) / len(pairs)


@distinct_2.mistake
def single_words(texts):
    """These are single words (distinct-1). Pairs were asked for."""
    words = [word for text in texts for word in text.split()]
    return len(set(words)) / len(words)


@distinct_2.alternative
def with_indices(texts):
    seen, total = set(), 0
    for words in map(str.split, texts):
        for i in range(len(words) - 1):
            seen.add(" ".join(words[i : i + 2]))
            total += 1
    return len(seen) / total
