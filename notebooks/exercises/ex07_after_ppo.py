"""Exercises of notebook 07."""

import torch
from torch.nn.functional import logsigmoid, relu

from engine import Set, normal, pick, ragged

SET = Set(
    "07_after_ppo",
    "After PPO",
    "import torch\nfrom torch.nn.functional import logsigmoid",
)
check = SET.check


@SET.exercise(
    "A group's advantages",
    1,
    10,
    (
        "Which responses must you compare a response with, so that an easy prompt "
        "alone does not favor it?",
        "Each row belongs to one prompt. Keep the dimension that you average over.",
    ),
)
def group_advantages(rewards, divide):
    """Return GRPO's advantages from the rewards of G responses to each of P prompts:
    (P, G) → (P, G).

    An advantage is the reward minus its *group's* mean. If `divide` is True, divide
    this difference by the group's unbiased standard deviation plus 1e-4. Without the
    division, the advantages are those of Dr. GRPO.
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-4) if divide else centered


@group_advantages.inputs
def _(dice):
    p, g = pick(dice, (2, 3)), pick(dice, (4, 5))
    rewards = pick(dice, (0.5, 1)) * normal(dice, p, g) + normal(dice, p, 1)
    rewards[0] = 1.0  # all rewards of this prompt are equal
    return rewards, bool(dice.initial_seed() % 2)


def _std(x, dimension=1, correction=1):
    return x.std(dimension, keepdim=True, correction=correction)


CENTERS = {  # name: (baseline, message)
    "": (lambda x: x.mean(1, keepdim=True), ""),
    "batch mean": (
        lambda x: x.mean(),
        "You subtract the mean of the whole batch, so every response to an easy prompt "
        "would look good. Compare each response only with its own group, whose "
        "responses answer the same prompt.",
    ),
    "prompts' mean": (
        lambda x: x.mean(0, keepdim=True),
        "You average over prompts (dim 0). A group is a row.",
    ),
    "median": (
        lambda x: x.median(1, keepdim=True).values,
        "You subtract the group's median. Subtract its mean.",
    ),
    "middle": (
        lambda x: x.quantile(0.5, 1, keepdim=True),
        "You subtract the group's median. Subtract its mean.",
    ),
    "best": (
        lambda x: x.amax(1, keepdim=True),
        "You subtract the group's best reward. Subtract its mean.",
    ),
    "worst": (
        lambda x: x.amin(1, keepdim=True),
        "You subtract the group's lowest reward. Subtract its mean.",
    ),
    "first": (
        lambda x: x[:, :1],
        "You subtract the first response's reward. Subtract the group's mean.",
    ),
    "sum": (
        lambda x: x.sum(1, keepdim=True),
        "You subtract the group's sum. Subtract its mean.",
    ),
    "nothing": (lambda x: 0 * x, "You do not subtract the mean."),
    "others": (
        lambda x: (x.sum(1, keepdim=True) - x) / (x.shape[1] - 1),
        "You compare with the mean of the *other* rewards, as RLOO does. GRPO's mean "
        "includes all rewards of the group.",
    ),
}
SCALES = {  # name: (divisor, message)
    "": (lambda x: _std(x) + 1e-4, ""),
    "biased": (
        lambda x: _std(x, correction=0) + 1e-4,
        "Your standard deviation divides by n. To make it unbiased, divide by n − 1.",
    ),
    "small number missing": (
        _std,
        "You add nothing to the standard deviation, so you divide by 0 (or nearly 0) "
        "for a group whose rewards are all equal. Add 1e-4.",
    ),
    "small number inside": (
        lambda x: (_std(x) ** 2 + 1e-4).sqrt(),
        "You add 1e-4 inside the square root. Add it to the standard deviation itself.",
    ),
    "variance": (
        lambda x: _std(x) ** 2 + 1e-4,
        "You divide by the variance. Divide by its square root.",
    ),
    "batch": (
        lambda x: x.std() + 1e-4,
        "You divide by the standard deviation of the whole batch. Each group has its "
        "own standard deviation.",
    ),
    "biased batch": (
        lambda x: x.std(correction=0) + 1e-4,
        "You divide by the (biased) standard deviation of the whole batch. Each group "
        "has its own standard deviation.",
    ),
    "prompts": (
        lambda x: _std(x, 0) + 1e-4,
        "Your standard deviation runs over prompts (dim 0). A group is a row.",
    ),
    "product": (
        lambda x: 1 / (_std(x) + 1e-4),
        "You multiply by the standard deviation. Divide by it.",
    ),
    "mean": (
        lambda x: x.mean(1, keepdim=True) + 1e-4,
        "You divide by the group's mean. Divide by its standard deviation.",
    ),
    "range": (
        lambda x: x.amax(1, keepdim=True) - x.amin(1, keepdim=True) + 1e-4,
        "You divide by the range of a group. Divide by its standard deviation.",
    ),
    "length": (
        lambda x: (x - x.mean(1, keepdim=True)).norm(dim=1, keepdim=True) + 1e-4,
        "You divide by the square root of the *sum* of squares. A standard deviation "
        "averages the squares.",
    ),
    "absolute": (
        lambda x: (x - x.mean(1, keepdim=True)).abs().mean(1, keepdim=True) + 1e-4,
        "You divide by the mean absolute deviation. Divide by the standard deviation.",
    ),
} | {
    f"{number} added": (
        lambda x, number=number: _std(x) + number,
        "You add the wrong number to the standard deviation. Add 1e-4."
        if number > 1e-7
        else "You add nearly nothing to the standard deviation. Add 1e-4.",
    )
    for number in (1e-8, 1e-5, 1e-3, 1e-2, 0.1, 1)
}


OFTEN = ("", "batch", "prompts", "biased", "small number missing")  # with each center


def _group(center, scale):
    def code(rewards, divide):
        centered = rewards - CENTERS[center][0](rewards)
        return centered / SCALES[scale][0](rewards) if divide else centered

    message = f"{CENTERS[center][1]} {SCALES[scale][1]}".strip()
    group_advantages.say(message, **{f"{center}, {scale}": code})


for _center in CENTERS:
    for _scale in SCALES:
        if (_center or _scale) and (not _center or _scale in OFTEN):
            _group(_center, _scale)


def _when_divided(message, **codes):
    """Register mistakes that affect only the result with ``divide``."""
    for name, code in codes.items():

        def either(rewards, divide, code=code):
            mean = rewards.mean(1, keepdim=True)
            return code(rewards, mean, _std(rewards)) if divide else rewards - mean

        group_advantages.say(message, **{name: either})


_when_divided(
    "If `divide` is True, you do not subtract the mean. Subtract the mean whether or "
    "not `divide` is True.",
    not_centered=lambda x, mean, std: x / (std + 1e-4),
)
_when_divided(
    "You divide only the mean or only the reward. Divide the difference between the "
    "two. Check the parentheses.",
    only_the_mean=lambda x, mean, std: x - mean / (std + 1e-4),
    only_the_reward=lambda x, mean, std: x / (std + 1e-4) - mean,
)
_when_divided(
    "You add 1e-4 after the division, but it belongs in the divisor. Check the "
    "parentheses.",
    after_the_division=lambda x, mean, std: (x - mean) / std + 1e-4,
    after_a_division_of_zeros=lambda x, mean, std: (
        ((x - mean) / std).nan_to_num() + 1e-4
    ),
)
_when_divided(
    "You subtract 1e-4 from the standard deviation. Add it.",
    subtracted=lambda x, mean, std: (x - mean) / (std - 1e-4),
)
_when_divided(
    "You divide twice by the standard deviation.",
    twice=lambda x, mean, std: (x - mean) / (std + 1e-4) ** 2,
)
_when_divided(
    "You divide by the square root of the standard deviation. `std` already includes a "
    "square root.",
    rooted=lambda x, mean, std: (x - mean) / (std.sqrt() + 1e-4),
    rooted_with_number=lambda x, mean, std: (x - mean) / (std + 1e-4).sqrt(),
)
group_advantages.say(
    "You divide even if `divide` is False. Without the division, a group of nearly "
    "equal rewards keeps its small advantages, and β keeps its meaning.",
    always_divided=lambda rewards, divide: group_advantages.solution(rewards, True),
)
group_advantages.say(
    "You never divide. Divide if `divide` is True.",
    never_divided=lambda rewards, divide: group_advantages.solution(rewards, False),
)
group_advantages.say(
    "You divide exactly when `divide` is False.",
    wrong_way_round=lambda rewards, divide: group_advantages.solution(
        rewards, not divide
    ),
)


@group_advantages.alternative
def row_by_row(rewards, divide):
    rows = []
    for row in rewards:
        rows.append((row - row.mean()) / (row.std() + 1e-4 if divide else 1.0))
    return torch.stack(rows)


@SET.exercise(
    "Best of n",
    2,
    15,
    (
        "When is the worst of all responses the best of n draws?",
        "F(y) adds up the probabilities of y and of all worse responses. What does "
        "F(y−) add up?",
    ),
)
def best_of_n(probabilities, n):
    """Return each response's probability of being the best of n draws: (N,), from worst
    to best → (N,).

    The responses are ordered by their rewards, which are all different. Response y is
    the best draw if all n draws score at most as high as y, but not all of them score
    lower. The probability of this event is F(y)ⁿ − F(y−)ⁿ.
    """
    at_most = probabilities.cumsum(0)
    return at_most**n - (at_most - probabilities) ** n


@best_of_n.inputs
def _(dice):
    return normal(dice, pick(dice, range(4, 8))).softmax(0), pick(dice, (2, 3, 5))


@best_of_n.mistake
def drawn_once(probabilities, n):
    """You return the probability that y is drawn at all in n draws. For y to be *kept*,
    no draw may be better.
    """
    return 1 - (1 - probabilities) ** n


@best_of_n.mistake
def at_most_alone(probabilities, n):
    """You return the probability that the best draw is *at most* as good as y. Subtract
    the probability that the best draw is worse than y.
    """
    return probabilities.cumsum(0) ** n


@best_of_n.mistake
def worst_of_n(probabilities, n):
    """You return the probability of being the worst of n draws, because you sum from
    the wrong end.
    """
    at_least = probabilities.flip(0).cumsum(0).flip(0)
    return at_least**n - (at_least - probabilities) ** n


@best_of_n.mistake
def power_of_each(probabilities, n):
    """You return the probability that all n draws are y. Some draws may score lower."""
    return probabilities**n


@best_of_n.mistake
def powers_normalized(probabilities, n):
    """You raise each probability to a power and normalize. A response is kept for its
    *rank*, so the formula must contain the probabilities of worse responses.
    """
    return probabilities**n / (probabilities**n).sum()


@best_of_n.mistake
def less_alone(probabilities, n):
    """You return the probability that all draws score lower than y."""
    return (probabilities.cumsum(0) - probabilities) ** n


@best_of_n.mistake
def one_draw_times_n(probabilities, n):
    """For each draw, you add the probability that this draw is y and the other draws
    score at most as high. You count a case several times if y is drawn more than once.
    """
    return n * probabilities * probabilities.cumsum(0) ** (n - 1)


@best_of_n.mistake
def others_less(probabilities, n):
    """You count only cases in which y is drawn exactly once. Response y may be drawn
    more than once.
    """
    return n * probabilities * (probabilities.cumsum(0) - probabilities) ** (n - 1)


@best_of_n.mistake
def first_lost(probabilities, n):
    """You give the worst response a probability of 0. No response scores lower, so its
    F(y−) is 0.
    """
    powers = probabilities.cumsum(0) ** n
    return torch.cat([powers.new_zeros(1), powers.diff()])


@best_of_n.mistake
def scaled(probabilities, n):
    """You multiply by n, but probabilities of draws do not add up: only the best draw
    counts.
    """
    return probabilities * n


@best_of_n.mistake
def unchanged(probabilities, n):
    """You return the probabilities of a single draw."""
    return probabilities.clone()


def _best(message, **formulas):
    """Register formulas of p, F(y), F(y−) and n."""
    for name, formula in formulas.items():

        def code(probabilities, n, formula=formula):
            at_most = probabilities.cumsum(0)
            return formula(probabilities, at_most, at_most - probabilities, n)

        best_of_n.say(message, **{name: code})


_best(
    "Your result lacks the worst response. No response scores lower, so its F(y−) is "
    "0.",
    one_lost=lambda p, F, less, n: (F**n).diff(),
)
_best(
    "Only your result for the worst response is wrong. Its F(y−) is 0, and its F(y) is "
    "its own probability. Raise both to the power n.",
    wrapped=lambda p, F, less, n: F**n - F.roll(1) ** n,
    worst_not_raised=lambda p, F, less, n: torch.cat([p[:1], (F**n).diff()]),
)
_best(
    "You return each response's result at a neighboring position: all results are "
    "shifted by one.",
    next_response=lambda p, F, less, n: torch.cat([(F**n).diff(), 1 - F[-1:] ** n]),
    next_and_one=lambda p, F, less, n: torch.cat([(F**n).diff(), 1 + 0 * F[-1:]]),
    previous=lambda p, F, less, n: (
        less**n - torch.cat([p.new_zeros(2), F])[: len(p)] ** n
    ),
)
_best(
    "Your F(y−) leaves out two responses. It must leave out only y itself.",
    two_skipped=lambda p, F, less, n: (
        F**n - torch.cat([p.new_zeros(2), F])[: len(p)] ** n
    ),
)
_best(
    "You sort the probabilities. The responses are already in the order of their "
    "rewards, which is a different order.",
    sorted_first=lambda p, F, less, n: best_of_n.solution(p.sort().values, n),
    sorted_down=lambda p, F, less, n: best_of_n.solution(
        p.sort(descending=True).values, n
    ),
)
_best(
    "You return the probability that y is drawn exactly once, whatever the other "
    "draws are. For y to be the best, no other draw may score higher.",
    once=lambda p, F, less, n: n * p * (1 - p) ** (n - 1),
)
_best(
    "You require one fixed draw to be y. Any of the n draws may be y, and several "
    "draws may be y.",
    first_draw=lambda p, F, less, n: p * F ** (n - 1),
    first_draw_only=lambda p, F, less, n: p * less ** (n - 1),
)
_best(
    "You scale your probabilities so that they sum to 1. If a formula counts each "
    "event once, its probabilities already sum to 1.",
    first_draw_scaled=lambda p, F, less, n: p * F ** (n - 1) / (p * F ** (n - 1)).sum(),
    others_less_scaled=lambda p, F, less, n: (
        p * less ** (n - 1) / (p * less ** (n - 1)).sum()
    ),
    drawn_scaled=lambda p, F, less, n: (1 - (1 - p) ** n) / (1 - (1 - p) ** n).sum(),
    at_most_scaled=lambda p, F, less, n: F**n / (F**n).sum(),
    less_scaled=lambda p, F, less, n: less**n / (less**n).sum(),
)
_best(
    "You raise only one of F(y) and F(y−) to the power n. Raise both.",
    only_the_upper=lambda p, F, less, n: F**n - less,
    only_the_lower=lambda p, F, less, n: F - less**n,
)
_best(
    "You subtract the wrong event. Subtract the probability that all n draws score "
    "lower than y.",
    all_are_y=lambda p, F, less, n: F**n - p**n,
    none_is_y=lambda p, F, less, n: F**n - (1 - p) ** n,
    all_better=lambda p, F, less, n: F**n - (1 - F) ** n,
)
_best(
    "You return the probability that at least one draw scores higher than y.",
    beaten=lambda p, F, less, n: 1 - F**n,
)
_best(
    "You return the probability that at least one draw is y or better. A better draw "
    "would be kept instead of y.",
    reached=lambda p, F, less, n: 1 - less**n,
)
_best(
    "You use the probabilities of *worse* responses where the probabilities of better "
    "responses belong, or the reverse.",
    all_higher=lambda p, F, less, n: (1 - F) ** n,
    none_lower=lambda p, F, less, n: (1 - less) ** n,
    some_lower=lambda p, F, less, n: 1 - (1 - less) ** n,
    some_at_most=lambda p, F, less, n: 1 - (1 - F) ** n,
)
_best(
    "You return F(y), the probability that a single draw is y or worse.",
    cumulative=lambda p, F, less, n: F,
)
_best(
    "You take a root. All n draws must be at most as good as y, and the probabilities "
    "of independent events multiply.",
    rooted=lambda p, F, less, n: F ** (1 / n) - less ** (1 / n),
)


@best_of_n.alternative
def by_differences(probabilities, n):
    powers = probabilities.cumsum(0) ** n
    return torch.diff(powers, prepend=powers.new_zeros(1))


@SET.exercise(
    "DPO's loss",
    2,
    15,
    (
        "Start from the pairwise loss of notebook 01. What replaces a score?",
        "Compute both implied rewards, each from its answer's two log-probabilities.",
    ),
    True,
)
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """Return DPO's loss for pairs, from log-probabilities: four (B,) → one number.

    It is notebook 01's pairwise loss, with the implied reward β (log π − log π_ref)
    as the score, averaged over pairs. The reference does not learn: detach its
    log-probabilities.
    """
    implied = beta * (chosen - ref_chosen.detach())
    against = beta * (rejected - ref_rejected.detach())
    return -logsigmoid(implied - against).mean()


@dpo_loss.inputs
def _(dice):
    b, scale = pick(dice, range(3, 7)), pick(dice, (1, 10, 30))
    return *(-scale * normal(dice, 4, b).abs()), pick(dice, (0.05, 0.1, 0.5))


LEARNED = "no_beta wrong_way_round summed divided_by_beta beta_outside no_logarithm "
LEARNED += "positive references_added each_answer_alone mean_inside rejected_left_out"
LEARNED = LEARNED.split()


def _dpo(message, **losses):
    """Register losses that take c, r, their references and beta.

    Some of these losses also train the references.
    """
    for name, loss in losses.items():

        def learns(chosen, rejected, ref_chosen, ref_rejected, beta, loss=loss):
            return loss(chosen, rejected, ref_chosen, ref_rejected, beta)

        def code(c, r, ref_c, ref_r, beta, loss=loss):
            return loss(c, r, ref_c.detach(), ref_r.detach(), beta)

        dpo_loss.say(message, **{name: code})
        if name in LEARNED:
            also = " The reference also gets a gradient. Detach its log-probabilities."
            dpo_loss.say(message + also, **{f"{name}, reference learns": learns})


def _margin(message, **margins):
    """Register DPO's loss with wrong margins."""
    for name, margin in margins.items():

        def loss(*given, margin=margin):
            return -logsigmoid(margin(*given)).mean()

        _dpo(message, **{name: loss})


