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


@SET.exercise("A reward that counts a word", 1, 5)
def word_reward(text, word):
    """Count how often a text contains a word: two str → a number.

    This is the simplest possible reward. Ignore case, and count only whole words:
    *other* and *then* do not contain the word *the*. Words consist of letters; spaces
    and punctuation separate them. `word` is a single word and may contain capitals.
    A policy finds every loophole in a reward, so this reward should have none.
    """
    return float(len(re.findall(rf"\b{re.escape(word.lower())}\b", text.lower())))


@word_reward.inputs
def _(generator):
    word = pick(generator, ["the", "The", "a", "Sea", "MAN", "good"])
    always = [word[:2], word.upper(), word.lower(), word.capitalize()]
    parts = [
        *TEXTS,
        *(f"{mark}{word}{mark}" for mark in ".,?!':;"),
        *(f"end{mark}{word}" for mark in ".,?!"),
        *(f"{word} {word}", f"{word}-{word}", f"({word})", f"{word}s", f"un{word}"),
    ]
    chosen = torch.randperm(len(parts), generator=generator)[:12]
    parts = always + [parts[i] for i in chosen]
    order = torch.randperm(len(parts), generator=generator)
    text = pick(generator, [" ", ". "]).join(parts[i] for i in order)
    ends = pick(generator, ["{0}", "{1} {0}", "{0} {1}", "{1} {0} {1}"])
    return ends.format(text, word), word


def count(pattern, text):
    return float(len(re.findall(pattern, text)))


word_reward.hints = (
    "Write down three texts that a careless count gets wrong, and try your code "
    "on them.",
    r"In a regular expression, `\b` is a word boundary. Does your code find THE?",
)
word_reward.mistakes = {
    "counts_parts_of_words": (
        "You count parts of longer words: *other*, *then* and *breathe* contain the "
        "letters of *the*, but not the word. PPO would exploit such words.",
        lambda text, word: float(text.lower().count(word.lower())),
        lambda text, word: count(rf"\b{word.lower()}", text.lower()),
        lambda text, word: count(rf"{word.lower()}\b", text.lower()),
    ),
    "looks_at_capitals": (
        "You miss words because of capitals: `The` and `THE` must count as `the`, in "
        "the text and in `word`.",
        lambda text, word: count(rf"\b{word}\b", text),
        lambda text, word: count(rf"\b{word}\b", text.lower()),
        lambda text, word: count(rf"\b{word.lower()}\b", text),
    ),
    "punctuation": (
        "You miss words next to punctuation. Every character that is not a letter "
        "separates words.",
        lambda text, word: float(text.lower().split().count(word.lower())),
        lambda text, word: float(
            re.sub("[.,!?]", " ", text.lower()).split().count(word.lower())
        ),
        lambda text, word: float(
            re.findall(r"[^\s.,!?:;]+", text.lower()).count(word.lower())
        ),
        lambda text, word: float(
            re.findall("[a-z']+", text.lower()).count(word.lower())
        ),
    ),
    "neighbors_required": (
        "You require a character before and after the word. The first and last words "
        "have only one such character, and the two words of `the the` share one.",
        lambda text, word: count(rf"(?:^|\W){word.lower()}(?:\W|$)", text.lower()),
        lambda text, word: count(rf"(?<=\W){word.lower()}(?=\W)", text.lower()),
        lambda text, word: float(text.lower().count(f" {word.lower()} ")),
    ),
}
word_reward.alternatives = [
    lambda text, word: float(
        sum(part == word.lower() for part in re.split(r"\W+", text.lower()))
    )
]


