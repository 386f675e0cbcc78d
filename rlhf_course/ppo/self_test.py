"""Test a policy before PPO trains it: each way of computing its logits must give the same ones."""

from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from rlhf_course.policy.network import accepts_argument, without_dropout
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.rollout import Samples, forward
from rlhf_course.ppo.sampling import can_select_rows

TOKENS = 8  # in the plain pass
FAILURES = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
SWITCH = "PPOConfig(self_test=False) omits this test."


class Difference(NamedTuple):
    """Store log-probabilities (N, V) or (N, 1) that were computed in two ways."""

    finding: str  # if they differ
    advice: str
    actual: Tensor
    plain: Tensor


@torch.no_grad()
def check_policy(policy, config: PPOConfig, accelerator: Accelerator) -> None:
    """Raise ``ValueError`` unless sampling and training see the logits of a plain, unpadded pass.

    Five passes over at most two short rows: a plain pass; the same with position ids; left-padded
    queries of unequal length; their next tokens, with the cache; and the pass that ``step`` makes.
    Weights, modes and random generators do not change. NaN is left to ``generate`` and ``step``,
    which name its place.
    """
    ids = spread_tokens(policy)
    devices = [policy.device] if policy.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices=devices),
            without_dropout(policy),
            accelerator.autocast(),
        ):
            plain = plain_logprobs(policy, ids)
            differences = compare(policy, ids, plain, config)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise ValueError(
            f"The self-test of the policy failed: {explain(error)} {SWITCH}"
        ) from error
    tolerance = relative_tolerance(policy, accelerator) * plain.std().item()
    for difference in differences:
        error = (difference.actual - difference.plain).square().mean(-1).sqrt().max().item()
        if error > tolerance:
            raise ValueError(
                f"The self-test of the policy failed: {difference.finding}. The difference is"
                f" {error:.2g} nats; rounding explains {tolerance:.2g}. {difference.advice}"
                f" {SWITCH}"
            )


def explain(error: Exception) -> str:
    """Return one line on an exception in a pass; a ValueError says what to do."""
    reason = str(error).strip().split("\n")[0]
    if isinstance(error, ValueError):
        return reason
    return (
        f"{type(error).__name__}: {reason:.300}. Use a causal language model that transformers can"
        " run with left padding and a DynamicCache."
    )


def plain_logprobs(policy, ids: Tensor, **positions: Tensor) -> Tensor:
    """Return the next tokens' log-probabilities (T, V) of one unpadded row, ``ids`` (T,)."""
    output = policy.pretrained_model(input_ids=ids.unsqueeze(0), use_cache=False, **positions)
    if output.logits.dim() != 3 or output.logits.shape[:2] != (1, len(ids)):
        raise ValueError(
            f"{len(ids)} tokens have logits of shape {tuple(output.logits.shape)}, so positions"
            " were added or removed. Train an adapter that changes weights, such as LoRA."
        )
    return output.logits[0].float().log_softmax(-1)


def compare(policy, ids: Tensor, plain: Tensor, config: PPOConfig) -> list[Difference]:
    """Compare sampling and ``step`` with the plain pass, causes first."""
    long = max(2, len(ids) - 3)  # the plain pass continues after both queries
    short = long // 2
    first, second = sampler_logprobs(policy, ids, [long, short])
    differences = [
        *position_differences(policy, ids, plain),
        Difference(
            "the logits of a token depend on later tokens",
            "Use a causal language model: PPO needs one that reads from left to right.",
            actual=first[:1],
            plain=plain[[long - 1]],
        ),
        Difference(
            "a query that is padded on the left has other logits than on its own",
            "Use another model, or sample one query at a time (batch_size=1 in generate).",
            actual=first[1:],
            plain=plain[[short - 1]],
        ),
    ]
    if second is not None:
        differences.append(
            Difference(
                "logits with a cache differ from those of one pass over all tokens",
                "Use another model, or another version of transformers.",
                actual=second,
                plain=plain[[long, short]],
            )
        )
    differences.append(step_difference(policy, ids, [long, short], plain, config))
    return differences


