"""Rollouts: sampling responses in one batch, and laying queries and responses out so that responses line up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

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


@dataclass
class Rollout:
    """One batch of samples; queries are padded left, responses right, so that column t is response token t.

    input_ids and attention_mask are (B, Q + R), position_ids too; mask is (B, R), 1.0 on response tokens; scores
    is (B,). The rest is (B, R) in float32 and filled in by the trainer: log-probabilities and KL in nats.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    scores: Tensor
    logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    kl: Tensor | None = None
    rewards: Tensor | None = None
    non_score_rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def from_lists(
        cls,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Tensor,
        pad_token_id: int,
        response_masks: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Lay out ragged token lists; masks come from lengths, never from ``ids != pad`` (pad may be EOS)."""
        q = max(map(len, queries))
        r = max(map(len, responses))
        device = scores.device
        input_ids = torch.full((len(queries), q + r), pad_token_id, device=device)
        attention_mask = torch.zeros_like(input_ids)
        mask = torch.zeros((len(queries), r), device=device)
        for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
            span = slice(q - len(query), q + len(response))
            input_ids[row, span] = torch.cat([query, response]).to(device)
            attention_mask[row, span] = 1
            mask[row, : len(response)] = 1.0
            if response_masks is not None:
                mask[row, : len(response)] *= response_masks[row].to(device)
        return cls(input_ids, attention_mask, mask, scores)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def responses(self) -> Tensor:
        """Response token ids (B, R), padding included."""
        return self.input_ids[:, -self.mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """Position of every token in its own sequence (B, Q + R); left padding shifts nothing."""
        return (self.attention_mask.cumsum(1) - 1).clamp(min=0)

    def select(self, rows: Tensor) -> Rollout:
        """These rows alone, without the columns that none of them uses."""
        part = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        part = {name: tensor[rows] for name, tensor in part.items()}
        r = self.mask.shape[1]
        used = part["attention_mask"].any(0).nonzero()
        first, last = int(used[0]), int(used[-1]) + 1
        unused = self.attention_mask.shape[1] - last
        for name, tensor in part.items():
            if name in ("input_ids", "attention_mask"):
                part[name] = tensor[:, first:last]
            elif name != "scores":
                part[name] = tensor[:, : r - unused]
        return replace(Rollout(**part))


@torch.no_grad()
def generate(
    model, tokenizer, queries: Sequence[Tensor], lengths: Sequence[int] | None = None, **generation_kwargs
) -> list[Tensor]:
    """Sample one response per query, all rows in one left-padded batch; returns ragged response token ids.

    Row i ends after ``lengths[i]`` tokens (max_new_tokens where lengths is None) or after its first EOS, which it
    keeps: the same distribution as row-by-row sampling. Dropout is off, whatever mode the model is in.

    Raises ``FloatingPointError`` when the model's probabilities are not finite.
    """
    generation_kwargs.setdefault("pad_token_id", _pad_token_id(tokenizer))
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


def _pad_token_id(tokenizer) -> int:
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
