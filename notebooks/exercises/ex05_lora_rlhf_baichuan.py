"""Exercises of notebook 05."""

from itertools import combinations

import torch

from engine import Set, normal, pick

SET = Set("05_lora_rlhf_baichuan", "LoRA RLHF on Baichuan")
check = SET.check


@SET.exercise(
    "Split a packed matrix",
    1,
    5,
    (
        "Does a row of the matrix belong to one output or to one input? Look at "
        "`x @ W_pack.T`.",
        "Three blocks of H rows each are stacked vertically. In which order are they?",
    ),
)
def split_w_pack(packed):
    """Split W_pack into query, key and value matrices: (3H, H) → three (H, H).

    Baichuan computes query, key and value in one matrix product, `x @ W_pack.T`, and
    then splits the result. Llama has three separate matrices.
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
    """You swap key and query, so each token would attend with its key instead of its
    query. The order is query, key, value.
    """
    query, key, value = packed.chunk(3)
    return key, query, value


@split_w_pack.mistake
def transposed(packed):
    """You transpose the matrices, but `nn.Linear` stores weights as (outputs, inputs),
    both in the packed matrix and in the three separate matrices.
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
    """You split columns, which are inputs. Each of the three matrices needs all
    inputs.
    """
    return tuple(packed.chunk(3, dim=1))


@split_w_pack.mistake
def from_the_transposed(packed):
    """You transpose before you split, but rows are already outputs."""
    return tuple(packed.T.chunk(3))


@split_w_pack.mistake
def all_the_query(packed):
    """You return the query's matrix three times. The second and third matrices begin
    further down.
    """
    h = packed.shape[1]
    return packed[:h], packed[:h], packed[:h]


def _blocks(order):
    """Return a mistake with the three blocks in another order, or repeated."""
    return lambda packed: tuple(packed.chunk(3)[i] for i in order)


def _rows(bounds):
    """Return a mistake that slices rows at bounds that depend on H."""
    return lambda p: tuple(p[i:j] for i, j in bounds(p.shape[1]))


