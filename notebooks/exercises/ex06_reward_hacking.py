"""Exercises of notebook 06."""

import torch

from engine import Set, normal

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
    "In a healthy run KL starts at 0, and is never clearly negative.",
)
def diagnose(run):
    """Say what is wrong with a run, only from its curves: str → str.

    | run | score | KL | length |
    |---|---|---|---|
    | one | rises | 0 at step 1, then rises | falls to one token |
    | two | stays the same | 0 at step 1, then stays below 0 | stays the same |
    | three | rises slowly | far above 0 at step 1 already | stays the same |

    Answer for each of `"one"`, `"two"`, `"three"` with one of `"empty answers"`,
    `"sampling settings"`, `"wrong reference"`, `"learning rate too low"`, `"healthy"`.
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
    The reward model likes empty answers, and the policy exploits this mistake.
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
    "Set the logit to −∞ *before* the log-softmax: the rest must sum to 1.",
)
def suppress_first(logits, token):
    """Log-probabilities (R, V) of one response, with a token forbidden at its first
    position: logits (R, V) → (R, V).

    The policy that is scored must be the one that was sampled, so what is forbidden in
    sampling is forbidden here, and only where it was: at the first token.
    """
    allowed = logits.clone()
    allowed[0, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.inputs
def _(dice):
    return normal(dice, 4, 5), 2


@suppress_first.mistake
def everywhere(logits, token):
    """The token is forbidden everywhere: no answer could ever end. Only the first
    position was masked in sampling.
    """
    allowed = logits.clone()
    allowed[:, token] = -torch.inf
    return allowed.log_softmax(-1)


@suppress_first.mistake
def after_the_softmax(logits, token):
    """The mask comes after the log-softmax, so the first row sums to less than 1: its
    log-probabilities are too low by log(1 − p(EOS)), and the penalty is smallest
    where EOS is likeliest.
    """
    logprobs = logits.log_softmax(-1)
    logprobs[0, token] = -torch.inf
    return logprobs


@suppress_first.mistake
def in_sampling_alone(logits, token):
    """Nothing is masked here: what is scored is not what was sampled, and KL comes out
    too low (case a, half a cure).
    """
    return logits.log_softmax(-1)


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
    "log π_masked = log π − log(1 − p) for every other token.",
)
def kl_error(p, ref_p):
    """By how much KL is too low when EOS is masked in sampling alone: two (N,) → a
    number.

    `p` and `ref_p` are the probabilities of EOS at the first token, of policy and
    reference. Sampled is the masked policy; compared are unmasked log-probabilities.
    Return true minus reported KL, averaged.
    """
    return (torch.log1p(-ref_p) - torch.log1p(-p)).mean()


@kl_error.inputs
def _(dice):
    return normal(dice, 6).sigmoid(), normal(dice, 6).sigmoid() * 0.1


@kl_error.mistake
def policy_alone(p, ref_p):
    """The reference is masked, too: its −log(1 − p_ref) belongs in the difference."""
    return -torch.log1p(-p).mean()


@kl_error.mistake
def wrong_way_round(p, ref_p):
    """The sign is wrong: the likelier EOS becomes, the *smaller* is the reported KL."""
    return (torch.log1p(-p) - torch.log1p(-ref_p)).mean()


@kl_error.mistake
def probabilities_of_eos(p, ref_p):
    """That is the log-ratio of EOS itself, which is never sampled. All the other tokens
    are scaled by 1 / (1 − p).
    """
    return (p.log() - ref_p.log()).mean()


@kl_error.alternative
def as_a_ratio(p, ref_p):
    return ((1 - ref_p) / (1 - p)).log().mean()


@SET.exercise(
    "Take length out of the labels",
    2,
    15,
    "Count both kinds; keep the first n of each, in the old order.",
)
def balance(longer_won):
    """Rows of pairs to keep, as many of either kind: list of bool → list of int.

    Where the longer answer mostly wins (or mostly loses), a reward model learns length.
    Keep the first rows of each kind, as many as the rarer one has, in their order.
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
    return (
        (torch.rand(12, generator=dice) < 0.7).tolist() + [True, True, False, False],
    )


@balance.mistake
def all_of_them(longer_won):
    """Nothing is dropped: the labels prefer a length as before."""
    return list(range(len(longer_won)))


@balance.mistake
def one_kind(longer_won):
    """Only one kind is left: now length predicts the label *perfectly*."""
    return [row for row, longer in enumerate(longer_won) if longer]


@balance.mistake
def first_half(longer_won):
    """You keep as many rows as a balanced set has, but not as many of either kind."""
    n = min(sum(longer_won), len(longer_won) - sum(longer_won))
    return list(range(2 * n))


@balance.alternative
def sorted_union(longer_won):
    rows = {
        side: [i for i, longer in enumerate(longer_won) if longer is side]
        for side in (True, False)
    }
    n = min(map(len, rows.values()))
    return sorted(rows[True][:n] + rows[False][:n])
