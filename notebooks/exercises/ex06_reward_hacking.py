"""Exercises of notebook 06."""

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
        "Start with the KL column: what does a healthy run show there?",
        "In a healthy run KL starts at 0, and is never clearly negative.",
    ),
)
def diagnose(run):
    """Say what is wrong with a run, only from its curves: str → str.

    | run | score | KL | length |
    |---|---|---|---|
    | one | rises | 0 at step 1, then rises | falls to one token |
    | two | stays the same | 0 at step 1, then stays below 0 | stays the same |
    | three | rises slowly | already far above 0 at step 1 | stays the same |

    Step 1 is measured before the first update. `run` is `"one"`, `"two"` or `"three"`.
    Return the one cause that explains the whole row: `"empty answers"`,
    `"sampling settings"`, `"wrong reference"`, `"learning rate too low"` or
    `"healthy"`.
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
    """A rising score does not make run one healthy: its answers shrank to one token.
    The reward model scores empty answers high, and the policy exploits this mistake.
    """
    return {"one": "healthy", "two": "sampling settings", "three": "wrong reference"}[
        run
    ]


@diagnose.mistake
def nothing_moves(run):
    """Run two does not learn slowly: its KL is *negative*, which no divergence can be.
    It samples from one distribution and scores another: top_k, a penalty, or a
    suppressed token.
    """
    return {
        "one": "empty answers",
        "two": "learning rate too low",
        "three": "wrong reference",
    }[run]


@diagnose.mistake
def far_is_far(run):
    """Run three did not move far: its KL was far above 0 *before the first update*. The
    reference is another model, for instance one without the SFT adapter.
    """
    return {
        "one": "empty answers",
        "two": "sampling settings",
        "three": "empty answers",
    }[run]


SEEN = {
    "one": "Look at run one again: how long are its answers in the end?",
    "two": "Look at run two again: can a divergence have this sign for long?",
    "three": "Look at run three again: has any weight changed at step 1?",
}
TAKEN = {"one": "healthy", "two": "learning rate too low", "three": "empty answers"}
CAUSES = (
    *("empty answers", "sampling settings", "wrong reference"),
    *("learning rate too low", "healthy"),
)


def _confuse(run_, cause, message):
    def confused(run):
        return cause if run == run_ else diagnose.solution(run)

    confused.__name__ = f"{run_} is {cause}"
    confused.__doc__ = message
    diagnose.mistake(confused)


for _run, _message in SEEN.items():
    for _cause in CAUSES:
        if _cause not in (diagnose.solution(_run), TAKEN[_run]):
            _confuse(_run, _cause, _message)


@diagnose.mistake
def all_healthy(run):
    """None of the three runs is healthy: each row has something that no healthy run
    shows.
    """
    return "healthy"


@diagnose.mistake
def two_and_three_swapped(run):
    """You swapped runs two and three: one has a KL below 0, the other has a KL above 0
    too early.
    """
    other = {"two": "three", "three": "two"}
    return diagnose.solution(other.get(run, run))


@diagnose.mistake
def one_and_two_swapped(run):
    """You swapped runs one and two: whose answers shrink?"""
    return diagnose.solution({"one": "two", "two": "one"}.get(run, run))


@diagnose.mistake
def one_and_three_swapped(run):
    """You swapped runs one and three: whose KL is wrong before any update?"""
    return diagnose.solution({"one": "three", "three": "one"}.get(run, run))


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
        "What must the probabilities of a row sum to, with one token forbidden?",
        "A logit of −∞ has probability 0. In which row, and before which step?",
    ),
    ("logits",),
)
def suppress_first(logits, token):
    """Log-probabilities (R, V) of one response, with a token forbidden at its first
    position: logits (R, V) → (R, V).

    The scored policy must be the sampled policy. So forbid the token that sampling
    forbids, and only at the same position: the first token. Training needs the
    gradient.
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
    """You forbid the token everywhere: no answer could ever end. Sampling masked only
    the first position.
    """
    allowed = logits.clone()
    allowed[:, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def after_the_softmax(logits, token):
    """The mask comes after the log-softmax, so the first row sums to less than 1: its
    log-probabilities are too low by log(1 − p(EOS)), and the penalty is smallest where
    EOS is most likely.
    """
    logprobs = logits.log_softmax(-1).clone()
    logprobs[0, token] = -torch.inf
    return logprobs


@suppress_first.mistake
def in_sampling_alone(logits, token):
    """You mask nothing: the scored policy is not the sampled policy, and KL is too low
    (case a, the partial fix).
    """
    return logits.log_softmax(-1)


@suppress_first.mistake
def last_position(logits, token):
    """You forbid the token at the last position. An answer may not *begin* with it."""
    allowed = logits.clone()
    allowed[-1, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def everywhere_except_first(logits, token):
    """Yours is reversed: you forbid the token everywhere except at the first
    position.
    """
    allowed = logits.clone()
    allowed[1:, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def position_for_token(logits, token):
    """You swapped row and column: a row is a position, a column is a token."""
    allowed = logits.clone()
    allowed[min(token, len(logits) - 1), 0] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def logit_zero(logits, token):
    """A logit of 0 forbids nothing: its exponential is 1."""
    allowed = logits.clone()
    allowed[0, token] = 0
    return allowed.log_softmax(-1)


@suppress_first.mistake
def logprob_zero(logits, token):
    """A log-probability of 0 is a probability of 1: the token would be certain."""
    logprobs = suppress_first.solution(logits, token).clone()
    logprobs[0, token] = 0
    return logprobs


@suppress_first.mistake
def probabilities(logits, token):
    """These are probabilities. Return their logarithms."""
    return suppress_first.solution(logits, token).exp()


@suppress_first.mistake
def logits_only(logits, token):
    """These are still logits: nothing makes their exponentials sum to 1."""
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
def large_negative(logits, token):
    """Your forbidden token is rare, but not impossible."""
    allowed = logits.clone()
    allowed[0, token] -= 10
    return allowed.log_softmax(-1)


@suppress_first.mistake
def first_row_forbidden(logits, token):
    """You forbid the whole first row. Forbid only one token of it."""
    allowed = logits.clone()
    allowed[0] = -torch.inf
    return allowed.log_softmax(-1)


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
        "Write the probability of a token that is not EOS, without and with the mask.",
        "Divide each model by the probability that its mask leaves. What remains?",
    ),
)
def kl_error(p, ref_p):
    """By how much is KL too low if only sampling masks EOS? Two (N,) → a number.

    `p` and `ref_p` are the probabilities of EOS at the first token, of policy and
    reference. The masked policy is sampled, so EOS is never drawn at the first token.
    The true KL compares the masked policy with the masked reference; the reported KL
    compares unmasked log-probabilities of the same tokens. Return true minus reported
    KL, averaged.
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
    """The reference is also masked: your difference lacks its part."""
    return -torch.log1p(-p).mean()


@kl_error.mistake
def wrong_way_round(p, ref_p):
    """The sign is wrong: the more likely EOS becomes, the *smaller* the
    reported KL is.
    """
    return (torch.log1p(-p) - torch.log1p(-ref_p)).mean()


@kl_error.mistake
def probabilities_of_eos(p, ref_p):
    """This is the log-ratio of EOS itself, which is never sampled. By how much do the
    probabilities of all other tokens change?
    """
    return (p.log() - ref_p.log()).mean()


@kl_error.mistake
def added(p, ref_p):
    """Both terms have the same sign: KL is about a *ratio* of policy and reference."""
    return -(torch.log1p(-p) + torch.log1p(-ref_p)).mean()


@kl_error.mistake
def ratio_alone(p, ref_p):
    """This is a ratio. KL is in nats, so take the logarithm."""
    return ((1 - ref_p) / (1 - p)).mean()


@kl_error.mistake
def difference_of_probabilities(p, ref_p):
    """This is a difference of probabilities. KL compares logarithms."""
    return (p - ref_p).mean()


@kl_error.mistake
def weighted_by_p(p, ref_p):
    """You weight by the probability of EOS. EOS is never sampled; every token that is
    sampled has the whole error.
    """
    return (p * (torch.log1p(-ref_p) - torch.log1p(-p))).mean()


@kl_error.mistake
def weighted_by_the_rest(p, ref_p):
    """You weight by 1 − p. The masked policy samples *only* other tokens."""
    return ((1 - p) * (torch.log1p(-ref_p) - torch.log1p(-p))).mean()


@kl_error.mistake
def kl_of_eos_or_not(p, ref_p):
    """This is the whole KL between EOS and not EOS. Here EOS is never sampled."""
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
    """You average the ratios first: take the logarithm of each ratio."""
    return ((1 - ref_p) / (1 - p)).mean().log()


@kl_error.mistake
def reference_alone(p, ref_p):
    """The policy's part is missing: you compute only the reference's part."""
    return torch.log1p(-ref_p).mean()


@kl_error.mistake
def summed(p, ref_p):
    """You return a sum. Return an average."""
    return (torch.log1p(-ref_p) - torch.log1p(-p)).sum()


@kl_error.alternative
def as_a_ratio(p, ref_p):
    return ((1 - ref_p) / (1 - p)).log().mean()


@SET.exercise(
    "Take length out of the labels",
    2,
    15,
    (
        "The longer answer wins seven of ten pairs. How many rows can you keep?",
        "Count both kinds first. How many of each kind may you still keep at a row?",
    ),
)
def balance(longer_won):
    """Choose rows of pairs, equally many of each kind: list of bool → list of int.

    If the longer answer mostly wins (or mostly loses), a reward model learns length.
    Keep the first rows of each kind, as many as the rarer kind has, in their original
    order.
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
    return ((torch.rand(pick(dice, range(9, 16)), generator=dice) < share).tolist(),)


@balance.mistake
def all_of_them(longer_won):
    """You drop nothing: the labels still prefer a length."""
    return list(range(len(longer_won)))


@balance.mistake
def one_kind(longer_won):
    """Only one kind is left: now length predicts the label *perfectly*."""
    return [row for row, longer in enumerate(longer_won) if longer]


@balance.mistake
def first_half(longer_won):
    """You keep as many rows as a balanced set has, but not equally many of
    each kind.
    """
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    return list(range(2 * n))


@balance.mistake
def other_kind_only(longer_won):
    """Only rows whose longer answer lost are left: length predicts every label."""
    return [row for row, longer in enumerate(longer_won) if not longer]


@balance.mistake
def last_rows(longer_won):
    """You keep the last rows of each kind. Keep the first ones."""
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    rows = _rows(longer_won)
    return sorted(
        rows[True][len(rows[True]) - n :] + rows[False][len(rows[False]) - n :]
    )


@balance.mistake
def not_in_order(longer_won):
    """These are the right rows in the wrong order. Keep the original order."""
    rows = _rows(longer_won)
    n = min(map(len, rows.values()))
    return rows[True][:n] + rows[False][:n]


@balance.mistake
def not_in_order_either(longer_won):
    """These are the right rows in the wrong order. Keep the original order."""
    rows = _rows(longer_won)
    n = min(map(len, rows.values()))
    return rows[False][:n] + rows[True][:n]


@balance.mistake
def labels_for_rows(longer_won):
    """These are labels. Return the *numbers* of the rows."""
    return [longer_won[row] for row in balance.solution(longer_won)]


@balance.mistake
def a_mask_of_rows(longer_won):
    """This is a mask: whether each row is kept. Return the numbers of the kept rows."""
    kept = balance.solution(longer_won)
    return [row in kept for row in range(len(longer_won))]


@balance.mistake
def counted_from_one(longer_won):
    """You count rows from 1. The first row is 0."""
    return [row + 1 for row in balance.solution(longer_won)]


@balance.mistake
def dropped_rows(longer_won):
    """These are the rows to drop. Return the rows to keep."""
    kept = balance.solution(longer_won)
    return [row for row in range(len(longer_won)) if row not in kept]


@balance.mistake
def true_is_rarer(longer_won):
    """You assume that the longer answer wins less often. Look for the rarer kind, which
    may be either.
    """
    return _up_to(longer_won, sum(longer_won))


@balance.mistake
def false_is_rarer(longer_won):
    """You assume that the longer answer wins more often. Look for the rarer kind, which
    may be either.
    """
    return _up_to(longer_won, len(longer_won) - sum(longer_won))


@balance.mistake
def half_of_all(longer_won):
    """You keep half of the rows. The number of rows of the rarer kind decides."""
    return _up_to(longer_won, len(longer_won) // 2)


@balance.mistake
def one_too_few(longer_won):
    """You keep one pair too few of each kind: count the rarer kind again."""
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    return _up_to(longer_won, max(0, n - 1))


def _rows(longer_won):
    return {
        side: [i for i, longer in enumerate(longer_won) if longer is side]
        for side in (True, False)
    }


def _up_to(longer_won, n):
    rows = _rows(longer_won)
    return sorted(rows[True][:n] + rows[False][:n])


@balance.alternative
def sorted_union(longer_won):
    rows = {
        side: [i for i, longer in enumerate(longer_won) if longer is side]
        for side in (True, False)
    }
    n = min(map(len, rows.values()))
    return sorted(rows[True][:n] + rows[False][:n])