@SET.exercise("Which position predicts which token", 2, 10)
def response_logprobs(logits, ids, query_length):
    """Return every response token's log-probability: logits (T, V), ids (T,) → (R,).

    `ids` is a query of `query_length` tokens, followed by a response. `logits[t]` is
    the model's output after reading token t. Return the log-probabilities of the
    response's tokens. Nearly every hand-written PPO implementation gets the positions
    wrong at first.
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


def token_by_token(logits, ids, query_length):
    steps = range(query_length, len(ids))
    return torch.stack(
        [logits[t - 1, ids[t]] - logits[t - 1].logsumexp(0) for t in steps]
    )


def of_ids(values, ids):
    return values.gather(1, ids.unsqueeze(1)).squeeze(1)


response_logprobs.hints = (
    "Sketch five positions and the token that each position predicts.",
    "Position t predicts token t + 1. Which position predicts the first response "
    "token?",
)
response_logprobs.mistakes = {
    "forgot_the_shift": (
        "The shift by one is missing: `logits[t]` predicts token t + 1, so the first "
        "response token is predicted by the last query token.",
        lambda logits, ids, q: of_ids(logits[q:].log_softmax(-1), ids[q:]),
    ),
    "wrong_rows": (
        "You read the wrong rows of `logits`. A token's log-probability must come from "
        "the row directly before this token.",
        lambda logits, ids, q: of_ids(logits[: len(ids) - q].log_softmax(-1), ids[q:]),
        lambda logits, ids, q: of_ids(
            logits.log_softmax(-1)[(torch.arange(q, len(ids)) - 2).clamp(min=0)],
            ids[q:],
        ),
        lambda logits, ids, q: of_ids(logits.log_softmax(-1).roll(-1, 0)[q:], ids[q:]),
    ),
    "wrong_tokens": (
        "You read the right rows of `logits` but look up the wrong tokens: in each row "
        "you look up the token that the model has just read, not the next token.",
        lambda logits, ids, q: of_ids(
            logits[q - 1 : -1].log_softmax(-1), ids[q - 1 : -1]
        ),
    ),
    "returned_the_logit": (
        "You return logits, whose exponentials do not sum to 1. Return "
        "log-probabilities instead.",
        lambda logits, ids, q: of_ids(logits[q - 1 : -1], ids[q:]),
    ),
    "over_time": (
        "You normalize over positions. The probabilities of all tokens at *one* "
        "position must sum to 1.",
        lambda logits, ids, q: of_ids(logits.log_softmax(0)[q - 1 : -1], ids[q:]),
    ),
}
response_logprobs.alternatives = [token_by_token]


@SET.exercise("KL of a response", 1, 5)
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


mean_kl.hints = (
    "Which of the two models drew the tokens? This model's log-probability comes "
    "first.",
    "Compute one KL for each response. Then average over responses.",
)
mean_kl.mistakes = {
    "wrong_way_round": (
        "The sign is wrong: KL grows where the *policy* gives its samples more "
        "probability than the reference does.",
        lambda p, q: (q - p).sum(1).mean(),
    ),
    "never_negative": (
        "You drop negative values or their signs. A single token or response may have"
        " a negative value: only the mean over all samples is a KL.",
        lambda p, q: (p - q).abs().sum(1).mean(),
        lambda p, q: (p - q).clamp(min=0).sum(1).mean(),
        lambda p, q: (p - q).sum(1).clamp(min=0).mean(),
        lambda p, q: (p - q).sum(1).abs().mean(),
    ),
    "with_probabilities": (
        "You weight each term by its token's probability. These tokens were *sampled*, "
        "so the likely tokens already occur more often.",
        lambda p, q: (p.exp() * (p - q)).sum(1).mean(),
    ),
    "another_estimator": (
        "You use another estimator of KL: squared differences (k2) or k3. The exercise "
        "asks for the plain difference.",
        lambda p, q: ((p - q) ** 2 / 2).sum(1).mean(),
        lambda p, q: ((q - p).expm1() - (q - p)).sum(1).mean(),
    ),
}
mean_kl.alternatives = [
    lambda logprobs, ref_logprobs: (logprobs.sum() - ref_logprobs.sum()) / len(logprobs)
]
