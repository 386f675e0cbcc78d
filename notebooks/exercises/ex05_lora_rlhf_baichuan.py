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
        "Three blocks of H rows each are stacked vertically. In which order?",
    ),
)
def split_w_pack(packed):
    """Split a W_pack into query, key and value matrices: (3H, H) → three (H, H).

    Baichuan computes all three in one matrix product, `x @ W_pack.T`, and then splits
    the result into three: query, key, value. Llama has three matrices.
    """
    return tuple(packed.chunk(3))


@split_w_pack.inputs
def _(generator):
    h = pick(generator, range(3, 6))
    return (normal(generator, 3 * h, h),)


@split_w_pack.mistake
def every_third_row(packed):
    """You take every third row. The three matrices are stacked, not interleaved."""
    return packed[::3], packed[1::3], packed[2::3]


@split_w_pack.mistake
def key_first(packed):
    """You swap key and query, so attention would look the wrong way. The order is
    query, key, value.
    """
    query, key, value = packed.chunk(3)
    return key, query, value


@split_w_pack.mistake
def transposed(packed):
    """You transpose the matrices: `nn.Linear` stores (outputs, inputs), in the packed
    matrix and in the three.
    """
    return tuple(part.T for part in packed.chunk(3))


@split_w_pack.mistake
def value_first(packed):
    """Your order is reversed. The order is query, key, value."""
    return tuple(packed.chunk(3)[::-1])


@split_w_pack.mistake
def value_before_key(packed):
    """You swap key and value. The order is query, key, value."""
    query, key, value = packed.chunk(3)
    return query, value, key


@split_w_pack.mistake
def columns(packed):
    """You split columns, which are inputs. Each of the three needs all inputs."""
    return tuple(packed.chunk(3, dim=1))


@split_w_pack.mistake
def from_the_transposed(packed):
    """You transpose before you split, but rows are already outputs."""
    return tuple(packed.T.chunk(3))


@split_w_pack.mistake
def all_the_query(packed):
    """You return the query's matrix three times. The second and third begin further
    down.
    """
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
        "What has length 1 afterward: a row, a column, or the whole matrix?",
        "A length is the root of a sum of squares. Keep the dimension you sum over.",
    ),
)
def normalize_head(weight):
    """Turn Baichuan 2's vocabulary projection into a plain one: (V, H) → (V, H).

    Baichuan 2 scales each token's row to length 1 before it multiplies. If you scale
    once, on disk, you need no special code.
    """
    return weight / weight.norm(dim=1, keepdim=True)


@normalize_head.inputs
def _(generator):
    v, h = pick(generator, range(5, 8)), pick(generator, range(2, 5))
    return (normal(generator, v, h) * pick(generator, (0.01, 1, 3)),)


@normalize_head.mistake
def columns(weight):
    """You scale columns, the hidden dimensions. A token's direction is a *row*."""
    return weight / weight.norm(dim=0, keepdim=True)


@normalize_head.mistake
def whole_matrix(weight):
    """You divide by one number for the whole matrix: frequent tokens keep their longer
    rows, and their larger logits.
    """
    return weight / weight.norm()


@normalize_head.mistake
def squared(weight):
    """You divide by the squared length. Take the root."""
    return weight / weight.square().sum(1, keepdim=True)


@normalize_head.mistake
def sum_of_sizes(weight):
    """You divide by the sum of absolute values. A length is the root of a sum of
    squares.
    """
    return weight / weight.abs().sum(1, keepdim=True)


@normalize_head.mistake
def largest(weight):
    """You divide by the largest entry of a row. Divide by its length."""
    return weight / weight.abs().amax(1, keepdim=True)


@normalize_head.mistake
def plain_sum(weight):
    """You divide by the sum of a row. Where is the square, and where is the root?"""
    return weight / weight.sum(1, keepdim=True)


@normalize_head.mistake
def standard_deviation(weight):
    """You divide by a standard deviation, so rows do not have length 1."""
    return weight / weight.std(1, keepdim=True)


@normalize_head.mistake
def whitened(weight):
    """You subtract a mean first. Change only the length of a row."""
    centered = weight - weight.mean(1, keepdim=True)
    return centered / centered.norm(dim=1, keepdim=True)


@normalize_head.mistake
def multiplied(weight):
    """You multiply by the length instead of dividing."""
    return weight * weight.norm(dim=1, keepdim=True)


@normalize_head.mistake
def mean_square(weight):
    """You take the root of a *mean* of squares, which is not the length."""
    return weight / weight.square().mean(1, keepdim=True).sqrt()


@normalize_head.mistake
def lengths(weight):
    """You return the lengths themselves. Divide the rows by them."""
    return weight.norm(dim=1, keepdim=True)


@normalize_head.alternative
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
    """Compute a linear layer with LoRA: x (B, I), weight (O, I), adapters name → (A, B)
    → (B, O).

    A is (r, I) and B is (O, r). Use only the adapter named `active`; None means only
    the base, as for the reference of a new policy. Scale an adapter's part by `alpha` /
    r.
    """
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(a) * (x @ a.T @ b.T)
    return output


