"""Exercises of notebook 00."""

import re

import torch

from engine import Set, normal, pick

SET = Set("00_hello_rlhf", "Hello, RLHF", "import re\n\nimport torch")
check = SET.check
TEXTS = [
    "The man and the sea",
    "Other people gather there",
    "the the the",
    "Bathe, then breathe",
    "THE END",
    "a sea, (a man) and a seaman",
    "Good? good: GOODS",
]


@SET.exercise(
    "A reward that counts a word",
    1,
    5,
    (
        "Write down three texts that a careless count gets wrong, and try yours.",
        r"In a regular expression, `\b` is the edge of a word. What about THE?",
    ),
)
def word_reward(text, word):
    """How often a text holds a word: two str → a number.

    The simplest reward there is. Whole words count, in capitals or not: *other* and
    *then* hold no *the*. Words are made of letters; spaces and punctuation separate
    them. `word` is one word and may be in capitals too. A policy finds every loophole
    of a reward, so this reward should have none.
    """
    return float(len(re.findall(rf"\b{re.escape(word.lower())}\b", text.lower())))


@word_reward.inputs
def _(dice):
    text = ". ".join(TEXTS[i] for i in torch.randperm(len(TEXTS), generator=dice)[:5])
    word = pick(dice, ["the", "The", "a", "sea", "MAN", "good"])
    return f"{text}. The other one.", word


@word_reward.mistake
def counts_parts_of_words(text, word):
    """You count parts of words: *other*, *then* and *breathe* hold the letters of
    *the* as well. PPO would find them.
    """
    return float(text.lower().count(word.lower()))


@word_reward.mistake
def looks_at_capitals(text, word):
    """A word at the beginning of a sentence is not counted: `The` is `the` as well."""
    return float(len(re.findall(rf"\b{word}\b", text)))


@word_reward.mistake
def split_at_spaces(text, word):
    """A word beside a comma or a full stop is not counted: punctuation sticks to it."""
    return float(text.lower().split().count(word.lower()))


@word_reward.mistake
def found_or_not(text, word):
    """You say whether the word is there; asked was how often."""
    return float(re.search(rf"\b{word}\b", text, re.I) is not None)


@word_reward.mistake
def a_share(text, word):
    """That is a share of all words. A count was asked for."""
    words = re.findall(r"\w+", text.lower())
    return words.count(word.lower()) / len(words)


@word_reward.mistake
def capitals_of_the_word(text, word):
    """The text is in small letters then, but `word` may have capitals as well."""
    return float(len(re.findall(rf"\b{word}\b", text.lower())))


@word_reward.alternative
def by_splitting(text, word):
    return float(sum(part == word.lower() for part in re.split(r"\W+", text.lower())))


@SET.exercise(
    "Which position predicts which token",
    2,
    10,
    (
        "Draw five positions and the token that each of them predicts.",
        "Position t predicts token t + 1. Which one predicts the first response token?",
    ),
)
def response_logprobs(logits, ids, query_length):
    """Log-probability of every response token: logits (T, V), ids (T,) → (R,).

    `ids` is a query of `query_length` tokens and then a response. `logits[t]` is what
    the model says after reading token t. Return the log-probabilities of the response's
    tokens. Nearly every home-made PPO gets this wrong first.
    """
    logprobs = logits[query_length - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, ids[query_length:].unsqueeze(1)).squeeze(1)


@response_logprobs.inputs
def _(dice):
    query, response, v = (pick(dice, range(*x)) for x in ((1, 5), (2, 6), (5, 9)))
    length = query + response
    return (
        3 * normal(dice, length, v),
        torch.randint(v, (length,), generator=dice),
        query,
    )


@response_logprobs.mistake
def forgot_the_shift(logits, ids, query_length):
    """The shift by one is missing: `logits[t]` predicts token t + 1, so the first
    response token is predicted by the last query token.
    """
    return (
        logits[query_length:]
        .log_softmax(-1)
        .gather(1, ids[query_length:].unsqueeze(1))
        .squeeze(1)
    )


@response_logprobs.mistake
def returned_the_logit(logits, ids, query_length):
    """These are logits, not log-probabilities: nothing makes their exponentials sum
    to 1.
    """
    return (
        logits[query_length - 1 : -1]
        .gather(1, ids[query_length:].unsqueeze(1))
        .squeeze(1)
    )


@response_logprobs.mistake
def the_query_too(logits, ids, query_length):
    """The query is in there as well. PPO trains only the response: nobody asked the
    policy to write the query.
    """
    return logits[:-1].log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)


@response_logprobs.alternative
def token_by_token(logits, ids, query_length):
    steps = range(query_length, len(ids))
    return torch.stack(
        [logits[t - 1, ids[t]] - logits[t - 1].logsumexp(0) for t in steps]
    )


@SET.exercise(
    "KL of a response",
    1,
    5,
    (
        "Which of the two models drew the tokens? Its log-probability comes first.",
        "One response has one KL. Then average over responses.",
    ),
)
def mean_kl(logprobs, ref_logprobs):
    """KL to the reference in nats per response: two (B, R) of sampled tokens → a
    number.

    The mean over responses of the summed difference of log-probabilities. It is what a
    run shows as `objective/kl`.
    """
    return (logprobs - ref_logprobs).sum(1).mean()


@mean_kl.inputs
def _(dice):
    b, r = pick(dice, range(2, 5)), pick(dice, range(5, 8))
    return -normal(dice, b, r).abs(), -normal(dice, b, r).abs()


@mean_kl.mistake
def wrong_way_round(logprobs, ref_logprobs):
    """The sign is wrong: KL grows where the *policy* gives its samples more probability
    than the reference does.
    """
    return (ref_logprobs - logprobs).sum(1).mean()


@mean_kl.mistake
def per_token(logprobs, ref_logprobs):
    """That is per token. A response's KL is the sum over its tokens; the target of 6
    nats is meant per response.
    """
    return (logprobs - ref_logprobs).mean()


@mean_kl.mistake
def absolute(logprobs, ref_logprobs):
    """Absolute differences are no KL: single tokens may be negative, and their mean
    over samples is right only then.
    """
    return (logprobs - ref_logprobs).abs().sum(1).mean()


@mean_kl.mistake
def with_probabilities(logprobs, ref_logprobs):
    """You weight each term by its probability. These tokens were *sampled*, so the
    likely ones come up more often already.
    """
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(1).mean()


@mean_kl.mistake
def in_bits(logprobs, ref_logprobs):
    """That is in bits. A nat belongs to the natural logarithm, which these are."""
    return (logprobs - ref_logprobs).sum(1).mean() / 0.6931471805599453


@mean_kl.mistake
def never_negative(logprobs, ref_logprobs):
    """You cut off what is negative. Single tokens or responses may be: only the mean
    over all samples is a KL.
    """
    return (logprobs - ref_logprobs).clamp(min=0).sum(1).mean()


@mean_kl.alternative
def flat(logprobs, ref_logprobs):
    return (logprobs.sum() - ref_logprobs.sum()) / len(logprobs)
