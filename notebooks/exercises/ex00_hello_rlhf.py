"""Exercises of notebook 00."""

import re
import string

import torch

from engine import Set, normal, pick

SET = Set("00_hello_rlhf", "Hello, RLHF", "import re\n\nimport torch")
check = SET.check


def named(exercise, name, message, mistake):
    """Register one mistake under a computed name."""
    exercise.say(message, **{name: mistake})


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
        "Write down three texts that a careless count gets wrong, and try your code "
        "on them.",
        r"In a regular expression, `\b` is a word boundary. Does your code find THE?",
    ),
)
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


@word_reward.mistake
def counts_parts_of_words(text, word):
    """You count parts of words: *other*, *then* and *breathe* contain the letters of
    *the*, but not the word. PPO would exploit such words.
    """
    return float(text.lower().count(word.lower()))


@word_reward.mistake
def looks_at_capitals(text, word):
    """You miss words with capitals, for example at the beginning of a sentence: `The`
    must count as `the`.
    """
    return float(len(re.findall(rf"\b{word}\b", text)))


@word_reward.mistake
def split_at_spaces(text, word):
    """You miss words next to punctuation: after split() the punctuation belongs to the
    word.
    """
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


named(
    word_reward,
    "a_share_of_pieces",
    a_share.__doc__,
    lambda text, word: word_reward.solution(text, word) / len(text.split()),
)
named(
    word_reward,
    "a_share_by_split",
    a_share.__doc__,
    lambda text, word: split_at_spaces(text, word) / len(text.split()),
)


@word_reward.mistake
def capitals_of_the_word(text, word):
    """You lowercase only the text, but `word` may also have capitals."""
    return float(len(re.findall(rf"\b{word}\b", text.lower())))


MATCHES = {  # name: (message, pattern)
    "whole words": ("", r"\b{}\b"),
    "parts": (
        "You count parts of words: *other* does not contain the word *the*.",
        "{}",
    ),
    "pieces": (
        "You miss words next to punctuation: after split() the punctuation belongs to "
        "the word.",
        r"(?<!\S){}(?!\S)",
    ),
    "left edge": ("You count longer words that begin with the word.", r"\b{}"),
    "right edge": ("You count longer words that end with the word.", r"{}\b"),
    "shared edges": (
        "You miss a word directly after a match: the match includes the character "
        "between the two words, so the next match cannot begin with that character.",
        r"(?:^|\W){}(?:\W|$)",
    ),
    "both neighbors": (
        "You require one character before and one after the word. The first and last "
        "words have only one such character, and the two words of `the the` share one.",
        r"\W{}\W",
    ),
    "not at the ends": (
        "You miss the word at the beginning or end of the text: you require a "
        "character before and after it.",
        r"(?<=\W){}(?=\W)",
    ),
    "between spaces": (
        "You require a space before and after the word, so you miss it next to "
        "punctuation and at the beginning or end of the text.",
        " {} ",
    ),
    "between spaces or ends": (
        "You require spaces around the word, so you miss it next to punctuation, and "
        "you count only one of the two words in `the the`.",
        "(?:^| ){}(?: |$)",
    ),
}
CAPITALS = {  # name: (message, change of the text, change of the word)
    "": ("", str.lower, str.lower),
    "text in small letters": (capitals_of_the_word.__doc__, str.lower, str),
    "word in small letters": (
        "You lowercase only `word`, but the text may also have capitals.",
        str,
        str.lower,
    ),
    "as given": (
        "You distinguish capitals from lowercase letters: `The` must count as `the`.",
        str,
        str,
    ),
}
for match, (problem, pattern) in MATCHES.items():
    for case, (more, of_text, of_word) in CAPITALS.items():
        if f"{match} {case}" not in (
            "whole words ",
            "whole words text in small letters",
            "whole words as given",
            "parts ",
            "pieces ",
        ):
            named(
                word_reward,
                f"{match} {case}".strip().replace(" ", "_"),
                f"{problem} {more}".strip(),
                lambda text, word, pattern=pattern, of_text=of_text, of_word=of_word: (
                    float(len(re.findall(pattern.format(of_word(word)), of_text(text))))
                ),
            )