def position_differences(policy, ids: Tensor, plain: Tensor) -> list[Difference]:
    """Compare passes with and without the positions 0, 1, 2, …, if the model takes positions."""
    if not accepts_argument(policy, "position_ids"):
        return []
    positions = torch.arange(len(ids), device=ids.device).unsqueeze(0)
    return [
        Difference(
            "the model does not number its positions 0, 1, 2, …, as PPO does (RoBERTa and its"
            " relatives begin at the padding token's id + 1)",
            "Use a model whose positions begin at 0.",
            actual=plain_logprobs(policy, ids, position_ids=positions),
            plain=plain,
        )
    ]


def sampler_logprobs(policy, ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities (B, V) behind each query, and behind its next token.

    Query i is the first ``lengths[i]`` of ``ids``. These passes are the sampler's; where a cache
    can select rows, they change places between the passes. The second is None without a cache.
    """
    device = ids.device
    queries = [ids[:length] for length in lengths]
    mask = pad_sequence(
        [torch.ones_like(query) for query in queries], batch_first=True, padding_side="left"
    )
    input_ids = pad_sequence(queries, batch_first=True, padding_side="left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes_positions = accepts_argument(policy, "position_ids")
    arguments = {"position_ids": positions} if takes_positions else {}
    if not accepts_argument(policy, "past_key_values"):
        first = policy.next_token_logits(input_ids, mask, **arguments)
        return first.log_softmax(-1), None
    cache = DynamicCache(config=policy.config)
    arguments |= {"past_key_values": cache, "use_cache": True}
    first = policy.next_token_logits(input_ids, mask, **arguments)
    order = torch.arange(len(lengths), device=device)
    if can_select_rows(cache):
        order = order.flip(0)
        cache.batch_select_indices(order)
    next_tokens = ids[torch.tensor(lengths, device=device)].unsqueeze(1)
    visible = torch.cat([mask, torch.ones_like(next_tokens)], dim=1)
    if takes_positions:
        arguments["position_ids"] = (positions[:, -1:] + 1)[order]
    second = policy.next_token_logits(next_tokens[order], visible[order], **arguments)
    return first.log_softmax(-1), second[order].log_softmax(-1)


def step_difference(
    policy, ids: Tensor, lengths: list[int], plain: Tensor, config: PPOConfig
) -> Difference:
    """Compare the log-probabilities of tokens in the pass that ``step`` makes."""
    long, short = lengths
    ends = [len(ids), min(len(ids), short + 2)]  # so that both share a row if the model can pack
    samples = Samples.from_lists(
        queries=[ids[:length] for length in lengths],
        responses=[ids[length:end] for length, end in zip(lengths, ends, strict=True)],
        scores=torch.zeros(len(lengths), device=ids.device),
        pad_token_id=0,
    )
    chunk_size = config.logprob_chunk_size
    if not policy.logits_are_projections:
        chunk_size = None  # step refuses chunks of such a model, and says why
    outputs = forward(policy, samples, chunk_size=chunk_size, pack=config.fast)
    next_tokens = plain[:-1].gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)
    expected = [
        next_tokens[length - 1 : end - 1] for length, end in zip(lengths, ends, strict=True)
    ]
    return Difference(
        "step's log-probabilities differ from those of a plain pass",
        "Train the model's own weights, or an adapter that changes weights, such as LoRA.",
        actual=outputs.logprobs[samples.mask > 0].unsqueeze(-1),
        plain=torch.cat(expected).unsqueeze(-1),
    )


def spread_tokens(policy) -> Tensor:
    """Return token ids (T,) from all parts of the vocabulary; fewer than 8 if positions are few."""
    positions = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    tokens = min(TOKENS, positions or TOKENS)
    places = torch.arange(1, tokens + 1, device=policy.device)
    return places * policy.vocab_size // (tokens + 2)


def relative_tolerance(policy, accelerator: Accelerator) -> float:
    """Return how much rounding may change, in standard deviations of the log-probabilities."""
    dtypes = {weight.dtype for weight in policy.pretrained_model.parameters()}
    is_low = accelerator.mixed_precision != "no" or not dtypes <= {torch.float32, torch.float64}
    uses_tf32 = policy.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    if is_low:
        return 0.25
    return 0.03 if uses_tf32 else 1e-3