def _losses(message, **functions):
    """Register wrong losses computed from the right margin."""
    for name, function in functions.items():

        def loss(c, r, ref_c, ref_r, beta, function=function):
            return function(c - ref_c - r + ref_r, beta)

        _dpo(message, **{name: loss})


dpo_loss.say(
    "The value is right, but a gradient flows into the reference. Detach the "
    "reference's log-probabilities.",
    reference_learns=lambda c, r, ref_c, ref_r, beta: (
        -logsigmoid(beta * (c - ref_c - r + ref_r)).mean()
    ),
)
_margin(
    "The reference is missing: nothing keeps the policy near the reference.",
    no_reference=lambda c, r, ref_c, ref_r, beta: beta * (c - r),
)
_margin(
    "The reference and β are missing. You compute the pairwise loss from "
    "log-probabilities instead of implied rewards.",
    no_reference_or_beta=lambda c, r, ref_c, ref_r, beta: c - r,
)
_margin(
    "You use the reference's log-probability for only one of the two answers.",
    reference_of_chosen=lambda c, r, ref_c, ref_r, beta: beta * (c - ref_c - r),
    reference_of_rejected=lambda c, r, ref_c, ref_r, beta: beta * (c - r + ref_r),
)
_margin(
    "The reference has the wrong sign, or you use each answer's reference "
    "log-probability for the other answer. An implied reward contains a *difference* "
    "from the reference.",
    references_added=lambda c, r, ref_c, ref_r, beta: beta * (c + ref_c - r - ref_r),
)
_margin(
    "One of the reference's two log-probabilities has the wrong sign.",
    chosen_reference_added=lambda c, r, ref_c, ref_r, beta: (
        beta * (c + ref_c - r + ref_r)
    ),
    rejected_reference_subtracted=lambda c, r, ref_c, ref_r, beta: (
        beta * (c - ref_c - r - ref_r)
    ),
)
_margin(
    "You add the implied rewards of the two answers. Subtract the implied reward of "
    "the rejected answer.",
    implied_added=lambda c, r, ref_c, ref_r, beta: beta * (c - ref_c + r - ref_r),
)
_margin(
    "You multiply only a part of the margin by β. β must scale each whole log-ratio.",
    beta_on_policy=lambda c, r, ref_c, ref_r, beta: beta * (c - r) - ref_c + ref_r,
    beta_on_reference=lambda c, r, ref_c, ref_r, beta: c - r - beta * (ref_c - ref_r),
    beta_on_chosen=lambda c, r, ref_c, ref_r, beta: beta * (c - ref_c) - r + ref_r,
    beta_on_rejected=lambda c, r, ref_c, ref_r, beta: c - ref_c - beta * (r - ref_r),
)
_margin(
    "You use a difference of probability ratios. The implied reward contains the "
    "*logarithm* of a ratio.",
    ratios=lambda c, r, ref_c, ref_r, beta: (
        beta * ((c - ref_c).exp() - (r - ref_r).exp())
    ),
    powers_of_ratios=lambda c, r, ref_c, ref_r, beta: (
        (beta * (c - ref_c)).exp() - (beta * (r - ref_r)).exp()
    ),
)
_margin(
    "You subtract probabilities. Subtract log-probabilities.",
    probabilities=lambda c, r, ref_c, ref_r, beta: (
        beta * (c.exp() - ref_c.exp() - r.exp() + ref_r.exp())
    ),
)
_margin(
    "You divide log-probabilities by each other. Subtract them.",
    ratio_of_logarithms=lambda c, r, ref_c, ref_r, beta: beta * (c / ref_c - r / ref_r),
)
_margin(
    "The rejected answer is missing.",
    rejected_left_out=lambda c, r, ref_c, ref_r, beta: beta * (c - ref_c),
)
_margin(
    "The chosen answer is missing.",
    chosen_left_out=lambda c, r, ref_c, ref_r, beta: -beta * (r - ref_r),
)
_dpo(
    "You apply a sigmoid to each answer's implied reward. Apply a sigmoid only to the "
    "*difference* of the implied rewards.",
    each_answer_alone=lambda c, r, ref_c, ref_r, beta: (
        -(logsigmoid(beta * (c - ref_c)) + logsigmoid(-beta * (r - ref_r))).mean()
    ),
    difference_of_logs=lambda c, r, ref_c, ref_r, beta: (
        -(logsigmoid(beta * (c - ref_c)) - logsigmoid(beta * (r - ref_r))).mean()
    ),
    difference_of_sigmoids=lambda c, r, ref_c, ref_r, beta: (
        -((beta * (c - ref_c)).sigmoid() - (beta * (r - ref_r)).sigmoid()).mean()
    ),
)
_losses(
    "β is missing: it sets how much reward one nat of KL must earn.",
    no_beta=lambda margin, beta: -logsigmoid(margin).mean(),
)
_losses(
    "The sign is wrong: your loss makes the rejected answer more likely.",
    wrong_way_round=lambda margin, beta: -logsigmoid(-beta * margin).mean(),
)
_losses(
    "You sum over pairs, so the loss and its gradient grow with the batch. Take the "
    "mean.",
    summed=lambda margin, beta: -logsigmoid(beta * margin).sum(),
)
_losses(
    "You divide by β. The implied reward is β *times* the log-ratio.",
    divided_by_beta=lambda margin, beta: -logsigmoid(margin / beta).mean(),
)
_losses(
    "Your β is outside the sigmoid. β belongs inside, as a factor of the log-ratio.",
    beta_outside=lambda margin, beta: -beta * logsigmoid(margin).mean(),
)
_losses(
    "Your loss contains β inside and outside the sigmoid. β belongs only inside.",
    beta_twice=lambda margin, beta: -beta * logsigmoid(beta * margin).mean(),
    beta_and_inverse=lambda margin, beta: -logsigmoid(beta * margin).mean() / beta,
)
_losses(
    "You average probabilities, without a logarithm.",
    no_logarithm=lambda margin, beta: -torch.sigmoid(beta * margin).mean(),
    probability_of_error=lambda margin, beta: torch.sigmoid(-beta * margin).mean(),
)
_losses(
    "The minus sign is missing: an optimizer would make the chosen answers less "
    "likely.",
    positive=lambda margin, beta: logsigmoid(beta * margin).mean(),
)
_losses(
    "You average before the logarithm. Compute a loss for each pair, and then take "
    "the mean.",
    mean_inside=lambda margin, beta: -logsigmoid(beta * margin.mean()),
    mean_of_sigmoids=lambda margin, beta: -torch.sigmoid(beta * margin).mean().log(),
)
_losses(
    "You compute a squared loss, as IPO does. DPO uses a sigmoid.",
    squared=lambda margin, beta: (margin - 1 / (2 * beta)).square().mean(),
    squared_with_beta=lambda margin, beta: (beta * margin - 0.5).square().mean(),
    squared_of_one=lambda margin, beta: (beta * margin - 1).square().mean(),
)
_losses(
    "You compute a hinge loss, which ignores pairs with a large margin. DPO uses a "
    "smooth loss, the pairwise loss of notebook 01.",
    hinge=lambda margin, beta: relu(1 - beta * margin).mean(),
    hinge_at_zero=lambda margin, beta: relu(-beta * margin).mean(),
    hinge_of_one=lambda margin, beta: relu(1 - margin).mean(),
    hinge_of_beta=lambda margin, beta: relu(beta - margin).mean(),
    squared_hinge=lambda margin, beta: relu(1 - beta * margin).square().mean(),
)
_losses(
    "You compute an exponential loss: no sigmoid limits the weight of a wrong pair.",
    exponential=lambda margin, beta: (-beta * margin).exp().mean(),
)
_losses(
    "You return minus the mean margin: the sigmoid and its logarithm are missing.",
    linear=lambda margin, beta: -(beta * margin).mean(),
    linear_without_beta=lambda margin, beta: -margin.mean(),
)
_losses(
    "You add β to the margin, or subtract β from it. β is a factor.",
    plus_beta=lambda margin, beta: -logsigmoid(margin + beta).mean(),
    minus_beta=lambda margin, beta: -logsigmoid(margin - beta).mean(),
)


