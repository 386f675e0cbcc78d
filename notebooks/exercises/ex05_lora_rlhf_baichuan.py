"""Exercises of notebook 05."""

import torch

from engine import Set, normal, pick

SET = Set("05_lora_rlhf_baichuan", "LoRA RLHF on Baichuan")
check = SET.check


@SET.exercise(
    "Split a packed matrix",
    1,
    5,
    (
        "Is a row of the matrix one output or one input? Look at `x @ W_pack.T`.",
        "Three blocks of H rows each lie below one another. In which order?",
    ),
)
def split_w_pack(packed):
    """Query, key and value matrices out of a W_pack: (3H, H) → three (H, H).

    Baichuan computes all three in one matrix product, `x @ W_pack.T`, and then cuts the
    result into three: query, key, value. Llama has three matrices.
    """
    return tuple(packed.chunk(3))


@split_w_pack.inputs
def _(dice):
    h = pick(dice, range(3, 6))
    return (normal(dice, 3 * h, h),)


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


@split_w_pack.mistake
def value_first(packed):
    """The order is query, key, value; yours starts from the other end."""
    return tuple(packed.chunk(3)[::-1])


@split_w_pack.mistake
def value_before_key(packed):
    """Key and value have changed places: the order is query, key, value."""
    query, key, value = packed.chunk(3)
    return query, value, key


@split_w_pack.mistake
def columns(packed):
    """You cut columns, which are inputs. Each of the three needs all inputs."""
    return tuple(packed.chunk(3, dim=1))


@split_w_pack.mistake
def from_the_transposed(packed):
    """You transpose before you cut: rows are outputs already."""
    return tuple(packed.T.chunk(3))


@split_w_pack.mistake
def all_the_query(packed):
    """All three are the query's: the second and third part begin further down."""
    h = packed.shape[1]
    return packed[:h], packed[:h], packed[:h]


@split_w_pack.alternative
def by_view(packed):
    return tuple(packed.view(3, -1, packed.shape[1]))


@SET.exercise(
    "A normalized head",
    1,
    5,
    (
        "What has length 1 afterwards: a row, a column, or the whole matrix?",
        "A length is the root of a sum of squares. Keep the dimension you sum over.",
    ),
)
def normalise_head(weight):
    """The vocabulary projection of Baichuan 2 as a plain one: (V, H) → (V, H).

    Baichuan 2 scales each token's row to length 1 before it multiplies. Done once, on
    the disk, no code is needed.
    """
    return weight / weight.norm(dim=1, keepdim=True)


@normalise_head.inputs
def _(dice):
    v, h = pick(dice, range(5, 8)), pick(dice, range(2, 5))
    return (normal(dice, v, h) * pick(dice, (0.01, 1, 3)),)


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


@normalise_head.mistake
def sum_of_sizes(weight):
    """You divide by the sum of absolute values: a length is the root of a sum of
    squares.
    """
    return weight / weight.abs().sum(1, keepdim=True)


@normalise_head.mistake
def largest(weight):
    """You divide by the largest entry of a row, and not by its length."""
    return weight / weight.abs().amax(1, keepdim=True)


@normalise_head.mistake
def plain_sum(weight):
    """You divide by the sum of a row. Where is the square, and where the root?"""
    return weight / weight.sum(1, keepdim=True)


@normalise_head.mistake
def standard_deviation(weight):
    """You divide by a standard deviation: then rows have another length than 1."""
    return weight / weight.std(1, keepdim=True)


@normalise_head.mistake
def whitened(weight):
    """You subtract a mean first. Only the length of a row is changed."""
    centered = weight - weight.mean(1, keepdim=True)
    return centered / centered.norm(dim=1, keepdim=True)


@normalise_head.mistake
def multiplied(weight):
    """You multiply by the length instead of dividing."""
    return weight * weight.norm(dim=1, keepdim=True)


@normalise_head.mistake
def mean_square(weight):
    """You take the root of a *mean* of squares: that is not the length."""
    return weight / weight.square().mean(1, keepdim=True).sqrt()


@normalise_head.mistake
def lengths(weight):
    """These are the lengths themselves: divide the rows by them."""
    return weight.norm(dim=1, keepdim=True)


@normalise_head.alternative
def with_torch(weight):
    return torch.nn.functional.normalize(weight)


