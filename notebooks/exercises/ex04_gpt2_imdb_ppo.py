"""Exercises of notebook 04."""

import math

import torch

from engine import Set, normal, pick, ragged

SET = Set("04_gpt2_imdb_ppo", "GPT-2 on IMDB", "import math\n\nimport torch")
check = SET.check


@SET.exercise(
    "The right logit",
    1,
    5,
    (
        "How would yours behave with a classifier that has its columns the other way?",
        "The dict leads from a column to its name; you need the way back.",
    ),
)
def positive_logit(logits, id2label):
    """The raw logit of POSITIVE: (B, 2), a dict from column to label → (B,).

    Classifiers order their labels as they like. A run that rewards the wrong column
    learns to write bad reviews, and its reward curve looks fine.
    """
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column]


@positive_logit.inputs
def _(dice):
    labels = ["NEGATIVE", "POSITIVE"]
    if dice.initial_seed() % 2:
        labels.reverse()
    columns = list(enumerate(labels))
    if torch.rand((), generator=dice) < 0.5:
        columns.reverse()  # a dict may be in any order
    return 3 * normal(dice, pick(dice, range(3, 7)), 2), dict(columns)


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


@positive_logit.mistake
def always_the_first(logits, id2label):
    """You take column 0 whatever it is called."""
    return logits[:, 0]


@positive_logit.mistake
def the_other_column(logits, id2label):
    """That is the logit of NEGATIVE: this policy learns to write bad reviews."""
    column = next(column for column, label in id2label.items() if label == "NEGATIVE")
    return logits[:, column]


@positive_logit.mistake
def a_log_probability(logits, id2label):
    """That is a log-probability. The raw logit was asked for."""
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits.log_softmax(1)[:, column]


@positive_logit.mistake
def one_sigmoid(logits, id2label):
    """You squash the logit by a sigmoid. The raw one was asked for."""
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column].sigmoid()


@positive_logit.mistake
def a_difference(logits, id2label):
    """That is the difference of both logits. The raw one of POSITIVE was asked for."""
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column] - logits[:, 1 - column]


@positive_logit.mistake
def order_of_the_dict(logits, id2label):
    """You count where the name stands in the dict. The dict's *key* is the column."""
    return logits[:, list(id2label.values()).index("POSITIVE")]


@positive_logit.mistake
def both_columns(logits, id2label):
    """You keep both columns: one number per text was asked for."""
    return logits.clone()


@positive_logit.alternative
def by_list(logits, id2label):
    return logits[:, [id2label[i] for i in range(2)].index("POSITIVE")]


@SET.exercise(
    "A mean with its interval",
    1,
    10,
    (
        "Four times as many texts: how much narrower should the interval be?",
        "A standard error is a standard deviation of single texts over a root.",
    ),
)
def mean_ci(x):
    """Mean and half-width of its 95 % interval: (n,) → two numbers.

    Before and after are means over some hundred prompts. How far may each be off? Use
    1.96 standard errors, with the unbiased standard deviation.
    """
    return x.mean(), 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.inputs
def _(dice):
    n, scale = pick(dice, range(3, 14)), pick(dice, [0.5, 1, 5])
    return (scale * normal(dice, n) + 1,)


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


@mean_ci.mistake
def bounds(x):
    """These are the two ends of the interval. Mean and half-width were asked for."""
    half = 1.96 * x.std() / math.sqrt(len(x))
    return x.mean() - half, x.mean() + half


@mean_ci.mistake
def full_width(x):
    """That is the whole width; the half of it was asked for."""
    return x.mean(), 2 * 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def variance_for_std(x):
    """You forgot the root of the variance."""
    return x.mean(), 1.96 * x.var() / math.sqrt(len(x))


@mean_ci.mistake
def variance_over_n(x):
    """You forgot a root: 1.96 times the *variance* of the mean is no length."""
    return x.mean(), 1.96 * x.var() / len(x)


@mean_ci.mistake
def median(x):
    """The first number is a median; the mean was asked for."""
    return x.median(), 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def two_standard_errors(x):
    """You use 2, and 1.96 was asked for."""
    return x.mean(), 2 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def ninety_percent(x):
    """1.645 standard errors make an interval of 90 %."""
    return x.mean(), 1.645 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def root_of_n_minus_1(x):
    """You correct for n − 1 twice, or at the wrong place: the *mean* is over n
    texts.
    """
    return x.mean(), 1.96 * x.std() / math.sqrt(len(x) - 1)


@mean_ci.mistake
def only_the_half_width(x):
    """One number only: return the mean and the half-width."""
    return 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def half_width_first(x):
    """The two have changed places: the mean comes first."""
    return 1.96 * x.std() / math.sqrt(len(x)), x.mean()


@mean_ci.alternative
def by_variance(x):
    return x.sum() / len(x), 1.96 * (x.var() / len(x)) ** 0.5


@SET.exercise(
    "Perplexity of many responses",
    2,
    10,
    (
        "Two responses of 1 and 9 tokens: how much should each count?",
        "First one mean over all *tokens*, and only then out of the logarithm.",
    ),
)
def perplexity(logprobs, mask):
    """Perplexity per token of a batch of responses: two (B, R) → a number.

    exp of minus the mean log-probability of a token. Long responses weigh more than
    short ones, because they have more tokens.
    """
    return torch.exp(-(logprobs * mask).sum() / mask.sum())


@perplexity.inputs
def _(dice):
    b, r = pick(dice, range(3, 6)), pick(dice, range(6, 9))
    return -normal(dice, b, r).abs() * pick(dice, [0.5, 2]), ragged(dice, b, r)


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