@dpo_loss.alternative
def by_softplus(chosen, rejected, ref_chosen, ref_rejected, beta):
    wanted, unwanted = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    return torch.nn.functional.softplus(beta * (unwanted - wanted)).mean()


@SET.exercise(
    "An engine that samples",
    2,
    15,
    (
        "Given each token's log-probability, what is the log-probability of the whole "
        "response?",
        "A response has one weight. Compute two sums first, then the ratio of "
        "probabilities; then apply the limit.",
    ),
    ("logprobs",),
)
def off_policy_loss(logprobs, engine, mask, advantages, most):
    """Return REINFORCE's loss on responses that another policy sampled → one number.

    `logprobs` (log π of the policy) and `engine` (log q of the sampler) are (B, T),
    like the bool `mask`; `advantages` is (B,). π and q of a response are products over
    its real tokens. The weight is π/q, capped at `most`, and it has no
    gradient. For each response, compute −weight × advantage × log π of the whole
    response. The loss is the mean over responses.
    """
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most).detach()
    return -(weight * advantages * response).mean()


@off_policy_loss.inputs
def _(dice):
    b, t = pick(dice, (4, 5)), pick(dice, (6, 7))
    logprobs, mask = -normal(dice, b, t).abs(), ragged(dice, b, t).bool()
    engine = logprobs + 0.4 * normal(dice, b, t)
    return logprobs, engine, mask, normal(dice, b), pick(dice, (0.8, 1.5, 3.0))


