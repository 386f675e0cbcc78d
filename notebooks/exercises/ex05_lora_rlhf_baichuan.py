"""Exercises of notebook 05."""

import torch

from engine import Set, normal

SET = Set("05_lora_rlhf_baichuan", "LoRA RLHF on Baichuan")
check = SET.check


@SET.exercise(
    "Split a packed matrix",
    1,
    5,
    "Rows are outputs: the first H of them are the query's.",
)
def split_w_pack(packed):
    """Query, key and value matrices out of a W_pack: (3H, H) → three (H, H).

    Baichuan computes all three in one matrix product, `x @ W_pack.T`, and then cuts the
    result into three: query, key, value. Llama has three matrices.
    """
    return tuple(packed.chunk(3))


@split_w_pack.inputs
def _(dice):
    return (normal(dice, 12, 4),)


@split_w_pack.mistake
def every_third_row(packed):
    """You take every third row. The three lie one after another, not interleaved."""
    return packed[::3], packed[1::3], packed[2::3]


@split_w_pack.mistake
def key_first(packed):
    """The order is query, key, value; here key and query are swapped, and attention
    would look the wrong way round.
    """
    query, key, value = packed.chunk(3)
    return key, query, value


@split_w_pack.mistake
def transposed(packed):
    """These are transposed: `nn.Linear` keeps (outputs, inputs), in the packed matrix
    as in the three.
    """
    return tuple(part.T for part in packed.chunk(3))


@split_w_pack.alternative
def by_view(packed):
    return tuple(packed.view(3, -1, packed.shape[1]))


@SET.exercise(
    "A normalised head",
    1,
    5,
    "Divide each row by its length; a row is one token's direction.",
)
def normalise_head(weight):
    """The vocabulary projection of Baichuan 2 as a plain one: (V, H) → (V, H).

    Baichuan 2 scales each token's row to length 1 before it multiplies. Done once, on
    the disk, no code is needed.
    """
    return weight / weight.norm(dim=1, keepdim=True)


@normalise_head.inputs
def _(dice):
    return (normal(dice, 6, 4) * 3,)


@normalise_head.mistake
def columns(weight):
    """You scale columns, the hidden dimensions. A token's direction is a *row*."""
    return weight / weight.norm(dim=0, keepdim=True)


@normalise_head.mistake
def whole_matrix(weight):
    """You divide by one number for the whole matrix: frequent tokens keep their longer
    rows, and their larger logits.
    """
    return weight / weight.norm()


@normalise_head.mistake
def squared(weight):
    """You divide by the squared length: take the root."""
    return weight / weight.square().sum(1, keepdim=True)


@normalise_head.alternative
def with_torch(weight):
    return torch.nn.functional.normalize(weight)


@SET.exercise(
    "A layer with adapters",
    2,
    15,
    "x Wᵀ, plus (α / r) · (x Aᵀ) Bᵀ of the one adapter that is switched on.",
)
def lora_forward(x, weight, adapters, active, alpha):
    """Output of a linear layer with LoRA: x (B, I), weight (O, I), adapters name → (A,
    B) → (B, O).

    A is (r, I) and B is (O, r). Only the adapter called `active` takes part; None means
    the base alone, which is what the reference of a fresh policy is.
    """
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(a) * (x @ a.T @ b.T)
    return output


@lora_forward.inputs
def _(dice):
    adapters = {
        name: (normal(dice, 2, 4), normal(dice, 3, 2))
        for name in ("policy", "ref", "reward")
    }
    active = [None, "policy", "ref"][int(torch.randint(3, (), generator=dice))]
    return normal(dice, 5, 4), normal(dice, 3, 4), adapters, active, 8


@lora_forward.mistake
def all_adapters(x, weight, adapters, active, alpha):
    """All adapters take part. The policy would wear the reward model's adapter, and the
    reference the policy's.
    """
    return x @ weight.T + sum(
        alpha / len(a) * (x @ a.T @ b.T) for a, b in adapters.values()
    )


