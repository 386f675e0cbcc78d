"""Sampling responses, all queries of a batch at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_course.policy import inference_mode_of


class LengthSampler:
    """Draws response or query lengths from the integers min_value … max_value − 1, uniformly."""

    def __init__(self, min_value: int, max_value: int) -> None:
        if max_value <= min_value:
            raise ValueError(f"LengthSampler({min_value}, {max_value}) is empty: max_value is exclusive.")
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


@torch.no_grad()
def generate(
    model, tokenizer, queries: Sequence[Tensor], lengths: Sequence[int] | None = None, **generation_kwargs
) -> list[Tensor]:
    """Sample one response per query, all rows in one left-padded batch; returns ragged response token ids.

    Row i ends after ``lengths[i]`` tokens (max_new_tokens where lengths is None) or after its first EOS, which it
    keeps: the same distribution as row-by-row sampling. Dropout is off, whatever mode the model is in.

    Raises ``FloatingPointError`` when the model's probabilities are not finite.
    """
    generation_kwargs.setdefault("pad_token_id", pad_token_id(tokenizer))
    if generation_kwargs.get("min_length", 0) < 0:  # how classic scripts say "no minimum"
        generation_kwargs.pop("min_length")
    if "top_k" in generation_kwargs:
        generation_kwargs["top_k"] = int(generation_kwargs["top_k"])  # classic scripts pass 0.0
    if lengths is not None:
        generation_kwargs["max_new_tokens"] = max(lengths)
    warn_if_scores_differ(model, generation_kwargs)

    device, width = model.device, max(map(len, queries))
    input_ids = torch.full((len(queries), width), generation_kwargs["pad_token_id"], device=device)
    attention_mask = torch.zeros_like(input_ids)
    for row, query in enumerate(queries):
        input_ids[row, width - len(query) :] = query.to(device)
        attention_mask[row, width - len(query) :] = 1
    with inference_mode_of(model):
        try:
            output = model.generate(input_ids=input_ids, attention_mask=attention_mask, **generation_kwargs)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise FloatingPointError(
                "The policy's next-token probabilities hold NaN, Inf or negative numbers, so nothing can be sampled. "
                "Usual causes: float16 weights trained directly (load them in float32, or use bf16 autocast), "
                "or a learning rate that blew the weights up. Go back to the last checkpoint."
            ) from error
    responses = output[:, width:].cpu()
    eos = generation_kwargs.get("eos_token_id", model.config.eos_token_id)
    ends = torch.isin(responses, torch.tensor(eos if eos is not None else -1))
    first_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, responses.shape[1])
    limits = torch.tensor(lengths) if lengths is not None else first_end
    kept = torch.minimum(first_end, limits).tolist()
    return [row[:n].to(device) for row, n in zip(responses, kept, strict=True)]


def pad_token_id(tokenizer) -> int:
    """The tokenizer's padding token, or EOS where it has none."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError("The tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token.")
    return pad


# What keeps the sampled distribution equal to the one that is scored.
_NEUTRAL: dict[str, Callable[[object], bool]] = {
    "top_k": lambda v: v in (0, None),
    "top_p": lambda v: v in (1, None),
    "temperature": lambda v: v in (1, None),
    "repetition_penalty": lambda v: v in (1, None),
    "no_repeat_ngram_size": lambda v: not v,
    "min_length": lambda v: not v,
    "min_new_tokens": lambda v: not v,
    "suppress_tokens": lambda v: not v,
    "begin_suppress_tokens": lambda v: not v,
    "bad_words_ids": lambda v: not v,
}
_TRANSFORMERS_DEFAULTS = {"top_k": 50}  # what generate() does when nobody says otherwise


def warn_if_scores_differ(model, generation_kwargs: dict) -> None:
    """Warn (once per setting) when sampling is not from the model's own distribution, which biases ratio and KL."""
    saved = getattr(getattr(model, "pretrained_model", model), "generation_config", None)
    if not generation_kwargs.get("do_sample", getattr(saved, "do_sample", False)):
        return
    for name, neutral in _NEUTRAL.items():
        value = generation_kwargs.get(name, getattr(saved, name, None))
        if value is None and name not in generation_kwargs:
            value = _TRANSFORMERS_DEFAULTS.get(name)
        if not neutral(value):
            warnings.warn(
                f"Sampling with {name}={value} is not sampling from the distribution whose log-probabilities PPO "
                "scores: ratios are biased and the KL can go negative. Pass top_k=0, top_p=1.0 and no penalties.",
                stacklevel=4,
            )
