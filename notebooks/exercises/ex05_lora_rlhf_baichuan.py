"""Exercises of notebook 05."""

import torch

from engine import Set, normal, pick

SET = Set("05_lora_rlhf_baichuan", "LoRA RLHF on Baichuan")
check = SET.check


@SET.exercise("Split a packed matrix", 1, 5)
def split_w_pack(packed):
    """Split W_pack into query, key and value matrices: (3H, H) → three (H, H).

    Baichuan computes query, key and value in one matrix product, `x @ W_pack.T`, and
    then splits the result. Llama has three separate matrices: [Memory and
    layouts](../deeper/memory_and_layouts.ipynb), section 1.
    """
    return tuple(packed.chunk(3))


@split_w_pack.inputs
def _(generator):
    h = pick(generator, range(3, 6))
    return (normal(generator, 3 * h, h),)


def pieces(packed, *bounds):
    """Return rows of W_pack; the bounds are in units of H rows, and may be off by 1."""
    h = packed.shape[1]
    return tuple(packed[first * h + a : last * h + b] for first, a, last, b in bounds)


split_w_pack.hints = (
    "Does a row of the matrix belong to one output or to one input? Look at "
    "`x @ W_pack.T`.",
    "Three blocks of H rows each are stacked vertically. In which order are they?",
)
split_w_pack.mistakes = {
    "every_third_row": (
        "You take every third row. The three matrices are stacked, not interleaved.",
        lambda packed: (packed[::3], packed[1::3], packed[2::3]),
    ),
    "scrambled": (
        "Your view or reshape mixes rows and columns: elements of one row end up in "
        "different matrices or different rows.",
        lambda packed: tuple(packed.T.reshape(3, packed.shape[1], -1)),
        lambda packed: packed.reshape(packed.shape[1], -1, 3).unbind(-1),
    ),
    "wrong_rows": (
        "At least one of your blocks begins or ends at the wrong row. Each of the "
        "three matrices has H rows, and no row is lost or used twice.",
        lambda packed: packed.split(3),
        lambda packed: packed.chunk(packed.shape[1]),
        lambda packed: pieces(packed, (0, 0, 1, -1), (1, 0, 2, -1), (2, 0, 3, -1)),
        lambda packed: pieces(packed, (0, 0, 1, 0), (1, 1, 2, 1), (2, 1, 3, 0)),
    ),
    "one_block_twice": (
        "You return one of the three blocks more than once, and you leave out at least "
        "one other block.",
        lambda packed: tuple(packed.chunk(3)[i] for i in (0, 1, 1)),
        lambda packed: tuple(packed.chunk(3)[i] for i in (0, 0, 2)),
    ),
}
split_w_pack.alternatives = [lambda packed: tuple(packed.view(3, -1, packed.shape[1]))]


@SET.exercise("A normalized head", 1, 5)
def normalize_head(weight):
    """Convert Baichuan 2's vocabulary projection to a linear layer: (V, H) → (V, H).

    Baichuan 2 scales each token's row to length 1 before each matrix product. If you
    scale the rows once and save them, the model needs no special code: [Memory and
    layouts](../deeper/memory_and_layouts.ipynb), section 1.
    """
    return weight / weight.norm(dim=1, keepdim=True)


@normalize_head.inputs
def _(generator):
    v, h = pick(generator, range(5, 8)), pick(generator, range(2, 5))
    return (normal(generator, v, h) * pick(generator, (0.01, 1, 3)),)


normalize_head.hints = (
    "What has length 1 afterward: a row, a column, or the whole matrix?",
    "A length is the square root of a sum of squares. Keep the dimension that you "
    "sum over.",
)
normalize_head.mistakes = {
    "one_number_for_all_rows": (
        "You divide the whole matrix by one number, so longer rows stay longer and "
        "keep their larger logits. Each row has its own length.",
        lambda w: w / w.norm(),
        lambda w: w / w.norm(dim=1).mean(),
        lambda w: w / w.norm(dim=1).max(),
        lambda w: w / w.norm(dim=1)[0],
    ),
    "squared": (
        "You divide by the squared length. Divide by the length itself.",
        lambda w: w / w.square().sum(1, keepdim=True),
    ),
    "another_length": (
        "You measure a row by its absolute values, its largest entry, a mean, or a "
        "standard deviation. A length is the square root of a sum of squares.",
        lambda w: w / w.abs().sum(1, keepdim=True),
        lambda w: w / w.abs().amax(1, keepdim=True),
        lambda w: w / w.square().mean(1, keepdim=True).sqrt(),
        lambda w: w / w.std(1, keepdim=True),
    ),
    "more_than_the_length": (
        "You change more than the lengths, with a softmax or by subtracting a mean. "
        "Scale each row, and keep the direction of its vector.",
        lambda w: w.softmax(1),
        lambda w: normalize_head.solution(w - w.mean(1, keepdim=True)),
    ),
}
normalize_head.alternatives = [lambda weight: torch.nn.functional.normalize(weight)]