@SET.exercise(
    "A layer with adapters",
    2,
    15,
    (
        "Write the shapes below x, A and B: in which order can they be multiplied?",
        "The base's output comes first; one adapter may add to it. How large is r?",
    ),
    ("x",),
)
def lora_forward(x, weight, adapters, active, alpha):
    """Output of a linear layer with LoRA: x (B, I), weight (O, I), adapters name → (A,
    B) → (B, O).

    A is (r, I) and B is (O, r). Only the adapter called `active` takes part; None means
    only the base, as the reference of a fresh policy. An adapter's part is scaled by
    `alpha` / r.
    """
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(a) * (x @ a.T @ b.T)
    return output


@lora_forward.inputs
def _(dice):
    adapters = {}
    for name in pick(dice, (("policy", "ref", "reward"), ("ref", "reward", "policy"))):
        r = pick(dice, (2, 3))
        adapters[name] = normal(dice, r, 4), normal(dice, 5, r)
    active = [None, "policy", "ref", "reward"][dice.initial_seed() % 4]
    x = normal(dice, pick(dice, (2, 6)), 4)
    return x, normal(dice, 5, 4), adapters, active, pick(dice, (1, 8, 16))


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
    """The policy's adapter is on whatever was asked for: KL would always be 0,
    because the reference is the policy.
    """
    a, b = adapters["policy"]
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def adapter_alone(x, weight, adapters, active, alpha):
    """The base is missing where an adapter is on: an adapter *adds* to it."""
    if active is None:
        return x @ weight.T
    a, b = adapters[active]
    return alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def base_alone(x, weight, adapters, active, alpha):
    """No adapter takes part in yours."""
    return x @ weight.T


@lora_forward.mistake
def divided_by_alpha(x, weight, adapters, active, alpha):
    """The factor is upside down: α over r."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + len(a) / alpha * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def rank_from_the_wrong_side(x, weight, adapters, active, alpha):
    """You divide α by another dimension than r, the one that A and B share."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(b) * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def inputs_for_rank(x, weight, adapters, active, alpha):
    """You divide α by the number of inputs: r is the other dimension of A."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / a.shape[1] * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def root_of_the_rank(x, weight, adapters, active, alpha):
    """You divide by the root of r (that is rsLoRA): r itself was asked for."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(a) ** 0.5 * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def subtracted(x, weight, adapters, active, alpha):
    """The adapter is subtracted: it adds to the base."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output - alpha / len(a) * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def base_scaled_too(x, weight, adapters, active, alpha):
    """The factor scales the base as well: only the adapter has it."""
    if active is None:
        return x @ weight.T
    a, b = adapters[active]
    return alpha / len(a) * (x @ weight.T + x @ a.T @ b.T)


@lora_forward.mistake
def none_is_the_reference(x, weight, adapters, active, alpha):
    """None means only the base: no adapter, not that of another name."""
    a, b = adapters[active or "ref"]
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def first_adapter(x, weight, adapters, active, alpha):
    """You take the first adapter of the dict, and not the one called `active`."""
    if active is None:
        return x @ weight.T
    a, b = next(iter(adapters.values()))
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.alternative
def merged(x, weight, adapters, active, alpha):
    if active in adapters:
        a, b = adapters[active]
        weight = weight + (b @ a) * (alpha / a.shape[0])
    return torch.nn.functional.linear(x, weight)


@SET.exercise(
    "Which adapter when",
    2,
    10,
    (
        "Which of the three models does each stage ask: who samples, who learns?",
        "One stage needs the frozen copy, one needs the judge.",
    ),
)
def adapter_of(stage):
    """Which adapter is on in each part of a PPO step: str → str.

    `stage` is one of `generate`, `log-probabilities`, `reference log-probabilities`,
    `score`, `update`. The adapters are called `policy`, `ref` and `reward`. PPO comes
    after SFT here, so the reference is the adapter `ref`, a frozen copy of what SFT
    taught, and not only the base as in the exercise before.
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


def _stages(**changes):
    right = dict.fromkeys(STAGES, "policy")
    right |= {"reference log-probabilities": "ref", "score": "reward"}
    return right | {name.replace("_", "-"): to for name, to in changes.items()}


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


@adapter_of.mistake
def reference_is_the_base(stage):
    """After SFT the reference is an adapter as well: a frozen copy called by
    its name.
    """
    return (
        None if stage == "reference log-probabilities" else adapter_of.solution(stage)
    )


@adapter_of.mistake
def trains_the_reward_model(stage):
    """The update changes the reward model in yours. PPO changes the *policy* only."""
    return _stages(update="reward")[stage]


