"""Exercises of notebook 04."""

import math
from collections import Counter
from itertools import combinations, permutations, product

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
        "The dict maps a column to its label; you need the reverse mapping.",
    ),
)
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


@positive_logit.mistake
def always_the_second(logits, id2label):
    """You take column 1, whatever its label is. In some classifiers, column 1 is
    NEGATIVE.
    """
    return logits[:, 1]


@positive_logit.mistake
def the_larger_one(logits, id2label):
    """You take the larger logit: a clearly negative text would get as high a reward as
    a clearly positive text.
    """
    return logits.max(1).values


@positive_logit.mistake
def a_probability(logits, id2label):
    """You return a probability, which squeezes the scores of all clearly positive texts
    into 0.99 … 1. Return the raw logit.
    """
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits.softmax(1)[:, column]


@positive_logit.mistake
def always_the_first(logits, id2label):
    """You take column 0, whatever its label is."""
    return logits[:, 0]


@positive_logit.mistake
def the_other_column(logits, id2label):
    """You return NEGATIVE's logit: a policy would learn to write negative reviews."""
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
    """You return the difference of the two logits. Return the raw logit of POSITIVE."""
    column = next(column for column, label in id2label.items() if label == "POSITIVE")
    return logits[:, column] - logits[:, 1 - column]


@positive_logit.mistake
def order_of_the_dict(logits, id2label):
    """You use the label's position in the dict. The dict's *key* is the column."""
    return logits[:, list(id2label.values()).index("POSITIVE")]


@positive_logit.mistake
def both_columns(logits, id2label):
    """You keep both columns. Return one number per text."""
    return logits.clone()


def _positive(x, names):
    return x[:, next(i for i, name in names.items() if name == "POSITIVE")]


def _negative(x, names):
    return x[:, next(i for i, name in names.items() if name == "NEGATIVE")]


def _predicted(x, names):
    return _positive(x, names) > _negative(x, names)


def _scored(change):
    """Return mistakes that negate or zero a score if NEGATIVE is predicted."""

    def signed(x, names):
        top = change(x).amax(1)
        return torch.where(_predicted(x, names), top, -top)

    def without_negatives(x, names):
        return _positive(change(x), names) * _predicted(x, names)

    return signed, without_negatives


positive_logit.more(
    {
        "entry_of_the_dict": (
            "You take a fixed entry of the dict, such as its first or last entry. The "
            "entries may be in any order, so look for the label.",
            lambda x, names: x[:, list(names)[0]],
            lambda x, names: x[:, list(names)[1]],
        ),
        "minus_the_other": (
            "You return minus the logit of NEGATIVE. The two logits are not opposites "
            "of each other.",
            lambda x, names: -_negative(x, names),
        ),
        "sign_of_one_column": (
            "You always read the same column and change the sign of its logit if the "
            "column belongs to NEGATIVE. In that case, read the other column.",
            lambda x, names: x[:, 1] * (1 if names[1] == "POSITIVE" else -1),
            lambda x, names: x[:, 0] * (1 if names[0] == "POSITIVE" else -1),
        ),
        "prediction": (
            "You return only which label wins. Return the logit itself.",
            lambda x, names: _predicted(x, names).double(),
            lambda x, names: 2 * _predicted(x, names).double() - 1,
            lambda x, names: x.argmax(1),
            lambda x, names: _positive(x, names).sign(),
            lambda x, names: (_positive(x, names) > 0).double(),
        ),
        "score_of_the_winner": (
            "Your result depends on which label wins. Return the same label's logit "
            "for every text.",
            *_scored(torch.clone),
            *_scored(lambda x: x.softmax(1)),
            lambda x, names: x.softmax(1).amax(1),
            lambda x, names: x.log_softmax(1).amax(1),
        ),
        "smaller": (
            "You take the smaller logit of each text. Find the column by its label.",
            lambda x, names: x.amin(1),
        ),
        "of_the_other_label": (
            "You read the column of NEGATIVE and also transform it. Return the raw "
            "logit of POSITIVE.",
            lambda x, names: _negative(x.softmax(1), names),
            lambda x, names: _negative(x.log_softmax(1), names),
            lambda x, names: _negative(x, names).sigmoid(),
            lambda x, names: _negative(x, names) - _positive(x, names),
        ),
        "both_logits_mixed": (
            "Your result mixes both logits. Return one of them unchanged.",
            lambda x, names: _positive(x, names) - x.mean(1),
            lambda x, names: x.mean(1),
            lambda x, names: x.sum(1),
            lambda x, names: x.logsumexp(1),
            lambda x, names: (
                _positive(x.softmax(1), names) - _negative(x.softmax(1), names)
            ),
            lambda x, names: _positive(x, names) / _negative(x, names),
            lambda x, names: _positive(x, names) / x.norm(dim=1),
        ),
        "over_the_texts": (
            "Your result for a text depends on the other texts of the batch. Return "
            "each text's raw logit.",
            lambda x, names: _positive(x.softmax(0), names),
            lambda x, names: _positive(x.log_softmax(0), names),
            lambda x, names: (
                (_positive(x, names) - _positive(x, names).mean())
                / _positive(x, names).std()
            ),
            lambda x, names: (
                (_positive(x, names) - _positive(x, names).mean())
                / _positive(x, names).std(correction=0)
            ),
            lambda x, names: _positive(x, names) / _positive(x, names).std(),
        ),
        "bounded": (
            "You limit or squeeze the logit. Return it unchanged.",
            lambda x, names: _positive(x, names).tanh(),
            *(
                lambda x, names, most=most: _positive(x, names).clamp(-most, most)
                for most in (1, 2, 3, 5)
            ),
            lambda x, names: torch.nn.functional.logsigmoid(_positive(x, names)),
            lambda x, names: torch.nn.functional.softplus(_positive(x, names)),
        ),
        "one_text": (
            "You return the logit of one text. Return one number per text.",
            lambda x, names: _positive(x, names)[0],
            lambda x, names: _positive(x, names)[-1],
            lambda x, names: _positive(x, names).amax(),
        ),
        "both_transformed": (
            "You keep both columns and also change or reorder them. Return one raw "
            "logit per text.",
            lambda x, names: x.softmax(1),
            lambda x, names: x.log_softmax(1),
            lambda x, names: x.sigmoid(),
            lambda x, names: torch.stack((_positive(x, names), _negative(x, names)), 1),
        ),
    },
)


