"""Sample responses to all queries in a batch together."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rlhf_course.policy.network import accepts_argument, without_dropout
from rlhf_course.ppo.checks import check_length, token_ids, warn_about_queries
from rlhf_course.ppo.settings import end_tokens, normalize
from rlhf_course.ppo.settings import pad_token_id as pad_token_id

# Tokens between two checks for finished rows.
CPU_SYNC = 1
GPU_SYNC = 8
WORTH_DROPPING = 0.875  # share of running rows; copying the cache also costs time
# Settings with which samples follow the distribution that PPO scores. Set all of them: a setting
# that is left out comes from the model's generation_config. Qwen2.5-0.5B-Instruct, for example,
# saves temperature 0.7, top_p 0.8, top_k 20 and repetition_penalty 1.1.
SAMPLING = {
    "do_sample": True,
    "top_k": 0,
    "top_p": 1.0,
    "temperature": 1.0,
    "repetition_penalty": 1.0,
}
# Avoid cuDNN: it compiles a plan for each length, and each new token changes the length.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NOT_FINITE = (
    "The policy's next-token probabilities are not finite, so nothing can be sampled. Train"
    " float32 weights, lower the learning rate, or go back to the last checkpoint."
)


# Settings saved with a model must not change what transformers returns: one row per query.
ONE_TENSOR = {"num_return_sequences": 1, "return_dict_in_generate": False, "stop_strings": None}


@torch.no_grad()
def generate(
    model,
    tokenizer,
    queries: Sequence[Tensor],
    /,
    lengths: Sequence[int] | None = None,
    begin_suppress: Sequence[int] = (),
    fast: bool = True,
    **settings,
) -> list[Tensor]:
    """Sample one response per query, in one left-padded batch; return the response token ids.

    Row i ends after ``lengths[i]`` tokens (default: see :func:`normalize`) or after its first EOS,
    which stays in the row. No row begins with a token in ``begin_suppress``. Dropout is off. If
    ``fast`` is set and the settings keep the model's distribution, :func:`sample` samples;
    otherwise transformers does.

    Raises ``FloatingPointError`` for probabilities that are not finite, and ``ValueError`` if a
    response may need more positions than the model has, or if a setting cannot be honored.
    """
    queries = token_ids(model.vocab_size, "query", queries)
    warn_about_queries(queries, tokenizer)
    settings, limits = normalize(model, tokenizer, queries, lengths, settings)
    both = [len(query) + limit for query, limit in zip(queries, limits.tolist(), strict=True)]
    check_length(max(both), model.config)
    input_ids = pad_sequence(
        queries, batch_first=True, padding_value=settings["pad_token_id"], padding_side="left"
    ).to(model.device)
    attention_mask = pad_sequence(
        [torch.ones_like(query) for query in queries], batch_first=True, padding_side="left"
    ).to(model.device)
    eos = end_tokens(model, settings)
    keeps_distribution = samples_plainly(model, settings, begin_suppress)
    with without_dropout(model), sdpa_kernel(ATTENTION):
        if keeps_distribution and fast and limits.all():
            responses = sample(model, input_ids, attention_mask, limits, begin_suppress, eos)
        else:
            responses = generate_with_transformers(
                model, input_ids, attention_mask, limits, begin_suppress, settings
            )
    is_end = torch.isin(responses, eos)
    first_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, responses.shape[1]).cpu()
    ends = torch.where(limits > 0, torch.minimum(first_end, limits), first_end)
    return [row[:end] for row, end in zip(responses, ends.tolist(), strict=True)]


def sample(
    model,
    input_ids: Tensor,
    attention_mask: Tensor,
    limits: Tensor,
    begin_suppress: Sequence[int],
    eos: Tensor,
) -> Tensor:
    """Sample responses (B, longest) token by token, arbitrary after a row's end.

    Finished rows leave the batch early if the cache allows: ``rows`` has the numbers of those that
    remain. Raises
    ``FloatingPointError`` for probabilities that are not finite.
    """
    device = input_ids.device
    batch_size, width = input_ids.shape
    longest = int(limits.max())
    limits = limits.to(device)
    rows = torch.arange(batch_size, device=device)
    is_running = torch.ones_like(rows, dtype=torch.bool)
    responses = torch.zeros(batch_size, longest, dtype=torch.long, device=device)
    total_probability = torch.zeros((), device=device)  # NaN as soon as one logit is NaN
    # Of the whole query at first, (B, T); then of one token per row, (B, 1).
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    visible = pad(attention_mask, (0, longest), value=1)
    cache = DynamicCache(config=model.config)
    settings = {"past_key_values": cache, "use_cache": True}
    takes_positions = accepts_argument(model, "position_ids")
    check_every = CPU_SYNC if input_ids.is_cpu else GPU_SYNC
    for t in range(longest):
        if takes_positions:
            settings["position_ids"] = positions
        logits = model.next_token_logits(input_ids, visible[:, : width + t], **settings)
        tokens, probability = draw(logits, begin_suppress if t == 0 else ())
        responses[rows, t] = tokens
        total_probability = total_probability + probability.sum()
        is_running &= (limits[rows] > t + 1) & ~torch.isin(tokens, eos)
        input_ids = tokens.unsqueeze(1)
        positions = positions[:, -1:] + 1
        if (t + 1) % check_every == 0 or t + 1 == longest:
            if not total_probability.isfinite():
                raise FloatingPointError(NOT_FINITE)
            keep = is_running.nonzero().squeeze(1)
            if not len(keep):
                break
            if len(keep) <= WORTH_DROPPING * len(rows) and can_select_rows(cache):
                cache.batch_select_indices(keep)
                rows = rows[keep]
                is_running = is_running[keep]
                input_ids = input_ids[keep]
                positions = positions[keep]
                visible = visible[keep]
    return responses


def can_select_rows(cache: DynamicCache) -> bool:
    """Return whether ``batch_select_indices`` cuts all of a cache's states to some rows.

    transformers does not cut the recurrent states of hybrid models, such as LFM2 and Falcon-H1.
    """
    return all(
        hasattr(layer, "batch_select_indices")
        and not isinstance(layer, LinearAttentionCacheLayerMixin)
        for layer in cache.layers
    )


def draw(logits: Tensor, suppress: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw tokens (B,) from softmax(logits), except ``suppress``; return them and row sums (B,).

    A row sums to 1, or to NaN if a logit is NaN. Logits (B, V) may change in place.
    Inverting the cumulative distribution needs one random number per row, not one per logit.
    """
    for token in suppress:
        logits[:, token] = -torch.inf
    finest = torch.float32 if logits.device.type == "mps" else torch.float64
    cumulative = logits.softmax(-1).cumsum(-1, dtype=finest)
    sums = cumulative[:, -1:]
    uniform = torch.rand(len(logits), 1, dtype=finest, device=logits.device) * sums
    tokens = torch.searchsorted(cumulative, uniform, right=True).clamp(max=logits.shape[1] - 1)
    return tokens.squeeze(1), sums.squeeze(1)