@adapter_of.mistake
def trains_the_reference(stage):
    """The update changes the reference in yours: it is to stay as it is."""
    return _stages(update="ref")[stage]


@adapter_of.mistake
def scores_by_the_reference(stage):
    """The reference judges in yours. There is an adapter that was trained to judge."""
    return _stages(score="ref")[stage]


@adapter_of.mistake
def logprobs_of_the_reference(stage):
    """Plain log-probabilities are those of the model that sampled."""
    return _stages(log_probabilities="ref")[stage]


@adapter_of.mistake
def judge_samples(stage):
    """The reward model writes in yours. It was trained to judge."""
    return _stages(generate="reward")[stage]


@adapter_of.mistake
def reference_is_the_reward_model(stage):
    """The reference and the reward model are two adapters."""
    return "reward" if stage.startswith("ref") else adapter_of.solution(stage)


@adapter_of.mistake
def reference_and_reward_swapped(stage):
    """Reference and reward model have changed places."""
    swapped = {"ref": "reward", "reward": "ref", "policy": "policy"}
    return swapped[adapter_of.solution(stage)]


@adapter_of.mistake
def policy_everywhere(stage):
    """The policy does everything in yours: it would be its own reference and judge."""
    return "policy"


@adapter_of.alternative
def by_cases(stage):
    if stage.startswith("reference"):
        return "ref"
    return "reward" if stage == "score" else "policy"


@SET.exercise(
    "What SFT learns from",
    1,
    10,
    (
        "Write one row with a question of 2 tokens and an answer of 3. Where is EOS?",
        "The ones begin after the question. How many tokens are to be learned?",
    ),
)
def completion_mask(question_length, answer_length, width):
    """The mask of one row, question + answer + EOS, padded on the right: three numbers
    → (width,).

    Only the answer and its EOS are learned. Without the EOS a model learns to answer
    and not to stop.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length + 1] = 1
    return mask


@completion_mask.inputs
def _(dice):
    question, answer = pick(dice, range(1, 6)), pick(dice, range(1, 5))
    return question, answer, question + answer + 1 + pick(dice, (0, 1, 2, 4))


@completion_mask.mistake
def no_eos(question_length, answer_length, width):
    """The EOS after the answer is not learned: the model will never stop."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def question_too(question_length, answer_length, width):
    """The question is learned as well. Nobody will ask the model to write questions."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[: question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def padding_too(question_length, answer_length, width):
    """Padding is learned. It is EOS, so the model would learn to say EOS after EOS,
    many times in every row.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length:] = 1
    return mask


@completion_mask.mistake
def one_too_many(question_length, answer_length, width):
    """One token too many is learned: the first one of padding."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length + 2] = 1
    return mask


@completion_mask.mistake
def starts_late(question_length, answer_length, width):
    """The answer's first token is missing."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length + 1 : question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def starts_early(question_length, answer_length, width):
    """The question's last token is learned as well."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length - 1 : question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def shifted_early(question_length, answer_length, width):
    """Everything begins one token early: no shift was asked for."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length - 1 : question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def inverted(question_length, answer_length, width):
    """Yours is 1 where nothing is to be learned, and 0 on the answer."""
    return 1 - by_comparison(question_length, answer_length, width)


@completion_mask.mistake
def eos_alone(question_length, answer_length, width):
    """Only the EOS is learned in yours, and not the answer."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def length_for_end(question_length, answer_length, width):
    """The slice ends at the answer's length. It must end where the answer ends, which
    is further right by the question.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : answer_length + 1] = 1
    return mask


@completion_mask.mistake
def padded_on_the_left(question_length, answer_length, width):
    """The ones stand at the right end: rows are padded on the right."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[width - answer_length - 1 :] = 1
    return mask


@completion_mask.mistake
def question_only(question_length, answer_length, width):
    """The question is learned in yours, and the answer is not."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[:question_length] = 1
    return mask


@completion_mask.mistake
def last_column(question_length, answer_length, width):
    """You put the EOS into the last column. It follows the answer; then comes
    padding.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length] = 1
    mask[-1] = 1
    return mask


@completion_mask.mistake
def all_ones(question_length, answer_length, width):
    """Everything is learned: the question and padding as well."""
    return torch.ones(width, dtype=torch.float64)


@completion_mask.alternative
def by_comparison(question_length, answer_length, width):
    column = torch.arange(width)
    return (
        (column >= question_length) & (column <= question_length + answer_length)
    ).double()