@positive_logit.alternative
def by_list(logits, id2label):
    return logits[:, [id2label[i] for i in range(2)].index("POSITIVE")]


@SET.exercise(
    "A mean with its interval",
    1,
    10,
    (
        "With four times as many texts, how much narrower should the interval be?",
        "A standard error is the standard deviation of single scores divided by a "
        "square root.",
    ),
)
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


@mean_ci.mistake
def spread_of_single_texts(x):
    """You return the spread of single scores. The *mean* of n scores varies less, by a
    factor of √n.
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
    """You use one standard error, which gives roughly a 68 % interval. For a 95 %
    interval, use 1.96 standard errors.
    """
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
    """You use the variance instead of its square root."""
    return x.mean(), 1.96 * x.var() / math.sqrt(len(x))


@mean_ci.mistake
def variance_over_n(x):
    """You do not take a square root. You return 1.96 times the *variance* of the mean,
    which has different units from `x`.
    """
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
    """You use 1.645 standard errors, which give a 90 % interval. For a 95 % interval,
    use 1.96.
    """
    return x.mean(), 1.645 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def root_of_n_minus_1(x):
    """You divide by n − 1 once too often, or in the wrong place. The *mean* is over n
    texts.
    """
    return x.mean(), 1.96 * x.std() / math.sqrt(len(x) - 1)


@mean_ci.mistake
def only_the_half_width(x):
    """You return only one number. Return the mean and the half-width."""
    return 1.96 * x.std() / math.sqrt(len(x))


@mean_ci.mistake
def half_width_first(x):
    """The two numbers are swapped: the mean comes first."""
    return 1.96 * x.std() / math.sqrt(len(x)), x.mean()


T_975 = (4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004)
T_975 += (2.262157, 2.228139, 2.200985, 2.178813)  # 2 … 12 degrees of freedom


def _error(x):
    return x.std() / len(x) ** 0.5


def _half(width):
    """Return a mistake that returns a right mean and a wrong half-width."""
    return lambda x: (x.mean(), width(x))


def _center(center):
    """Return a mistake that returns a right half-width and a wrong mean."""
    return lambda x: (center(x), 1.96 * _error(x))


def _several():
    """Yield half-widths with at least two wrong parts."""
    stds = {0: torch.std, 1: lambda x: x.std(correction=0), 2: torch.var}
    stds[3] = lambda x: x.var(correction=0)
    for factor in (1.96, 1, 1.645, 2, 3.92):
        for kind, std in stds.items():
            for power in (0.5, 0, 1):
                wrong = (factor != 1.96) + (kind > 0) + (power != 0.5)
                if kind != 3 and wrong > 1 and (factor, kind, power) != (1.96, 2, 1):
                    yield lambda x, factor=factor, std=std, power=power: (
                        x.mean(),
                        factor * std(x) / len(x) ** power,
                    )
    for power in (0.5, 0, 1):
        yield lambda x, power=power: (x.mean(), 1.96 * stds[3](x) / len(x) ** power)


mean_ci.more(
    {
        "quantile_of_t": (
            "You use a quantile of Student's t. This exercise asks for 1.96.",
            _half(lambda x: T_975[len(x) - 3] * _error(x)),
        ),
        "exact_quantile": (
            "You use the unrounded normal quantile. Use 1.96.",
            _half(lambda x: 1.959964 * _error(x)),
        ),
        "half_of_the_half": (
            "Your second number is half of the half-width: you divide by 2 once too "
            "often.",
            _half(lambda x: 0.98 * _error(x)),
        ),
        "another_factor": (
            "Your factor for the standard error is not 1.96.",
            *(
                _half(lambda x, z=z: z * _error(x))
                for z in (0.95, 0.975, 1.64, 1.65, 1.69, 1.9, 1.95, 1.98, 2.576, 2.58)
            ),
            *(
                _half(lambda x, z=z: z * _error(x))
                for z in (3, 1.282, 95, 0.05, 0.025, 4, 1.96**2, 1 / 1.96)
            ),
        ),
        "fixed_n": (
            "You divide by the square root of a fixed number of texts. Use the length "
            "of `x`.",
            *(
                _half(lambda x, n=n: 1.96 * x.std() / n**0.5)
                for n in (2, 10, 50, 64, 100, 128, 200, 256, 500, 512, 1000)
            ),
        ),
        "another_divisor": (
            "You divide the standard deviation by the wrong number. How does the "
            "right divisor depend on n?",
            *(
                _half(lambda x, f=f: 1.96 * x.std() / f(len(x)))
                for f in (
                    math.log,
                    lambda n: math.log(n + 1),
                    math.log2,
                    lambda n: n - 1,
                    lambda n: n**2,
                    lambda n: n ** (1 / 3),
                    lambda n: (n + 1) ** 0.5,
                    lambda n: (2 * n) ** 0.5,
                    lambda n: (n / 2) ** 0.5,
                    lambda n: (n - 2) ** 0.5,
                    lambda n: 2 * n,
                )
            ),
        ),
        "multiplied_by_n": (
            "Your half-width grows with the number of texts, but more texts make a "
            "mean more precise.",
            _half(lambda x: 1.96 * x.std() * len(x) ** 0.5),
            _half(lambda x: 1.96 * x.std() * len(x)),
            _half(lambda x: 1.96 * x.var() * len(x) ** 0.5),
            _half(lambda x: x.std() * len(x) ** 0.5),
        ),
        "root_of_a_value": (
            "You divide by the square root of the values' mean or sum. Divide by the "
            "square root of the number of values.",
            _half(lambda x: 1.96 * x.std() / x.mean().abs() ** 0.5),
            _half(lambda x: 1.96 * x.std() / x.sum().abs() ** 0.5),
        ),
        "root_of_too_much": (
            "You take the square root of too many factors. Check the units: a "
            "half-width has the units of `x`.",
            _half(lambda x: 1.96 * (x.std() / len(x)) ** 0.5),
            _half(lambda x: 1.96 * _error(x) ** 0.5),
            _half(lambda x: (1.96 * x.std() / len(x)) ** 0.5),
            _half(lambda x: (1.96 * _error(x)) ** 0.5),
            _half(lambda x: (1.96 * x.var() / len(x)) ** 0.5),
            _half(lambda x: (1.96 * x.std()) ** 0.5),
        ),
        "about_zero": (
            "You measure the spread around 0. Subtract the mean before you square.",
            *(
                _half(lambda x, c=c, p=p: 1.96 * (x @ x / (len(x) - c)) ** 0.5 / p(x))
                for c in (1, 0)
                for p in (lambda x: len(x) ** 0.5, lambda x: 1)
            ),
        ),
        "sum_of_squares": (
            "You do not divide the sum of squared deviations by n − 1, so your "
            "standard deviation is too large.",
            _half(lambda x: 1.96 * (x.var() * (len(x) - 1)) ** 0.5),
        ),
        "absolute_deviation": (
            "You average absolute deviations. A standard deviation averages squares.",
            *(
                _half(lambda x, c=c, p=p: 1.96 * (x - c(x)).abs().mean() / len(x) ** p)
                for c in (torch.mean, torch.median)
                for p in (0.5, 0)
            ),
            _half(
                lambda x: (
                    1.96 * (x - x.mean()).abs().sum() / (len(x) - 1) / len(x) ** 0.5
                )
            ),
            _half(lambda x: 1.96 * (x - x.median()).abs().median() / len(x) ** 0.5),
        ),
        "spread_from_order": (
            "You measure the spread with percentiles or extremes of single scores. Use "
            "the standard deviation, and remember that a *mean* varies less than "
            "single scores do.",
            _half(lambda x: (x.quantile(0.975) - x.quantile(0.025)) / 2),
            _half(lambda x: x.quantile(0.975) - x.quantile(0.025)),
            _half(lambda x: (x.quantile(0.95) - x.quantile(0.05)) / 2),
            _half(lambda x: (x.amax() - x.amin()) / 2),
            _half(lambda x: x.amax() - x.amin()),
            _half(lambda x: 1.96 * (x.amax() - x.amin()) / len(x) ** 0.5),
            _half(
                lambda x: 1.96 * (x.quantile(0.75) - x.quantile(0.25)) / len(x) ** 0.5
            ),
            lambda x: (x.quantile(0.025), x.quantile(0.975)),
        ),
        "share": (
            "You use the formula for a share of successes, but these scores may be "
            "numbers other than 0 and 1.",
            _half(lambda x: 1.96 * ((x.mean() * (1 - x.mean())).abs() / len(x)) ** 0.5),
            _half(lambda x: 1.96 * (x.mean() * (1 - x.mean()) / len(x)) ** 0.5),
            _half(
                lambda x: 1.96 * (x.mean() * (1 - x.mean())).clamp(0).div(len(x)) ** 0.5
            ),
        ),
        "poisson": (
            "You use the mean in place of the variance. Compute the spread of `x`.",
            _half(lambda x: 1.96 * (x.mean().abs() / len(x)) ** 0.5),
        ),
        "relative": (
            "Your half-width is relative to the mean. Return it in the units of `x`.",
            _half(lambda x: 1.96 * _error(x) / x.mean().abs()),
            _half(lambda x: 196 * _error(x) / x.mean().abs()),
        ),
        "one_bound": (
            "Your second number is an end of the interval. Return the distance between "
            "this end and the mean.",
            _half(lambda x: x.mean() + 1.96 * _error(x)),
            _half(lambda x: x.mean() - 1.96 * _error(x)),
        ),
        "bounds_differently": (
            "You return the ends of an interval. Return the mean and the half-width.",
            lambda x: (x.mean() + 1.96 * _error(x), x.mean() - 1.96 * _error(x)),
            lambda x: (
                x.mean(),
                x.mean() - 1.96 * _error(x),
                x.mean() + 1.96 * _error(x),
            ),
            lambda x: (
                x.mean() - 1.96 * _error(x),
                x.mean(),
                x.mean() + 1.96 * _error(x),
            ),
            lambda x: (x.mean() - 1.96 * x.std(), x.mean() + 1.96 * x.std()),
            lambda x: (x.mean() - _error(x), x.mean() + _error(x)),
        ),
        "negative_width": (
            "Your half-width is negative. A width is at least 0.",
            _half(lambda x: -1.96 * _error(x)),
        ),
        "only_the_mean": (
            "You return only the mean. Return the half-width as well.",
            lambda x: x.mean(),
            lambda x: (x.mean(),),
        ),
        "another_center": (
            "Your first number is not the mean of all scores. Check what you sum and "
            "what you divide by.",
            *map(
                _center,
                (
                    lambda x: x.sum() / (len(x) - 1),
                    lambda x: x.sum(),
                    lambda x: x.abs().mean(),
                    lambda x: x.quantile(0.5),
                    lambda x: (x.amax() + x.amin()) / 2,
                    lambda x: x.sum() / (len(x) + 1),
                    lambda x: x.sort().values[1:-1].mean(),
                    lambda x: x.square().mean().sqrt(),
                    lambda x: x[0],
                    lambda x: 0 * x[0],
                ),
            ),
        ),
        "several_parts": (
            "More than one part of your half-width is wrong. Check the factor, the "
            "standard deviation, and the number by which you divide the standard "
            "deviation, one after the other.",
            *_several(),
        ),
    },
)


@mean_ci.alternative
def by_variance(x):
    return x.sum() / len(x), 1.96 * (x.var() / len(x)) ** 0.5


@SET.exercise(
    "Perplexity of many responses",
    2,
    10,
    (
        "Two responses have 1 and 9 tokens. How much should each response count?",
        "Take one mean over all *tokens* first. Only then undo the logarithm.",
    ),
)
def perplexity(logprobs, mask):
    """Return the perplexity per token of a batch: two (B, R) → a number.

    Perplexity is exp of minus the mean log-probability of a token. Long responses count
    more than short responses, because they have more tokens.
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
    """You average the responses' perplexities, so a single unusual response would
    dominate the mean. Average logarithms over tokens.
    """
    return torch.exp(-(logprobs * mask).sum(1) / mask.sum(1)).mean()


