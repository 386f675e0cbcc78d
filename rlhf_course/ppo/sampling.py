"""Sampling responses, all queries of a batch at once."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from rlhf_course.policy.save_load import known_tokens
from rlhf_course.policy.value_head import can_pack, takes, without_dropout
from rlhf_course.ppo.device import to_device
from rlhf_course.ppo.input_checks import check_length, token_ids
from rlhf_course.runtime.argument_checks import check_positive

CPU_SYNC, GPU_SYNC = (
    1,
    8,
)  # tokens from one sync with the host, which looks for finished rows, to the next


class LengthSampler:
    """Draws response or query lengths from the integers min_value … max_value − 1, uniformly."""

    def __init__(self, min_value: int, max_value: int) -> None:
        check_positive("min_value of a LengthSampler", min_value)
        if max_value <= min_value:
            raise ValueError(
                f"LengthSampler({min_value}, {max_value}) is empty: max_value is exclusive."
            )
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


@torch.no_grad()
def generate(
    model,
    tokenizer,
    queries: Sequence[Tensor],
    lengths: Sequence[int] | None = None,
    begin_suppress: Sequence[int] = (),
    fast: bool = True,
    all_max: Callable[[int], int] | None = None,
    decoders=None,
    **generation_kwargs,
) -> list[Tensor]:
    """Sample one response per query, all rows in one left-padded batch; returns ragged response
    token ids.

    Row i ends after ``lengths[i]`` tokens (default: max_new_tokens) or after its first EOS, which
    it keeps: the same distribution as row-by-row sampling. It never begins with a token of
    ``begin_suppress``. Dropout is off.

    Sampling from the model's own distribution takes the short path below if ``fast``, on a GPU with
    one CUDA graph per token from ``decoders``, a :class:`~rlhf_course.ppo.decoder.Decoders`. Other
    settings, and models without a key-value cache, go to transformers' ``generate``. FSDP's forward
    is collective: all ranks sample until the slowest has finished, and ``all_max`` is the maximum
    of a number over ranks.

    Raises ``FloatingPointError`` when the model's probabilities are not finite, and ``ValueError``
    when a response may outgrow the positions that the model knows.
    """
    settings = dict(generation_kwargs)
    check_positive("max_new_tokens", settings.get("max_new_tokens", 1))
    if settings.pop("return_dict_in_generate", False):
        raise ValueError("generate gives token ids alone: leave return_dict_in_generate out.")
    if settings.get("num_return_sequences", 1) != 1:
        raise ValueError(
            "num_return_sequences must be 1: a response per query. For several, repeat the queries."
        )
    settings.setdefault("pad_token_id", pad_token_id(tokenizer))
    if settings.get("min_length", 0) < 0:  # how classic scripts say "no minimum"
        settings.pop("min_length")
    if "top_k" in settings:
        settings["top_k"] = int(settings["top_k"])  # classic scripts pass 0.0
    saved = getattr(
        model.pretrained_model, "generation_config", None
    )  # where chat models list several EOS
    eos = settings.get(
        "eos_token_id", getattr(saved, "eos_token_id", None) or model.config.eos_token_id
    )
    eos = torch.tensor([] if eos is None else eos, dtype=torch.long).reshape(-1)

    queries = token_ids(known_tokens(model), query=queries)
    width = max(map(len, queries))
    limits = torch.tensor(lengths or [settings.get("max_new_tokens", 0)] * len(queries))
    check_length(width + int(limits.max()), model.config)
    input_ids = pad_sequence(queries, True, settings["pad_token_id"], padding_side="left")
    attention_mask = pad_sequence(
        [torch.ones(len(query), dtype=torch.long) for query in queries], True, 0, "left"
    )
    ends = tuple(eos.tolist())
    input_ids, attention_mask, device_limits, eos = to_device(
        [input_ids, attention_mask, limits, eos], model.device
    )

    plain = samples_plainly(model, settings, begin_suppress) and takes(
        model, "past_key_values"
    )  # Mamba does not
    with without_dropout(model):
        if fast and plain and (lengths is not None or "max_new_tokens" in settings):
            longest, decoder = (all_max or int)(int(limits.max())), None
            if decoders is not None and model.device.type == "cuda" and can_pack(model):
                decoder = decoders.find(model, input_ids, longest, eos, ends)
            batch = (input_ids, attention_mask, device_limits, longest, begin_suppress)
            responses, finite = (
                decoder.sample(*batch) if decoder else _sample(model, *batch, eos, all_max or int)
            )
            if not finite:
                raise _not_finite()
        else:
            if lengths is not None:
                settings["max_new_tokens"] = max(lengths)
            if begin_suppress:
                settings["begin_suppress_tokens"] = list(begin_suppress)
            settings["synced_gpus"] = all_max is not None
            try:
                output = model.generate(
                    input_ids=input_ids, attention_mask=attention_mask, **settings
                )
            except RuntimeError as error:
                raise (_not_finite() if "probability tensor" in str(error) else error) from error
            responses = output[:, width:]
    is_end = torch.isin(responses, eos)
    first_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, responses.shape[1]).tolist()
    at_most = lengths or [settings.get("max_new_tokens", responses.shape[1])] * len(responses)
    return [row[: min(both)] for row, *both in zip(responses, first_end, at_most, strict=True)]


def _sample(
    model,
    input_ids: Tensor,
    attention_mask: Tensor,
    limits: Tensor,
    longest: int,
    begin_suppress: Sequence[int],
    eos: Tensor,
    all_max: Callable[[int], int],
) -> tuple[Tensor, bool]:
    """Sample from softmax(logits) with a key-value cache; as
    :meth:`~rlhf_course.ppo.decoder.Decoder.sample`.

    Finished rows leave the batch as soon as a sync finds an eighth of it finished.
    """
    rows, cache = (
        torch.arange(len(input_ids), device=input_ids.device),
        DynamicCache(config=model.config),
    )
    responses = torch.zeros(len(input_ids), longest, dtype=torch.long, device=input_ids.device)
    width = input_ids.shape[1]
    running, finite = (
        torch.ones_like(rows, dtype=torch.bool),
        torch.ones((), dtype=torch.bool, device=rows.device),
    )
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    visible, mask = pad(attention_mask, (0, longest), value=1), attention_mask
    if can_pack(
        model
    ):  # transformers would make the same mask for every token, and read from the device for it
        visible = visible.bool()[:, None, None]
        causal = torch.ones(width, width, dtype=torch.bool, device=rows.device).tril()
        mask = (
            visible[..., :width] & causal | causal & causal.T
        )  # padding sees itself: no row is empty
    arguments = {"attention_mask": mask} | (
        {"position_ids": positions} if takes(model, "position_ids") else {}
    )
    sync_every, precise = CPU_SYNC if rows.is_cpu else GPU_SYNC, finest_float(rows.device)
    for t in range(longest):
        logits, *_ = model(
            input_ids=input_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **arguments,
        )
        tokens, total = draw(logits[:, -1], begin_suppress if t == 0 else (), precise)
        finite &= total.isfinite().all()
        responses[rows, t] = tokens.squeeze(1)
        running &= (limits[rows] > t + 1) & ~torch.isin(tokens.squeeze(1), eos)
        if (t + 1) % sync_every == 0 or t + 1 == longest:
            n_running, is_finite = torch.stack([running.sum(), finite]).tolist()
            if not is_finite:
                return responses, False
            if all_max(n_running) == 0:
                break
            if 0 < n_running <= 0.875 * len(rows):
                keep = running.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                state = (rows, running, tokens, visible, positions)
                rows, running, tokens, visible, positions = (x[keep] for x in state)
        input_ids, positions = tokens, positions[:, -1:] + 1
        arguments["attention_mask"] = visible[..., : width + t + 1]
        if "position_ids" in arguments:
            arguments["position_ids"] = positions
    return responses, True


def draw(logits: Tensor, suppress: Sequence[int], precise: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens (B, 1) drawn from softmax(logits) (B, V) without those of ``suppress``, and the total
    probability (B,).

    The cumulative distribution is inverted, which takes one random number per row instead of one
    per logit. The total is NaN where a logit is.
    """
    for token in suppress:
        logits[:, token] = -torch.inf
    cumulative = logits.softmax(-1).cumsum(-1, dtype=precise)
    uniform = torch.rand(len(logits), 1, dtype=precise, device=logits.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform, right=True).clamp(max=logits.shape[1] - 1)
    return tokens, cumulative[:, -1]


