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
        "What would your code do with a classifier whose columns are swapped?",
        "The dict maps a column to its name; you need the reverse.",
    ),
)
def positive_logit(logits, id2label):
    """Return the raw logit of POSITIVE: (B, 2), a dict from column to label → (B,).

    Classifiers order their labels as they like. A run that rewards the wrong column
    learns to write bad reviews, and its reward curve looks fine.
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


@positive_logit.mistake
def always_the_second(logits, id2label):
    """You take column 1 whatever its label. For some classifiers it is NEGATIVE."""
    return logits[:, 1]


@positive_logit.mistake
def the_larger_one(logits, id2label):
    """You take the larger logit: a clearly negative text would be rewarded as highly as
    a clearly positive one.
    """
    return logits.max(1).values


@positive_logit.mistake
def a_probability(logits, id2label):
    """You return a probability, which squeezes everything the classifier is sure of
    into 0.99 … 1. Return the raw logit.
    """
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits.softmax(1)[:, column]


@positive_logit.mistake
def always_the_first(logits, id2label):
    """You take column 0 whatever its label."""
    return logits[:, 0]


@positive_logit.mistake
def the_other_column(logits, id2label):
    """You return the logit of NEGATIVE: this policy learns to write bad reviews."""
    column = next(column for column, label in id2label.items() if label == "NEGATIVE")
    return logits[:, column]


@positive_logit.mistake
def a_log_probability(logits, id2label):
    """You return a log-probability. Return the raw logit."""
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits.log_softmax(1)[:, column]


@positive_logit.mistake
def one_sigmoid(logits, id2label):
    """You pass the logit through a sigmoid. Return the raw logit."""
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column].sigmoid()


@positive_logit.mistake
def a_difference(logits, id2label):
    """You return the difference of both logits. Return the raw logit of POSITIVE."""
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column] - logits[:, 1 - column]


@positive_logit.mistake
def order_of_the_dict(logits, id2label):
    """You use the name's position in the dict. The dict's *key* is the column."""
    return logits[:, list(id2label.values()).index("POSITIVE")]


@positive_logit.mistake
def both_columns(logits, id2label):
    """You keep both columns. Return one number per text."""
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
        "A standard error is the standard deviation of single texts divided by a root.",
    ),
)
def mean_ci(x):
    """Return the mean and the half-width of its 95 % interval: (n,) → two numbers.

    The scores before and after training are means over some hundred prompts. How far
    may each mean be off? Use 1.96 standard errors, with the unbiased standard
    deviation.
    """
    return x.mean(), 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.inputs
def _(generator):
    n, scale = pick(generator, range(3, 14)), pick(generator, [0.5, 1, 5])
    return (scale * normal(generator, n) + 1,)


@mean_ci.mistake
def spread_of_single_texts(x):
    """You return how far single texts scatter. The *mean* of n texts scatters √n times
    less.
    """
    return x.mean(), 1.96 * x.std()


@mean_ci.mistake
def divided_by_n(x):
    """You divide by n. The standard error divides by √n."""
    return x.mean(), 1.96 * x.std() / len(x)


@mean_ci.mistake
def biased_std(x):
    """Your standard deviation divides by n. For a sample, divide by n − 1."""
    return x.mean(), 1.96 * x.std(correction=0) / math.sqrt(len(x))


@mean_ci.mistake
def forgot_the_factor(x):
    """You use one standard error, which covers about 68 %. For 95 % use 1.96."""
    return x.mean(), x.std() / math.sqrt(len(x))


@mean_ci.mistake
def bounds(x):
    """You return the two ends of the interval. Return the mean and the half-width."""
    half = 1.96 * x.std() / math.sqrt(len(x))
    return x.mean() - half, x.mean() + half


@mean_ci.mistake
def full_width(x):
    """You return the whole width. Return half of it."""
    return x.mean(), 2 * 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def variance_for_std(x):
    """You forgot the square root of the variance."""
    return x.mean(), 1.96 * x.var() / math.sqrt(len(x))


@mean_ci.mistake
def variance_over_n(x):
    """You forgot a root: 1.96 times the *variance* of the mean is not a length."""
    return x.mean(), 1.96 * x.var() / len(x)


@mean_ci.mistake
def median(x):
    """Your first number is the median. Return the mean."""
    return x.median(), 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def two_standard_errors(x):
    """You use 2 standard errors. Use 1.96."""
    return x.mean(), 2 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def ninety_percent(x):
    """You use 1.645 standard errors, which make an interval of 90 %."""
    return x.mean(), 1.645 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def root_of_n_minus_1(x):
    """You correct for n − 1 twice, or in the wrong place: the *mean* has n texts."""
    return x.mean(), 1.96 * x.std() / math.sqrt(len(x) - 1)


@mean_ci.mistake
def only_the_half_width(x):
    """You return only one number. Return the mean and the half-width."""
    return 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def half_width_first(x):
    """The two numbers are swapped: the mean comes first."""
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
        "Take one mean over all *tokens* first, and only then undo the logarithm.",
    ),
)
def perplexity(logprobs, mask):
    """Return the perplexity per token of a batch: two (B, R) → a number.

    Perplexity is exp of minus the mean log-probability of a token. Long responses weigh
    more than short ones, because they have more tokens.
    """
    return torch.exp(-(logprobs * mask).sum() / mask.sum())


@perplexity.inputs
def _(generator):
    b, r = pick(generator, range(3, 6)), pick(generator, range(6, 9))
    return -normal(generator, b, r).abs() * pick(generator, [0.5, 2]), ragged(
        generator, b, r
    )


@perplexity.mistake
def padding_counts(logprobs, mask):
    """Your mean includes padding."""
    return torch.exp(-logprobs.mean())


@perplexity.mistake
def mean_of_perplexities(logprobs, mask):
    """You average the responses' perplexities: a single unusual one would dominate.
    Average logarithms, over tokens.
    """
    return torch.exp(-(logprobs * mask).sum(1) / mask.sum(1)).mean()


@perplexity.mistake
def mean_of_means(logprobs, mask):
    """Each response weighs the same, so a token of a short one counts more. Divide the
    whole sum by the number of all tokens.
    """
    return torch.exp(-((logprobs * mask).sum(1) / mask.sum(1)).mean())


@perplexity.mistake
def wrong_sign(logprobs, mask):
    """The minus sign is missing: your result is at most 1, and *higher* for better
    models.
    """
    return torch.exp((logprobs * mask).sum() / mask.sum())


@perplexity.mistake
def zeros_count(logprobs, mask):
    """Padding adds nothing to the sum, but still counts in your divisor."""
    return torch.exp(-(logprobs * mask).mean())


@perplexity.mistake
def per_response(logprobs, mask):
    """You divide by the number of responses. Return the perplexity per *token*."""
    return torch.exp(-(logprobs * mask).sum(1).mean())


@perplexity.mistake
def mean_probability(logprobs, mask):
    """You average probabilities. Average their logarithms."""
    return 1 / ((logprobs.exp() * mask).sum() / mask.sum())


@perplexity.mistake
def mean_of_token_perplexities(logprobs, mask):
    """You exponentiate each token before you average: one unlikely token would
    dominate.
    """
    return ((-logprobs).exp() * mask).sum() / mask.sum()


@perplexity.mistake
def base_two(logprobs, mask):
    """You raise 2 to the mean, but these logarithms are natural."""
    return 2 ** (-(logprobs * mask).sum() / mask.sum())


@perplexity.mistake
def entropy(logprobs, mask):
    """You return the mean loss in nats, not the perplexity. Exponentiate it."""
    return -(logprobs * mask).sum() / mask.sum()


@perplexity.mistake
def of_each_response(logprobs, mask):
    """You return one number per response. Return one for the whole batch."""
    return torch.exp(-(logprobs * mask).sum(1) / mask.sum(1))


@perplexity.mistake
def no_mean(logprobs, mask):
    """You exponentiate a sum over tokens. Divide it by their number first."""
    return torch.exp(-(logprobs * mask).sum())


@perplexity.alternative
def by_selection(logprobs, mask):
    return 1 / logprobs[mask.bool()].mean().exp()


@SET.exercise(
    "Distinct word pairs",
    1,
    10,
    (
        "How many pairs does a text of five words have, and a text of one word?",
        "Each text has its own pairs. What counts once, even if many texts have it?",
    ),
)
def distinct_2(texts):
    """Return the share of distinct word pairs among all word pairs of all texts: list
    of str → a number.

    The share drops when a policy repeats itself, within a text or from text to text. A
    pair is two neighboring words of one text in their order; words are separated by
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
    texts += [
        "a great film a great film",
        "film",
        "great a film",
        "no where",
        "now here",
        "",
    ]
    if generator.initial_seed() % 5 == 4:  # no pairs
        return (["film", ""],)
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
    return sum(shares) / max(1, len(shares))