DETACH = "upside_down untruncated clamped_from_below limit_on_the_logarithm "
DETACH += "mean_log_ratio limit_per_token mean_of_ratios wrong_sign summed"
DETACH = DETACH.split()


def _weighted(message, **weights):
    """Register wrong weights from logprobs, engine, mask and most; some are also
    registered without detaching.
    """
    for name, weight in weights.items():

        def loss(logprobs, engine, mask, advantages, most, weight=weight):
            response = (logprobs * mask).sum(1)
            detached = weight(logprobs.detach(), engine, mask, most)
            return -(detached * advantages * response).mean()

        def learns(logprobs, engine, mask, advantages, most, weight=weight):
            response = (logprobs * mask).sum(1)
            return -(
                weight(logprobs, engine, mask, most) * advantages * response
            ).mean()

        off_policy_loss.say(message, **{name: loss})
        if name in DETACH:
            also = " Also detach the weight: a gradient flows through it."
            off_policy_loss.say(message + also, **{f"{name}, learns": learns})


def _after_weight(message, **losses):
    """Register wrong losses computed from the right weight, log π and log q."""
    for name, loss in losses.items():
        for learned in (False, True)[: 1 + (name in DETACH)]:

            def code(
                logprobs, engine, mask, advantages, most, loss=loss, learned=learned
            ):
                response, sampled = (logprobs * mask).sum(1), (engine * mask).sum(1)
                weight = (response - sampled).exp().clamp(max=most)
                weight = weight if learned else weight.detach()
                return loss(weight, advantages, response, sampled, mask, most)

            also = " Also detach the weight: a gradient flows through it." * learned
            key = name + ", learns" * learned
            off_policy_loss.say(message + also, **{key: code})


