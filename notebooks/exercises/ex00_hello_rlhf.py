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
        "Write down three texts that a careless count gets wrong, and try your code.",
        r"In a regular expression, `\b` is the edge of a word. What about THE?",
    ),
)
def word_reward(text, word):
    """Count how often a text contains a word: two str → a number.

    This is the simplest possible reward. Count whole words, in capitals or not: *other*
    and *then* do not contain the word *the*. Words consist of letters; spaces and
    punctuation separate them. `word` is one word and may also be in capitals. A policy
    finds every loophole of a reward, so this reward should have none.
    """
    return float(len(re.findall(rf"\b{re.escape(word.lower())}\b", text.lower())))


@word_reward.inputs
def _(generator):
    text = ". ".join(
        TEXTS[i] for i in torch.randperm(len(TEXTS), generator=generator)[:5]
    )
    word = pick(generator, ["the", "The", "a", "sea", "MAN", "good"])
    ends = (
        ". The other one.",
        f"-end,{word}",
        f". 'So-{word}' and ({word})",
        f"; {word}",
    )
    return text + pick(generator, ends), word


@word_reward.mistake
def counts_parts_of_words(text, word):
    """You count parts of words: *other*, *then* and *breathe* contain the letters of
    *the* as well. PPO would exploit such words.
    """
    return float(text.lower().count(word.lower()))


@word_reward.mistake
def looks_at_capitals(text, word):
    """You miss a word at the beginning of a sentence: `The` is `the` as well."""
    return float(len(re.findall(rf"\b{word}\b", text)))


@word_reward.mistake
def split_at_spaces(text, word):
    """You miss words next to a comma or a period: punctuation stays attached."""
    return float(text.lower().split().count(word.lower()))


@word_reward.mistake
def found_or_not(text, word):
    """You return whether the word occurs; return how often it occurs."""
    return float(re.search(rf"\b{word}\b", text, re.I) is not None)


@word_reward.mistake
def a_share(text, word):
    """You return a share of all words; return a count."""
    words = re.findall(r"\w+", text.lower())
    return words.count(word.lower()) / len(words)


@word_reward.mistake
def capitals_of_the_word(text, word):
    """You lowercase only the text, but `word` may have capitals as well."""
    return float(len(re.findall(rf"\b{word}\b", text.lower())))


@word_reward.alternative
def by_splitting(text, word):
    return float(sum(part == word.lower() for part in re.split(r"\W+", text.lower())))


@SET.exercise(
    "Which position predicts which token",
    2,
    10,
    (
        "Draw five positions and the token that each position predicts.",
        "Position t predicts token t + 1. Which one predicts the first response token?",
    ),
)
def response_logprobs(logits, ids, query_length):
    """Return every response token's log-probability: logits (T, V), ids (T,) → (R,).

    `ids` is a query of `query_length` tokens, followed by a response. `logits[t]` is
    the model's output after reading token t. Return the log-probabilities of the
    response's tokens. Nearly every hand-written PPO gets the positions wrong at first.
    """
    logprobs = logits[query_length - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, ids[query_length:].unsqueeze(1)).squeeze(1)


@response_logprobs.inputs
def _(generator):
    query, response, v = (pick(generator, range(*x)) for x in ((1, 5), (2, 6), (5, 9)))
    length = query + response
    return (
        3 * normal(generator, length, v),
        torch.randint(v, (length,), generator=generator),
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
    """You return logits, not log-probabilities: their exponentials do not sum to 1."""
    return (
        logits[query_length - 1 : -1]
        .gather(1, ids[query_length:].unsqueeze(1))
        .squeeze(1)
    )


@response_logprobs.mistake
def the_query_too(logits, ids, query_length):
    """Your result includes the query. PPO trains only the response: the policy did not
    write the query.
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
        "Each response has one KL. Then average over responses.",
    ),
)
def mean_kl(logprobs, ref_logprobs):
    """Return the KL to the reference, in nats per response: two (B, R) → a number.

    The arguments are log-probabilities of sampled tokens. Sum their differences over a
    response, and return the mean over responses. A run logs this KL as `objective/kl`.
    """
    return (logprobs - ref_logprobs).sum(1).mean()


@mean_kl.inputs
def _(generator):
    b, r = pick(generator, range(2, 5)), pick(generator, range(5, 8))
    return -normal(generator, b, r).abs(), -normal(generator, b, r).abs()


@mean_kl.mistake
def wrong_way_round(logprobs, ref_logprobs):
    """The sign is wrong: KL grows where the *policy* gives its samples more probability
    than the reference does.
    """
    return (ref_logprobs - logprobs).sum(1).mean()


@mean_kl.mistake
def per_token(logprobs, ref_logprobs):
    """You return the KL per token. A response's KL is the sum over its tokens; the
    target of 6 nats is per response.
    """
    return (logprobs - ref_logprobs).mean()


@mean_kl.mistake
def absolute(logprobs, ref_logprobs):
    """Absolute differences are not a KL: differences of single tokens may be negative,
    and their mean over samples is right only if you keep the sign.
    """
    return (logprobs - ref_logprobs).abs().sum(1).mean()


@mean_kl.mistake
def with_probabilities(logprobs, ref_logprobs):
    """You weight each term by its probability. These tokens were *sampled*, so the
    likely ones already occur more often.
    """
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(1).mean()


@mean_kl.mistake
def in_bits(logprobs, ref_logprobs):
    """Your result is in bits. The arguments are natural logarithms, so use nats."""
    return (logprobs - ref_logprobs).sum(1).mean() / 0.6931471805599453


@mean_kl.mistake
def never_negative(logprobs, ref_logprobs):
    """You set negative values to 0. Single tokens or responses may be negative: only
    the mean over all samples is a KL.
    """
    return (logprobs - ref_logprobs).clamp(min=0).sum(1).mean()


@mean_kl.alternative
def flat(logprobs, ref_logprobs):
    return (logprobs.sum() - ref_logprobs.sum()) / len(logprobs)