SOME_MARKS = """You miss words next to some punctuation marks. Every character that is
    not a letter separates words.
    """
for number, marks in enumerate((".", ".,", ".,!?", ".,;:!?", string.punctuation)):
    named(
        word_reward,
        f"stripped_{number}",
        SOME_MARKS,
        lambda text, word, marks=marks: float(
            sum(x.strip(marks) == word.lower() for x in text.lower().split())
        ),
    )
    if marks != string.punctuation:
        named(
            word_reward,
            f"replaced_{number}",
            SOME_MARKS,
            lambda text, word, marks=marks: split_at_spaces(
                "".join(" " if x in marks else x for x in text), word
            ),
        )
for name, inside in {"apostrophes": "'", "hyphens": "-", "both_marks": "'-"}.items():
    named(
        word_reward,
        f"{name}_in_words",
        SOME_MARKS,
        lambda text, word, inside=inside: float(
            re.findall(rf"[a-z{inside}]+", text.lower()).count(word.lower())
        ),
    )


def words(text):
    return re.findall(r"[a-z]+", text.lower())


for name, part in {
    "last_word_skipped": slice(-1),
    "first_word_skipped": slice(1, None),
    "both_ends_skipped": slice(1, -1),
}.items():
    named(
        word_reward,
        name,
        "You skip the first or the last word of the text.",
        lambda text, word, part=part: float(words(text)[part].count(word.lower())),
    )
for name, forms in {
    "two_forms": (str.lower, str.capitalize),
    "given_and_small": (str, str.lower),
    "given_and_capitalized": (str, str.capitalize),
    "given_small_and_capitals": (str, str.lower, str.upper),
}.items():
    named(
        word_reward,
        name,
        "You find only some spellings, such as `the` and `The`. Any letter may be a "
        "capital.",
        lambda text, word, forms=forms: float(
            sum(
                len(re.findall(rf"\b{form}\b", text))
                for form in {f(word) for f in forms}
            )
        ),
    )
named(
    word_reward,
    "joined_words",
    MATCHES["shared edges"][0],
    lambda text, word: float(
        f" {' '.join(words(text))} ".count(f" {word.lower()} "),
    ),
)
named(
    word_reward,
    "flags_as_a_number",
    "You distinguish capitals from lowercase letters and count at most two words. Some "
    "functions of `re` read a third or fourth argument as a number, so pass the flag "
    "with `flags=`.",
    lambda text, word: min(looks_at_capitals(text, word), 2.0),
)
named(
    word_reward,
    "parts_of_the_word",
    "You count words that are a part of `word`. Count only words that equal `word`.",
    lambda text, word: float(sum(x in word.lower() for x in words(text))),
)
named(
    word_reward,
    "words_that_contain",
    counts_parts_of_words.__doc__,
    lambda text, word: float(sum(word.lower() in x for x in text.lower().split())),
)


@word_reward.alternative
def by_splitting(text, word):
    return float(sum(part == word.lower() for part in re.split(r"\W+", text.lower())))


@SET.exercise(
    "Which position predicts which token",
    2,
    10,
    (
        "Sketch five positions and the token that each position predicts.",
        "Position t predicts token t + 1. Which position predicts the first response "
        "token?",
    ),
)
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
    """You return logits, whose exponentials do not sum to 1. Return log-probabilities
    instead.
    """
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


def of_ids(values, ids):
    return values.gather(1, ids.unsqueeze(1)).squeeze(1)


def shifted(by, values=0):
    """Return a mistake that reads logits and ids from other positions."""

    def mistake(logits, ids, query_length):
        t = torch.arange(query_length, len(ids))
        logprobs = logits.log_softmax(-1)[(t - by).clamp(0, len(ids) - 1)]
        return of_ids(logprobs, ids[t - values])

    return mistake


OVER_TIME = """You normalize over positions. The probabilities of all tokens at *one*
    position must sum to 1.
    """
SHIFT = """You read the wrong rows of `logits`. A token's log-probability must come from
    the row directly before this token.
    """
