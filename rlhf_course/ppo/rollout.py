"""Rollouts: queries and responses laid out so that responses line up, and what a model says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_course.policy import takes_positions
from rlhf_course.ppo.algorithm import entropy_from_logits, logprobs_from_logits


@dataclass
class Rollout:
    """One batch of samples; queries are padded left, responses right, so that column t is response token t.

    input_ids and attention_mask are (B, Q + R); mask is (B, R), 1.0 on response tokens; scores is (B,); the two
    lengths are (B,) on the CPU, in tokens. The rest is (B, R) in float32, 0 on padding, and filled in by the
    trainer: log-probabilities and KL in nats.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    scores: Tensor
    query_lengths: Tensor
    response_lengths: Tensor
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
        """Lay out ragged token lists on the scores' device.

        Masks come from lengths, never from ``ids != pad``, because the padding token may be EOS.
        """
        query_lengths = torch.tensor([len(query) for query in queries])
        response_lengths = torch.tensor([len(response) for response in responses])
        q, r = int(query_lengths.max()), int(response_lengths.max())
        input_ids = torch.full((len(queries), q + r), pad_token_id)
        for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
            input_ids[row, q - len(query) : q] = query
            input_ids[row, q : q + len(response)] = response
        column = torch.arange(-q, r)
        attention_mask = (column >= -query_lengths.unsqueeze(1)) & (column < response_lengths.unsqueeze(1))
        mask = attention_mask[:, q:].float()
        if response_masks is not None:
            for row, keep in enumerate(response_masks):
                mask[row, : len(keep)] *= keep.float().cpu()
        tensors = (tensor.to(scores.device) for tensor in (input_ids, attention_mask.long(), mask))
        return cls(*tensors, scores, query_lengths, response_lengths)

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
        """These rows (indices on the CPU) alone, without the columns that none of them uses."""
        q, r = int(self.query_lengths[rows].max()), int(self.response_lengths[rows].max())
        start = self.input_ids.shape[1] - self.mask.shape[1] - q
        part = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        for name, tensor in part.items():
            columns = slice(start, start + q + r) if name in ("input_ids", "attention_mask") else slice(r)
            part[name] = tensor[rows, columns] if tensor.dim() == 2 else tensor[rows]
        return Rollout(**part)


def forward(
    model, rollout: Rollout, groups: int = 1, whole_vocabulary: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, values and entropies of the response tokens, (B, R) each.

    With ``whole_vocabulary`` also all log-probabilities (B, R, V), else None. The rows run in ``groups`` of similar
    length, so that short samples are not padded to the longest; the numbers do not depend on it.
    """
    lengths = rollout.query_lengths + rollout.response_lengths
    order = lengths.argsort()
    if lengths.min() == lengths.max():
        groups = 1
    collected = []
    for rows in order.chunk(groups):
        part = rollout.select(rows)
        logits, values = response_logits(model, part)
        logprobs = logprobs_from_logits(logits, part.responses)
        found = [logprobs, values, entropy_from_logits(logits)]
        if whole_vocabulary:
            found.append(logits.log_softmax(-1))
        missing = rollout.mask.shape[1] - part.mask.shape[1]
        collected.append([pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)) for tensor in found])
    back = order.argsort()
    logprobs, values, entropy, *rest = (torch.cat(tensors)[back] for tensors in zip(*collected, strict=True))
    return logprobs, values, entropy, rest[0] if rest else None


def response_logits(model, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Logits (B, R, V) and values (B, R) of a value-head model at the positions that predict each response token.

    The last token predicts nothing that is needed, and the vocabulary projection runs on R positions only.
    """
    arguments = {"position_ids": rollout.position_ids[:, :-1]} if takes_positions(model) else {}
    logits, _, values = model(
        input_ids=rollout.input_ids[:, :-1],
        attention_mask=rollout.attention_mask[:, :-1],
        logits_to_keep=rollout.mask.shape[1],
        use_cache=False,
        **arguments,
    )
    return logits, values
