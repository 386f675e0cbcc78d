"""Check a PPO step for silent errors: reject unusable samples, warn about suspicious samples."""

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor


def check_samples(
    policy, size: int, queries, responses, scores, masks=None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return queries and responses as 1-D tensors; raise ``ValueError`` for unusable samples."""
    given = {"queries": queries, "responses": responses, "scores": scores, "response_masks": masks}
    for name, rows in given.items():
        if rows is not None and len(rows) != size:
            raise ValueError(f"{name} has {len(rows)} entries; pass {size}, or set batch_size.")
    queries = token_ids(policy.vocab_size, "query", queries)
    responses = token_ids(policy.vocab_size, "response", responses)
    pairs = () if masks is None else zip(masks, responses, strict=True)
    for i, (keep, response) in enumerate(pairs):
        if len(keep) != len(response) or {*torch.as_tensor(keep).tolist()} not in ({0, 1}, {1}):
            raise ValueError(
                f"response_masks {i}, {keep!r:.60}, does not fit {len(response)} response tokens."
                " Pass 0 or 1 for each, and at least one 1."
            )
    longest = max(len(q) + len(r) for q, r in zip(queries, responses, strict=True))
    check_length(longest, policy.config)
    return queries, responses


def token_ids(known: int, name: str, rows: Sequence) -> list[Tensor]:
    """Return the rows (lists or tensors) as 1-D int64 tensors on the CPU.

    Raises ``ValueError`` for a row that is empty, is not a list of tokens, or has a token outside
    the vocabulary of size ``known``.
    """
    rows = [torch.as_tensor(row) for row in rows]
    for i, row in enumerate(rows):
        if row.dim() != 1 or row.is_floating_point() and len(row):
            what = f"{row.dtype} of shape {tuple(row.shape)}"
            raise ValueError(f"{name} {i} must be a 1-D tensor of token ids; got {what}.")
        if not len(row):
            raise ValueError(
                f"{name} {i} is empty: PPO predicts tokens from earlier tokens and scores the last"
                " token. Leave this sample out, or sample at least one token."
            )
    together = torch.cat([row.to(rows[0].device) for row in rows]).cpu().long()
    rows = [*together.split([len(row) for row in rows])]
    for i, row in enumerate(rows):
        if bad := [token for token in row.tolist() if not 0 <= token < known]:
            raise ValueError(
                f"{name} {i}: token {bad[0]} is not in 0–{known - 1}; use the model's tokenizer."
            )
    return rows


def check_length(tokens: int, config) -> None:
    """Raise ``ValueError`` if a query and its response need more positions than the model has.

    The last token needs no position, because it predicts no token.
    """
    known = getattr(config.get_text_config(), "max_position_embeddings", None) or tokens
    if tokens - 1 > known:
        raise ValueError(
            f"The longest query and response are {tokens} tokens together, but the model has"
            f" {known} positions. Cut the queries, or sample fewer tokens (max_new_tokens)."
        )


def stack_scores(scores: Sequence[Tensor] | Tensor, device: torch.device, step: int) -> Tensor:
    """Return the scores as float32 (B,) on ``device``; raise unless each is one finite number."""
    scores = [torch.as_tensor(score).detach() for score in scores]
    for i, score in enumerate(scores):
        if score.numel() != 1:
            raise ValueError(f"score {i} has shape {tuple(score.shape)}; pass one number.")
    stacked = torch.stack([score.reshape(()).float() for score in scores]).to(device)
    if not stacked.isfinite().all():
        i = int((~stacked.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"Step {step + 1}: the score of sample {i} is {stacked[i].item()}. Look at its text and"
            " at the reward model's dtype: float16 overflows where bfloat16 does not."
        )
    return stacked


def check_outputs(name: str, outputs: Tensor, step: int) -> None:
    """Raise ``FloatingPointError``, with a sample's number, if outputs (B, R) have NaN or Inf."""
    is_finite = outputs.isfinite().all(-1)
    if not is_finite.all():
        sample = int((~is_finite).nonzero()[0])
        raise FloatingPointError(
            f"Step {step + 1}: the {name} for sample {sample} are NaN or"
            " Inf; no weight was changed. Policy: train float32 weights, lower the learning"
            " rate, or go back to the last checkpoint. Reference: load it in float32."
        )


def warn_about_samples(queries, responses, masks, tokenizer) -> None:
    """Warn of padding, queries repeated in responses, and masked EOS; each silently harms PPO."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    pad, warn = eos if pad is None else pad, partial(warnings.warn, stacklevel=3)
    padded = {
        "queries": sum(
            len(q) > 1 and (bool((q[:2] == pad).all()) or int(q[-1]) in (pad, eos)) for q in queries
        ),
        "responses": sum(
            eos is not None and any((r[:-1] == x).any() for x in {eos, pad}) for r in responses
        ),
    }
    for name in filter(padded.get, padded):
        warn(
            f"{padded[name]} of {len(queries)} {name} are padded (token {pad}) or contain EOS, and"
            " PPO would learn these tokens like any other. Remove these tokens before step()."
        )
    pairs = [*zip(queries, responses, strict=True)]
    repeat = all(len(r) > len(q) and r[: len(q)].equal(q) for q, r in pairs)
    if repeat and any(len(q) > 1 for q in queries):
        warn(
            "Each response begins with its query, and the policy would learn to repeat it. Call"
            " generate with return_prompt=False."
        )
    last = zip(responses, () if masks is None else masks, strict=False)
    if hidden := sum(bool(r[-1] == eos) and not bool(mask[-1]) for r, mask in last):
        warn(
            f"response_masks leave out the final EOS of {hidden} of {len(responses)} responses, so"
            " the policy cannot learn to stop. Make masks from lengths, not from ids != pad."
        )
