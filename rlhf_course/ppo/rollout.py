"""Rollouts: queries and responses as one batch, and a model's numbers for every response token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlhf_course.policy.network import can_pack

FirstPass = tuple[Tensor, Tensor, Tensor]  # log-probabilities, values, entropies: (B, R) each
ON_HOST = ("input_ids", "query_lengths", "response_lengths")
CPU_PIECE, GPU_PIECE = 2**19, 2**24  # logits of one softmax: what a cache holds, or 64 MiB


class Layout(NamedTuple):
    """A batch as a policy takes it, on the device; N response tokens."""

    labels: Tensor  # (N,) the response tokens
    place: Tensor  # (N,) where each belongs in the flattened (B · R)
    arguments: dict[str, Tensor]  # of forward; positions (N,) are where the labels are predicted


@dataclass
class Rollout:
    """One batch of samples, padded on the right; tensors about responses are aligned to them.

    On the host: input_ids (B, T), query then response, and the two lengths (B,), in tokens. On the
    device: scores (B,) and mask (B, R), 1.0 on response tokens. The rest is (B, R) in float32 on
    the device, 0 on padding, and filled in by a PPO step; log-probabilities and KL are in nats.
    There is no attention mask: a causal model never looks to the right, where the padding is.
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
    layouts: dict[bool, Layout] = field(default_factory=dict, init=False)  # of lay_out

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
        pairs = zip(on_host(queries), on_host(responses), strict=True)
        input_ids = pad_sequence([torch.cat(pair) for pair in pairs], True, pad_token_id)
        mask = torch.arange(int(response_lengths.max())) < response_lengths.unsqueeze(1)
        if response_masks is not None:
            mask &= pad_sequence([keep > 0 for keep in on_host(response_masks)], True)
        mask = mask.float().to(scores.device)
        return cls(input_ids, query_lengths, response_lengths, scores, mask)

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: Tensor) -> Self:
        """These rows (indices on the CPU) alone, without the columns that none of them uses."""
        t = int((self.query_lengths[rows] + self.response_lengths[rows]).max())
        r = int(self.response_lengths[rows].max())
        on_device = rows.to(self.mask.device)
        part = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        for name, tensor in part.items():
            picked = tensor[rows if name in ON_HOST else on_device]
            width = t if name == "input_ids" else r
            part[name] = picked if picked.dim() == 1 else picked[:, :width]
        return Rollout(**part)

    def lay_out(self, packed: bool) -> Layout:
        """The batch as a policy's forward takes it; worked out once per rollout, on the host.

        Every sample comes without its last token, which predicts nothing that is needed. Plain: one
        sample per row and a mask of ones, which keeps transformers on its causal fast path. Packed:
        several samples share a row, positions restart with each, and a mask (rows, 1, W, W) keeps
        them apart; that leaves far less padding.
        """
        if packed in self.layouts:
            return self.layouts[packed]
        lengths, device = self.query_lengths + self.response_lengths - 1, self.mask.device
        first, rows, width = arrange(lengths, packed)
        column, response_column = torch.arange(int(lengths.max())), torch.arange(self.mask.shape[1])
        place, real = first.unsqueeze(1) + column, column < lengths.unsqueeze(1)

        def fill(values: Tensor, blank: int) -> Tensor:
            flat = torch.full((rows * width,), blank)
            flat[place[real]] = values.expand(real.shape)[real]
            return flat.view(rows, width)

        tokens = response_column < self.response_lengths.unsqueeze(1)
        predicts = (first + self.query_lengths - 1).unsqueeze(1) + response_column
        arguments = {"input_ids": fill(self.input_ids[:, : len(column)], 0)}
        arguments["positions"] = predicts[tokens]
        if packed:
            arguments["position_ids"] = fill(column, 0)
            sample = fill(torch.arange(len(self)).unsqueeze(1), -1)
            same = sample.unsqueeze(1) == sample.unsqueeze(2)
            arguments["attention_mask"] = same.tril().unsqueeze(1)
        else:
            arguments["attention_mask"] = torch.ones(rows, width, dtype=torch.long)
        labels = (self.query_lengths.unsqueeze(1) + response_column).clamp(max=len(column))
        labels = self.input_ids.gather(1, labels)[tokens].to(device)
        arguments = {name: value.to(device) for name, value in arguments.items()}
        layout = Layout(labels, tokens.flatten().nonzero()[:, 0].to(device), arguments)
        self.layouts[packed] = layout
        return layout


