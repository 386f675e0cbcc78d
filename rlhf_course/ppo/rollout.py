"""Rollouts: queries and responses as one batch, and what a model says of every response token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlhf_course.policy.value_head import can_pack
from rlhf_course.ppo.device import to_device, to_host
from rlhf_course.ppo.logprobs import label_logprobs

FirstPass = tuple[
    Tensor, Tensor, Tensor
]  # log-probabilities, values, entropies: (B, R) each, with their graph
ON_HOST = ("input_ids", "query_lengths", "response_lengths")


class Layout(NamedTuple):
    """A batch as a policy takes it, on the device; N response tokens."""

    labels: Tensor  # (N,) the response tokens
    place: Tensor  # (N,) where each belongs in the flattened (B · R)
    arguments: dict[
        str, Tensor
    ]  # of a policy's forward; its positions (N,) are where response tokens are predicted


@dataclass
class Rollout:
    """One batch of samples, padded on the right; tensors about responses are aligned to them.

    On the host: input_ids (B, T), query then response, and the two lengths (B,), in tokens. On the
    device: scores (B,) and mask (B, R), 1.0 on response tokens. The rest is (B, R) in float32 on
    the device, 0 on padding, and filled in by
    the trainer: log-probabilities and KL in nats. There is no attention mask: a causal model never
    looks at what stands to the right, so padding there needs no hiding.
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
        """One batch of ragged token lists, from either side; what belongs on a device goes to that
        of the scores.

        Masks come from lengths, never from ``ids != pad``, because the padding token may be EOS.
        """
        query_lengths = torch.tensor([len(query) for query in queries])
        response_lengths = torch.tensor([len(response) for response in responses])
        tokens = to_host([*queries, *responses])
        whole = [
            torch.cat(pair)
            for pair in zip(tokens[: len(queries)], tokens[len(queries) :], strict=True)
        ]
        input_ids = pad_sequence(whole, batch_first=True, padding_value=pad_token_id)
        mask = (torch.arange(int(response_lengths.max())) < response_lengths.unsqueeze(1)).float()
        if response_masks is not None:
            mask *= pad_sequence(
                [keep.float() for keep in to_host(response_masks)], batch_first=True
            )
        return cls(
            input_ids, query_lengths, response_lengths, scores, *to_device([mask], scores.device)
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: Tensor) -> Self:
        """These rows (indices on the CPU) alone, without the columns that none of them uses."""
        t = int((self.query_lengths[rows] + self.response_lengths[rows]).max())
        r = int(self.response_lengths[rows].max())
        [on_device] = to_device([rows], self.mask.device)
        part = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        for name, tensor in part.items():
            picked = tensor[rows if name in ON_HOST else on_device]
            part[name] = (
                picked if picked.dim() == 1 else picked[:, : t if name == "input_ids" else r]
            )
        return Rollout(**part)

    def lay_out(self, packed: bool) -> Layout:
        """The batch as a policy's forward takes it; worked out on the host, once per rollout, and
        sent at once.

        Every sample without its last token, which predicts nothing that is needed. Plain: a sample
        per row, and no mask is needed (all ones keep transformers on its causal fast path). Packed:
        several samples share a row, positions restart with each, and a mask (rows, 1, W, W) keeps
        them apart; that leaves far less padding.
        """
        if packed in self.layouts:
            return self.layouts[packed]
        lengths = self.query_lengths + self.response_lengths - 1
        width = longest = int(lengths.max())
        first, rows = torch.arange(len(self)) * width, len(self)
        if (
            packed
        ):  # with room for short samples beside the longest, where that makes less to compute
            widths = (longest, longest + longest // 2)
            layouts = [(w, *first_fit(lengths.tolist(), w)) for w in widths]
            width, first, rows = min(layouts, key=lambda layout: layout[0] * layout[2])
        column = torch.arange(longest)
        place, real = first.unsqueeze(1) + column, column < lengths.unsqueeze(1)

        def fill(values: Tensor, blank: int) -> Tensor:
            row_by_row = torch.full((rows * width,), blank)
            row_by_row[place[real]] = values.expand(real.shape)[real]
            return row_by_row.view(rows, width)

        response_column = torch.arange(self.mask.shape[1])
        tokens = response_column < self.response_lengths.unsqueeze(1)
        predicts = (first + self.query_lengths - 1).unsqueeze(1) + response_column
        labels = (self.query_lengths.unsqueeze(1) + response_column).clamp(max=longest)
        arguments = {
            "input_ids": fill(self.input_ids[:, :longest], 0),
            "positions": predicts[tokens],
        }
        arguments["labels"] = self.input_ids.gather(1, labels)[tokens]
        arguments["place"] = tokens.flatten().nonzero()[:, 0]
        if packed:
            arguments["position_ids"] = fill(column, 0)
        device = self.mask.device
        arguments = dict(zip(arguments, to_device([*arguments.values()], device), strict=True))
        if packed:
            sample = fill(torch.arange(len(self)).unsqueeze(1), -1)
            same_sample = sample.unsqueeze(1) == sample.unsqueeze(2)
            arguments["attention_mask"] = (
                (same_sample & torch.ones(width, width).tril().bool()).unsqueeze(1).to(device)
            )
        else:
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        self.layouts[packed] = Layout(arguments.pop("labels"), arguments.pop("place"), arguments)
        return self.layouts[packed]


def first_fit(lengths: list[int], width: int) -> tuple[Tensor, int]:
    """Samples into rows of ``width`` tokens, the longest first, each into the first row with room
    for it.

    Returns where each begins when the rows are laid end to end, and how many rows there are.
    """
    first, room = [0] * len(lengths), []
    for sample in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        row = next((row for row, left in enumerate(room) if left >= lengths[sample]), len(room))
        if row == len(room):
            room.append(width)
        first[sample] = row * width + width - room[row]
        room[row] -= lengths[sample]
    return torch.tensor(first), len(room)


def forward(
    model,
    rollout: Rollout,
    at_most: int | None = None,
    whole_vocabulary: bool = False,
    packed: bool | None = None,
    begin_suppress: Sequence[int] = (),
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, values and entropies of the response tokens, (B, R) each and 0 on padding.

    With ``whole_vocabulary`` also all log-probabilities (B, R, V), without a gradient, else None.
    ``at_most`` so many samples run at a time, those of similar length together; ``packed`` says
    whether samples share rows (default: on a CPU, where the model allows it), and the vocabulary
    projection runs on response tokens alone. The numbers depend on none of that. Tokens of
    ``begin_suppress`` have probability 0 where a response begins. With ``chunk``, the vocabulary's
    numbers for so many tokens are in memory at once; in the backward pass they are computed again.
    """
    if packed is None:  # a GPU prefers causal attention without a mask
        packed = rollout.mask.is_cpu and can_pack(model)
    collected, places, vocabularies = [], [], []
    whole = at_most is None or at_most >= len(rollout)
    order = (
        torch.arange(len(rollout))
        if whole
        else (rollout.query_lengths + rollout.response_lengths).argsort()
    )
    for rows in order.split(at_most or len(rollout)):
        part = rollout if whole else rollout.select(rows)
        labels, place, arguments = part.lay_out(packed)
        outputs, _, values = model(**arguments, use_cache=False, project=not chunk)
        width = part.mask.shape[1]
        begins = place % width == 0 if begin_suppress else labels  # which nothing asks for then
        if chunk:
            head = getattr(model, "module", model).pretrained_model.get_output_embeddings()
            parts = zip(*(x.split(chunk) for x in (outputs, labels, begins)), strict=True)
            found = [
                checkpoint(project, head, *x, begin_suppress, use_reentrant=False) for x in parts
            ]
            logprobs, entropies = (torch.cat(x) for x in zip(*found, strict=True))
        else:
            logits = rule_out(outputs, begins, begin_suppress)
            vocabularies += [logits.detach().log_softmax(-1)] if whole_vocabulary else []
            logprobs, entropies = label_logprobs(logits, labels)
        collected.append(torch.stack([logprobs, values, entropies]))
        if not whole:
            [rows] = to_device([rows], place.device)
            place = rows[place // width] * rollout.mask.shape[1] + place % width
        places.append(place)
    shape, place = rollout.mask.shape, _joined(places)
    found = _joined(collected, 1)
    found = (
        found.new_zeros(len(found), shape.numel()).index_copy(1, place, found).unflatten(1, shape)
    )
    if not whole_vocabulary:
        return *found.unbind(), None
    rows = _joined(vocabularies)
    rows = rows.new_zeros(shape.numel(), rows.shape[1]).index_copy(0, place, rows)
    return *found.unbind(), rows.unflatten(0, shape)


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def project(
    head: torch.nn.Module,
    hidden: Tensor,
    labels: Tensor,
    begins: Tensor,
    begin_suppress: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels (N,), and entropies (N,), from hidden states (N, H)."""
    return label_logprobs(rule_out(head(hidden).float(), begins, begin_suppress), labels)


def rule_out(logits: Tensor, begins: Tensor, begin_suppress: Sequence[int]) -> Tensor:
    """Logits (N, V) in which tokens of ``begin_suppress`` have no probability where a response
    ``begins`` (N,).
    """
    if not begin_suppress:
        return logits
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    for (
        token
    ) in begin_suppress:  # one by one: a list of them would be sent to the device, and waited for
        forbidden[:, token] = begins
    return logits.masked_fill(
        forbidden, torch.finfo(logits.dtype).min
    )  # not −inf, which makes NaN of 0 · −inf