@distinct_2.mistake
def mean_over_texts_with_pairs(texts):
    """You count each text separately and average. A policy that writes the *same* text
    to every query would look diverse.
    """
    shares = []
    for text in texts:
        if pairs := list(zip(text.split(), text.split()[1:])):
            shares.append(len(set(pairs)) / len(pairs))
    return sum(shares) / max(1, len(shares))


@distinct_2.mistake
def over_words(texts):
    """You divide by the number of words: there are fewer pairs than words."""
    return len(set(_pairs(texts))) / sum(len(text.split()) for text in texts)


@distinct_2.mistake
def a_count(texts):
    """You return a number of pairs. Return a share of all pairs."""
    return len(set(_pairs(texts)))


@distinct_2.mistake
def repeated(texts):
    """You return the share of repetitions. Return 1 minus that share."""
    pairs = _pairs(texts)
    return 1 - len(set(pairs)) / max(1, len(pairs))


@distinct_2.mistake
def order_forgotten(texts):
    """You ignore the order of a pair: *great film* and *film great* are two pairs."""
    pairs = _pairs(texts)
    return len(set(map(frozenset, pairs))) / max(1, len(pairs))


@distinct_2.mistake
def used_once(texts):
    """You count only pairs that occur once. A pair that occurs twice also counts, as
    one.
    """
    pairs = _pairs(texts)
    return sum(pairs.count(pair) == 1 for pair in pairs) / max(1, len(pairs))


