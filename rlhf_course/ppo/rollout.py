"""Rollouts: queries and responses as one batch, and a model's numbers for every response token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

FirstPass = tuple[Tensor, Tensor, Tensor]  # log-probabilities, values, entropies: (B, R) each
ON_HOST = ("input_ids", "query_lengths", "response_lengths")
CPU_PIECE, GPU_PIECE = 2**19, 2**24  # logits of one softmax: what a cache holds, or 64 MiB


@dataclass
class Rollout:
    """One batch of samples, padded on the right; tensors about responses are aligned to them.

    On the host: input_ids (B, T), query then response, and the two lengths (B,), in tokens. On the
    device: scores (B,) and mask (B, R), 1.0 on response tokens. The rest is (B, R) in float32 on
    the device, 0 on padding, and filled in by a PPO step; log-probabilities and KL are in nats.
    """

    input_ids: Tensor
    query_lengths: Tensor
    response_lengths: Tensor
    scores: Tensor
    mask: Tensor
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
    ) -> Self:
        """One batch of ragged token lists; mask and scores are on the device of the scores.

        Masks come from lengths, never from ``ids != pad``: the padding token may be EOS.
        """
        query_lengths, response_lengths = (
            torch.tensor([len(row) for row in rows]) for rows in (queries, responses)
        )
        pairs = zip(queries, responses, strict=True)
        rows = [torch.cat([query.cpu(), response.cpu()]) for query, response in pairs]
        mask = torch.arange(int(response_lengths.max())) < response_lengths.unsqueeze(1)
        if response_masks is not None:
            mask &= pad_sequence([torch.as_tensor(keep).cpu() > 0 for keep in response_masks], True)
        input_ids, mask = pad_sequence(rows, True, pad_token_id), mask.float().to(scores.device)
        return cls(input_ids, query_lengths, response_lengths, scores, mask)

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: Tensor) -> Self:
        """These rows (indices on the CPU) alone, without the columns that none of them uses."""
        t = int((self.query_lengths[rows] + self.response_lengths[rows]).max())
        r = int(self.response_lengths[rows].max())
        on_device = rows.to(self.mask.device)
        part = {name: value for name, value in vars(self).items() if value is not None}
        for name, tensor in part.items():
            picked = tensor[rows if name in ON_HOST else on_device]
            width = t if name == "input_ids" else r
            part[name] = picked if picked.dim() == 1 else picked[:, :width]
        return Rollout(**part)


def forward(
    model: nn.Module,
    rollout: Rollout,
    at_most: int | None = None,
    whole_vocabulary: bool = False,
    begin_suppress: Sequence[int] = (),
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, values and entropies of the response tokens, (B, R) each, 0 on padding.

    With ``whole_vocabulary`` also all log-probabilities (B, R, V), without a gradient; else None.
    ``at_most`` so many samples run at a time, those of similar length together; the numbers do not
    depend on it. Tokens of ``begin_suppress`` have probability 0 where a response begins. ``chunk``
    is how many tokens' logits are in memory at once; the backward pass computes them again.
    """
    size, width = min(at_most or len(rollout), len(rollout)), rollout.mask.shape[1]
    if size == len(rollout):
        return run(model, rollout, begin_suppress, chunk, whole_vocabulary)
    order = (rollout.query_lengths + rollout.response_lengths).argsort()
    parts = [rollout.select(rows) for rows in order.split(size)]
    found = [run(model, part, begin_suppress, chunk, whole_vocabulary) for part in parts]
    back = order.argsort().to(rollout.mask.device)
    together = []
    for column in zip(*found, strict=True):
        padded = [x if x is None else pad_columns(x, width) for x in column]
        together.append(None if padded[0] is None else torch.cat(padded)[back])
    return tuple(together)


def pad_columns(x: Tensor, width: int) -> Tensor:
    """x (B, R, …) with zeros up to (B, width, …)."""
    return torch.cat([x, x.new_zeros(len(x), width - x.shape[1], *x.shape[2:])], 1)


def run(
    model: nn.Module,
    part: Rollout,
    begin_suppress: Sequence[int],
    chunk: int | None,
    whole_vocabulary: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One pass of :func:`forward` over all samples at once.

    Padding on the right needs no attention mask, since a causal model never looks there: a mask of
    ones keeps transformers on its fast path. The last column predicts nothing and is left out.
    """
    inputs, positions, labels, begins, place = locate(part)
    outputs, _, values = model(
        inputs, torch.ones_like(inputs), positions, project=not chunk, use_cache=False
    )
    if chunk:
        head = getattr(model, "module", model).pretrained_model.get_output_embeddings()
        pieces = zip(*(x.split(chunk) for x in (outputs, labels, begins)), strict=True)
        found = [checkpoint(project, head, *x, begin_suppress, use_reentrant=False) for x in pieces]
        logprobs, entropies = (torch.cat(x) for x in zip(*found, strict=True))
    else:
        logits = rule_out(outputs, begins, begin_suppress)
        logprobs, entropies = label_logprobs(logits, labels)

    def unflatten(x: Tensor) -> Tensor:
        flat = x.new_zeros(part.mask.numel(), *x.shape[1:]).index_copy(0, place, x)
        return flat.unflatten(0, part.mask.shape)

    whole = unflatten(logits.detach().log_softmax(-1)) if whole_vocabulary else None
    return unflatten(logprobs), unflatten(values), unflatten(entropies), whole


def locate(part: Rollout) -> list[Tensor]:
    """What a pass needs, on the device: inputs (B, T − 1), and for each of N response tokens the
    position that predicts it in them, the token, whether it is a response's first, and its place in
    (B, R); positions and places are those of flattened tensors.
    """
    column, inputs = torch.arange(part.mask.shape[1]), part.input_ids[:, :-1]
    is_token = column < part.response_lengths.unsqueeze(1)
    start = torch.arange(len(part)) * inputs.shape[1] + part.query_lengths - 1
    positions = (start.unsqueeze(1) + column)[is_token]
    labels = part.input_ids[:, 1:].flatten()[positions]
    begins, place = (column == 0).expand_as(is_token)[is_token], is_token.flatten().nonzero()[:, 0]
    return [x.to(part.mask.device) for x in (inputs, positions, labels, begins, place)]


def label_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels (N,), and entropies (N,) in nats without a gradient.

    The logits (N, V) are looked at in pieces that stay in the cache. A forbidden token (−inf)
    counts 0 in the entropy.
    """
    rows = max(1, (CPU_PIECE if logits.is_cpu else GPU_PIECE) // logits.shape[-1])
    found, entropies = [], []
    for some, label in zip(logits.split(rows), labels.split(rows), strict=True):
        logprobs = some.log_softmax(-1)
        found.append(logprobs.gather(-1, label.unsqueeze(-1)).squeeze(-1))
        with torch.no_grad():
            entropies.append(-torch.linalg.vecdot(logprobs.exp(), logprobs.clamp(min=-1e9)))
    return torch.cat(found), torch.cat(entropies)


def project(
    head: nn.Module, hidden: Tensor, labels: Tensor, begins: Tensor, begin_suppress: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels (N,), and entropies (N,), from hidden states (N, H)."""
    return label_logprobs(rule_out(head(hidden).float(), begins, begin_suppress), labels)


def rule_out(logits: Tensor, begins: Tensor, begin_suppress: Sequence[int]) -> Tensor:
    """Logits (N, V) without ``begin_suppress`` tokens where a response begins (N,)."""
    if not begin_suppress:
        return logits
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    for token in begin_suppress:
        forbidden[:, token] = begins
    # Not −inf, which makes NaN of 0 · −inf.
    return logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)
