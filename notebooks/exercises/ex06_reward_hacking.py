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


@SET.exercise("Three broken runs", 2, 15)
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


def by_reasons(run):
    first, later = RUNS[run]
    if first != "0":
        return "wrong reference"
    return "sampling settings" if later == "below 0" else "empty answers"


CAUSES = [
    "empty answers",
    "sampling settings",
    "wrong reference",
    "learning rate too low",
    "healthy",
]


def misread(run):
    """Return the wrong answers that mistake only this run's cause."""
    return [
        lambda other, cause=cause: cause if other == run else diagnose.solution(other)
        for cause in CAUSES
        if cause != diagnose.solution(run)
    ]


diagnose.hints = (
    "Start with the KL column. Which values does a healthy run show there?",
    "In a healthy run, KL starts at 0 and is never clearly negative.",
)
diagnose.mistakes = {
    "run_one": (
        "Look at run one again: its score rises, but how long are its answers at the "
        "end? The policy exploits a mistake of the reward model.",
        *misread("one"),
    ),
    "run_two": (
        "Look at run two again: its KL is *negative*. Can a divergence keep this sign "
        "for long?",
        *misread("two"),
    ),
    "run_three": (
        "Look at run three again: its KL is far above 0 *before the first update*. Has "
        "any weight changed at step 1?",
        *misread("three"),
    ),
    "swapped": (
        "You swap the causes of two runs. Look at the KL at step 1, and at its sign "
        "later.",
        lambda run: diagnose.solution({"two": "three", "three": "two"}.get(run, run)),
        lambda run: diagnose.solution({"one": "three", "three": "one"}.get(run, run)),
        lambda run: diagnose.solution({"one": "two", "two": "one"}.get(run, run)),
    ),
}
diagnose.alternatives = [by_reasons]


@SET.exercise("Forbid EOS at the start", 2, 15, gradient=("logits",))
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


def with_a_mask(logits, token):
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    forbidden[0, token] = True
    allowed = logits.masked_fill(forbidden, -torch.inf)
    return allowed - allowed.logsumexp(-1, keepdim=True)


def forbidden(logits, token, row=0, logit=-torch.inf):
    allowed = logits.clone()
    allowed[row, token] = logit
    return allowed


suppress_first.hints = (
    "If one token is forbidden, what must the probabilities of a row sum to?",
    "A logit of −∞ gives probability 0. In which row do you need it, and before "
    "which step?",
)
suppress_first.mistakes = {
    "at_another_position": (
        "You forbid the token at the wrong positions. An answer must not *begin* with "
        "it; if it is forbidden everywhere, no answer can end.",
        lambda logits, token: forbidden(logits, token, slice(None)).log_softmax(-1),
        lambda logits, token: forbidden(logits, token, -1).log_softmax(-1),
        lambda logits, token: forbidden(logits, token, 1).log_softmax(-1),
    ),
    "after_the_softmax": (
        "You mask after the log-softmax, so the first row's probabilities sum to 1 − "
        "p(EOS) instead of 1, and its log-probabilities are too low.",
        lambda logits, token: forbidden(logits.log_softmax(-1), token),
    ),
    "only_rare": (
        "You make the forbidden token rare, or set its logit to 0, but its probability "
        "must be exactly 0.",
        lambda logits, token: forbidden(logits, token, logit=0).log_softmax(-1),
        lambda logits, token: forbidden(
            logits, token, logit=logits[0].min()
        ).log_softmax(-1),
        lambda logits, token: forbidden(
            logits, token, logit=logits[0, token] - 10
        ).log_softmax(-1),
    ),
    "normalized_elsewhere": (
        "You normalize over positions or over the whole matrix. Each position has its "
        "own distribution over tokens.",
        lambda logits, token: forbidden(logits, token).log_softmax(0),
        lambda logits, token: (
            forbidden(logits, token).flatten().log_softmax(0).view_as(logits)
        ),
    ),
}
suppress_first.alternatives = [with_a_mask]


@SET.exercise("How wrong is the KL?", 3, 20)
def kl_error(p, ref_p):
    """Return by how much KL is too low if only sampling masks EOS: two (N,) → float.

    `p` and `ref_p` are the policy's and the reference's probabilities of EOS at the
    first token. Responses are drawn from the masked policy, so EOS is never the first
    token. The true KL compares the masked policy with the masked reference; the
    reported KL compares unmasked log-probabilities of the same tokens. Return the mean
    of true minus reported KL. [Silent bugs](../deeper/silent_bugs.ipynb), case a, shows
    this error in a run.
    """
    return (torch.log1p(-ref_p) - torch.log1p(-p)).mean()