@SET.exercise("A layer with adapters", 2, 15, gradient=("x",))
def lora_forward(x, weight, adapters, active, alpha):
    """Compute a linear layer with LoRA: x (B, I), weight (O, I), adapters {name: (A,
    B)} → (B, O).

    A is (r, I) and B is (O, r). Use only the adapter named `active`. If `active` is
    None, use only the base; the base is the reference if the policy's adapter is new.
    Scale the adapter's output by `alpha` / r: [Memory and
    layouts](../deeper/memory_and_layouts.ipynb), section 2.
    """
    output = x @ weight.T
    if active is not None:
        a, b = adapters[active]
        output = output + alpha / len(a) * (x @ a.T @ b.T)
    return output


@lora_forward.inputs
def _(generator):
    seed, names = generator.initial_seed(), ["policy", "ref", "reward"]
    start = seed // 4 % 3
    ranks = torch.randperm(3, generator=generator)
    width, height = pick(generator, (4, 5)), pick(generator, (7, 9))
    adapters = {}
    for name, i in zip(names[start:] + names[:start], ranks):
        r = (2, 3, 6)[i]
        a, b = normal(generator, r, width), normal(generator, height, r)
        adapters[name] = a / 2, b / 4
    x = normal(generator, pick(generator, (2, 8)), width)
    weight = normal(generator, height, width)
    active = [None, *names][seed % 4]
    return x, weight, adapters, active, pick(generator, (1, 8, 16))


def merged(x, weight, adapters, active, alpha):
    if active in adapters:
        a, b = adapters[active]
        weight = weight + (b @ a) * (alpha / a.shape[0])
    return torch.nn.functional.linear(x, weight)


def scaled(factor):
    """Return a mistake with another factor, factor(alpha, A, B)."""

    def wrong(x, weight, adapters, active, alpha):
        output = x @ weight.T
        if active is not None:
            a, b = adapters[active]
            output = output + factor(alpha, a, b) * (x @ a.T @ b.T)
        return output

    return wrong


def with_adapters(names):
    """Return a mistake that adds other adapters, names(active, adapters)."""

    def wrong(x, weight, adapters, active, alpha):
        output = x @ weight.T
        for name in names(active, adapters):
            a, b = adapters[name]
            output = output + alpha / len(a) * (x @ a.T @ b.T)
        return output

    return wrong


def without_base(x, weight, adapters, active, alpha):
    base = weight if active is None else 0 * weight
    return lora_forward.solution(x, base, adapters, active, alpha)


lora_forward.hints = (
    "Write the shapes below x, A and B. In which order can you multiply them?",
    "The base's output comes first, and one adapter may add to it. How large is r?",
)
lora_forward.mistakes = {
    "another_rank": (
        "You do not divide α by r. r is the dimension that A and B share, and adapters "
        "may have different ranks.",
        scaled(lambda alpha, a, b: alpha),
        scaled(lambda alpha, a, b: alpha / 8),
        scaled(lambda alpha, a, b: alpha / len(b)),
        scaled(lambda alpha, a, b: alpha / a.shape[1]),
        scaled(lambda alpha, a, b: alpha / len(a) ** 0.5),
    ),
    "another_factor": (
        "Your factor is inverted, or you apply it twice, for example to A and to B. It "
        "must be α over r, once.",
        scaled(lambda alpha, a, b: len(a) / alpha),
        scaled(lambda alpha, a, b: (alpha / len(a)) ** 2),
    ),
    "other_adapters": (
        "You use other adapters than `active`. Use only the adapter with this name; if "
        "`active` is None, use only the base.",
        with_adapters(lambda active, adapters: adapters if active else []),
        with_adapters(lambda active, adapters: [active] if active else adapters),
        with_adapters(lambda active, adapters: [active or list(adapters)[0]]),
    ),
    "adapter_alone": (
        "You leave out the base when an adapter is on. An adapter *adds* to the base.",
        without_base,
    ),
}
lora_forward.alternatives = [merged]


