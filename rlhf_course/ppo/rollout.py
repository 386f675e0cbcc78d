"""Batch queries and responses as rollouts; compute a model's outputs per response token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

FirstPass = tuple[Tensor, Tensor, Tensor]  # log-probabilities, values, entropies: (B, R) each
ON_HOST = ("input_ids", "query_lengths", "response_lengths")
CPU_PIECE, GPU_PIECE = 2**19, 2**24  # logits per softmax: 2 MiB (fits a CPU cache), 64 MiB


@dataclass
class Rollout:
    """Store one batch of samples, padded on the right; (B, R) tensors are aligned to the responses.

    On the host: input_ids (B, T; query, then response) and both lengths (B,), in tokens. On the
    device: scores (B,), mask (B, R; 1.0 on tokens that count), and, filled in by a PPO step, the
    other tensors (B, R), in float32, 0 on padding. Log-probabilities and KL are in nats.
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
        cls, queries, responses, scores: Tensor, pad_token_id: int, response_masks=None
    ) -> Self:
        """Combine ragged token lists into one batch; put the mask on the scores' device.

        Masks come from lengths, never from ``ids != pad``, because the padding token may be EOS.
        """
        lengths = [torch.tensor([*map(len, rows)]) for rows in (queries, responses)]
        pairs = zip(queries, responses, strict=True)
        rows = [torch.cat([query.cpu(), response.cpu()]) for query, response in pairs]
        mask = torch.arange(int(lengths[1].max())) < lengths[1].unsqueeze(1)
        if response_masks is not None:
            mask &= pad_sequence([torch.as_tensor(keep).cpu() > 0 for keep in response_masks], True)
        input_ids, mask = pad_sequence(rows, True, pad_token_id), mask.float().to(scores.device)
        return cls(input_ids, *lengths, scores, mask)

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: Tensor) -> Self:
        """Return a rollout of ``rows`` (CPU indices), cut to its longest sample and response."""
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
    begin_suppress: Sequence[int] = (),
    chunk: int | None = None,
    at_most: int | None = None,
    whole_vocabulary: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return log-probabilities, values and entropies for the response tokens, (B, R), 0 on padding.

    Tokens in ``begin_suppress`` have probability 0 where a response begins. Only ``chunk``
    tokens' logits are in memory at a time; the backward pass recomputes them. At most ``at_most``
    samples, of similar length, run together; this does not change the outputs.
    If ``whole_vocabulary``, the fourth output has all log-probabilities (B, R, V), without a
    gradient; else it is None.
    """
    order, size = torch.arange(len(rollout)), at_most or len(rollout)
    if size < len(rollout):
        order = (rollout.query_lengths + rollout.response_lengths).argsort()
    how = begin_suppress, chunk, whole_vocabulary
    found = [run(model, rollout, rows, *how) for rows in order.split(size)]
    place, *columns = (
        None if parts[0] is None else torch.cat(parts) for parts in zip(*found, strict=True)
    )

    def unflatten(x: Tensor) -> Tensor:
        flat = x.new_zeros(rollout.mask.numel(), *x.shape[1:]).index_copy(0, place, x)
        return flat.unflatten(0, rollout.mask.shape)

    return tuple(x if x is None else unflatten(x) for x in columns)


def run(
    model: nn.Module, rollout: Rollout, rows: Tensor, begin_suppress, chunk, whole_vocabulary: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Run the model on ``rows``; return places (see :func:`locate`) and outputs, (N,) or (N, V).

    A causal model ignores padding on the right, so the mask is all ones, and transformers takes
    its fast path. The last column predicts no token and is left out.
    """
    inputs, positions, labels, begins, place = locate(rollout, rows)
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
    whole = logits.detach().log_softmax(-1) if whole_vocabulary else None
    return place, logprobs, values, entropies, whole


def locate(rollout: Rollout, rows: Tensor) -> list[Tensor]:
    """Return inputs (b, t − 1), positions, labels, begins and place (N,), on the device.

    The last four give, for each of the N response tokens, its predictor's index in the flattened
    inputs, its id, whether it begins a response, and its index in the flattened (B, R).
    """
    starts, lengths = (x[rows, None] for x in (rollout.query_lengths, rollout.response_lengths))
    column, number = torch.arange(rollout.mask.shape[1]), torch.arange(len(rows)).unsqueeze(1)
    is_token = column < lengths
    ids = rollout.input_ids[rows, : int((starts + lengths).max())]
    inputs = ids[:, :-1]
    positions = (number * inputs.shape[1] + starts - 1 + column)[is_token]
    labels = ids[:, 1:].flatten()[positions]
    begins = (column == 0).expand_as(is_token)[is_token]
    place = (rows.unsqueeze(1) * len(column) + column)[is_token]
    return [x.to(rollout.mask.device) for x in (inputs, positions, labels, begins, place)]


def label_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of labels (N,) and, without a gradient, entropies (N,), in nats.

    The logits (N, V) are processed in pieces (see CPU_PIECE); probability 0 adds no entropy.
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
    """Return log-probabilities of labels (N,), and entropies (N,), from hidden states (N, H)."""
    return label_logprobs(rule_out(head(hidden).float(), begins, begin_suppress), labels)


def rule_out(logits: Tensor, begins: Tensor, begin_suppress: Sequence[int]) -> Tensor:
    """Return logits (N, V) that forbid ``begin_suppress`` tokens where ``begins`` (N,) is true."""
    if not begin_suppress:
        return logits
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    for token in begin_suppress:
        forbidden[:, token] = begins
    return logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)  # 0 · −inf is NaN
