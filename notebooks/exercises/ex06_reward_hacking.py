"""Exercises of notebook 06."""

import itertools

import torch

from engine import Set, normal, pick

SET = Set("06_reward_hacking", "The reward-hacking clinic")
check = SET.check


RUNS = {  # KL at the first step, and later
    "one": ("0", "higher"),
    "two": ("0", "below 0"),
    "three": ("above 0", "higher"),
}


@SET.exercise(
    "Three broken runs",
    2,
    15,
    (
        "Start with the KL column. Which values does a healthy run show there?",
        "In a healthy run, KL starts at 0 and is never clearly negative.",
    ),
)
def diagnose(run):
    """Name the cause of a run's problem, given only its curves: str → str.

    | run | score | KL | length |
    |---|---|---|---|
    | one | rises | 0 at step 1, then rises | falls to one token |
    | two | stays the same | 0 at step 1, then stays below 0 | stays the same |
    | three | rises slowly | already far above 0 at step 1 | stays the same |

    Step 1 is measured before the first update. `run` is `"one"`, `"two"` or `"three"`.
    Return the only cause that explains the whole row: `"empty answers"`, `"sampling
    settings"`, `"wrong reference"`, `"learning rate too low"` or `"healthy"`.
    """
    return {
        "one": "empty answers",
        "two": "sampling settings",
        "three": "wrong reference",
    }[run]


@diagnose.inputs
def _(dice):
    return (list(RUNS)[dice.initial_seed() % 3],)


@diagnose.mistake
def the_score_is_all(run):
    """You call run one healthy because its score rises, but its answers shrink to one
    token. The reward model wrongly gives empty answers high scores, and the policy
    exploits this mistake.
    """
    return {"one": "healthy", "two": "sampling settings", "three": "wrong reference"}[
        run
    ]


@diagnose.mistake
def nothing_moves(run):
    """You blame run two's learning rate, but the run's KL is *negative*, which no
    divergence can be. The run samples from one distribution and computes
    log-probabilities under another, for example because of top_k, a penalty, or a
    suppressed token.
    """
    return {
        "one": "empty answers",
        "two": "learning rate too low",
        "three": "wrong reference",
    }[run]


@diagnose.mistake
def far_is_far(run):
    """You blame empty answers for run three, but its KL is far above 0 *before the
    first update*. Its reference is a different model, for instance a model without the
    SFT adapter.
    """
    return {
        "one": "empty answers",
        "two": "sampling settings",
        "three": "empty answers",
    }[run]


SEEN = {
    "one": "Look at run one again: how long are its answers at the end?",
    "two": "Look at run two again: can a divergence keep this sign for long?",
    "three": "Look at run three again: has any weight changed at step 1?",
}
TAKEN = {"one": "healthy", "two": "learning rate too low", "three": "empty answers"}
CAUSES = (
    *("empty answers", "sampling settings", "wrong reference"),
    *("learning rate too low", "healthy"),
)


@diagnose.mistake
def all_healthy(run):
    """You call all three runs healthy, but each row has a symptom that no healthy run
    shows.
    """
    return "healthy"


def _confuse(causes):
    answers = dict(zip(RUNS, causes))
    wrong = [run for run in RUNS if answers[run] != diagnose.solution(run)]
    special = len(wrong) == 1 and answers[wrong[0]] == TAKEN[wrong[0]]
    if wrong and not special and set(causes) != {"healthy"}:
        message = "\n".join(SEEN[run] for run in wrong)
        diagnose.say(message, **{", ".join(causes): lambda run: answers[run]})


for _causes in itertools.product(CAUSES, repeat=3):
    _confuse(_causes)

diagnose.say(
    "You do not spell the causes as the exercise does. Copy the exercise's strings, "
    "which are in lowercase and contain spaces.",
    capitalized=lambda run: diagnose.solution(run).capitalize(),
    title=lambda run: diagnose.solution(run).title(),
    upper=lambda run: diagnose.solution(run).upper(),
    underscores=lambda run: diagnose.solution(run).replace(" ", "_"),
    hyphens=lambda run: diagnose.solution(run).replace(" ", "-"),
    period=lambda run: diagnose.solution(run) + ".",
)


@diagnose.alternative
def by_reasons(run):
    first, later = RUNS[run]
    if first != "0":
        return "wrong reference"
    return "sampling settings" if later == "below 0" else "empty answers"