@SET.exercise("Which adapter when", 2, 10)
def adapter_of(stage):
    """Return the active adapter in a stage of a PPO step: str → str.

    `stage` is one of `generate`, `log-probabilities`, `reference log-probabilities`,
    `score`, `update`. The adapters are called `policy`, `ref` and `reward`. PPO comes
    after SFT here, so the reference is the adapter `ref`, a frozen copy of the
    SFT adapter. Unlike in the previous exercise, the reference is not the base without
    an adapter.
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


def by_cases(stage):
    if stage.startswith("reference"):
        return "ref"
    return "reward" if stage == "score" else "policy"


def except_for(stage, name):
    """Return a mistake whose answer for one stage is ``name``."""
    return lambda asked: name if asked == stage else adapter_of.solution(asked)


adapter_of.hints = (
    "Which of the three models samples, which one learns, and which one scores?",
    "One stage needs the frozen copy, and one stage needs the judge.",
)
adapter_of.mistakes = {
    "reference_is_the_policy": (
        "You compute the reference's log-probabilities with the policy's adapter, or "
        "with none. After SFT, the reference has its own adapter.",
        lambda stage: "reward" if stage == "score" else "policy",
        except_for("reference log-probabilities", None),
    ),
    "logprobs_of_the_reference": (
        "You use the reference for the plain log-probabilities. They come from the "
        "model that sampled the response.",
        except_for("log-probabilities", "ref"),
    ),
    "another_judge": (
        "You let the policy or the reference judge the answers. Use the adapter that "
        "was trained to judge.",
        except_for("score", "policy"),
        except_for("score", "ref"),
    ),
    "another_learner": (
        "Your update changes the wrong adapter. PPO changes only the *policy*.",
        except_for("update", "reward"),
        except_for("update", "ref"),
        except_for("update", None),
    ),
}
adapter_of.alternatives = [by_cases]


@SET.exercise("The tokens that SFT learns", 1, 10)
def completion_mask(question_length, answer_length, width):
    """Return the mask of one row, question + answer + EOS, padded on the right: three
    numbers → (width,).

    SFT learns only the answer and its EOS. Without the EOS, a model learns to answer
    but not to stop.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length + 1] = 1
    return mask


@completion_mask.inputs
def _(generator):
    question, answer = pick(generator, range(1, 6)), pick(generator, range(1, 5))
    return question, answer, question + answer + 1 + pick(generator, (0, 1, 2, 4))


def by_comparison(question_length, answer_length, width):
    column = torch.arange(width)
    return (
        (column >= question_length) & (column <= question_length + answer_length)
    ).double()


def ones(first, last, width):
    """Return a mask with ones from column ``first`` to column ``last`` - 1."""
    column = torch.arange(width)
    return ((column >= first) & (column < last)).double()


completion_mask.hints = (
    "Write one row with a question of 2 tokens and an answer of 3. Where is EOS?",
    "The ones of the mask begin after the question. How many tokens does SFT learn?",
)
completion_mask.mistakes = {
    "no_eos": (
        "Your mask omits the EOS after the answer, so the model never learns to stop.",
        lambda q, a, width: ones(q, q + a, width),
    ),
    "question_too": (
        "Your mask includes the question, but SFT must not train the model to write "
        "questions.",
        lambda q, a, width: ones(0, q + a + 1, width),
    ),
    "length_for_end": (
        "Your ones end as if the answer began in the first column. They must end "
        "further to the right: add the question's length.",
        lambda q, a, width: ones(q, a + 1, width),
    ),
    "eos_elsewhere": (
        "You mark only the EOS, or you mark the last column as the EOS. The EOS "
        "directly follows the answer, and the answer is learned as well.",
        lambda q, a, width: ones(q + a, q + a + 1, width),
        lambda q, a, width: ones(q, q + a, width) + ones(width - 1, width, width),
    ),
}
completion_mask.alternatives = [by_comparison]