@lora_forward.mistake
def no_scale(x, weight, adapters, active, alpha):
    """The factor α / r is missing: the adapter would pull with another strength than it
    was trained with.
    """
    output = x @ weight.T
    return (
        output
        if active is None
        else output + x @ adapters[active][0].T @ adapters[active][1].T
    )


@lora_forward.mistake
def alpha_alone(x, weight, adapters, active, alpha):
    """Scaled by α; it is α / r, so that a larger rank does not pull harder."""
    output = x @ weight.T
    return (
        output
        if active is None
        else output + alpha * (x @ adapters[active][0].T @ adapters[active][1].T)
    )


@lora_forward.mistake
def policy_always(x, weight, adapters, active, alpha):
    """The policy's adapter is on whatever was asked for: KL would be 0 for ever,
    because the reference is the policy.
    """
    a, b = adapters["policy"]
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.alternative
def merged(x, weight, adapters, active, alpha):
    if active in adapters:
        a, b = adapters[active]
        weight = weight + (b @ a) * (alpha / a.shape[0])
    return torch.nn.functional.linear(x, weight)


@SET.exercise(
    "Which adapter when", 2, 10, "Who samples? Who is held fixed? Who judges?"
)
def adapter_of(stage):
    """Which adapter is on in each part of a PPO step: str → str.

    `stage` is one of `generate`, `log-probabilities`, `reference log-probabilities`,
    `score`, `update`. The adapters are called `policy`, `ref` and `reward`.
    """
    return {"reference log-probabilities": "ref", "score": "reward"}.get(
        stage, "policy"
    )


STAGES = [
    "generate",
    "log-probabilities",
    "reference log-probabilities",
    "score",
    "update",
]


@adapter_of.inputs
def _(dice):
    return (STAGES[dice.initial_seed() % len(STAGES)],)


@adapter_of.mistake
def reference_is_the_policy(stage):
    """The reference's log-probabilities come from the policy's own adapter: KL is 0
    whatever happens, and nothing holds the policy back.
    """
    return "reward" if stage == "score" else "policy"


@adapter_of.mistake
def samples_from_the_reference(stage):
    """The *policy* samples: PPO's ratio compares with the policy that drew the
    responses.
    """
    return {
        "reference log-probabilities": "ref",
        "score": "reward",
        "generate": "ref",
    }.get(stage, "policy")


@adapter_of.mistake
def policy_judges_itself(stage):
    """The policy's adapter is on while answers are scored. The reward model judges with
    its own.
    """
    return "ref" if stage == "reference log-probabilities" else "policy"


@adapter_of.alternative
def by_cases(stage):
    if stage.startswith("reference"):
        return "ref"
    return "reward" if stage == "score" else "policy"


@SET.exercise(
    "What SFT learns from",
    1,
    10,
    "1 on the answer and its EOS, 0 on the question and on padding.",
)
def completion_mask(question_length, answer_length, width):
    """The mask of one row, question + answer + EOS, padded on the right: three numbers
    → (width,), float64.

    Only the answer and its EOS are learnt. Without the EOS a model learns to answer and
    not to stop.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length + 1] = 1
    return mask


@completion_mask.inputs
def _(dice):
    return (
        int(torch.randint(2, 5, (), generator=dice)),
        int(torch.randint(1, 4, (), generator=dice)),
        10,
    )


@completion_mask.mistake
def no_eos(question_length, answer_length, width):
    """The EOS behind the answer is not learnt: the model will never stop."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def question_too(question_length, answer_length, width):
    """The question is learnt, too. Nobody will ask the model to write questions."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[: question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def padding_too(question_length, answer_length, width):
    """Padding is learnt. It is EOS, so the model would learn to say EOS after EOS, many
    times in every row.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length:] = 1
    return mask


@completion_mask.alternative
def by_comparison(question_length, answer_length, width):
    column = torch.arange(width)
    return (
        (column >= question_length) & (column <= question_length + answer_length)
    ).double()