@lora_forward.inputs
def _(generator):
    adapters = {}
    for name in pick(
        generator, (("policy", "ref", "reward"), ("ref", "reward", "policy"))
    ):
        r = pick(generator, (2, 3))
        adapters[name] = normal(generator, r, 4), normal(generator, 5, r)
    active = [None, "policy", "ref", "reward"][generator.initial_seed() % 4]
    x = normal(generator, pick(generator, (2, 6)), 4)
    return x, normal(generator, 5, 4), adapters, active, pick(generator, (1, 8, 16))


@lora_forward.mistake
def all_adapters(x, weight, adapters, active, alpha):
    """You use all adapters. The policy would use the reward model's adapter, and the
    reference would use the policy's.
    """
    return x @ weight.T + sum(
        alpha / len(a) * (x @ a.T @ b.T) for a, b in adapters.values()
    )


@lora_forward.mistake
def no_scale(x, weight, adapters, active, alpha):
    """The factor α / r is missing: the adapter's effect would not have the size it had
    in training.
    """
    output = x @ weight.T
    return (
        output
        if active is None
        else output + x @ adapters[active][0].T @ adapters[active][1].T
    )


@lora_forward.mistake
def alpha_alone(x, weight, adapters, active, alpha):
    """You scale by α. Scale by α / r, so that a larger rank has no larger effect."""
    output = x @ weight.T
    return (
        output
        if active is None
        else output + alpha * (x @ adapters[active][0].T @ adapters[active][1].T)
    )


@lora_forward.mistake
def policy_always(x, weight, adapters, active, alpha):
    """The policy's adapter is on whatever `active` is: KL would always be 0, because
    the reference is the policy.
    """
    a, b = adapters["policy"]
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def adapter_alone(x, weight, adapters, active, alpha):
    """The base is missing when an adapter is on. An adapter *adds* to the base."""
    if active is None:
        return x @ weight.T
    a, b = adapters[active]
    return alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def base_alone(x, weight, adapters, active, alpha):
    """Your code uses no adapter."""
    return x @ weight.T


@lora_forward.mistake
def divided_by_alpha(x, weight, adapters, active, alpha):
    """Your factor is inverted: it must be α over r."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + len(a) / alpha * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def rank_from_the_wrong_side(x, weight, adapters, active, alpha):
    """You divide α by a dimension other than r, the one that A and B share."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(b) * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def inputs_for_rank(x, weight, adapters, active, alpha):
    """You divide α by the number of inputs, but r is the other dimension of A."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / a.shape[1] * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def root_of_the_rank(x, weight, adapters, active, alpha):
    """You divide by the root of r, as rsLoRA does. Divide by r itself."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(a) ** 0.5 * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def subtracted(x, weight, adapters, active, alpha):
    """You subtract the adapter. Add it to the base."""
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output - alpha / len(a) * (x @ a.T @ b.T)
    return output


@lora_forward.mistake
def base_scaled_too(x, weight, adapters, active, alpha):
    """The factor also scales the base. It must scale only the adapter."""
    if active is None:
        return x @ weight.T
    a, b = adapters[active]
    return alpha / len(a) * (x @ weight.T + x @ a.T @ b.T)


