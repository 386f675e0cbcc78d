"""Rollouts: queries and responses as one batch, and what a model says of every response token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_course.ppo.algorithm import entropy


@dataclass
class Rollout:
    """One batch of samples, padded on the right; tensors about responses are aligned to them.

    input_ids is (B, T), query then response; responses and mask are (B, R), the mask 1.0 on response tokens; scores is
    (B,); the two lengths are (B,) on the CPU, in tokens. The rest is (B, R) in float32, 0 on padding, and filled in by
    the trainer: log-probabilities and KL in nats. There is no attention mask: a causal model never looks at what stands
    to the right, so padding there needs no hiding.
    """

    input_ids: Tensor
    responses: Tensor
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
        whole = [torch.cat(pair).cpu() for pair in zip(queries, responses, strict=True)]
        input_ids = pad_sequence(whole, batch_first=True, padding_value=pad_token_id)
        response_ids = pad_sequence([r.cpu() for r in responses], batch_first=True, padding_value=pad_token_id)
        mask = (torch.arange(response_ids.shape[1]) < response_lengths.unsqueeze(1)).float()
        if response_masks is not None:
            for row, keep in enumerate(response_masks):
                mask[row, : len(keep)] *= keep.float().cpu()
        tensors = (tensor.to(scores.device) for tensor in (input_ids, response_ids, mask))
        return cls(*tensors, scores, query_lengths, response_lengths)

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: Tensor) -> Rollout:
        """These rows (indices on the CPU) alone, without the columns that none of them uses."""
        t = int((self.query_lengths[rows] + self.response_lengths[rows]).max())
        r = int(self.response_lengths[rows].max())
        part = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        on_device = rows.to(self.input_ids.device)
        for name, tensor in part.items():
            picked = tensor[on_device if tensor.device == on_device.device else rows]
            part[name] = picked if picked.dim() == 1 else picked[:, : t if name == "input_ids" else r]
        return Rollout(**part)

    def predicting_positions(self) -> Tensor:
        """Where each response token is predicted: one position before it, in input_ids without its last column.

        Places in the flattened B · (T − 1), response by response, without padding: (N,) for N response tokens.
        """
        start = torch.arange(len(self)) * (self.input_ids.shape[1] - 1) + self.query_lengths - 1
        position = start.unsqueeze(1) + torch.arange(self.mask.shape[1])
        return position[self._response_tokens()].to(self.input_ids.device)

    def _response_tokens(self) -> Tensor:
        return torch.arange(self.mask.shape[1]) < self.response_lengths.unsqueeze(1)


def forward(
    model, rollout: Rollout, groups: int = 1, at_most: int | None = None, whole_vocabulary: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, values and entropies of the response tokens, (B, R) each and 0 on padding.

    With ``whole_vocabulary`` also all log-probabilities (B, R, V), else None. The rows run in ``groups`` of similar
    length, so that short samples are not padded to the longest, ``at_most`` so many rows at a time, and the vocabulary
    projection runs on response tokens alone; the numbers depend on none of that.
    """
    lengths = rollout.query_lengths + rollout.response_lengths
    passes = -(-len(rollout) // (at_most or len(rollout)))
    if lengths.min() < lengths.max():
        passes *= groups
    collected, places = [], []
    for rows in lengths.argsort().chunk(passes):
        part = rollout.select(rows)
        response_tokens = part._response_tokens()
        ids = part.input_ids[:, :-1]  # the last token predicts nothing that is needed
        logits, _, values = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),  # all ones: transformers takes its causal fast path
            positions=part.predicting_positions(),
            use_cache=False,
        )
        labels = part.responses[response_tokens.to(part.responses.device)]
        all_logprobs = logits.log_softmax(-1)
        logprobs = all_logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        found = [logprobs, values, entropy(all_logprobs.detach())]
        collected.append([*found, all_logprobs] if whole_vocabulary else found)
        place = rows.unsqueeze(1) * rollout.mask.shape[1] + torch.arange(part.mask.shape[1])
        places.append(place[response_tokens])
    place = torch.cat(places).to(rollout.mask.device)
    results = [_spread(torch.cat(tensors), place, rollout.mask.shape) for tensors in zip(*collected, strict=True)]
    return (*results, None)[:4]


def _spread(packed: Tensor, place: Tensor, shape: torch.Size) -> Tensor:
    """Numbers of N response tokens (N, …) put to their places in (B, R, …), with 0 elsewhere."""
    blank = packed.new_zeros(shape.numel(), *packed.shape[1:])
    return blank.index_copy(0, place, packed).unflatten(0, shape)
