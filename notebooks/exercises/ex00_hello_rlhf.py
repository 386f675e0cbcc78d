"""Exercises of notebook 00."""

import re

import torch

from engine import Set, normal

SET = Set("00_hello_rlhf", "Hello, RLHF", "import re\n\nimport torch")
check = SET.check
TEXTS = [
    "The man and the sea",
    "Other people gather there",
    "the the the",
    "Bathe, then breathe",
    "THE END",
]


@SET.exercise(
    "A reward that counts a word",
    1,
    5,
    r"`re.findall(r'\bthe\b', …)` finds whole words; what about THE?",
)
def word_reward(text, word):
    """How often a text holds a word, as a float.

    The simplest reward there is. Whole words count, in capitals or not: *other* and
    *then* hold no *the*. A policy will find every loophole of a reward, so this one
    should have none to begin with.
    """
    return float(len(re.findall(rf"\b{re.escape(word.lower())}\b", text.lower())))


@word_reward.inputs
def _(dice):
    text = " ".join(TEXTS[i] for i in torch.randperm(len(TEXTS), generator=dice)[:4])
    return f"{text}. The other one.", "the"


@word_reward.mistake
def counts_parts_of_words(text, word):
    """You count parts of words: *other*, *then* and *breathe* hold the letters of
    *the*, too. PPO would love them.
    """
    return float(text.lower().count(word))


@word_reward.mistake
def looks_at_capitals(text, word):
    """A word at the beginning of a sentence is not counted: `The` is `the` as well."""
    return float(len(re.findall(rf"\b{word}\b", text)))


@word_reward.alternative
def by_splitting(text, word):
    return float(sum(part == word.lower() for part in re.split(r"\W+", text.lower())))


@SET.exercise(
    "Which position predicts which token",
    2,
    10,
    "Position t predicts token t + 1. Which one predicts the first response token?",
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
    length = int(torch.randint(6, 10, (), generator=dice))
    return normal(dice, length, 7), torch.randint(7, (length,), generator=dice), 3


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
    """These are logits, not log-probabilities: subtract the log-sum-exp over the
    vocabulary.
    """
    return (
        logits[query_length - 1 : -1]
        .gather(1, ids[query_length:].unsqueeze(1))
        .squeeze(1)
    )


@response_logprobs.mistake
def the_query_too(logits, ids, query_length):
    """The query is in there, too. PPO trains the response alone: nobody asked the
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
    "Sum over the tokens of one response, then average over responses.",
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
    return -normal(dice, 4, 5).abs(), -normal(dice, 4, 5).abs()


@mean_kl.mistake
def wrong_way_round(logprobs, ref_logprobs):
    """The sign is wrong: KL grows where the *policy* is surer than the reference of
    what it sampled.
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


@mean_kl.alternative
def flat(logprobs, ref_logprobs):
    return (logprobs.sum() - ref_logprobs.sum()) / len(logprobs)
