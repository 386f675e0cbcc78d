"""Sample responses to all queries in a batch together."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from rlhf_course.policy.network import accepts_argument, without_dropout
from rlhf_course.ppo.checks import check_length, token_ids
from rlhf_course.ppo.transformers_sampling import NOT_FINITE, generate_with_transformers

CPU_SYNC, GPU_SYNC = 1, 8  # tokens between two checks for finished rows
# Avoid cuDNN: it compiles a plan for each length, and each new token changes the length.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.no_grad()
def generate(
    model,
    tokenizer,
    queries: Sequence[Tensor],
    lengths: Sequence[int] | None = None,
    begin_suppress: Sequence[int] = (),
    fast: bool = True,
    **settings,
) -> list[Tensor]:
    """Sample one response per query, in one left-padded batch; return the response token ids.

    Row i ends after ``lengths[i]`` tokens (default: max_new_tokens) or after its first EOS, which
    stays in the row. No row begins with a token in ``begin_suppress``. Dropout is off. If ``fast``
    is set and the settings keep the model's distribution, :func:`_sample` samples; otherwise
    transformers does.

    Raises ``FloatingPointError`` for probabilities that are not finite, and ``ValueError`` if a
    response may need more positions than the model has.
    """
    settings = {"pad_token_id": pad_token_id(tokenizer)} | settings
    if settings.get("min_length", 0) < 0:  # "no minimum" in classic scripts
        del settings["min_length"]
    queries = token_ids(model.vocab_size, "query", queries)
    limits = torch.tensor(lengths or [settings.get("max_new_tokens", 0)] * len(queries))
    if lengths and min(lengths) < 1:
        raise ValueError("A response needs at least 1 token. Raise the length sampler's minimum.")
    check_length(max(map(len, queries)) + int(limits.max()), model.config)
    input_ids = pad_sequence(queries, True, settings["pad_token_id"], padding_side="left")
    mask = pad_sequence([torch.ones_like(query) for query in queries], True, 0, "left")
    batch, eos = (input_ids.to(model.device), mask.to(model.device)), end_tokens(model, settings)
    with without_dropout(model), sdpa_kernel(ATTENTION):
        if samples_plainly(model, settings, begin_suppress) and fast and limits.all():
            responses = _sample(model, *batch, limits, begin_suppress, eos)
        else:
            responses = generate_with_transformers(model, *batch, limits, begin_suppress, settings)
    is_end = torch.isin(responses, eos)
    first_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, responses.shape[1])
    ends = torch.where(limits > 0, torch.minimum(first_end.cpu(), limits), first_end.cpu())
    return [row[:end] for row, end in zip(responses, ends.tolist(), strict=True)]


def _sample(
    model, input_ids: Tensor, attention_mask: Tensor, limits: Tensor, begin_suppress, eos: Tensor
) -> Tensor:
    """Sample responses (B, longest), arbitrary after a row's end; drop finished rows early."""
    device, (n, width), longest = input_ids.device, input_ids.shape, int(limits.max())
    rows, limits = torch.arange(n, device=device), limits.to(device)
    responses = torch.zeros(n, longest, dtype=torch.long, device=device)
    running, total = torch.ones_like(rows, dtype=torch.bool), torch.zeros((), device=device)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    visible = pad(attention_mask, (0, longest), value=1)
    cache, places = DynamicCache(config=model.config), accepts_argument(model, "position_ids")
    how = {"past_key_values": cache, "use_cache": True}
    for t in range(longest):
        how |= {"position_ids": positions} if places else {}
        logits = model.next_token_logits(input_ids, visible[:, : width + t], **how)
        tokens, probability = draw(logits, begin_suppress if t == 0 else ())
        responses[rows, t], total = tokens.squeeze(1), total + probability.sum()
        running &= (limits[rows] > t + 1) & ~torch.isin(tokens.squeeze(1), eos)
        if (t + 1) % (CPU_SYNC if rows.is_cpu else GPU_SYNC) == 0 or t + 1 == longest:
            if not total.isfinite():
                raise FloatingPointError(NOT_FINITE)
            keep = running.nonzero().squeeze(1)
            if not len(keep):
                break
            if len(keep) <= 0.875 * len(rows):
                cache.batch_select_indices(keep)
                state = (rows, running, tokens, visible, positions)
                rows, running, tokens, visible, positions = (x[keep] for x in state)
        input_ids, positions = tokens, positions[:, -1:] + 1
    return responses


def draw(logits: Tensor, suppress: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw tokens (B, 1) from softmax(logits), except ``suppress``; return them and row sums (B,).

    A row sums to 1, or to NaN if a logit is NaN. Logits (B, V) may change in place.
    Inverting the cumulative distribution needs one random number per row, not one per logit.
    """
    for token in suppress:
        logits[:, token] = -torch.inf
    finest = torch.float32 if logits.device.type == "mps" else torch.float64
    cumulative = logits.softmax(-1).cumsum(-1, dtype=finest)
    uniform = torch.rand(len(logits), 1, dtype=finest, device=logits.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform, right=True).clamp(max=logits.shape[1] - 1)
    return tokens, cumulative[:, -1]


def end_tokens(model, settings: dict) -> Tensor:
    """Return the ids (n,) of tokens that end a response; a chat model's config lists several."""
    saved = getattr(model.pretrained_model, "generation_config", None)
    default = getattr(saved, "eos_token_id", None) or model.config.eos_token_id
    eos = settings.get("eos_token_id", default)
    return torch.tensor([] if eos is None else eos, dtype=torch.long, device=model.device).view(-1)


def pad_token_id(tokenizer) -> int:
    """Return the id of the padding token, or of EOS if the tokenizer has no padding token."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError("The tokenizer has no pad and no EOS token; set tokenizer.pad_token.")
    return pad


# Values that keep the sampled and the scored distribution equal, as None always does.
NEUTRAL = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0,
    "typical_p": 1.0,
    "eta_cutoff": 0,
    "epsilon_cutoff": 0,
    "temperature": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "logits_processor": None,
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
    plain = set(settings) <= UNDERSTOOD and accepts_argument(model, "past_key_values")
    for name, neutral in NEUTRAL.items():
        value = settings.get(name, getattr(saved, name, None))
        if value is None and name == "top_k" and name not in settings:
            value = 50  # transformers' default
        if name == "begin_suppress_tokens" and list(value or []) == list(begin_suppress):
            continue  # scoring by policy and reference also uses this mask
        if value not in (None, neutral) and (neutral or value):
            plain = False
            cure = f"Pass {name}={neutral}."
            if name == "begin_suppress_tokens":
                cure = "Use PPOConfig(begin_suppress_tokens=...): scoring then also masks them."
            what = f"Sampling with {name}={value} does not follow the distribution that PPO scores"
            warnings.warn(f"{what}: the KL can become negative. {cure}", stacklevel=4)
    return plain