ROWS = {
    "two_steps_early": shifted(2),
    "two_steps_early_from_the_end": lambda logits, ids, q: of_ids(
        logits.log_softmax(-1)[torch.arange(q, len(ids)) - 2], ids[q:]
    ),
    "one_step_late": shifted(-1),
    "one_step_late_rolled": lambda logits, ids, q: of_ids(
        logits.log_softmax(-1).roll(-1, 0)[q:], ids[q:]
    ),
    "from_the_start": lambda logits, ids, q: of_ids(
        logits[: len(ids) - q].log_softmax(-1), ids[q:]
    ),
    "from_the_second_row": lambda logits, ids, q: of_ids(
        logits[1 : len(ids) - q + 1].log_softmax(-1), ids[q:]
    ),
    "one_row_for_all": lambda logits, ids, q: logits[q - 1].log_softmax(-1)[ids[q:]],
}
for name, mistake in ROWS.items():
    named(response_logprobs, name, SHIFT, mistake)
TOKENS = """You read the right rows of `logits` but look up the wrong tokens: in each
    row you look up the token that the model has just read, not the next token.
    """
named(response_logprobs, "ids_too_early", TOKENS, shifted(1, 1))
named(
    response_logprobs,
    "the_query_instead",
    "You score the query's tokens, not the response's.",
    lambda logits, ids, q: of_ids(logits[: q - 1].log_softmax(-1), ids[1:q]),
)
named(
    response_logprobs,
    "all_without_the_shift",
    "Your result includes the query, and the shift is missing: in each row of "
    "`logits` you look up the token that the model has just read.",
    lambda logits, ids, q: of_ids(logits.log_softmax(-1), ids),
)
named(
    response_logprobs,
    "wrapped_around",
    "You start one token late, and your last value belongs to the first id.",
    lambda logits, ids, q: of_ids(logits.log_softmax(-1), ids.roll(-1))[q:],
)
named(
    response_logprobs,
    "last_token_missing",
    "The last response token is missing.",
    lambda logits, ids, q: response_logprobs.solution(logits, ids, q)[:-1],
)
named(
    response_logprobs,
    "last_token_missing_unshifted",
    "The shift by one is missing, and so is the last response token.",
    lambda logits, ids, q: forgot_the_shift(logits, ids, q)[:-1],
)
for name, rows in {
    "over_time": lambda x, q: x.log_softmax(0)[q - 1 : -1],
    "over_the_response": lambda x, q: x[q - 1 : -1].log_softmax(0),
    "over_the_shorter_text": lambda x, q: x[:-1].log_softmax(0)[q - 1 :],
}.items():
    named(
        response_logprobs,
        name,
        OVER_TIME,
        lambda logits, ids, q, rows=rows: of_ids(rows(logits, q), ids[q:]),
    )
named(
    response_logprobs,
    "over_chosen_tokens",
    "You select the tokens' logits before you normalize them: a softmax needs all "
    "tokens of the vocabulary.",
    lambda logits, ids, q: of_ids(logits[q - 1 : -1], ids[q:]).log_softmax(0),
)
NORMALIZERS = {
    "largest": (lambda x: x - x.amax(-1, keepdim=True), "their maximum"),
    "mean": (lambda x: x - x.mean(-1, keepdim=True), "their mean"),
    "sum": (lambda x: x - x.sum(-1, keepdim=True), "their sum"),
}
for name, (change, what) in NORMALIZERS.items():
    named(
        response_logprobs,
        f"minus_the_{name}",
        f"You subtract {what} from the logits; probabilities then do not sum to 1.",
        lambda logits, ids, q, change=change: of_ids(
            change(logits[q - 1 : -1]), ids[q:]
        ),
    )