def _log_ratio(logprobs, engine, mask):
    return ((logprobs - engine) * mask).sum(1)


off_policy_loss.say(
    "The value is right, but a gradient flows through the weight. Detach the weight.",
    weight_learns=lambda logprobs, engine, mask, advantages, most: (
        -(_log_ratio(logprobs, engine, mask).exp().clamp(max=most) * advantages)
        @ (logprobs * mask).sum(1)
        / len(logprobs)
    ),
)
_weighted(
    "Your weight is q/π. A response that the engine samples too *often* must get a "
    "smaller weight.",
    upside_down=lambda p, q, mask, most: (
        (-_log_ratio(p, q, mask)).exp().clamp(max=most)
    ),
    upside_down_untruncated=lambda p, q, mask, most: (-_log_ratio(p, q, mask)).exp(),
)
_weighted(
    "You do not limit the weight to `most`, so a single response that the engine "
    "rarely samples could outweigh the rest of the batch.",
    untruncated=lambda p, q, mask, most: _log_ratio(p, q, mask).exp(),
)
_weighted(
    "You use `most` as a lower limit. It is an upper limit.",
    clamped_from_below=lambda p, q, mask, most: (
        _log_ratio(p, q, mask).exp().clamp(min=most)
    ),
)
_weighted(
    "You limit the logarithm of the weight. Limit the weight itself to `most`.",
    limit_on_the_logarithm=lambda p, q, mask, most: (
        _log_ratio(p, q, mask).clamp(max=most).exp()
    ),
)
_weighted(
    "Your weight is a difference of logarithms. π/q is its exponential.",
    logarithm_for_weight=lambda p, q, mask, most: _log_ratio(p, q, mask).clamp(
        max=most
    ),
)
_weighted(
    "Your weight is a quotient of log-probabilities. π/q is the quotient of the "
    "probabilities.",
    quotient_of_logarithms=lambda p, q, mask, most: (
        (p * mask).sum(1) / (q * mask).sum(1)
    ).clamp(max=most),
    quotient_untruncated=lambda p, q, mask, most: (p * mask).sum(1) / (q * mask).sum(1),
)
_weighted(
    "You average log-ratios over a response's tokens (as GSPO does). π and q of a "
    "response are products over its tokens.",
    mean_log_ratio=lambda p, q, mask, most: (
        (_log_ratio(p, q, mask) / mask.sum(1)).exp().clamp(max=most)
    ),
)
_weighted(
    "Your weight is a mean or sum of the tokens' ratios. π and q of a response are "
    "products over its tokens.",
    mean_of_ratios=lambda p, q, mask, most: (
        ((p - q).exp() * mask).sum(1) / mask.sum(1)
    ).clamp(max=most),
    mean_of_limited_ratios=lambda p, q, mask, most: (
        ((p - q).exp().clamp(max=most) * mask).sum(1) / mask.sum(1)
    ),
    sum_of_ratios=lambda p, q, mask, most: (
        ((p - q).exp() * mask).sum(1).clamp(max=most)
    ),
)
_weighted(
    "You sum probabilities of tokens. π and q of a response are products over tokens.",
    sums_of_probabilities=lambda p, q, mask, most: (
        (p.exp() * mask).sum(1) / (q.exp() * mask).sum(1)
    ).clamp(max=most),
)
_weighted(
    "You limit each token's ratio. Limit the weight of the whole response.",
    limit_per_token=lambda p, q, mask, most: (
        ((p - q).exp().clamp(max=most).log() * mask).sum(1).exp()
    ),
    limits_per_token_and_response=lambda p, q, mask, most: (
        ((p - q).exp().clamp(max=most).log() * mask).sum(1).exp().clamp(max=most)
    ),
)
_weighted(
    "You drop a response whose weight exceeds `most`. Keep the response, and set "
    "its weight to `most`.",
    dropped=lambda p, q, mask, most: (
        (_log_ratio(p, q, mask).exp() <= most) * _log_ratio(p, q, mask).exp()
    ),
)
_weighted(
    "If a response's weight exceeds `most`, you set the weight to 1. Set it to `most`.",
    one_above=lambda p, q, mask, most: (
        _log_ratio(p, q, mask).exp().where(_log_ratio(p, q, mask).exp() <= most, 1.0)
    ),
)
_weighted(
    "Your weight includes padding, in π, in q, or in both. Include only real tokens.",
    padded_weight=lambda p, q, mask, most: (p - q).sum(1).exp().clamp(max=most),
    padded_engine=lambda p, q, mask, most: (
        ((p * mask).sum(1) - q.sum(1)).exp().clamp(max=most)
    ),
    padded_policy=lambda p, q, mask, most: (
        (p.sum(1) - (q * mask).sum(1)).exp().clamp(max=most)
    ),
)
_weighted(
    "You also limit the weight from below. Limit only large weights.",
    clipped_like_ppo=lambda p, q, mask, most: (
        _log_ratio(p, q, mask).exp().clamp(1 / most, most)
    ),
    clipped_at_one=lambda p, q, mask, most: (
        _log_ratio(p, q, mask).exp().clamp(1, max(1, most))
    ),
)
_weighted(
    "You limit the weight to the range 1 ± `most`, or to 1 + `most`. `most` itself is "
    "the limit.",
    around_one=lambda p, q, mask, most: (
        _log_ratio(p, q, mask).exp().clamp(1 - most, 1 + most)
    ),
    above_one=lambda p, q, mask, most: _log_ratio(p, q, mask).exp().clamp(max=1 + most),
)
_weighted(
    "You use π itself as the weight: q is missing.",
    policy_only=lambda p, q, mask, most: (p * mask).sum(1).exp().clamp(max=most),
)
_weighted(
    "Your weights are divided by their mean or sum. Use the weights unchanged.",
    softmax=lambda p, q, mask, most: _log_ratio(p, q, mask).softmax(0),
    scaled_first=lambda p, q, mask, most: (
        _log_ratio(p, q, mask).softmax(0) * len(p)
    ).clamp(max=most),
)
_weighted(
    "The weight is missing: the engine, not this policy, sampled these responses.",
    no_weight=lambda p, q, mask, most: torch.ones_like(p[:, 0]),
)
_weighted(
    "You use `most` as every weight, but it is only a limit.",
    constant=lambda p, q, mask, most: most * torch.ones_like(p[:, 0]),
)
off_policy_loss.say(
    "Your sums include padding. Multiply by the mask before you sum.",
    padding_counts=lambda logprobs, engine, mask, advantages, most: (
        off_policy_loss.solution(logprobs, engine, mask | True, advantages, most)
    ),
    padded_log=lambda logprobs, engine, mask, advantages, most: (
        -(
            _log_ratio(logprobs, engine, mask).exp().clamp(max=most).detach()
            * advantages
            * logprobs.sum(1)
        ).mean()
    ),
)
for _message, _limit in (
    ("You give each token its own weight. A *response* has one weight.", True),
    (
        "You give each token its own weight, without a limit. A *response* has one "
        "weight.",
        False,
    ),
):

    def _per_token(logprobs, engine, mask, advantages, most, limit=_limit):
        ratio = (logprobs - engine).exp().detach()
        weight = ratio.clamp(max=most) if limit else ratio
        return -((weight * logprobs * mask).sum(1) * advantages).mean()

    off_policy_loss.say(_message, **{f"weight_per_token {_limit}": _per_token})