@perplexity.mistake
def mean_of_means(logprobs, mask):
    """You give each response the same weight, so a token of a short response counts
    more than a token of a long response. Divide the sum over all tokens by the number
    of tokens.
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
    """Your divisor counts padding, although padding adds nothing to the sum."""
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
    """You exponentiate each token's value before you average, so one unlikely token
    would dominate the mean.
    """
    return ((-logprobs).exp() * mask).sum() / mask.sum()


@perplexity.mistake
def base_two(logprobs, mask):
    """You raise 2 to the power of the mean, but these logarithms are natural."""
    return 2 ** (-(logprobs * mask).sum() / mask.sum())


@perplexity.mistake
def entropy(logprobs, mask):
    """You return the mean loss in nats, not the perplexity. Exponentiate it."""
    return -(logprobs * mask).sum() / mask.sum()


@perplexity.mistake
def of_each_response(logprobs, mask):
    """You return one number per response. Return one number for the whole batch."""
    return torch.exp(-(logprobs * mask).sum(1) / mask.sum(1))


@perplexity.mistake
def no_mean(logprobs, mask):
    """You exponentiate a sum over tokens. Divide the sum by the number of tokens
    first.
    """
    return torch.exp(-(logprobs * mask).sum())


def _per_token(cut, cut_mask=None):
    """Return the solution on parts of its arguments."""

    def mistake(logprobs, mask):
        part = (cut_mask or cut)(mask)
        return torch.exp(-(cut(logprobs) * part).sum() / part.sum())

    return mistake


def _over(divisor):
    """Return the solution with another divisor of the sum."""
    return lambda logprobs, m: torch.exp(-(logprobs * m).sum() / divisor(m))


def _means(logprobs, mask, dim=1):
    """Return minus the mean log-probability of each row or column that has tokens."""
    n = mask.sum(dim)
    return (-(logprobs * mask).sum(dim) / n)[n > 0]


def _mean(logprobs, mask):
    return -(logprobs * mask).sum() / mask.sum()


perplexity.more(
    {
        "padding_in_the_sum": (
            "Your sum includes padding, although your divisor does not.",
            lambda x, m: torch.exp(-x.sum() / m.sum()),
        ),
        "first_token_left_out": (
            "You leave out each response's first token. No shift is needed: each "
            "element is already the log-probability of its own token.",
            _per_token(lambda x: x[:, 1:]),
            lambda x, m: torch.exp(-(x * m)[:, 1:].sum() / m.sum()),
        ),
        "last_column_left_out": (
            "You leave out the last column, so responses that reach it lose a token.",
            _per_token(lambda x: x[:, :-1]),
            lambda x, m: torch.exp(-(x * m)[:, :-1].sum() / m.sum()),
        ),
        "columns_do_not_match": (
            "Mask and log-probabilities do not match: you shift one of them, or leave "
            "out the first or last token of each response.",
            _per_token(lambda x: x[:, :-1], lambda m: m[:, 1:]),
            _per_token(lambda x: x[:, 1:], lambda m: m[:, :-1]),
            _per_token(torch.clone, lambda m: m.roll(1, 1)),
            _per_token(torch.clone, lambda m: m.roll(-1, 1)),
        ),
        "by_position": (
            "You average within each column first, so late positions, which few "
            "responses reach, count too much. Take one mean over all tokens.",
            lambda x, m: torch.exp(_means(x, m, 0).mean()),
            lambda x, m: torch.exp(_means(x, m, 0)).mean(),
            lambda x, m: torch.exp(_means(x, m, 0)),
        ),
        "median": (
            "You take a median. Perplexity uses the mean over tokens.",
            lambda x, m: torch.exp(-x[m.bool()].median()),
            lambda x, m: torch.exp(-x[m.bool()].quantile(0.5)),
            lambda x, m: torch.exp(_means(x, m).median()),
            lambda x, m: torch.exp(_means(x, m).quantile(0.5)),
        ),
        "extreme": (
            "You use only one token or one response. Average over all tokens.",
            lambda x, m: torch.exp(-x[m.bool()].amax()),
            lambda x, m: torch.exp(-x[m.bool()].amin()),
            lambda x, m: torch.exp(_means(x, m)[0]),
            lambda x, m: torch.exp(_means(x, m)[-1]),
            lambda x, m: torch.exp(_means(x, m).amax()),
            lambda x, m: torch.exp(_means(x, m).amin()),
        ),
        "columns_for_tokens": (
            "You divide by the number of columns. Divide by the number of real tokens "
            "in the batch.",
            _over(lambda m: m.shape[1]),
            lambda x, m: torch.exp(-(x * m).mean(1)).mean(),
            lambda x, m: torch.exp(-(x * m).mean(1)),
        ),
        "another_number_of_tokens": (
            "Your divisor is not the number of real tokens. Count the ones in the "
            "mask.",
            _over(lambda m: m.sum() - 1),
            _over(lambda m: m.sum() + 1),
            _over(lambda m: m.sum() - len(m)),
            _over(lambda m: m.sum() + len(m)),
            _over(lambda m: m.sum() ** 0.5),
            _over(lambda m: len(m) * m.sum()),
        ),
        "negative": (
            "Your result is negative, because a minus sign is outside the "
            "exponential. A perplexity is at least 1.",
            lambda x, m: -torch.exp(-_mean(x, m)),
            lambda x, m: -torch.exp(_mean(x, m)),
        ),
        "another_base": (
            "You use the wrong base: these logarithms are natural.",
            lambda x, m: 10 ** _mean(x, m),
            lambda x, m: torch.exp(_mean(x, m) / math.log(2)),
            lambda x, m: torch.exp(_mean(x, m) / math.log(10)),
        ),
        "no_exponential": (
            "You do not exponentiate, and your mean is not the loss per token in nats.",
            lambda x, m: -_mean(x, m),
            lambda x, m: _mean(x, m) / math.log(2),
            lambda x, m: _means(x, m).mean(),
            lambda x, m: _means(x, m),
            lambda x, m: -x.mean(),
            lambda x, m: -(x * m).sum(),
            lambda x, m: -(x * m).mean(),
            lambda x, m: -(x * m).sum(1).mean(),
        ),
        "weighted_by_length": (
            "Your weights grow with the square of a response's length. Each *token* "
            "must have the same weight.",
            lambda x, m: torch.exp(
                (_means(x, m) * m.sum(1) ** 2).sum() / (m.sum(1) ** 2).sum()
            ),
        ),
        "weighted_perplexities": (
            "You average the responses' perplexities, weighted by length. Average "
            "logarithms over all tokens, then exponentiate once.",
            lambda x, m: (torch.exp(_means(x, m)) * m.sum(1)).sum() / m.sum(),
        ),
        "logarithm_again": (
            "You take a logarithm of numbers that are already logarithms.",
            lambda x, m: torch.exp(-(x.abs().log() * m).sum() / m.sum()),
        ),
        "clipped": (
            "You limit the log-probabilities from below. Very unlikely tokens must "
            "count in full.",
            *(
                _per_token(lambda x, low=low: x.clamp(low), torch.clone)
                for low in (-1, -2, -3, -4, -5)
            ),
        ),
        "product": (
            "You multiply or sum perplexities. Average logarithms over all tokens, "
            "then exponentiate once.",
            lambda x, m: torch.exp(_means(x, m)).prod(),
            lambda x, m: torch.exp(_means(x, m)).sum(),
            lambda x, m: torch.exp(-(x * m).sum(1)).mean(),
            lambda x, m: (torch.exp(-x) * m).sum(),
        ),
        "harmonic": (
            "You average the inverse perplexities of responses. Average logarithms "
            "over all tokens.",
            lambda x, m: 1 / torch.exp(-_means(x, m)).mean(),
            lambda x, m: torch.exp(-_means(x, m)).mean(),
        ),
        "average_of_probabilities": (
            "You average probabilities, and return a number of at most 1. Average "
            "their logarithms.",
            lambda x, m: (x.exp() * m).sum() / m.sum(),
            lambda x, m: 1 - (x.exp() * m).sum() / m.sum(),
        ),
        "padding_as_probability_1": (
            "You exponentiate 0 where the mask is 0, so padding enters your mean as 1.",
            lambda x, m: torch.exp(-x * m).mean(),
            lambda x, m: torch.exp(-x * m).sum() / m.sum(),
            lambda x, m: 1 / torch.exp(x * m).mean(),
        ),
        "padding_in_each_response": (
            "You treat each response separately, and you include its padding.",
            lambda x, m: torch.exp(-x.mean(1)).mean(),
            lambda x, m: torch.exp(-x.mean(1)),
        ),
        "each_token": (
            "You return one number per token. Return one number for the whole batch.",
            lambda x, m: torch.exp(-x * m),
            lambda x, m: torch.exp(-x) * m,
            lambda x, m: torch.exp(-x),
        ),
        "joint_probability": (
            "You return the joint probability of many tokens. Take the mean over "
            "tokens, and check the sign.",
            lambda x, m: torch.exp((x * m).sum()),
            lambda x, m: torch.exp((x * m).sum(1)).mean(),
        ),
        "geometric_of_something": (
            "You exponentiate a square root or a square. Exponentiate the mean.",
            lambda x, m: torch.exp(_mean(x, m) ** 2),
            lambda x, m: torch.exp(_mean(x, m) ** 0.5),
            lambda x, m: torch.exp((x**2 * m).sum() / m.sum()),
            lambda x, m: torch.exp(((x**2 * m).sum() / m.sum()) ** 0.5),
        ),
    },
)


@perplexity.alternative
def by_selection(logprobs, mask):
    return 1 / logprobs[mask.bool()].mean().exp()


@SET.exercise(
    "Distinct word pairs",
    1,
    10,
    (
        "How many pairs does a text of five words have, and a text of one word?",
        "Each text has its own pairs. If a pair occurs in several texts, how many "
        "times does it count as a distinct pair?",
    ),
)
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


def _pairs(texts):
    return [pair for t in texts for pair in zip(t.split(), t.split()[1:])]


@distinct_2.mistake
def within_each_text(texts):
    """You count repetitions only within each text. A policy that writes the *same* text
    to every query would look diverse.
    """
    shares = []
    for text in texts:
        pairs = list(zip(text.split(), text.split()[1:]))
        shares.append(len(set(pairs)) / max(1, len(pairs)))
    return sum(shares) / max(1, len(shares))


@distinct_2.mistake
def mean_over_texts_with_pairs(texts):
    """You compute a share for each text and average the shares. A policy that writes
    the *same* text to every query would look diverse.
    """
    shares = []
    for text in texts:
        if pairs := list(zip(text.split(), text.split()[1:])):
            shares.append(len(set(pairs)) / len(pairs))
    return sum(shares) / max(1, len(shares))


@distinct_2.mistake
def over_words(texts):
    """You divide by the number of words, but there are fewer pairs than words."""
    return len(set(_pairs(texts))) / sum(len(text.split()) for text in texts)


@distinct_2.mistake
def a_count(texts):
    """You return a number of pairs. Return a share of all pairs."""
    return len(set(_pairs(texts)))


@distinct_2.mistake
def repeated(texts):
    """You return the share of repetitions. Return the share of distinct pairs."""
    pairs = _pairs(texts)
    return 1 - len(set(pairs)) / len(pairs) if pairs else 0


@distinct_2.mistake
def order_forgotten(texts):
    """You ignore word order, but *great film* and *film great* are different pairs."""
    pairs = _pairs(texts)
    return len(set(map(frozenset, pairs))) / max(1, len(pairs))


@distinct_2.mistake
def used_once(texts):
    """You count only pairs that occur once. Also count pairs that occur several times,
    each of them once.
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
    """You join the texts first, so the last word of one text and the first word of the
    next text form a pair that may be in neither text.
    """
    words = " ".join(texts).split()
    pairs = list(zip(words, words[1:]))
    return len(set(pairs)) / max(1, len(pairs))