@SET.exercise(
    "Forbid EOS at the start",
    2,
    15,
    (
        "If one token is forbidden, what must the probabilities of a row sum to?",
        "A logit of −∞ gives probability 0. In which row do you need it, and before "
        "which step?",
    ),
    ("logits",),
)
def suppress_first(logits, token):
    """Return one response's log-probabilities with a token forbidden at the first
    position: logits (R, V) → (R, V).

    The log-probabilities must be those of the policy that samples. So forbid `token`,
    but only at the first position, as sampling does.
    Keep the gradient, which training needs.
    """
    allowed = logits.clone()
    allowed[0, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.inputs
def _(dice):
    r, v = pick(dice, range(2, 5)), pick(dice, range(5, 8))
    return normal(dice, r, v), pick(dice, range(v))


@suppress_first.mistake
def everywhere(logits, token):
    """You forbid the token at all positions, so no answer could ever end. Sampling
    masks it only at the first position.
    """
    allowed = logits.clone()
    allowed[:, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def after_the_softmax(logits, token):
    """You mask after the log-softmax, so the first row's probabilities sum to 1 −
    p(EOS) instead of 1. This row's log-probabilities are too low, and the KL penalty is
    smallest where EOS is most likely.
    """
    logprobs = logits.log_softmax(-1).clone()
    logprobs[0, token] = -torch.inf
    return logprobs


@suppress_first.mistake
def in_sampling_alone(logits, token):
    """You mask nothing, so your log-probabilities are not those of the policy that
    samples, and KL is too low (case a, the partial fix).
    """
    return logits.log_softmax(-1)


@suppress_first.mistake
def last_position(logits, token):
    """You forbid the token at the last position. An answer must not *begin* with it."""
    allowed = logits.clone()
    allowed[-1, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def everywhere_except_first(logits, token):
    """You reverse the mask: you forbid the token everywhere except at the first
    position.
    """
    allowed = logits.clone()
    allowed[1:, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def position_for_token(logits, token):
    """You swap row and column: a row is a position, and a column is a token."""
    allowed = logits.clone()
    allowed[min(token, len(logits) - 1), 0] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def logit_zero(logits, token):
    """You set the logit to 0, which forbids nothing: its exponential is 1."""
    allowed = logits.clone()
    allowed[0, token] = 0
    return allowed.log_softmax(-1)


@suppress_first.mistake
def logprob_zero(logits, token):
    """You set the log-probability to 0, which means a probability of 1: the token would
    be certain.
    """
    logprobs = suppress_first.solution(logits, token).clone()
    logprobs[0, token] = 0
    return logprobs


@suppress_first.mistake
def probabilities(logits, token):
    """You return probabilities. Return their logarithms."""
    return suppress_first.solution(logits, token).exp()


@suppress_first.mistake
def logits_only(logits, token):
    """You return logits: nothing makes the exponentials of a row sum to 1."""
    allowed = logits.clone()
    allowed[0, token] = -torch.inf
    return allowed


@suppress_first.mistake
def over_the_tokens(logits, token):
    """You normalize over positions. Each position has its own distribution over
    tokens.
    """
    allowed = logits.clone()
    allowed[0, token] = -torch.inf
    return allowed.log_softmax(0)


@suppress_first.mistake
def first_row_forbidden(logits, token):
    """You forbid all tokens in the first row. Forbid only `token`."""
    allowed = logits.clone()
    allowed[0] = -torch.inf
    return allowed.log_softmax(-1)


def _forbid(message, **changes):
    """Register mistakes that change the logits in place before a log-softmax."""
    for name, change in changes.items():

        def code(logits, token, change=change):
            allowed = logits.clone()
            change(allowed, token)
            return allowed.log_softmax(-1)

        suppress_first.say(message, **{name: code})


def _put(value, rows=slice(1), columns=None):
    """Return a change that writes a value; the default place is the right one."""

    def change(x, token):
        x[rows, token if columns is None else columns(token)] = value

    return change


def _lower(amount):
    def change(x, token):
        x[0, token] -= amount

    return change


def _force(x, token):
    kept = x[0, token].clone()
    x[0] = -torch.inf
    x[0, token] = kept


def _smallest(x, token):
    x[0, token] = x.clone()[0].min()


def _wrong_sign(logits, token):
    rest = torch.log1p(-logits[0].softmax(-1)[token])
    logprobs = logits.log_softmax(-1)
    first = logprobs[:1] + rest
    first[0, token] = -torch.inf
    return torch.cat([first, logprobs[1:]])


def _only_first_normalized(logits, token):
    first = suppress_first.solution(logits, token)[:1]
    return torch.cat([first, logits[1:]])


def _without_column(x, token):
    return torch.cat([x[:, :token], x[:, token + 1 :]], 1)


def _with_one_normalizer(logits, token):
    allowed = logits.clone()
    allowed[0, token] = -torch.inf
    return allowed - allowed.logsumexp((0, 1))


_forbid(
    "You make the forbidden token rare, but its probability must be exactly 0.",
    smallest=_smallest,
    **{f"lower {x}": _lower(x) for x in (1, 2, 5, 10, 20, 50, 100, 1000)},
    **{f"logit {-x}": _put(-x) for x in (1, 5, 10, 20, 50, 100, 1000)},
    **{f"logit -1e{x}": _put(-(10.0**x)) for x in (4, 5, 6, 8, 9, 10, 12, 20, 30)},
    least=_put(torch.finfo(torch.float64).min),
    least_in_32_bits=_put(torch.finfo(torch.float32).min),
)
_forbid(
    "You set the logit to +∞, which forces the token and gives nan in its normalized "
    "row.",
    plus_infinity=_put(torch.inf),
)
_forbid(
    "You forbid the token at the second position, row 1. The first position is row 0.",
    second=_put(-torch.inf, slice(1, 2)),
)
_forbid(
    "You forbid the token at every position except the last. Sampling forbids it only "
    "at the first position.",
    all_except_last=_put(-torch.inf, slice(-1)),
)
_forbid(
    "You forbid a range of tokens. Forbid only `token`.",
    up_to=_put(-torch.inf, columns=lambda token: slice(token + 1)),
    below=_put(-torch.inf, columns=lambda token: slice(token)),
    from_token=_put(-torch.inf, columns=lambda token: slice(token, None)),
    above=_put(-torch.inf, columns=lambda token: slice(token + 1, None)),
)
_forbid(
    "You forbid the first or last token of the vocabulary. Forbid `token`.",
    token_zero=_put(-torch.inf, columns=lambda token: 0),
    last_token=_put(-torch.inf, columns=lambda token: -1),
)
_forbid(
    "You forbid all tokens *except* `token` at the first position, so `token` is "
    "certain there.",
    forced=_force,
)
suppress_first.say(
    "Your result has only the first position. Return all positions.",
    first_only=lambda logits, token: suppress_first.solution(logits, token)[:1],
    first_vector=lambda logits, token: suppress_first.solution(logits, token)[0],
)
suppress_first.say(
    "Your result lacks a row. Return all positions.",
    without_first=lambda logits, token: suppress_first.solution(logits, token)[1:],
)
suppress_first.say(
    "You remove the token's column. The result must have V columns, because the token "
    "is still allowed at other positions.",
    column_removed=lambda logits, token: _without_column(logits, token).log_softmax(-1),
    column_removed_at_the_end=lambda logits, token: _without_column(
        suppress_first.solution(logits, token), token
    ),
)
suppress_first.say(
    "You correct the other tokens of the first row in the wrong direction. If one "
    "token is forbidden, the others become *more* likely.",
    wrong_sign=_wrong_sign,
)
suppress_first.say(
    "You normalize only the first row. The result must have log-probabilities in all "
    "rows.",
    only_first_normalized=_only_first_normalized,
)
suppress_first.say(
    "You normalize over the whole matrix. Each row has its own distribution.",
    one_normalizer=_with_one_normalizer,
)


@suppress_first.alternative
def with_a_mask(logits, token):
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    forbidden[0, token] = True
    allowed = logits.masked_fill(forbidden, -torch.inf)
    return allowed - allowed.logsumexp(-1, keepdim=True)


@SET.exercise(
    "How wrong is the KL?",
    3,
    20,
    (
        "Write the probability of a token other than EOS, without and with the mask.",
        "Divide each model's probability by the total probability of the tokens that "
        "its mask allows. What remains of the difference between the true "
        "and the reported KL?",
    ),
)
def kl_error(p, ref_p):
    """Return by how much KL is too low if only sampling masks EOS: two (N,) → float.

    `p` and `ref_p` are the policy's and the reference's probabilities of EOS at the
    first token. Responses are drawn from the masked policy, so EOS is never the first
    token. The true KL compares the masked policy with the masked reference; the
    reported KL compares unmasked log-probabilities of the same tokens. Return the mean
    of true minus reported KL.
    """
    return (torch.log1p(-ref_p) - torch.log1p(-p)).mean()


@kl_error.inputs
def _(dice):
    n = pick(dice, range(3, 8))
    return (2 * normal(dice, n)).sigmoid(), normal(dice, n).sigmoid() * pick(
        dice, (0.1, 1)
    )


@kl_error.mistake
def policy_alone(p, ref_p):
    """Your difference lacks the reference's part: the reference is also masked."""
    return -torch.log1p(-p).mean()


@kl_error.mistake
def wrong_way_round(p, ref_p):
    """The sign is wrong: the more likely EOS becomes, the *smaller* the
    reported KL is.
    """
    return (torch.log1p(-p) - torch.log1p(-ref_p)).mean()


@kl_error.mistake
def probabilities_of_eos(p, ref_p):
    """You return the log-ratio of EOS itself, which is never sampled. By how much do
    the probabilities of all other tokens change?
    """
    return (p.log() - ref_p.log()).mean()


@kl_error.mistake
def added(p, ref_p):
    """You give both terms the same sign. KL compares policy and reference by the
    logarithm of a *ratio*.
    """
    return -(torch.log1p(-p) + torch.log1p(-ref_p)).mean()


@kl_error.mistake
def ratio_alone(p, ref_p):
    """You return a mean ratio. KL is in nats, so take logarithms."""
    return ((1 - ref_p) / (1 - p)).mean()


@kl_error.mistake
def difference_of_probabilities(p, ref_p):
    """You return a difference of probabilities. KL compares logarithms."""
    return (p - ref_p).mean()


@kl_error.mistake
def weighted_by_p(p, ref_p):
    """You weight by the probability of EOS. EOS is never sampled, and the whole
    error applies to every sampled token.
    """
    return (p * (torch.log1p(-ref_p) - torch.log1p(-p))).mean()


@kl_error.mistake
def weighted_by_the_rest(p, ref_p):
    """You weight by 1 − p. The masked policy samples *only* tokens other than EOS, so
    no weight is needed.
    """
    return ((1 - p) * (torch.log1p(-ref_p) - torch.log1p(-p))).mean()


@kl_error.mistake
def kl_of_eos_or_not(p, ref_p):
    """You return the whole KL of the choice between EOS and other tokens. Here EOS is
    never sampled.
    """
    rest = (1 - p) * (torch.log1p(-p) - torch.log1p(-ref_p))
    return (p * (p.log() - ref_p.log()) + rest).mean()


@kl_error.mistake
def mean_first(p, ref_p):
    """You average the probabilities first: the logarithm of a mean is a different
    number.
    """
    return torch.log1p(-ref_p.mean()) - torch.log1p(-p.mean())


@kl_error.mistake
def mean_of_ratios(p, ref_p):
    """You average the ratios before the logarithm. Take the logarithm of each ratio
    first.
    """
    return ((1 - ref_p) / (1 - p)).mean().log()


@kl_error.mistake
def reference_alone(p, ref_p):
    """You compute only the reference's part: the policy's part is missing."""
    return torch.log1p(-ref_p).mean()


@kl_error.mistake
def summed(p, ref_p):
    """You return a sum. Return an average."""
    return (torch.log1p(-ref_p) - torch.log1p(-p)).sum()


def _kl(message, **formulas):
    """Register functions of p, ref_p, and the error of each response."""
    for name, formula in formulas.items():

        def code(p, ref_p, formula=formula):
            error = torch.log1p(-ref_p) - torch.log1p(-p)
            return formula(p, ref_p, error)

        kl_error.say(message, **{name: code})


_kl(
    "You use 1 + p. All tokens other than EOS together have the probability 1 − p.",
    plus=lambda p, ref_p, error: (torch.log1p(p) - torch.log1p(ref_p)).mean(),
    plus_reversed=lambda p, ref_p, error: (torch.log1p(ref_p) - torch.log1p(p)).mean(),
)
_kl(
    "You take absolute values before averaging. Errors may be negative, and errors of "
    "opposite sign may cancel.",
    absolute=lambda p, ref_p, error: error.abs().mean(),
)
_kl(
    "You set negative errors to 0. The reported KL may also be too high.",
    cut=lambda p, ref_p, error: error.clamp(min=0).mean(),
)
_kl(
    "You use a ratio minus 1, which is close to the logarithm of the ratio only near "
    "a ratio of 1.",
    ratio_minus_one=lambda p, ref_p, error: error.expm1().mean(),
    one_minus_ratio=lambda p, ref_p, error: -(-error).expm1().mean(),
)
_kl(
    "You return a mean ratio. KL is in nats, so take logarithms.",
    inverse_ratio=lambda p, ref_p, error: (-error).exp().mean(),
    ratio_of_eos=lambda p, ref_p, error: (p / ref_p).mean(),
)
_kl(
    "You average the ratios before the logarithm, and your ratios are inverted.",
    log_of_inverse=lambda p, ref_p, error: (-error).exp().mean().log(),
)
_kl(
    "You use only one response. Average over all of them.",
    first_only=lambda p, ref_p, error: error[0],
    last_only=lambda p, ref_p, error: error[-1],
)
_kl(
    "You return a median or an extreme value. Return the average.",
    median=lambda p, ref_p, error: error.median(),
    middle=lambda p, ref_p, error: error.quantile(0.5),
    largest=lambda p, ref_p, error: error.max(),
    smallest=lambda p, ref_p, error: error.min(),
)
_kl(
    "You use logarithms to base 10. A KL in nats needs natural logarithms.",
    base_ten=lambda p, ref_p, error: error.mean() / torch.tensor(10.0).log(),
)
_kl(
    "You compare the odds of EOS. EOS is never sampled, so log p must not enter.",
    odds=lambda p, ref_p, error: (torch.logit(p) - torch.logit(ref_p)).mean(),
    odds_reversed=lambda p, ref_p, error: (torch.logit(ref_p) - torch.logit(p)).mean(),
)
_kl(
    "You return the log-ratio of EOS itself, which is never sampled. By how much do "
    "the probabilities of all other tokens change?",
    eos_reversed=lambda p, ref_p, error: (ref_p.log() - p.log()).mean(),
    eos_weighted=lambda p, ref_p, error: (p * (p.log() - ref_p.log())).mean(),
)
_kl(
    "You weight by a probability of the reference, or you divide by the sum of "
    "weights. Each response must count equally.",
    by_ref=lambda p, ref_p, error: (ref_p * error).mean(),
    by_ref_rest=lambda p, ref_p, error: ((1 - ref_p) * error).mean(),
    share_of_p=lambda p, ref_p, error: (p * error).sum() / p.sum(),
    share_of_rest=lambda p, ref_p, error: ((1 - p) * error).sum() / (1 - p).sum(),
)
_kl(
    "The reference's part is missing, or the sign of the policy's part is wrong.",
    rest_of_policy=lambda p, ref_p, error: torch.log1p(-p).mean(),
)
_kl(
    "You compute only the reference's part: the policy's part is missing.",
    rest_of_reference=lambda p, ref_p, error: -torch.log1p(-ref_p).mean(),
)
_kl(
    "You square the errors. Average the errors themselves.",
    squares=lambda p, ref_p, error: error.square().mean(),
    half_squares=lambda p, ref_p, error: error.square().mean() / 2,
)


@kl_error.alternative
def as_a_ratio(p, ref_p):
    return ((1 - ref_p) / (1 - p)).log().mean()


@SET.exercise(
    "Take length out of the labels",
    2,
    15,
    (
        "The longer answer wins seven of ten pairs. How many of these ten rows can you "
        "keep?",
        "Count both kinds first. At each row, how many rows of each kind may you "
        "still keep?",
    ),
)
def balance(longer_won):
    """Choose as many rows with True as with False: list of bool → list of int.

    If the longer answer mostly wins (or mostly loses), a reward model learns length.
    If the rarer kind has n rows, keep the first n rows of each kind. Return the indices
    of these rows in their original order.
    """
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    kept, left = [], {True: n, False: n}
    for row, longer in enumerate(longer_won):
        if left[longer]:
            kept.append(row)
            left[longer] -= 1
    return kept


@balance.inputs
def _(dice):
    share = (0.8, 0.2, 0.5, 1.1, 0.7, -1.0)[dice.initial_seed() % 6]
    if share == 0.5:  # equally many of both kinds
        return ((torch.randperm(12, generator=dice) < 6).tolist(),)
    return ((torch.rand(pick(dice, range(9, 16)), generator=dice) < share).tolist(),)


def _rows(longer_won):
    return {
        side: [i for i, longer in enumerate(longer_won) if longer is side]
        for side in (True, False)
    }


def _up_to(longer_won, n):
    rows = _rows(longer_won)
    return sorted(rows[True][:n] + rows[False][:n])


@balance.mistake
def all_of_them(longer_won):
    """You drop no row, so the labels still favor one length."""
    return list(range(len(longer_won)))


@balance.mistake
def one_kind(longer_won):
    """You keep only rows in which the longer answer won, so length predicts the label
    *perfectly*.
    """
    return [row for row, longer in enumerate(longer_won) if longer]


@balance.mistake
def first_half(longer_won):
    """You keep as many rows as a balanced set has, but not the same number of each
    kind.
    """
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    return list(range(2 * n))


@balance.mistake
def other_kind_only(longer_won):
    """You keep only rows in which the longer answer lost, so length predicts every
    label.
    """
    return [row for row, longer in enumerate(longer_won) if not longer]


@balance.mistake
def last_rows(longer_won):
    """You keep the last rows of each kind. Keep the first rows."""
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    rows = _rows(longer_won)
    return sorted(
        rows[True][len(rows[True]) - n :] + rows[False][len(rows[False]) - n :]
    )


@balance.mistake
def not_in_order(longer_won):
    """You return the right rows in the wrong order. Keep the original order."""
    rows = _rows(longer_won)
    n = min(map(len, rows.values()))
    return rows[True][:n] + rows[False][:n]


@balance.mistake
def not_in_order_either(longer_won):
    """You return the right rows in the wrong order. Keep the original order."""
    rows = _rows(longer_won)
    n = min(map(len, rows.values()))
    return rows[False][:n] + rows[True][:n]


@balance.mistake
def labels_for_rows(longer_won):
    """You return labels. Return the *indices* of the rows."""
    return [longer_won[row] for row in balance.solution(longer_won)]


@balance.mistake
def a_mask_of_rows(longer_won):
    """You return a mask of kept rows. Return the indices of these rows."""
    kept = balance.solution(longer_won)
    return [row in kept for row in range(len(longer_won))]


@balance.mistake
def counted_from_one(longer_won):
    """You count rows from 1. The first row has the number 0."""
    return [row + 1 for row in balance.solution(longer_won)]


@balance.mistake
def dropped_rows(longer_won):
    """You return the rows to drop. Return the rows to keep."""
    kept = balance.solution(longer_won)
    return [row for row in range(len(longer_won)) if row not in kept]


@balance.mistake
def true_is_rarer(longer_won):
    """You assume that the longer answer wins in fewer than half of the rows. Either
    kind may be the rarer kind.
    """
    return _up_to(longer_won, sum(longer_won))


@balance.mistake
def false_is_rarer(longer_won):
    """You assume that the longer answer wins in more than half of the rows. Either kind
    may be the rarer kind.
    """
    return _up_to(longer_won, len(longer_won) - sum(longer_won))


@balance.mistake
def half_of_all(longer_won):
    """Your limit for each kind is half the number of all rows. Keep all rows of the
    rarer kind, and the same number of rows of the other kind.
    """
    return _up_to(longer_won, len(longer_won) // 2)


@balance.mistake
def one_too_few(longer_won):
    """You keep one row too few of each kind. Count the rarer kind again."""
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    return _up_to(longer_won, max(0, n - 1))


def _kept_while(message, **tests):
    """Register loops that keep a row if a test of the kept counts holds."""
    for name, test in tests.items():

        def code(longer_won, test=test):
            n = min(map(len, _rows(longer_won).values()))
            kept, counts = [], {True: 0, False: 0}
            for row, longer in enumerate(longer_won):
                if test(counts[longer], counts[not longer], n):
                    kept.append(row)
                    counts[longer] += 1
            return kept

        balance.say(message, **{name: code})


def _by_kind(message, **choices):
    """Register functions of both kinds' rows and their smaller number."""
    for name, choice in choices.items():

        def code(longer_won, choice=choice):
            rows = _rows(longer_won)
            n = min(map(len, rows.values()))
            return choice(rows[True], rows[False], n)

        balance.say(message, **{name: code})


def _interleaved(first, second):
    return [row for pair in zip(first, second) for row in pair]


def _balanced_beginning(longer_won):
    sums = itertools.accumulate(1 if longer else -1 for longer in longer_won)
    return list(range(max([i + 1 for i, x in enumerate(sums) if x == 0], default=0)))


def _until_full(longer_won):
    kept = balance.solution(longer_won)
    end = next((row for row in range(len(longer_won)) if row not in kept), None)
    return kept if end is None else [row for row in kept if row < end]


_kept_while(
    "You keep one row too many of the more frequent kind. Check where you count.",
    one_too_many=lambda own, other, n: own <= n,
)
_kept_while(
    "You keep a row only while its kind is not ahead, so you lose some early rows. "
    "Count both kinds in the whole list first.",
    not_ahead=lambda own, other, n: own <= other,
    not_ahead_limited=lambda own, other, n: own <= other and own < n,
    behind_or_equal_once=lambda own, other, n: own < other + 2 and own < n,
)
_by_kind(
    "You return the right rows in the wrong order: the two kinds alternate. Keep the "
    "original order.",
    true_first=lambda true, false, n: _interleaved(true, false),
    false_first=lambda true, false, n: _interleaved(false, true),
)
_by_kind(
    "You return the right rows in reversed order. Keep the original order.",
    reversed_rows=lambda true, false, n: sorted(true[:n] + false[:n])[::-1],
)
_by_kind(
    "You return a list for each kind. Return one list of rows in their original order.",
    two_lists=lambda true, false, n: [true[:n], false[:n]],
    two_lists_swapped=lambda true, false, n: [false[:n], true[:n]],
    pairs=lambda true, false, n: list(zip(true, false)),
    pairs_swapped=lambda true, false, n: list(zip(false, true)),
)
_by_kind(
    "You keep only the rarer or only the more frequent kind. A balanced set has "
    "equally many rows of both kinds.",
    rarer=lambda true, false, n: min(true, false, key=len),
    rarer_second=lambda true, false, n: min(false, true, key=len),
    rarer_cut_true=lambda true, false, n: true[:n],
    rarer_cut_false=lambda true, false, n: false[:n],
    frequent=lambda true, false, n: max(true, false, key=len),
    frequent_second=lambda true, false, n: max(false, true, key=len),
)
_by_kind(
    "If all rows of a list are of one kind, you keep all of them. The rarer kind then "
    "has no rows, so keep none.",
    one_kind_kept=lambda true, false, n: sorted(true[: n or None] + false[: n or None]),
)
_by_kind(
    "The rarer kind has n rows, but you keep only n / 2 rows of each kind. Keep n rows "
    "of each kind.",
    half=lambda true, false, n: sorted(true[: n // 2] + false[: n // 2]),
)
_by_kind(
    "You keep the first rows of one kind and the last rows of the other kind. Keep the "
    "first rows of both kinds.",
    last_true=lambda true, false, n: sorted(true[len(true) - n :] + false[:n]),
    last_false=lambda true, false, n: sorted(true[:n] + false[len(false) - n :]),
)
balance.say(
    "You keep only the longest balanced beginning of the list. Later rows may also be "
    "among the first rows of their kind.",
    balanced_beginning=_balanced_beginning,
)
balance.say(
    "You stop when you have enough rows of one kind. Continue, because the other kind "
    "may still need rows.",
    until_full=_until_full,
)
balance.say(
    "You return the first row of a kind repeatedly: index() finds only the first "
    "occurrence.",
    index=lambda longer_won: [
        longer_won.index(longer_won[row]) for row in balance.solution(longer_won)
    ],
)


@balance.alternative
def sorted_union(longer_won):
    rows = {
        side: [i for i, longer in enumerate(longer_won) if longer is side]
        for side in (True, False)
    }
    n = min(map(len, rows.values()))
    return sorted(rows[True][:n] + rows[False][:n])