def generate_with_transformers(
    model,
    input_ids: Tensor,
    attention_mask: Tensor,
    limits: Tensor,
    begin_suppress: Sequence[int],
    settings: dict,
) -> Tensor:
    """Return responses (B, R) from transformers' ``generate``, which has more settings."""
    settings = dict(settings)
    if limits.any():
        settings["max_new_tokens"] = int(limits.max())
    if begin_suppress:
        settings["begin_suppress_tokens"] = list(begin_suppress)
    settings |= ONE_TENSOR | {"max_time": settings.get("max_time")}
    settings["logits_processor"] = [*(settings.get("logits_processor") or ()), refuse_nan]
    sequences = model.generate(input_ids=input_ids, attention_mask=attention_mask, **settings)
    return sequences[:, input_ids.shape[1] :]


def refuse_nan(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Act as a logits processor: return logits (B, V); raise ``FloatingPointError`` for NaN.

    On a GPU, sampling from NaN triggers a device-side assert, and the process loses the GPU.
    """
    if not logits.logsumexp(-1).isfinite().all():
        raise FloatingPointError(NOT_FINITE)
    return logits


# Values that keep the sampled and the scored distribution equal, as None always does.
NEUTRAL = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0,
    "top_h": None,
    "typical_p": 1.0,
    "eta_cutoff": 0,
    "epsilon_cutoff": 0,
    "temperature": 1.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "logits_processor": None,
    "prefix_allowed_tokens_fn": None,
    "watermarking_config": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "generation_config": None,
}
UNDERSTOOD = {*NEUTRAL, "do_sample", "max_new_tokens", "pad_token_id", "eos_token_id"}


def samples_plainly(model, settings: dict, begin_suppress: Sequence[int] = ()) -> bool:
    """Return whether the model has a cache and these settings keep the model's distribution.

    Mamba has no cache. Warn about settings that change the distribution, because they bias PPO's
    gradient and KL. Also warn if ``do_sample`` is not set and the default is greedy decoding.
    """
    saved = getattr(model.pretrained_model, "generation_config", None)
    if not settings.get("do_sample", getattr(saved, "do_sample", False)):
        if "do_sample" not in settings:
            warnings.warn("PPO learns nothing from greedy decoding; set do_sample.", stacklevel=4)
        return False
    changes = distribution_changes(saved, settings, begin_suppress)
    for name, value in changes.items():
        advice = f"Pass {name}={NEUTRAL[name]}."
        if name == "begin_suppress_tokens":
            advice = "Use PPOConfig(begin_suppress_tokens=...): scoring then also masks them."
        warnings.warn(
            f"Sampling with {name}={value} does not follow the distribution that PPO scores:"
            f" the KL can become negative. {advice}",
            stacklevel=4,
        )
    has_cache = accepts_argument(model, "past_key_values")
    return has_cache and not changes and UNDERSTOOD.issuperset(settings)


def distribution_changes(saved, settings: dict, begin_suppress: Sequence[int]) -> dict:
    """Return the settings, given or ``saved`` with the model, that change the distribution."""
    changes = {}
    for name, neutral in NEUTRAL.items():
        value = settings.get(name, getattr(saved, name, None))
        if name == "top_k" and value is None and name not in settings:
            value = 50  # transformers' default
        if name == "begin_suppress_tokens" and list(value or []) == list(begin_suppress):
            continue  # scoring by policy and reference also uses this mask
        is_neutral = value is None or value == neutral or (not neutral and not value)
        if not is_neutral:
            changes[name] = value
    return changes