named(
    response_logprobs,
    "a_sigmoid_per_token",
    "You use a sigmoid, but the possible tokens at one position are mutually "
    "exclusive: their probabilities must sum to 1.",
    lambda logits, ids, q: of_ids(
        torch.nn.functional.logsigmoid(logits[q - 1 : -1]), ids[q:]
    ),
)
named(
    response_logprobs,
    "logits_without_the_shift",
    "You return logits, not log-probabilities, and the shift by one is missing.",
    lambda logits, ids, q: of_ids(logits[q:], ids[q:]),
)
named(
    response_logprobs,
    "every_pair",
    "You return the log-probability of every response token at every position. Pair "
    "each position with its own token.",
    lambda logits, ids, q: logits[q - 1 : -1].log_softmax(-1)[:, ids[q:]],
)
named(
    response_logprobs,
    "the_whole_vocabulary",
    "You return the whole vocabulary's log-probabilities; select those of `ids`.",
    lambda logits, ids, q: logits[q - 1 : -1].log_softmax(-1),
)
named(
    response_logprobs,
    "the_likeliest",
    "You return the largest log-probability at each position, but the response may "
    "have a less likely token there.",
    lambda logits, ids, q: logits[q - 1 : -1].log_softmax(-1).amax(-1),
)
for name, change in {
    "a_loss": lambda x: -x.mean(),
    "a_summed_loss": lambda x: -x.sum(),
}.items():
    named(
        response_logprobs,
        name,
        "You return a loss: one number, with the wrong sign. Keep one value per token.",
        lambda logits, ids, q, change=change: change(
            response_logprobs.solution(logits, ids, q)
        ),
    )
for name, first in {"query_as_zeros": 0, "query_as_zeros_shifted": 1}.items():
    named(
        response_logprobs,
        name,
        "You set the query's values to 0 but keep them. Return only the response's "
        "values.",
        lambda logits, ids, q, first=first: torch.cat(
            [logits.new_zeros(q - first), response_logprobs.solution(logits, ids, q)]
        ),
    )


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
        "Which of the two models drew the tokens? This model's log-probability comes "
        "first.",
        "Compute one KL for each response. Then average over responses.",
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
    """Absolute differences do not give a KL. The difference at a single token may be
    negative, and the mean over samples is right only if you keep the signs.
    """
    return (logprobs - ref_logprobs).abs().sum(1).mean()


@mean_kl.mistake
def with_probabilities(logprobs, ref_logprobs):
    """You weight each term by its token's probability. These tokens were *sampled*, so
    the likely tokens already occur more often.
    """
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(1).mean()


@mean_kl.mistake
def in_bits(logprobs, ref_logprobs):
    """Your result is in bits. The arguments are natural logarithms, so use nats."""
    return (logprobs - ref_logprobs).sum(1).mean() / 0.6931471805599453


@mean_kl.mistake
def never_negative(logprobs, ref_logprobs):
    """You set negative values to 0. A single token or response may have a negative
    value: only the mean over all samples is a KL.
    """
    return (logprobs - ref_logprobs).clamp(min=0).sum(1).mean()