def finest_float(device: torch.device) -> torch.dtype:
    """float64; float32 on Apple's mps, which has nothing finer (PPO was not tried there)."""
    return torch.float32 if device.type == "mps" else torch.float64


def _not_finite() -> FloatingPointError:
    return FloatingPointError(
        "The policy's next-token probabilities hold NaN, Inf or negative numbers, so nothing can be"
        " sampled. Usual causes: float16 weights trained directly (load them in float32, or use"
        " bf16 autocast), or a learning rate that blew the weights up. Go back to the last"
        " checkpoint."
    )


def pad_token_id(tokenizer) -> int:
    """The tokenizer's padding token, or EOS where it has none."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError(
            "The tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token."
        )
    return pad


# Values that leave the sampled distribution equal to the one that is scored; None does, everywhere.
NEUTRAL = dict.fromkeys(
    ("top_p", "temperature", "repetition_penalty", "typical_p", "guidance_scale"), 1.0
)
NEUTRAL |= dict.fromkeys(("top_k", "no_repeat_ngram_size", "min_length", "min_new_tokens"), 0) | {
    "num_beams": 1
}
NEUTRAL |= dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0.0)
NEUTRAL |= dict.fromkeys(
    ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias")
)
CURES = {
    "begin_suppress_tokens": (
        "Name them in PPOConfig(begin_suppress_tokens=...) instead: then they are masked in the "
        "log-probabilities of policy and reference too."
    )
}
UNDERSTOOD = {*NEUTRAL, "do_sample", "max_new_tokens", "pad_token_id", "eos_token_id"}


def samples_plainly(model, settings: dict, begin_suppress: Sequence[int] = ()) -> bool:
    """Whether these generation settings sample from the model's own distribution, but for
    ``begin_suppress``.

    Other sampling settings give a warning (once each): PPO's ratios and KL would be biased. Greedy
    decoding gives none, it is not used for training.
    """
    saved = getattr(model.pretrained_model, "generation_config", None)
    if not settings.get("do_sample", getattr(saved, "do_sample", False)):
        return False
    plain = set(settings) <= UNDERSTOOD
    for name, neutral in NEUTRAL.items():
        value = settings.get(name, getattr(saved, name, None))
        if value is None and name == "top_k" and name not in settings:
            value = 50  # what transformers does when nobody says otherwise
        if name == "begin_suppress_tokens" and list(value or []) == list(begin_suppress):
            continue  # scored with the same mask
        if value not in (None, neutral) and (neutral or value):
            plain = False
            warnings.warn(
                f"Sampling with {name}={value} is not sampling from the distribution whose"
                " log-probabilities PPO scores: ratios are biased and the KL can go negative."
                f" {CURES.get(name, f'Pass {name}={neutral}.')}",
                stacklevel=4,
            )
    return plain