def on_host(rows: Sequence[Tensor]) -> list[Tensor]:
    """1-D tensors on the CPU, moved there together."""
    together = torch.cat([row.to(rows[0].device) for row in rows]).cpu()
    return [*together.split([len(row) for row in rows])]


def arrange(lengths: Tensor, packed: bool) -> tuple[Tensor, int, int]:
    """Where samples of these lengths (B,) begin in rows laid end to end; how many rows, how wide.

    Packed rows have room for short samples beside the longest, where that computes less.
    """
    longest = int(lengths.max())
    if not packed:
        return torch.arange(len(lengths)) * longest, len(lengths), longest
    widths = longest, longest + longest // 2
    candidates = [(*first_fit(lengths.tolist(), width), width) for width in widths]
    return min(candidates, key=lambda found: found[1] * found[2])


def first_fit(lengths: list[int], width: int) -> tuple[Tensor, int]:
    """Samples into rows of ``width`` tokens, the longest first, each into the first with room.

    Returns where each begins when the rows are laid end to end, and how many rows there are.
    """
    first, room = [0] * len(lengths), []
    for sample in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        fitting = (row for row, left in enumerate(room) if left >= lengths[sample])
        row = next(fitting, len(room))
        if row == len(room):
            room.append(width)
        first[sample] = row * width + width - room[row]
        room[row] -= lengths[sample]
    return torch.tensor(first), len(room)


def forward(
    model: nn.Module,
    rollout: Rollout,
    at_most: int | None = None,
    whole_vocabulary: bool = False,
    packed: bool | None = None,
    begin_suppress: Sequence[int] = (),
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, values and entropies of the response tokens, (B, R) each, 0 on padding.

    With ``whole_vocabulary`` also all log-probabilities (B, R, V), without a gradient; else None.
    ``at_most`` so many samples run at a time, those of similar length together; ``packed`` says
    whether samples share rows (default: on a CPU, where the model allows it). The numbers depend on
    neither. Tokens of ``begin_suppress`` have probability 0 where a response begins. ``chunk`` is
    how many tokens' logits are in memory at once; the backward pass computes them again.
    """
    if packed is None:  # a GPU prefers causal attention without a mask
        packed = rollout.mask.is_cpu and can_pack(model)
    size, order = min(at_most or len(rollout), len(rollout)), torch.arange(len(rollout))
    if size < len(rollout):
        order = (rollout.query_lengths + rollout.response_lengths).argsort()
    shape, collected, places, vocabularies = rollout.mask.shape, [], [], []
    for rows in order.split(size):
        part = rollout if size == len(rollout) else rollout.select(rows)
        how = packed, begin_suppress, chunk, whole_vocabulary
        place, vocabulary, *found = run(model, part, *how)
        collected.append(torch.stack(found))
        vocabularies.append(vocabulary)
        row, column = place // part.mask.shape[1], place % part.mask.shape[1]
        places.append(rows.to(place.device)[row] * shape[1] + column)
    place, found = torch.cat(places), torch.cat(collected, 1)
    found = found.new_zeros(3, shape.numel()).index_copy(1, place, found).unflatten(1, shape)
    if not whole_vocabulary:
        return *found, None
    rows = torch.cat(vocabularies)
    rows = rows.new_zeros(shape.numel(), rows.shape[1]).index_copy(0, place, rows)
    return *found, rows.unflatten(0, shape)


def run(
    model: nn.Module,
    part: Rollout,
    packed: bool,
    begin_suppress: Sequence[int],
    chunk: int | None,
    whole_vocabulary: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """One pass: places (N,) in the flattened (B · R), all log-probabilities (N, V) or None, and
    the labels' log-probabilities, values and entropies (N,)."""
    labels, place, arguments = part.lay_out(packed)
    outputs, _, values = model(**arguments, use_cache=False, project=not chunk)
    begins = place % part.mask.shape[1] == 0
    if not chunk:
        logits = rule_out(outputs, begins, begin_suppress)
        whole = logits.detach().log_softmax(-1) if whole_vocabulary else None
        logprobs, entropies = label_logprobs(logits, labels)
        return place, whole, logprobs, values, entropies
    head = getattr(model, "module", model).pretrained_model.get_output_embeddings()
    pieces = zip(*(x.split(chunk) for x in (outputs, labels, begins)), strict=True)
    found = [checkpoint(project, head, *x, begin_suppress, use_reentrant=False) for x in pieces]
    logprobs, entropies = (torch.cat(x) for x in zip(*found, strict=True))
    return place, None, logprobs, values, entropies


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
