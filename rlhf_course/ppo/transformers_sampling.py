"""Sample responses with transformers, for settings that the course's sampler does not support."""

from torch import Tensor

NOT_FINITE = (
    "The policy's next-token probabilities are not finite, so nothing can be sampled. Train"
    " float32 weights, lower the learning rate, or go back to the last checkpoint."
)


def generate_with_transformers(
    model, input_ids: Tensor, attention_mask: Tensor, limits: Tensor, begin_suppress, settings: dict
) -> Tensor:
    """Return responses (B, R) from transformers' ``generate``."""
    if settings.get("num_return_sequences", 1) != 1:
        raise ValueError("num_return_sequences must be 1. For more responses, repeat queries.")
    if stops := {"stop_strings", "stopping_criteria"} & {*settings}:
        raise ValueError(f"{stops} would add EOS that was not sampled. Set eos_token_id instead.")
    if "top_k" in settings:
        settings["top_k"] = int(settings["top_k"])  # classic scripts pass 0.0
    settings |= {"max_new_tokens": int(limits.max())} if limits.any() else {}
    settings |= {"begin_suppress_tokens": list(begin_suppress)} if begin_suppress else {}
    settings |= {"logits_processor": [*(settings.get("logits_processor") or ()), refuse_nan]}
    settings |= {"input_ids": input_ids, "attention_mask": attention_mask}
    return model.generate(**settings)[:, input_ids.shape[1] :]


def refuse_nan(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Act as a logits processor: return logits (B, V); raise ``FloatingPointError`` for NaN.

    On a GPU, sampling from NaN triggers a device-side assert, and the process loses the GPU.
    """
    if not logits.logsumexp(-1).isfinite().all():
        raise FloatingPointError(NOT_FINITE)
    return logits