@kl_error.inputs
def _(dice):
    n = pick(dice, range(3, 8))
    return (2 * normal(dice, n)).sigmoid(), normal(dice, n).sigmoid() * pick(
        dice, (0.1, 1)
    )


kl_error.hints = (
    "Write the probability of a token other than EOS, without and with the mask.",
    "Divide each model's probability by the total probability of the tokens that "
    "its mask allows. What remains of the difference between the true "
    "and the reported KL?",
)
kl_error.mistakes = {
    "averaged_too_early": (
        "You average before the logarithm. Take the logarithm for each pair of "
        "probabilities first.",
        lambda p, ref: torch.log1p(-ref.mean()) - torch.log1p(-p.mean()),
        lambda p, ref: ((1 - ref) / (1 - p)).mean().log(),
    ),
    "probabilities_of_eos": (
        "You return the log-ratio of EOS itself, which is never sampled. By how much "
        "do the probabilities of all other tokens change?",
        lambda p, ref: (p.log() - ref.log()).mean(),
    ),
    "weighted": (
        "You weight by the probability of EOS or of the other tokens. The masked "
        "policy samples *only* tokens other than EOS, so no weight is needed.",
        lambda p, ref: ((1 - p) * (torch.log1p(-ref) - torch.log1p(-p))).mean(),
        lambda p, ref: (p * (torch.log1p(-ref) - torch.log1p(-p))).mean(),
        lambda p, ref: (
            p * (p.log() - ref.log()) + (1 - p) * (torch.log1p(-p) - torch.log1p(-ref))
        ).mean(),
    ),
    "never_negative": (
        "You drop the signs of errors, with absolute values or by setting negative "
        "errors to 0. The reported KL may also be too high.",
        lambda p, ref: (torch.log1p(-ref) - torch.log1p(-p)).abs().mean(),
        lambda p, ref: (torch.log1p(-ref) - torch.log1p(-p)).clamp(min=0).mean(),
    ),
}
kl_error.alternatives = [lambda p, ref_p: ((1 - ref_p) / (1 - p)).log().mean()]


@SET.exercise("Take length out of the labels", 2, 15)
def balance(longer_won):
    """Choose as many rows with True as with False: list of bool → list of int.

    If the longer answer mostly wins (or mostly loses), a reward model learns length.
    If the rarer kind has n rows, keep the first n rows of each kind. Return the indices
    of these rows in their original order.
    [Over-optimization](../deeper/over_optimization.ipynb), case b, uses such pairs.
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


def sorted_union(longer_won):
    rows = {
        side: [i for i, longer in enumerate(longer_won) if longer is side]
        for side in (True, False)
    }
    n = min(map(len, rows.values()))
    return sorted(rows[True][:n] + rows[False][:n])


def rows(longer_won, kind):
    return [row for row, longer in enumerate(longer_won) if longer == kind]


def first_rows(longer_won, n):
    """Return the first n rows of each kind, in their original order."""
    return sorted(rows(longer_won, True)[:n] + rows(longer_won, False)[:n])


def rarer(longer_won):
    return min(sum(longer_won), len(longer_won) - sum(longer_won))


balance.hints = (
    "The longer answer wins seven of ten pairs. How many of these ten rows can you "
    "keep?",
    "Count both kinds first. At each row, how many rows of each kind may you "
    "still keep?",
)
balance.mistakes = {
    "not_in_order": (
        "You return the right rows in the wrong order. Keep the original order.",
        lambda x: rows(x, True)[: rarer(x)] + rows(x, False)[: rarer(x)],
        lambda x: [row for pair in zip(rows(x, True), rows(x, False)) for row in pair],
    ),
    "last_rows": (
        "You keep the last rows of each kind. Keep the first rows.",
        lambda x: sorted(
            rows(x, True)[sum(x) - rarer(x) :]
            + rows(x, False)[len(x) - sum(x) - rarer(x) :]
        ),
    ),
    "not_indices": (
        "You return labels or a mask. Return the *indices* of the rows.",
        lambda x: [x[row] for row in balance.solution(x)],
        lambda x: [row in balance.solution(x) for row in range(len(x))],
    ),
    "not_balanced": (
        "You do not keep equally many rows of both kinds. Either kind may be the rarer "
        "kind: keep all of its rows, and as many of the other kind.",
        lambda x: list(range(len(x))),
        lambda x: first_rows(x, sum(x)),
        lambda x: first_rows(x, len(x) - sum(x)),
        lambda x: first_rows(x, len(x) // 2),
        lambda x: first_rows(x, rarer(x) + 1),
        lambda x: list(range(2 * rarer(x))),
    ),
}
balance.alternatives = [sorted_union]
