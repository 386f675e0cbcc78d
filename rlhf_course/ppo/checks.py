"""Check a PPO step for silent errors: reject unusable samples, warn about suspicious samples."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from tokenizers import Encoding
from torch import Tensor

MANY = 0.1  # of the samples; fewer may repeat their query on their own


def check_samples(
    policy, size: int, queries, responses, scores, response_masks=None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return queries and responses as 1-D tensors; raise ``ValueError`` for unusable samples."""
    columns = {"queries": queries, "responses": responses, "scores": scores}
    if response_masks is not None:
        columns["response_masks"] = response_masks
    for name, rows in columns.items():
        if len(rows) != size:
            raise ValueError(f"{name} has {len(rows)} entries; pass {size}, or set batch_size.")
    queries = token_ids(policy.vocab_size, "query", queries)
    responses = token_ids(policy.vocab_size, "response", responses)
    if response_masks is not None:
        check_masks(response_masks, responses)
    lengths = [len(q) + len(r) for q, r in zip(queries, responses, strict=True)]
    check_length(max(lengths), policy.config)
    return queries, responses


def check_masks(response_masks, responses: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` unless each mask has 0 or 1 per response token, and at least one 1."""
    for i, (mask, response) in enumerate(zip(response_masks, responses, strict=True)):
        numbers = set(torch.as_tensor(mask).tolist())
        if len(mask) != len(response) or numbers not in ({0, 1}, {1}):
            raise ValueError(
                f"response_masks {i}, {mask!r:.60}, does not fit {len(response)} response tokens."
                " Pass 0 or 1 for each, and at least one 1."
            )


def token_ids(vocab_size: int, name: str, rows: Sequence) -> list[Tensor]:
    """Return the rows (lists or tensors) as 1-D int64 tensors on the CPU.

    Raises ``ValueError`` for a row that is empty, is not a list of tokens, or has a token outside
    the vocabulary.
    """
    rows = [torch.as_tensor(row) for row in as_rows(name, rows)]
    for i, row in enumerate(rows):
        if row.dim() != 1 or (len(row) and row.is_floating_point()):
            raise ValueError(
                f"{name} {i} must be a 1-D tensor of token ids; got {row.dtype} of shape"
                f" {tuple(row.shape)}."
            )
        if not len(row):
            raise ValueError(
                f"{name} {i} is empty: PPO predicts tokens from earlier tokens and scores the last"
                " token. Leave this sample out, or sample at least one token."
            )
    # One copy from a GPU for all rows.
    tokens = torch.cat([row.to(rows[0].device) for row in rows]).cpu().long()
    rows = list(tokens.split([len(row) for row in rows]))
    for i, row in enumerate(rows):
        unknown = row[(row < 0) | (row >= vocab_size)]
        if len(unknown):
            raise ValueError(
                f"{name} {i}: token {int(unknown[0])} is not in 0–{vocab_size - 1}; use the model's"
                " tokenizer."
            )
    return rows


def as_rows(name: str, rows) -> list:
    """Return the rows as a list; raise ``ValueError`` for texts and for a tokenizer's output."""
    wrong = str | Mapping | Encoding | None
    for entry in [rows] if isinstance(rows, wrong) else rows:
        if isinstance(entry, wrong):
            raise ValueError(
                f"A {name} is a {type(entry).__name__}, not token ids. Pass the tokenizer's"
                ' ["input_ids"], as a list of 1-D tensors; apply_chat_template returns ids with'
                " return_dict=False."
            )
    return list(rows)


def drop_masked(queries: Sequence[Tensor], masks) -> list[Tensor]:
    """Return the queries without tokens whose entry in ``attention_mask`` is 0."""
    masks = torch.as_tensor(masks) if not isinstance(masks, list | tuple) else masks
    if isinstance(masks, Tensor) and masks.dim() == 1:
        masks = [masks]
    if len(masks) != len(queries):
        raise ValueError(
            f"attention_mask has {len(masks)} rows for {len(queries)} queries. Pass one per query."
        )
    visible = []
    for i, (query, mask) in enumerate(zip(queries, masks, strict=True)):
        query = torch.as_tensor(query)
        keep = torch.as_tensor(mask).to(query.device) > 0
        if keep.shape != query.shape:
            raise ValueError(
                f"attention_mask {i} has shape {tuple(keep.shape)}, and its query"
                f" {tuple(query.shape)}. Pass 0 or 1 for each token."
            )
        visible.append(query[keep])
    return visible


def check_length(tokens: int, config) -> None:
    """Raise ``ValueError`` if a query and its response need more positions than the model has.

    The last token needs no position, because it predicts no token.
    """
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and short and tokens - 1 > short:
        raise ValueError(
            f"The longest query and response are {tokens} tokens together, and beyond {short}"
            " this model (longrope) turns all positions by other factors, so a token's probability"
            " would depend on the batch. Cut the queries, or sample fewer tokens (max_new_tokens)."
        )
    if positions and tokens - 1 > positions:
        raise ValueError(
            f"The longest query and response are {tokens} tokens together, but the model has"
            f" {positions} positions. Cut the queries, or sample fewer tokens (max_new_tokens)."
        )


def stack_scores(scores: Sequence[Tensor] | Tensor, device: torch.device, step: int) -> Tensor:
    """Return the scores as float32 (B,) on ``device``; raise unless each is one finite number."""
    for i, score in enumerate(scores):
        if score is None or isinstance(score, str | list | Mapping):
            raise ValueError(
                f"score {i} is {score!r:.80}; pass one number per response. For a classifier's"
                " score of a label, use rlhf_course.rewards.SentimentReward."
            )
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


def warn_about_samples(queries, responses, response_masks, tokenizer) -> None:
    """Warn of padding, query tokens in responses, and masked EOS; each silently harms PPO."""
    warn_about_queries(queries, tokenizer)
    warn = partial(warnings.warn, stacklevel=3)
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    n_padded = sum(is_padded_response(response, pad, eos) for response in responses)
    if n_padded:
        warn(
            f"{n_padded} of {len(responses)} responses are padded (token {pad}) or contain EOS, and"
            " PPO would learn these tokens like any other. Remove these tokens before step(); after"
            " generate with EOS switched off, they may stay."
        )
    warn_about_slices(queries, responses, warn)
    if response_masks is not None:
        n_masked = sum(
            bool(response[-1] == eos) and not mask[-1]
            for response, mask in zip(responses, response_masks, strict=True)
        )
        if n_masked:
            warn(
                f"response_masks leave out the final EOS of {n_masked} of {len(responses)}"
                " responses, so the policy cannot learn to stop. Make masks from lengths, not from"
                " ids != pad."
            )


def warn_about_queries(queries: Sequence[Tensor], tokenizer) -> None:
    """Warn of queries with padding, or with a token that ends texts; sampling reads both."""
    warn = partial(warnings.warn, stacklevel=4)
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    bos = getattr(tokenizer, "bos_token_id", None)
    n_padded = sum(is_padded_query(query, pad, eos, bos) for query in queries)
    if n_padded:
        warn(
            f"{n_padded} of {len(queries)} queries are padded (token {pad}) or contain EOS, and PPO"
            " would learn these tokens like any other. Remove these tokens, or pass attention_mask"
            " to generate."
        )
    separator = getattr(tokenizer, "sep_token_id", None)
    if separator is not None and separator not in (pad, eos):
        n_ended = sum(len(query) > 1 and int(query[-1]) == separator for query in queries)
        if n_ended:
            warn(
                f"{n_ended} of {len(queries)} queries end in the separator (token {separator}), and"
                " a response would begin behind it. Tokenize with add_special_tokens=False."
            )


def warn_about_slices(queries: Sequence[Tensor], responses: Sequence[Tensor], warn) -> None:
    """Warn if responses begin with their query, or with its last tokens.

    ``response[-gen_len:]`` has this effect if a response ended early. One sample is not enough: a
    response may repeat its query.
    """
    pairs = list(zip(queries, responses, strict=True))
    all_repeat = all(len(r) > len(q) and r[: len(q)].equal(q) for q, r in pairs)
    if all_repeat and any(len(query) > 1 for query in queries):
        warn(
            "Each response begins with its query, and the policy would learn to repeat it. Call"
            " generate with return_prompt=False."
        )
        return
    n_repeat = sum(begins_with_tail(response, query) for query, response in pairs)
    if n_repeat >= max(2, MANY * len(pairs)):
        warn(
            f"{n_repeat} of {len(pairs)} responses begin with the last tokens of their query, as"
            " response[-gen_len:] leaves them if a response ends early. Use"
            " response[len(query):], or generate with return_prompt=False."
        )


def begins_with_tail(response: Tensor, query: Tensor) -> bool:
    """Return whether a response begins with its query's last two or more tokens."""
    longest = min(len(query), len(response) - 1)
    return any(response[:n].equal(query[-n:]) for n in range(2, longest + 1))


def is_padded_query(
    query: Tensor, pad: int | None, eos: int | None, bos: int | None = None
) -> bool:
    """Return whether a query begins with padding, or ends with padding or EOS.

    One token at the beginning that is BOS or EOS is no padding. A query of one token may be any.
    """
    if len(query) < 2:
        return False
    first = query[:2] if pad in (bos, eos) else query[:1]
    return bool((first == pad).all()) or int(query[-1]) in (pad, eos)


def is_padded_response(response: Tensor, pad: int | None, eos: int | None) -> bool:
    """Return whether a response has padding or EOS before its last token."""
    if eos is None:  # the padding token may be an ordinary one
        return False
    earlier = response[:-1]
    return bool(((earlier == eos) | (earlier == pad)).any())