ESTIMATES = {  # name: (message, term of a token)
    "": ("", lambda p, q: p - q),
    "reversed": ("The sign is wrong. Swap the two models.", lambda p, q: q - p),
    "half_squares": (
        "You square the differences (this estimator is called k2). The exercise asks "
        "for the plain difference, and the mean of k2 is not a KL.",
        lambda p, q: (p - q) ** 2 / 2,
    ),
    "squares": (
        "You square the differences: their signs are lost, and the mean is not a KL.",
        lambda p, q: (p - q) ** 2,
    ),
    "k3": (
        "You use the KL estimator k3. The exercise asks for the plain difference.",
        lambda p, q: (q - p).expm1() - (q - p),
    ),
    "k3_reversed": (
        "You use the KL estimator k3 with the models swapped. The exercise asks for "
        "the plain difference.",
        lambda p, q: (p - q).expm1() - (p - q),
    ),
    "absolute": (absolute.__doc__, lambda p, q: (p - q).abs()),
    "clamped": (never_negative.__doc__, lambda p, q: (p - q).clamp(min=0)),
    "weighted": (with_probabilities.__doc__, lambda p, q: p.exp() * (p - q)),
    "weighted_by_the_reference": (
        "You weight terms by the reference's probability (as `kl_div` does). The "
        "policy *sampled* these tokens, so no weight is needed.",
        lambda p, q: q.exp() * (q - p),
    ),
    "weighted_by_the_other": (
        "You weight each term by the reference's probability. The policy *sampled* "
        "these tokens, so no weight is needed.",
        lambda p, q: q.exp() * (p - q),
    ),
    "probabilities": (
        "You subtract probabilities; KL subtracts their logarithms.",
        lambda p, q: p.exp() - q.exp(),
    ),
    "ratios": (
        "You return ratios of probabilities: the logarithm is missing.",
        lambda p, q: (p - q).exp(),
    ),
    "logarithms_twice": (
        "You take a logarithm of log-probabilities.",
        lambda p, q: (p / q).log(),
    ),
    "divided": (
        "You divide one log-probability by the other. The logarithm of a ratio of "
        "probabilities is a *difference*.",
        lambda p, q: p / q,
    ),
}
REDUCTIONS = {  # name: (message, reduction)
    "per_response": ("", lambda x: x.sum(1).mean()),
    "per_token": ("You also average over tokens; sum over them.", lambda x: x.mean()),
    "per_batch": ("You also sum over responses; average instead.", lambda x: x.sum()),
}
KNOWN = (
    "_per_response _per_token _per_batch reversed_per_response absolute_per_response "
    "clamped_per_response weighted_per_response"
)
for estimate, (problem, term) in ESTIMATES.items():
    for reduction, (more, reduce) in REDUCTIONS.items():
        if f"{estimate}_{reduction}" not in KNOWN.split():
            named(
                mean_kl,
                f"{estimate}_{reduction}",
                f"{problem} {more}".strip(),
                lambda p, q, term=term, reduce=reduce: reduce(term(p, q)),
            )
for name, (message, reduce) in {
    "responses_never_negative": (
        "You set a response's value to 0 if it is negative. A single value may be "
        "negative: only the mean over all samples is a KL.",
        lambda x: x.sum(1).clamp(min=0).mean(),
    ),
    "responses_absolute": (
        "You take the absolute value of each response's sum, so the sign is lost. The "
        "value of a single response may be negative.",
        lambda x: x.sum(1).abs().mean(),
    ),
    "median": (
        "You return a median over responses; return the mean over responses.",
        lambda x: x.sum(1).median(),
    ),
    "middle": (
        "You return a median over responses; return the mean over responses.",
        lambda x: x.sum(1).quantile(0.5),
    ),
    "largest": (
        "You return the largest KL of any response; return the mean over responses.",
        lambda x: x.sum(1).amax(),
    ),
    "last_token": (
        "You use only the last token of each response; sum over all tokens.",
        lambda x: x[:, -1].mean(),
    ),
    "first_token": (
        "You use only the first token of each response; sum over all tokens.",
        lambda x: x[:, 0].mean(),
    ),
    "last_token_skipped": (
        "The last token of each response is missing.",
        lambda x: x[:, :-1].sum(1).mean(),
    ),
    "first_token_skipped": (
        "The first token of each response is missing.",
        lambda x: x[:, 1:].sum(1).mean(),
    ),
    "ratio_of_responses": (
        "You return the mean ratio of the responses' probabilities: the logarithm is "
        "missing.",
        lambda x: x.sum(1).exp().mean(),
    ),
    "logarithm_of_the_mean": (
        "You return the logarithm of a mean ratio. The mean of the logarithms is a "
        "different number.",
        lambda x: x.sum(1).exp().mean().log(),
    ),
    "squared_responses": (
        "You square the KL of each response: the sign is lost, and the unit changes.",
        lambda x: (x.sum(1) ** 2).mean(),
    ),
    "every_token": (
        "You return one number per token. Sum over each response, then average over "
        "responses.",
        lambda x: x,
    ),
}.items():
    named(mean_kl, name, message, lambda p, q, reduce=reduce: reduce(p - q))
named(
    mean_kl,
    "renormalized",
    "You apply a softmax over the tokens of a response. The arguments are already "
    "log-probabilities, and the tokens of a response are not mutually exclusive.",
    lambda p, q: (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(1).mean(),
)


@mean_kl.alternative
def flat(logprobs, ref_logprobs):
    return (logprobs.sum() - ref_logprobs.sum()) / len(logprobs)