@distinct_2.mistake
def single_words(texts):
    """You count single words (distinct-1). Count pairs."""
    words = [word for text in texts for word in text.split()]
    return len(set(words)) / max(1, len(words))


def _words(texts):
    return [text.split() for text in texts]


def _part(some, everything):
    return some / everything if everything else 0


def _distinct(pairs_of, join=tuple):
    """Return distinct-2 with other pairs per text."""

    def mistake(texts):
        pairs = [join(pair) for words in _words(texts) for pair in pairs_of(words)]
        return _part(len(set(pairs)), len(pairs))

    return mistake


def _over_total(total):
    """Return distinct-2 with another divisor."""
    return lambda texts: _part(len(set(_pairs(texts))), total(_words(texts)))


def _counts(share):
    """Return a share that depends on how often each pair occurs."""
    return lambda texts: share(Counter(_pairs(texts)).values())


distinct_2.more(
    {
        "wrong_without_pairs": (
            "Your result is wrong only if there are no pairs. Read the last sentence "
            "of the exercise.",
            *(
                lambda texts, value=value: (
                    distinct_2.solution(texts) if _pairs(texts) else value
                )
                for value in (1, math.nan, None, -1)
            ),
        ),
        "distinct_within_a_text": (
            "You count distinct pairs in each text and add the counts. A pair that "
            "occurs again in *another* text must not count twice.",
            lambda texts: _part(
                sum(len(set(zip(w, w[1:]))) for w in _words(texts)), len(_pairs(texts))
            ),
        ),
        "equal_texts_once": (
            "You drop repeated texts first, which hides repetitions from text to text.",
            lambda texts: distinct_2.solution(list(set(texts))),
        ),
        "glued_words": (
            "You join the two words of a pair without a separator, so *no where* and "
            "*now here* become the same string.",
            _distinct(lambda w: zip(w, w[1:]), "".join),
        ),
        "pair_lost": (
            "You leave out the first or the last pair of each text. Check where your "
            "loop or slice begins and ends.",
            _distinct(lambda w: zip(w[:-1], w[1:-1])),
            _distinct(lambda w: zip(w[1:], w[2:])),
        ),
        "all_combinations": (
            "You pair words that are not neighbors.",
            _distinct(lambda w: combinations(w, 2)),
            _distinct(lambda w: zip(w, w[2:])),
            _distinct(lambda w: permutations(w, 2)),
            _distinct(lambda w: product(w, w)),
            _distinct(lambda w: combinations(w, 2), frozenset),
            _distinct(lambda w: combinations(sorted(set(w)), 2)),
        ),
        "wraps_around": (
            "You pair the last word of a text with its first. These two words are not "
            "neighbors.",
            _distinct(lambda w: zip(w, w[1:] + w[:1])),
        ),
        "different_words": (
            "You compare the two words of a pair with each other. Compare whole "
            "*pairs*.",
            _distinct(lambda w: [pair for pair in zip(w, w[1:]) if len(set(pair)) > 1]),
            lambda texts: _part(
                sum(a != b for a, b in _pairs(texts)), len(_pairs(texts))
            ),
            lambda texts: _part(
                len({(a, b) for a, b in _pairs(texts) if a != b}), len(_pairs(texts))
            ),
        ),
        "longer_groups": (
            "You count groups of words that are not pairs. Count only pairs.",
            _distinct(lambda w: zip(w, w[1:], w[2:], w[3:])),
            _distinct(lambda w: [*zip(w), *zip(w, w[1:])]),
        ),
        "whole_texts": (
            "You compare whole texts. Compare pairs of words.",
            lambda texts: len(set(texts)) / len(texts),
        ),
        "per_text": (
            "You divide by the number of texts. Divide by the number of pairs.",
            _over_total(len),
        ),
        "per_distinct_word": (
            "You divide by a number of distinct words, or by the number of pairs that "
            "they could form. Divide by the number of pairs that occur.",
            _over_total(lambda w: len({x for words in w for x in words})),
            _over_total(lambda w: len({x for words in w for x in words}) ** 2),
            _over_total(lambda w: sum(len(set(words)) for words in w)),
        ),
        "miscounted_pairs": (
            "You divide by the wrong number of pairs. Check texts of one word, empty "
            "texts, and the boundaries between texts.",
            _over_total(lambda w: sum(map(len, w)) - 1),
            _over_total(lambda w: sum(max(len(words) - 1, 1) for words in w)),
            _over_total(lambda w: max(0, sum(len(words) - 1 for words in w))),
            _over_total(lambda w: sum(len(words) - 1 for words in w if words) + 1),
            _over_total(lambda w: sum(len(words) // 2 for words in w)),
            _over_total(lambda w: sum(len(words) - 2 for words in w if words)),
            _over_total(lambda w: sum(max(len(words) - 2, 0) for words in w)),
        ),
        "characters_for_words": (
            "You count characters. Split the texts into words first.",
            lambda texts: _part(len(set(_pairs(texts))), sum(map(len, texts))),
            lambda texts: _part(
                len({p for w in _words(texts) for x in w for p in zip(x, x[1:])}),
                sum(len(x) - 1 for w in _words(texts) for x in w),
            ),
            lambda texts: _part(len(set("".join(texts))), len("".join(texts))),
        ),
        "one_text_only": (
            "You use only some of the texts. Count the pairs of all texts.",
            lambda texts: distinct_2.solution(texts[:1]),
            lambda texts: distinct_2.solution(texts[-1:]),
            lambda texts: distinct_2.solution(texts[1:]),
            lambda texts: distinct_2.solution(texts[:-1]),
        ),
        "list_for_share": (
            "You return one number per text. Return one number for all texts.",
            lambda texts: [distinct_2.solution([text]) for text in texts],
        ),
        "number_of_pairs": (
            "You return a number of pairs. Return a share.",
            lambda texts: len(_pairs(texts)),
            lambda texts: len(_pairs(texts)) - len(set(_pairs(texts))),
        ),
        "upside_down": (
            "Your fraction is inverted.",
            lambda texts: _part(len(_pairs(texts)), len(set(_pairs(texts)))),
        ),
        "repeated_pairs": (
            "You measure how many pairs are repeated. Count each distinct pair once, "
            "whether it occurs again or not.",
            _counts(lambda n: _part(sum(x > 1 for x in n), len(n))),
            _counts(lambda n: _part(sum(x == 1 for x in n), len(n))),
            _counts(lambda n: _part(sum(x > 1 for x in n), sum(n))),
            _counts(lambda n: _part(sum(x for x in n if x > 1), sum(n))),
            _counts(lambda n: _part(max(n, default=0), sum(n))),
        ),
    },
)


@distinct_2.alternative
def with_indices(texts):
    seen, total = set(), 0
    for words in map(str.split, texts):
        for i in range(len(words) - 1):
            seen.add(" ".join(words[i : i + 2]))
            total += 1
    return len(seen) / total if total else 0.0