@distinct_2.mistake
def no_overlap(texts):
    """Your pairs do not overlap. Each word except the last begins a pair."""
    pairs = [pair for t in texts for pair in zip(t.split()[::2], t.split()[1::2])]
    return len(set(pairs)) / max(1, len(pairs))


@distinct_2.mistake
def characters(texts):
    """You count pairs of characters. Count pairs of words."""
    pairs = [pair for text in texts for pair in zip(text, text[1:])]
    return len(set(pairs)) / max(1, len(pairs))


@distinct_2.mistake
def threes(texts):
    """You count triples. Count pairs."""
    words = [text.split() for text in texts]
    triples = [triple for w in words for triple in zip(w, w[1:], w[2:])]
    return len(set(triples)) / max(1, len(triples))


@distinct_2.mistake
def across_texts(texts):
    """You join the texts first, so the last word of one and the first of the next make
    a pair that no text contains.
    """
    words = " ".join(texts).split()
    pairs = list(zip(words, words[1:]))
    return len(set(pairs)) / max(1, len(pairs))


@distinct_2.mistake
def single_words(texts):
    """You count single words (distinct-1). Count pairs."""
    words = [word for text in texts for word in text.split()]
    return len(set(words)) / max(1, len(words))


@distinct_2.alternative
def with_indices(texts):
    seen, total = set(), 0
    for words in map(str.split, texts):
        for i in range(len(words) - 1):
            seen.add(" ".join(words[i : i + 2]))
            total += 1
    return len(seen) / total if total else 0.0