split_w_pack.more(
    {
        "rotated": (
            "None of your three blocks is in the right position. The order is query, "
            "key, value.",
            _blocks((1, 2, 0)),
            _blocks((2, 0, 1)),
        ),
        "one_block_twice": (
            "You return one of the three blocks more than once, and you leave out at "
            "least one other block.",
            *map(
                _blocks,
                (
                    (0, 1, 1),
                    (0, 0, 1),
                    (0, 0, 2),
                    (0, 2, 2),
                    (1, 1, 2),
                    (0, 1, 0),
                    (2, 1, 2),
                    (1, 1, 1),
                    (2, 2, 2),
                ),
            ),
        ),
        "columns_differently": (
            "You split columns, which are inputs. Each of the three matrices needs "
            "all inputs.",
            lambda p: p.tensor_split(3, 1),
            lambda p: p.split(3, 1),
            lambda p: p.split(max(1, p.shape[1] // 3), 1),
            lambda p: (p[:, : p.shape[1]], p[:, p.shape[1] :], p[:, p.shape[1] :]),
        ),
        "scrambled_by_a_view": (
            "Your view or reshape mixes rows and columns: elements of one row end up "
            "in different matrices or different rows.",
            lambda p: p.reshape(p.shape[1], p.shape[1], 3).unbind(-1),
            lambda p: p.reshape(p.shape[1], p.shape[1], 3).transpose(0, 1).unbind(-1),
            lambda p: p.T.reshape(3, p.shape[1], p.shape[1]),
            lambda p: p.T.reshape(p.shape[1], p.shape[1], 3).unbind(-1),
        ),
        "wrong_rows": (
            "At least one of your slices begins or ends at the wrong row. Each of the "
            "three matrices has H rows, and no row is lost or used twice.",
            *map(
                _rows,
                (
                    lambda h: ((0, h), (h + 1, 2 * h + 1), (2 * h + 1, 3 * h)),
                    lambda h: ((0, h), (h + 1, 2 * h + 1), (2 * h + 2, 3 * h)),
                    lambda h: ((0, h), (h + 1, 2 * h), (2 * h + 1, 3 * h)),
                    lambda h: ((0, h - 1), (h, 2 * h - 1), (2 * h, 3 * h - 1)),
                    lambda h: ((0, h - 1), (h, 2 * h - 1), (2 * h, 3 * h)),
                    lambda h: ((0, h), (h, 2 * h), (2 * h, 3 * h - 1)),
                    lambda h: ((0, h), (h - 1, 2 * h - 1), (2 * h, 3 * h)),
                    lambda h: ((0, h), (h - 1, 2 * h - 1), (2 * h - 1, 3 * h - 1)),
                    lambda h: ((0, h), (h - 1, 2 * h - 1), (2 * h - 2, 3 * h - 2)),
                    lambda h: ((0, h), (h + 1, 2 * h), (2 * h, 3 * h)),
                    lambda h: ((0, h + 1), (h, 2 * h + 1), (2 * h, 3 * h)),
                    lambda h: ((1, h + 1), (h + 1, 2 * h + 1), (2 * h + 1, 3 * h)),
                    lambda h: ((0, h), (h, 2 * h), (h, 3 * h)),
                    lambda h: ((0, h), (h, 3 * h), (2 * h, 3 * h)),
                    lambda h: ((0, 3 * h), (h, 3 * h), (2 * h, 3 * h)),
                    lambda h: ((0, h), (0, 2 * h), (0, 3 * h)),
                ),
            ),
        ),
        "wrong_size": (
            "Your blocks do not have H rows each. Check your number of rows, and "
            "whether your function takes the number of blocks or their size.",
            lambda p: p.split(3),
            lambda p: p.chunk(2),
            *map(
                _rows,
                (
                    lambda h: (
                        (0, h // 3),
                        (h // 3, 2 * (h // 3)),
                        (2 * (h // 3), None),
                    ),
                    lambda h: ((0, h // 3), (h // 3, 2 * (h // 3)), (2 * (h // 3), h)),
                    lambda h: ((0, 3), (3, 6), (6, None)),
                    lambda h: ((0, 1), (1, 2), (2, 3)),
                ),
            ),
            lambda p: (p[0], p[1], p[2]),
        ),
        "scaled": (
            "You scale a matrix. Split the packed matrix without changing its numbers.",
            lambda p: (p.chunk(3)[0] / p.shape[1] ** 0.5, *p.chunk(3)[1:]),
            lambda p: (p / p.shape[1] ** 0.5).chunk(3),
        ),
        "not_split": (
            "You do not return three matrices.",
            lambda p: p.clone(),
            lambda p: (p, p, p),
        ),
        "rows_reversed": (
            "You reverse the order of rows.",
            lambda p: p.flip(0).chunk(3),
        ),
    },
)


@split_w_pack.alternative
def by_view(packed):
    return tuple(packed.view(3, -1, packed.shape[1]))


@SET.exercise(
    "A normalized head",
    1,
    5,
    (
        "What has length 1 afterward: a row, a column, or the whole matrix?",
        "A length is the square root of a sum of squares. Keep the dimension that you "
        "sum over.",
    ),
)
def normalize_head(weight):
    """Convert Baichuan 2's vocabulary projection to a linear layer: (V, H) → (V, H).

    Baichuan 2 scales each token's row to length 1 before each matrix product. If you
    scale the rows once and save them, the model needs no special code.
    """
    return weight / weight.norm(dim=1, keepdim=True)


@normalize_head.inputs
def _(generator):
    v, h = pick(generator, range(5, 8)), pick(generator, range(2, 5))
    return (normal(generator, v, h) * pick(generator, (0.01, 1, 3)),)


@normalize_head.mistake
def columns(weight):
    """You scale columns, which are hidden dimensions. A token's vector is a *row*."""
    return weight / weight.norm(dim=0, keepdim=True)


@normalize_head.mistake
def whole_matrix(weight):
    """You divide the whole matrix by one number, so longer rows stay longer and keep
    their larger logits.
    """
    return weight / weight.norm()


@normalize_head.mistake
def squared(weight):
    """You divide by the squared length. Divide by the length itself."""
    return weight / weight.square().sum(1, keepdim=True)


@normalize_head.mistake
def sum_of_sizes(weight):
    """You divide by the sum of absolute values. A length is the square root of a sum of
    squares.
    """
    return weight / weight.abs().sum(1, keepdim=True)


@normalize_head.mistake
def largest(weight):
    """You divide by the largest entry of a row. Divide by the row's length."""
    return weight / weight.abs().amax(1, keepdim=True)


@normalize_head.mistake
def plain_sum(weight):
    """You divide by the sum of a row. For a length, sum the squares of the elements and
    take the square root.
    """
    return weight / weight.sum(1, keepdim=True)


@normalize_head.mistake
def standard_deviation(weight):
    """You divide by a standard deviation or variance, so rows do not have length 1."""
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
    """You take the square root of a *mean* of squares, which is not the length."""
    return weight / weight.square().mean(1, keepdim=True).sqrt()


@normalize_head.mistake
def lengths(weight):
    """You return the lengths themselves. Divide the rows by them."""
    return weight.norm(dim=1, keepdim=True)


def _over(length):
    return lambda w: w / length(w)


def _length(w):
    return w.norm(dim=1, keepdim=True)


normalize_head.more(
    {
        "softmax": (
            "You apply a softmax. Scale each row, and keep the signs of its elements.",
            *(lambda w, dim=dim: w.softmax(dim) for dim in (1, 0)),
            *(lambda w, dim=dim: w.log_softmax(dim) for dim in (1, 0)),
        ),
        "dimensions_for_length": (
            "You divide by a number that depends only on the shape. Measure each "
            "row's length.",
            *map(
                _over,
                (
                    lambda w: w.shape[1] ** 0.5,
                    lambda w: w.shape[1],
                    lambda w: len(w),
                    lambda w: len(w) ** 0.5,
                ),
            ),
        ),
        "one_number_for_all_rows": (
            "You divide all rows by the same number. Each row has its own length.",
            *map(
                _over,
                (
                    lambda w: _length(w).mean(),
                    lambda w: _length(w).amax(),
                    lambda w: _length(w).amin(),
                    lambda w: _length(w).median(),
                    lambda w: _length(w)[0],
                    lambda w: _length(w)[-1],
                    lambda w: _length(w).sum(),
                    lambda w: w.abs().amax(),
                    lambda w: w.std(),
                    lambda w: w.sum(),
                    lambda w: w.norm() ** 2,
                    lambda w: w.abs().sum(),
                    lambda w: w.square().mean().sqrt(),
                    lambda w: torch.linalg.matrix_norm(w, 2),
                ),
            ),
        ),
        "standardized": (
            "You subtract a mean and divide by a spread, as layer norm does. Change "
            "only the rows' lengths.",
            *(
                lambda w, c=c, d=d: (
                    (w - w.mean(d, keepdim=True)) / w.std(d, correction=c, keepdim=True)
                )
                for c in (0, 1)
                for d in (0, 1)
            ),
            lambda w: torch.nn.functional.layer_norm(w, w.shape[1:]),
            lambda w: (w - w.mean()) / w.std(),
        ),
        "centered": (
            "You subtract a mean from the rows or columns. Change only the rows' "
            "lengths.",
            lambda w: w - w.mean(1, keepdim=True),
            lambda w: w - w.mean(0),
            lambda w: (w - w.mean(0)) / (w - w.mean(0)).norm(dim=1, keepdim=True),
        ),
        "biased_deviation": (
            "You divide by a standard deviation or variance, so rows do not have "
            "length 1.",
            _over(lambda w: w.std(1, correction=0, keepdim=True)),
            _over(lambda w: w.var(1, keepdim=True)),
        ),
        "rms_with_epsilon": (
            "You use a *mean* of squares, plus a small number, inside the square root. "
            "The length uses the sum of squares.",
            *(
                _over(lambda w, e=e: (w.square().mean(1, keepdim=True) + e).sqrt())
                for e in (1e-5, 1e-6, 1e-8)
            ),
        ),
        "only_shrinks": (
            "You only shorten long rows. *Each* row must get length 1, including the "
            "short rows.",
            _over(lambda w: _length(w).clamp(1)),
        ),
        "something_added": (
            "You add a number to the length or set a lower bound for it, so short "
            "rows do not reach length 1. A vocabulary has no rows of length 0.",
            *(
                _over(lambda w, e=e: _length(w) + e)
                for e in (1, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)
            ),
            *(
                _over(lambda w, e=e: (_length(w) ** 2 + e).sqrt())
                for e in (1, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)
            ),
            *(_over(lambda w, e=e: _length(w).clamp(e)) for e in (0.1, 0.01)),
        ),
        "size_of_the_sum": (
            "You divide by the absolute or squared sum of a row, as if you squared "
            "after summing. Square the elements first.",
            _over(lambda w: w.sum(1, keepdim=True).abs()),
            _over(lambda w: w.sum(1, keepdim=True) ** 2),
        ),
        "average_size": (
            "You divide by a mean. A length is the square root of a sum of squares.",
            _over(lambda w: w.mean(1, keepdim=True)),
            _over(lambda w: w.abs().mean(1, keepdim=True)),
            _over(lambda w: w.square().mean(1, keepdim=True)),
        ),
        "root_of_the_length": (
            "You take one square root too many. Divide by the length itself.",
            _over(lambda w: _length(w) ** 0.5),
        ),
        "signed_largest": (
            "You scale by the largest or smallest entries of a row. Divide by the "
            "row's length.",
            _over(lambda w: w.amax(1, keepdim=True)),
            lambda w: (
                (w - w.amin(1, keepdim=True))
                / (w.amax(1, keepdim=True) - w.amin(1, keepdim=True))
            ),
        ),
        "columns_as_well": (
            "You scale columns in addition to rows. Scale only rows.",
            lambda w: w / _length(w) / (w / _length(w)).norm(dim=0),
            lambda w: w / w.norm(dim=0) / _length(w / w.norm(dim=0)),
        ),
        "columns_by_another_measure": (
            "You scale columns instead of rows, and not by a length. Divide each row "
            "by its length.",
            *map(
                _over,
                (
                    lambda w: w.sum(0),
                    lambda w: w.abs().sum(0),
                    lambda w: w.std(0),
                    lambda w: w.square().sum(0),
                    lambda w: w.abs().amax(0),
                ),
            ),
        ),
        "squared_elements": (
            "You return squared elements, which have lost their signs.",
            lambda w: w.square() / w.square().sum(1, keepdim=True),
            lambda w: w.square() / _length(w),
        ),
        "unchanged": (
            "You return the matrix without changing the lengths of its rows.",
            lambda w: w.clone(),
        ),
        "only_lengths": (
            "You return one number per row. Return the scaled matrix.",
            lambda w: w.norm(dim=1),
            lambda w: w.square().sum(1),
            lambda w: 1 / _length(w),
        ),
    },
)


@normalize_head.alternative
def with_torch(weight):
    return torch.nn.functional.normalize(weight)


@SET.exercise(
    "A layer with adapters",
    2,
    15,
    (
        "Write the shapes below x, A and B. In which order can you multiply them?",
        "The base's output comes first, and one adapter may add to it. How large is r?",
    ),
    ("x",),
)
def lora_forward(x, weight, adapters, active, alpha):
    """Compute a linear layer with LoRA: x (B, I), weight (O, I), adapters {name: (A,
    B)} → (B, O).

    A is (r, I) and B is (O, r). Use only the adapter named `active`. If `active` is
    None, use only the base; the base is the reference if the policy's adapter is new.
    Scale the adapter's output by `alpha` / r.
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


@lora_forward.mistake
def all_adapters(x, weight, adapters, active, alpha):
    """You use all adapters. The policy would use the reward model's adapter, and the
    reference would use the policy's adapter.
    """
    return x @ weight.T + sum(
        alpha / len(a) * (x @ a.T @ b.T) for a, b in adapters.values()
    )


@lora_forward.mistake
def no_scale(x, weight, adapters, active, alpha):
    """The factor α / r is missing: the adapter's effect would not have the size that it
    had in training.
    """
    output = x @ weight.T
    return (
        output
        if active is None
        else output + x @ adapters[active][0].T @ adapters[active][1].T
    )


@lora_forward.mistake
def alpha_alone(x, weight, adapters, active, alpha):
    """You scale by α. Scale by α / r, so that the update does not grow with r."""
    output = x @ weight.T
    return (
        output
        if active is None
        else output + alpha * (x @ adapters[active][0].T @ adapters[active][1].T)
    )


@lora_forward.mistake
def policy_always(x, weight, adapters, active, alpha):
    """You always use the policy's adapter, whatever `active` is. KL would always be 0,
    because the reference would be the policy.
    """
    a, b = adapters["policy"]
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def adapter_alone(x, weight, adapters, active, alpha):
    """You leave out the base when an adapter is on. An adapter *adds* to the base."""
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
    """You divide α by a dimension that is not r. A and B share the dimension r."""
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
    """You divide by the square root of r, as rsLoRA does. Divide by r itself."""
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
    """You also multiply the base by the factor. The factor must scale only the
    adapter.
    """
    if active is None:
        return x @ weight.T
    a, b = adapters[active]
    return alpha / len(a) * (x @ weight.T + x @ a.T @ b.T)


@lora_forward.mistake
def none_is_the_reference(x, weight, adapters, active, alpha):
    """You use an adapter when `active` is None. In that case, use only the base."""
    a, b = adapters[active or "ref"]
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


@lora_forward.mistake
def first_adapter(x, weight, adapters, active, alpha):
    """You take the dict's first adapter instead of the adapter named `active`."""
    if active is None:
        return x @ weight.T
    a, b = next(iter(adapters.values()))
    return x @ weight.T + alpha / len(a) * (x @ a.T @ b.T)


def _layer(factor=None, names=None, inner=None, base=1):
    """Return lora_forward with another scale, choice of adapters, or inner function.

    ``factor`` takes alpha, A, B, x and adapters; ``names`` takes active and adapters.
    """

    def mistake(x, weight, adapters, active, alpha):
        output = base * (x @ weight.T)
        chosen = [active] if active else []
        for name in names(active, list(adapters)) if names else chosen:
            a, b = adapters[name]
            scale = factor(alpha, a, b, x, adapters) if factor else alpha / len(a)
            hidden = x @ a.T
            output = output + scale * (inner(hidden) if inner else hidden) @ b.T
        return output

    return mistake


lora_forward.more(
    {
        "all_when_one_is_active": (
            "Whenever an adapter is on, you use all adapters. Use only the adapter "
            "named `active`.",
            _layer(names=lambda on, every: every if on else []),
        ),
        "all_for_none": (
            "You use all adapters when `active` is None. In that case, use only the "
            "base.",
            _layer(names=lambda on, every: [on] if on else every),
        ),
        "the_others": (
            "You use the adapters that are *not* named `active`.",
            _layer(names=lambda on, every: [n for n in every if n != on]),
            _layer(names=lambda on, every: [n for n in every if on and n != on]),
        ),
        "fallback": (
            "You use an adapter when `active` is None. In that case, use only the "
            "base.",
            _layer(names=lambda on, every: [on or every[0]]),
            _layer(names=lambda on, every: [on or every[-1]]),
            _layer(names=lambda on, every: [on or "policy"]),
            _layer(names=lambda on, every: [on or "reward"]),
        ),
        "fixed_adapter": (
            "You use the same adapter whatever name `active` holds. Look the name up.",
            *(
                _layer(names=lambda on, every, name=name: [name] if on else [])
                for name in ("policy", "ref", "reward")
            ),
            *(
                _layer(names=lambda on, every, name=name: [name])
                for name in ("ref", "reward")
            ),
            _layer(names=lambda on, every: every[-1:] if on else []),
            _layer(names=lambda on, every: every[:1]),
        ),
        "one_name_ignored": (
            "For at least one name, you leave out the adapter. Each name in `active` "
            "turns on its own adapter.",
            *(
                _layer(
                    names=lambda on, every, off=off: [on] if on and on != off else []
                )
                for off in ("ref", "policy", "reward")
            ),
            _layer(names=lambda on, every: [on] if on == "policy" else []),
        ),
        "nothing_for_none": (
            "You do not return the base's output when `active` is None. The base is "
            "always used.",
            lambda x, weight, adapters, active, alpha: (
                lora_forward.solution(x, weight, adapters, active, alpha)
                if active
                else 0 * (x @ weight.T)
            ),
            lambda x, weight, adapters, active, alpha: (
                lora_forward.solution(x, weight, adapters, active, alpha)
                if active
                else x
            ),
        ),
        "scaled_twice": (
            "You apply the factor twice, for example to A and to B. Apply it once.",
            _layer(lambda alpha, a, *_: (alpha / len(a)) ** 2),
        ),
        "times_the_rank": (
            "You multiply by r where you should divide by r.",
            _layer(lambda alpha, a, *_: alpha * len(a)),
        ),
        "root_of_the_factor": (
            "You take the square root of α / r. Use the factor itself.",
            _layer(lambda alpha, a, *_: (alpha / len(a)) ** 0.5),
        ),
        "rank_twice": (
            "You divide by r twice.",
            _layer(lambda alpha, a, *_: alpha / len(a) ** 2),
        ),
        "whole_numbers": (
            "Your factor is a whole number: // or int() drops the fraction.",
            _layer(lambda alpha, a, *_: alpha // len(a)),
        ),
        "fixed_rank": (
            "You divide α by the same number for all adapters. Adapters may have "
            "different ranks: r is a dimension of A and B.",
            *(
                _layer(lambda alpha, *_, r=r: alpha / r)
                for r in (2, 3, 4, 8, 16, 32, 64)
            ),
        ),
        "rank_of_another": (
            "You take r from an adapter that is not always the active one.",
            _layer(lambda alpha, a, b, x, all: alpha / len([*all.values()][0][0])),
            _layer(lambda alpha, a, b, x, all: alpha / len([*all.values()][-1][0])),
            _layer(lambda alpha, a, b, x, all: alpha / len(all["policy"][0])),
        ),
        "another_size_for_rank": (
            "You divide α by a size that is not r. Which dimension do A and B share?",
            _layer(lambda alpha, a, b, x, _: alpha / len(x)),
            _layer(lambda alpha, a, b, x, _: alpha / a.numel()),
            _layer(lambda alpha, a, b, x, _: alpha / b.numel()),
            _layer(lambda alpha, a, b, x, _: alpha / a.shape[1] ** 0.5),
        ),
        "nonlinear": (
            "You apply a nonlinear function between A and B. An adapter is linear.",
            *(
                _layer(inner=inner)
                for inner in (
                    torch.relu,
                    torch.tanh,
                    torch.sigmoid,
                    torch.nn.functional.gelu,
                    torch.nn.functional.silu,
                )
            ),
        ),
        "base_again": (
            "Your result contains the base twice.",
            _layer(base=2),
        ),
        "no_base": (
            "Your result never contains the base's output. An adapter *adds* to it.",
            _layer(base=0),
        ),
    },
)


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
        "Which of the three models samples, which one learns, and which one scores?",
        "One stage needs the frozen copy, and one stage needs the judge.",
    ),
)
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


def _stages(**changes):
    right = dict.fromkeys(STAGES, "policy")
    right |= {"reference log-probabilities": "ref", "score": "reward"}
    return right | {name.replace("_", "-"): to for name, to in changes.items()}


@adapter_of.mistake
def reference_is_the_policy(stage):
    """You compute the reference's log-probabilities with the policy's adapter: KL is
    always 0, and nothing keeps the policy near the reference.
    """
    return "reward" if stage == "score" else "policy"


@adapter_of.mistake
def samples_from_the_reference(stage):
    """You sample from the reference. The *policy* must sample: PPO's ratio compares the
    updated policy with the policy that drew the responses.
    """
    return {
        "reference log-probabilities": "ref",
        "score": "reward",
        "generate": "ref",
    }.get(stage, "policy")


@adapter_of.mistake
def policy_judges_itself(stage):
    """You score answers with the policy's adapter. The reward model has its own
    adapter.
    """
    return "ref" if stage == "reference log-probabilities" else "policy"


@adapter_of.mistake
def reference_is_the_base(stage):
    """You return None for the reference. After SFT the reference is also an adapter, a
    frozen copy of the SFT adapter. Return its name.
    """
    return (
        None if stage == "reference log-probabilities" else adapter_of.solution(stage)
    )


@adapter_of.mistake
def trains_the_reward_model(stage):
    """Your update changes the reward model. PPO changes only the *policy*."""
    return _stages(update="reward")[stage]


@adapter_of.mistake
def trains_the_reference(stage):
    """Your update changes the reference. The reference must stay unchanged."""
    return _stages(update="ref")[stage]


@adapter_of.mistake
def scores_by_the_reference(stage):
    """You let the reference judge the answers. Use the adapter that was trained to
    judge.
    """
    return _stages(score="ref")[stage]


@adapter_of.mistake
def logprobs_of_the_reference(stage):
    """You use the reference for the plain log-probabilities. They come from the model
    that sampled the response.
    """
    return _stages(log_probabilities="ref")[stage]


@adapter_of.mistake
def judge_samples(stage):
    """You let the reward model write the answers. It was trained to judge, not to
    write.
    """
    return _stages(generate="reward")[stage]


@adapter_of.mistake
def reference_is_the_reward_model(stage):
    """You use the reward model as the reference. These are two different adapters."""
    return "reward" if stage.startswith("ref") else adapter_of.solution(stage)


@adapter_of.mistake
def reference_and_reward_swapped(stage):
    """You swap the reference and the reward model."""
    swapped = {"ref": "reward", "reward": "ref", "policy": "policy"}
    return swapped[adapter_of.solution(stage)]


@adapter_of.mistake
def policy_everywhere(stage):
    """You use the policy for all stages, so it would be its own reference and judge."""
    return "policy"


REASONS = {
    "generate": "Responses are drawn from the model that PPO trains.",
    "log-probabilities": "Plain log-probabilities come from the model that sampled "
    "the response.",
    "reference log-probabilities": "KL compares the policy with a frozen copy of "
    "the SFT adapter.",
    "score": "Scores come from the adapter that was trained to judge.",
    "update": "The update changes only the model that PPO trains.",
}


def _table(changes):
    return lambda stage: changes.get(stage, adapter_of.solution(stage))


adapter_of.more(
    {
        **{
            f"{stage} by {name}": (
                f"Your choice for `{stage}` is wrong. {reason}",
                _table({stage: name}),
            )
            for stage, reason in REASONS.items()
            for name in (None, "base", "reward")
            if name == "base"
            or stage == "log-probabilities"
            or name is None
            and stage != "reference log-probabilities"
        },
        **{
            f"{one} by {x}, {other} by {y}": (
                f"Your choices for `{one}` and `{other}` are wrong. {REASONS[one]} "
                f"{REASONS[other]}",
                _table({one: x, other: y}),
            )
            for one, other in combinations(STAGES, 2)
            for x in ("policy", "ref", "reward")
            for y in ("policy", "ref", "reward")
            if adapter_of.solution(one) != x and adapter_of.solution(other) != y
            if (one, other) != ("reference log-probabilities", "score")
            or (x, y) not in (("policy", "policy"), ("reward", "ref"))
        },
        "policy_and_reference_swapped": (
            "You swap the policy and its reference.",
            lambda stage: {"policy": "ref", "ref": "policy"}.get(
                adapter_of.solution(stage), "reward"
            ),
        ),
        "one_adapter_for_all": (
            "You use the same adapter for all stages. The policy, the reference and "
            "the reward model have separate adapters.",
            lambda stage: "ref",
            lambda stage: "reward",
        ),
        "unknown_name": (
            "You return a name that no adapter has. The adapters are called `policy`, "
            "`ref` and `reward`.",
            *(
                _table({"reference log-probabilities": name})
                for name in ("reference", "ref_policy", "ref_model", "sft", "SFT", "")
            ),
            *(
                _table({"score": name})
                for name in ("score", "reward_model", "reward model", "rm", "critic")
            ),
            _table({"reference log-probabilities": "reference", "score": "score"}),
            lambda stage: adapter_of.solution(stage).capitalize(),
            lambda stage: adapter_of.solution(stage).upper(),
            lambda stage: stage,
        ),
        "a_collection": (
            "You return a collection of adapters. Return one name.",
            lambda stage: [adapter_of.solution(stage)],
            lambda stage: (adapter_of.solution(stage),),
        ),
    },
)


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
        "The ones of the mask begin after the question. How many tokens does SFT "
        "learn?",
    ),
)
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


@completion_mask.mistake
def no_eos(question_length, answer_length, width):
    """Your mask omits the EOS after the answer, so the model never learns to stop."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def question_too(question_length, answer_length, width):
    """Your mask includes the question, but SFT must not train the model to write
    questions.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[: question_length + answer_length + 1] = 1
    return mask


@completion_mask.mistake
def padding_counts(question_length, answer_length, width):
    """Your mask includes padding, so the model would learn to write padding tokens
    after EOS.
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
    """Your mask includes only the EOS. Include the answer as well."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length + answer_length] = 1
    return mask


@completion_mask.mistake
def length_for_end(question_length, answer_length, width):
    """Your ones end as if the answer began in the first column. They must end further
    to the right: add the question's length.
    """
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : answer_length + 1] = 1
    return mask


@completion_mask.mistake
def padded_on_the_left(question_length, answer_length, width):
    """Your ones are at the right end, but rows are padded on the right."""
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
    """You mark the last column as the EOS. The EOS directly follows the answer."""
    mask = torch.zeros(width, dtype=torch.float64)
    mask[question_length : question_length + answer_length] = 1
    mask[-1] = 1
    return mask


@completion_mask.mistake
def all_ones(question_length, answer_length, width):
    """Your mask includes everything, even the question and padding."""
    return torch.ones(width, dtype=torch.float64)


def _ones(start, stop):
    """Return a mask with ones between two columns, which depend on q, a and width."""

    def mistake(q, a, width):
        column = torch.arange(width)
        return ((column >= start(q, a, width)) & (column < stop(q, a, width))).double()

    return mistake


def _changed(change):
    return lambda q, a, width: change(by_comparison(q, a, width))


completion_mask.more(
    {
        "shares": (
            "Your ones are divided by their number. A mask contains only 0 and 1.",
            _changed(lambda mask: mask / mask.sum()),
        ),
        "labels": (
            "You use −100, −1 or −∞, as in labels or attention scores. A mask "
            "contains only 0 and 1.",
            *(
                _changed(lambda mask, low=low: torch.where(mask > 0, 1.0, low))
                for low in (-100.0, -1.0, -torch.inf)
            ),
            _changed(lambda mask: torch.where(mask > 0, 0.0, -torch.inf)),
        ),
        "short_mask": (
            "Your mask does not have `width` columns. Do not change its length.",
            _changed(lambda mask: mask[1:]),
            _changed(lambda mask: mask[:-1]),
            _changed(lambda mask: torch.cat((mask, mask[:1] * 0))),
            _changed(lambda mask: mask[mask > 0]),
        ),
        "last_column_is_padding": (
            "Your last column is always 0, so a row without padding loses its EOS.",
            _ones(lambda q, a, w: q, lambda q, a, w: min(q + a + 1, w - 1)),
        ),
        "empty_without_padding": (
            "Your mask is empty for a row without padding. A slice up to −0 ends at 0.",
            _ones(
                lambda q, a, w: q, lambda q, a, w: 0 if w == q + a + 1 else q + a + 1
            ),
        ),
        "all_but_the_last": (
            "Your mask ends in the next-to-last column, wherever the answer ends.",
            _ones(lambda q, a, w: q, lambda q, a, w: w - 1),
        ),
        "everything_shifted_late": (
            "Your mask begins and ends one token late.",
            _ones(lambda q, a, w: q + 1, lambda q, a, w: q + a + 2),
        ),
        "two_missing": (
            "Your mask omits tokens at the end of the answer, and its EOS.",
            _ones(lambda q, a, w: q, lambda q, a, w: q + a - 1),
        ),
        "inside_only": (
            "Your mask omits the answer's first token and its EOS.",
            _ones(lambda q, a, w: q + 1, lambda q, a, w: q + a),
        ),
        "late_to_the_end": (
            "Your mask omits the answer's first token, and includes padding.",
            _ones(lambda q, a, w: q + 1, lambda q, a, w: w),
        ),
        "question_without_eos": (
            "Your mask includes the question and omits the EOS.",
            _ones(lambda q, a, w: 0, lambda q, a, w: q + a),
        ),
        "only_padding": (
            "Your ones begin only after the answer and continue into the padding.",
            _ones(lambda q, a, w: q + a + 1, lambda q, a, w: w),
            _ones(lambda q, a, w: q + a, lambda q, a, w: w),
        ),
        "answer_at_the_start": (
            "Your ones begin in the first column, where the question is.",
            _ones(lambda q, a, w: 0, lambda q, a, w: a),
            _ones(lambda q, a, w: 0, lambda q, a, w: q + 1),
        ),
        "end_without_question": (
            "Your ones end as if the answer began in the first column. They must end "
            "where the answer and its EOS end.",
            _ones(lambda q, a, w: q, lambda q, a, w: a),
        ),
        "left_without_eos": (
            "Your ones are counted from the right end, but rows are padded on the "
            "right.",
            _ones(lambda q, a, w: w - a, lambda q, a, w: w),
            _ones(lambda q, a, w: w - a - 1, lambda q, a, w: w - 1),
        ),
        "question_and_eos": (
            "Your mask includes the question and the EOS, but not the answer.",
            lambda q, a, w: (
                (torch.arange(w) < q) | (torch.arange(w) == q + a)
            ).double(),
        ),
        "one_answer_token": (
            "Your mask has at most one 1. Include the whole answer and its EOS.",
            _ones(lambda q, a, w: q, lambda q, a, w: q + 1),
            _ones(lambda q, a, w: q + a - 1, lambda q, a, w: q + a),
            _ones(lambda q, a, w: w - 1, lambda q, a, w: w),
        ),
        "no_ones": (
            "Your mask is 0 everywhere, so nothing is learned.",
            _changed(torch.zeros_like),
        ),
        "not_a_mask": (
            "You return a count of tokens. Return a mask with one 0 or 1 per column.",
            _changed(lambda mask: mask.sum()),
            _changed(lambda mask: mask.cumsum(0)),
            _changed(lambda mask: mask * mask.cumsum(0)),
        ),
        "columns_of_ones": (
            "You return the columns where the mask is 1. Return the mask itself.",
            _changed(lambda mask: mask.nonzero().flatten()),
        ),
    },
)


@completion_mask.alternative
def by_comparison(question_length, answer_length, width):
    column = torch.arange(width)
    return (
        (column >= question_length) & (column <= question_length + answer_length)
    ).double()