@lora_forward.mistake
def none_is_the_reference(x, weight, adapters, active, alpha):
    """None means only the base, without any adapter."""
    a, b = adapters[active or "ref"]
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def first_adapter(x, weight, adapters, active, alpha):
    """You take the first adapter of the dict instead of the one named `active`."""
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
        "Which of the three models does each stage use: which samples, which learns?",
        "One stage needs the frozen copy, one needs the judge.",
    ),
)
def adapter_of(stage):
    """Return the adapter that is on in each part of a PPO step: str → str.

    `stage` is one of `generate`, `log-probabilities`, `reference log-probabilities`,
    `score`, `update`. The adapters are called `policy`, `ref` and `reward`. PPO comes
    after SFT here, so the reference is the adapter `ref`, a frozen copy of SFT's
    adapter, and not only the base as in the previous exercise.
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
def _(generator):
    return (STAGES[generator.initial_seed() % len(STAGES)],)


def _stages(**changes):
    right = dict.fromkeys(STAGES, "policy")
    right |= {"reference log-probabilities": "ref", "score": "reward"}
    return right | {name.replace("_", "-"): to for name, to in changes.items()}


@adapter_of.mistake
def reference_is_the_policy(stage):
    """The reference's log-probabilities come from the policy's own adapter: KL is
    always 0, and nothing holds the policy back.
    """
    return "reward" if stage == "score" else "policy"


@adapter_of.mistake
def samples_from_the_reference(stage):
    """You sample from the reference. The *policy* must sample: PPO's ratio compares
    with the policy that drew the responses.
    """
    return {
        "reference log-probabilities": "ref",
        "score": "reward",
        "generate": "ref",
    }.get(stage, "policy")


@adapter_of.mistake
def policy_judges_itself(stage):
    """The policy's adapter is on while answers are scored. The reward model has its own
    adapter.
    """
    return "ref" if stage == "reference log-probabilities" else "policy"


@adapter_of.mistake
def reference_is_the_base(stage):
    """After SFT the reference is also an adapter, a frozen copy. Return its name."""
    return (
        None if stage == "reference log-probabilities" else adapter_of.solution(stage)
    )


@adapter_of.mistake
def trains_the_reward_model(stage):
    """Your update changes the reward model. PPO changes only the *policy*."""
    return _stages(update="reward")[stage]


@adapter_of.mistake
def trains_the_reference(stage):
    """Your update changes the reference. It must stay unchanged."""
    return _stages(update="ref")[stage]


@adapter_of.mistake
def scores_by_the_reference(stage):
    """Your reference judges the answers. Use the adapter that was trained to judge."""
    return _stages(score="ref")[stage]


@adapter_of.mistake
def logprobs_of_the_reference(stage):
    """You use the reference. Plain log-probabilities are those of the model that
    sampled.
    """
    return _stages(log_probabilities="ref")[stage]


@adapter_of.mistake
def judge_samples(stage):
    """Your reward model writes the answers. It was trained to judge."""
    return _stages(generate="reward")[stage]


@adapter_of.mistake
def reference_is_the_reward_model(stage):
    """You use the reward model as the reference. They are two adapters."""
    return "reward" if stage.startswith("ref") else adapter_of.solution(stage)


@adapter_of.mistake
def reference_and_reward_swapped(stage):
    """You swap the reference and the reward model."""
    swapped = {"ref": "reward", "reward": "ref", "policy": "policy"}
    return swapped[adapter_of.solution(stage)]


@adapter_of.mistake
def policy_everywhere(stage):
    """Your policy does everything: it would be its own reference and judge."""
    return "policy"


@adapter_of.alternative
def by_cases(stage):
    if stage.startswith("reference"):
        return "ref"
    return "reward" if stage == "score" else "policy"


@SET.exercise(
    "The tokens that SFT learns",
    1,
    10,
    (
        "Write one row with a question of 2 tokens and an answer of 3. Where is EOS?",
        "The ones begin after the question. How many tokens does SFT learn?",
    ),
)
def completion_mask(question_length, answer_length, width):
    """Return the mask of one row, question + answer + EOS, padded on the right: three
    numbers → (width,).

    SFT learns only the answer and its EOS. Without the EOS a model learns to answer but
    not to stop.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length + 1] = 1
    return mask


@completion_mask.inputs
def _(generator):
    question, answer = pick(generator, range(1, 6)), pick(generator, range(1, 5))
    return question, answer, question + answer + 1 + pick(generator, (0, 1, 2, 4))


@completion_mask.mistake
def no_eos(question_length, answer_length, width):
    """Your mask omits the EOS after the answer: the model will never stop."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def question_too(question_length, answer_length, width):
    """Your mask includes the question. No user asks the model to write questions."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[: question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def padding_too(question_length, answer_length, width):
    """Your mask includes padding. Padding is EOS, so the model would learn to say EOS
    after EOS, many times in every row.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length:] = 1
    return mask


@completion_mask.mistake
def one_too_many(question_length, answer_length, width):
    """Your mask includes one token too many: the first padding token."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length + 2] = 1
    return mask


@completion_mask.mistake
def starts_late(question_length, answer_length, width):
    """Your mask omits the answer's first token."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length + 1 : question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def starts_early(question_length, answer_length, width):
    """Your mask includes the question's last token."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length - 1 : question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def shifted_early(question_length, answer_length, width):
    """Your mask begins and ends one token early. Do not shift it."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length - 1 : question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def inverted(question_length, answer_length, width):
    """Your mask is inverted: it is 0 on the answer and its EOS, and 1 elsewhere."""
    return 1 - by_comparison(question_length, answer_length, width)


@completion_mask.mistake
def eos_alone(question_length, answer_length, width):
    """Your mask includes only the EOS. Include the answer."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def length_for_end(question_length, answer_length, width):
    """Your slice ends at the answer's length. It must end where the answer ends,
    further right by the question's length.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : answer_length + 1] = 1
    return mask


@completion_mask.mistake
def padded_on_the_left(question_length, answer_length, width):
    """The ones are at the right end, but rows are padded on the right."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[width - answer_length - 1 :] = 1
    return mask


@completion_mask.mistake
def question_only(question_length, answer_length, width):
    """Your mask includes the question instead of the answer."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[:question_length] = 1
    return mask


@completion_mask.mistake
def last_column(question_length, answer_length, width):
    """You put the EOS into the last column. It must follow the answer directly."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length] = 1
    mask[-1] = 1
    return mask


@completion_mask.mistake
def all_ones(question_length, answer_length, width):
    """Your mask includes everything, even the question and padding."""
    return torch.ones(width, dtype=torch.float64)


@completion_mask.alternative
def by_comparison(question_length, answer_length, width):
    column = torch.arange(width)
    return (
        (column >= question_length) & (column <= question_length + answer_length)
    ).double()