_after_weight(
    "The sign is wrong: an optimizer *minimizes*.",
    wrong_sign=lambda w, a, log, q, mask, most: (w * a * log).mean(),
)
_after_weight(
    "You sum over responses. Take the mean.",
    summed=lambda w, a, log, q, mask, most: -(w * a * log).sum(),
)
_after_weight(
    "You divide by the number of tokens. The mean is over responses.",
    mean_over_tokens=lambda w, a, log, q, mask, most: -(w * a * log).sum() / mask.sum(),
    mean_over_places=lambda w, a, log, q, mask, most: (
        -(w * a * log).sum() / mask.numel()
    ),
)
_after_weight(
    "Your log π is an average over tokens. The log π of the whole response is a sum.",
    mean_per_response=lambda w, a, log, q, mask, most: (
        -(w * a * log / mask.sum(1)).mean()
    ),
)
_after_weight(
    "You divide by the sum of the weights. The mean is over responses.",
    normalized_weights=lambda w, a, log, q, mask, most: -(w * a * log).sum() / w.sum(),
)
_after_weight(
    "You limit weight × advantage. Limit only the weight: an advantage may be larger "
    "than `most`.",
    limit_on_the_product=lambda w, a, log, q, mask, most: (
        -(((log - q).exp() * a).clamp(max=most).detach() * log).mean()
    ),
)
_after_weight(
    "You multiply by π instead of log π.",
    probability=lambda w, a, log, q, mask, most: -(w * a * log.exp()).mean(),
)
_after_weight(
    "You subtract the mean advantage first. Use the advantages unchanged.",
    centered=lambda w, a, log, q, mask, most: -(w * (a - a.mean()) * log).mean(),
    whitened=lambda w, a, log, q, mask, most: (
        -(w * (a - a.mean()) / (a.std() + 1e-8) * log).mean()
    ),
)
_after_weight(
    "You average the factors separately. Multiply them first, and then average.",
    mean_of_weights=lambda w, a, log, q, mask, most: -(a * log).mean() * w.mean(),
    means=lambda w, a, log, q, mask, most: -w.mean() * a.mean() * log.mean(),
)
_after_weight(
    "You multiply by the log-ratio log π − log q. The loss contains only log π.",
    log_ratio=lambda w, a, log, q, mask, most: -(w * a * (log - q)).mean(),
)


@off_policy_loss.mistake
def log_of_the_engine(logprobs, engine, mask, advantages, most):
    """You multiply by the engine's log-probability. Multiply by the policy's
    log-probability, which has a gradient.
    """
    response, sampled = (logprobs * mask).sum(1), (engine * mask).sum(1)
    weight = (response - sampled).exp().clamp(max=most).detach()
    return -(weight * advantages * sampled).mean() + 0 * response.sum()


@off_policy_loss.mistake
def ratio_is_the_loss(logprobs, engine, mask, advantages, most):
    """Your loss lacks the factor log π."""
    response = (logprobs * mask).sum(1)
    weight = (response - (engine * mask).sum(1)).exp().clamp(max=most)
    return -(weight * advantages).mean()


@off_policy_loss.alternative
def response_by_response(logprobs, engine, mask, advantages, most):
    total = 0.0
    for logp, sampled, real, advantage in zip(logprobs, engine, mask, advantages):
        logp, sampled = logp[real], sampled[real]
        weight = (logp - sampled).detach().sum().exp().clamp(max=most)
        total = total - weight * advantage * sum(logp)
    return total / len(logprobs)