@perplexity.mistake
def zeros_count(logprobs, mask):
    """Padding adds nothing to the sum, and still counts in what you divide by."""
    return torch.exp(-(logprobs * mask).mean())


@perplexity.mistake
def per_response(logprobs, mask):
    """You divide by the number of responses: a perplexity per *token* was asked for."""
    return torch.exp(-(logprobs * mask).sum(1).mean())


@perplexity.mistake
def mean_probability(logprobs, mask):
    """You average probabilities; their logarithms are averaged."""
    return 1 / ((logprobs.exp() * mask).sum() / mask.sum())


@perplexity.mistake
def mean_of_token_perplexities(logprobs, mask):
    """You exponentiate each token and average then. One unlikely token would
    dominate.
    """
    return ((-logprobs).exp() * mask).sum() / mask.sum()


@perplexity.mistake
def base_two(logprobs, mask):
    """You raise 2 to it. These logarithms are natural ones."""
    return 2 ** (-(logprobs * mask).sum() / mask.sum())


@perplexity.mistake
def entropy(logprobs, mask):
    """That is the mean loss in nats, not the perplexity: exponentiate it."""
    return -(logprobs * mask).sum() / mask.sum()


@perplexity.mistake
def of_each_response(logprobs, mask):
    """One number per response: one for the whole batch was asked for."""
    return torch.exp(-(logprobs * mask).sum(1) / mask.sum(1))


@perplexity.mistake
def no_mean(logprobs, mask):
    """You exponentiate a sum over tokens: divide it by their number first."""
    return torch.exp(-(logprobs * mask).sum())


@perplexity.alternative
def by_selection(logprobs, mask):
    return 1 / logprobs[mask.bool()].mean().exp()


@SET.exercise(
    "Different word pairs",
    1,
    10,
    (
        "How many pairs has a text of five words, and one of a single word?",
        "Each text has its own pairs. What is counted once, though many texts have it?",
    ),
)
def distinct_2(texts):
    """Share of different word pairs among all word pairs of all texts: list of str → a
    number.

    It drops when a policy repeats itself, within a text or from text to text. A pair is
    two neighboring words of one text in their order; words are separated by spaces. No
    pairs at all make 0.
    """
    pairs = [pair for text in texts for pair in zip(text.split(), text.split()[1:])]
    return len(set(pairs)) / max(1, len(pairs))


@distinct_2.inputs
def _(dice):
    words = "a great film and a great cast in a film no where now here".split()
    order = torch.randint(len(words), (3, 6), generator=dice).tolist()
    texts = [" ".join(words[i] for i in row[: pick(dice, (4, 6))]) for row in order]
    texts += [
        "a great film a great film",
        "film",
        "great a film",
        "no where",
        "now here",
    ]
    return (texts + texts[:1],)  # one text comes twice


def _pairs(texts):
    return [pair for t in texts for pair in zip(t.split(), t.split()[1:])]


@distinct_2.mistake
def within_each_text(texts):
    """You count repetitions within each text only. A policy that writes the *same* text
    to every query would look diverse.
    """
    shares = []
    for text in texts:
        pairs = list(zip(text.split(), text.split()[1:]))
        shares.append(len(set(pairs)) / max(1, len(pairs)))
    return sum(shares) / len(shares)


@distinct_2.mistake
def mean_over_texts_with_pairs(texts):
    """You count each text separately and average. A policy that writes the *same* text
    to every query would look diverse.
    """
    shares = []
    for text in texts:
        if pairs := list(zip(text.split(), text.split()[1:])):
            shares.append(len(set(pairs)) / len(pairs))
    return sum(shares) / len(shares)


@distinct_2.mistake
def over_words(texts):
    """You divide by the number of words: there are fewer pairs than words."""
    return len(set(_pairs(texts))) / sum(len(text.split()) for text in texts)


@distinct_2.mistake
def a_count(texts):
    """That is a number of pairs. A share of all pairs was asked for."""
    return len(set(_pairs(texts)))


@distinct_2.mistake
def repeated(texts):
    """That is the share of repetitions: 1 minus what was asked for."""
    pairs = _pairs(texts)
    return 1 - len(set(pairs)) / len(pairs)


@distinct_2.mistake
def order_forgotten(texts):
    """You ignore the order of a pair: *great film* and *film great* are two."""
    pairs = _pairs(texts)
    return len(set(map(frozenset, pairs))) / len(pairs)


@distinct_2.mistake
def used_once(texts):
    """You count pairs that occur once only. A pair that occurs twice is one more."""
    pairs = _pairs(texts)
    return sum(pairs.count(pair) == 1 for pair in pairs) / len(pairs)


@distinct_2.mistake
def no_overlap(texts):
    """Your pairs do not overlap: each word but the last begins one."""
    pairs = [pair for t in texts for pair in zip(t.split()[::2], t.split()[1::2])]
    return len(set(pairs)) / len(pairs)


@distinct_2.mistake
def characters(texts):
    """These are pairs of characters. Pairs of words were asked for."""
    pairs = [pair for text in texts for pair in zip(text, text[1:])]
    return len(set(pairs)) / len(pairs)


@distinct_2.mistake
def threes(texts):
    """These are triples; pairs were asked for."""
    words = [text.split() for text in texts]
    triples = [triple for w in words for triple in zip(w, w[1:], w[2:])]
    return len(set(triples)) / len(triples)


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
