"""Batch queries and responses as samples; compute a model's outputs per response token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlhf_course.policy.network import packed_attention_mask

# Logits per softmax: 2 MiB (fits a CPU cache), 64 MiB.
CPU_PIECE = 2**19
GPU_PIECE = 2**24


@dataclass(frozen=True, eq=False)
class Samples:
    """Store what was sampled: one batch of queries and responses, padded on the right.

    On the host: input_ids (B, T; query, then response) and both lengths (B,), in tokens. On the
    device: scores (B,), and mask (B, R), 1.0 on the response tokens that count.
    """

    input_ids: Tensor
    query_lengths: Tensor
    response_lengths: Tensor
    scores: Tensor
    mask: Tensor

    @classmethod
    def from_lists(
        cls, queries, responses, scores: Tensor, pad_token_id: int, response_masks=None
    ) -> Self:
        """Combine ragged token lists into one batch; put the mask on the scores' device.

        Masks come from lengths, never from ``ids != pad``, because the padding token may be EOS.
        """
        query_lengths = torch.tensor([len(query) for query in queries])
        response_lengths = torch.tensor([len(response) for response in responses])
        rows = [
            torch.cat([query.cpu(), response.cpu()])
            for query, response in zip(queries, responses, strict=True)
        ]
        mask = torch.arange(int(response_lengths.max())) < response_lengths.unsqueeze(1)
        if response_masks is not None:
            kept = [torch.as_tensor(keep).cpu() > 0 for keep in response_masks]
            mask &= pad_sequence(kept, batch_first=True)
        return cls(
            input_ids=pad_sequence(rows, batch_first=True, padding_value=pad_token_id),
            query_lengths=query_lengths,
            response_lengths=response_lengths,
            scores=scores,
            mask=mask.float().to(scores.device),
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: Tensor) -> Self:
        """Return the samples ``rows`` (CPU indices), cut to the longest sample and response."""
        query_lengths = self.query_lengths[rows]
        response_lengths = self.response_lengths[rows]
        longest_sample = int((query_lengths + response_lengths).max())
        longest_response = int(response_lengths.max())
        rows_on_device = rows.to(self.mask.device)
        return Samples(
            input_ids=self.input_ids[rows, :longest_sample],
            query_lengths=query_lengths,
            response_lengths=response_lengths,
            scores=self.scores[rows_on_device],
            mask=self.mask[rows_on_device, :longest_response],
        )


class Outputs(NamedTuple):
    """Store a model's outputs per response token: (B, R), or (N,) before they are in rows."""

    logprobs: Tensor  # of the sampled tokens, in nats
    values: Tensor
    entropies: Tensor  # of the next-token distributions, in nats; without a gradient
    all_logprobs: Tensor | None = None  # of the whole vocabulary, (…, V); without a gradient


class Inputs(NamedTuple):
    """Store a model's inputs for one pass, and where its N response tokens belong."""

    input_ids: Tensor  # (b, T)
    arguments: dict[str, Tensor]  # attention_mask and, if samples share rows, position_ids
    predicts: Tensor  # (b, T), boolean: the next token belongs to a response
    labels: Tensor  # (N,): these next tokens, row by row
    row: Tensor  # (N,): their samples
    t: Tensor  # (N,): their places in their responses


def forward(
    model: nn.Module,
    samples: Samples,
    begin_suppress: Sequence[int] = (),
    chunk_size: int | None = None,
    at_most: int | None = None,
    whole_vocabulary: bool = False,
    pack: bool = True,
) -> Outputs:
    """Return a model's outputs for the response tokens, (B, R) each, 0 on padding.

    Tokens in ``begin_suppress`` have probability 0 where a response begins. Only ``chunk_size``
    tokens' logits are in memory at a time; the backward pass recomputes them. At most ``at_most``
    samples, of similar length, run together; on a CPU they share rows if ``pack`` is set and the
    model can pack. Neither changes the outputs by more than rounding.
    If ``whole_vocabulary``, ``all_logprobs`` (B, R, V) is computed.
    """
    order = torch.arange(len(samples))
    size = at_most or len(samples)
    if size < len(samples):
        order = (samples.query_lengths + samples.response_lengths).argsort()
    # A GPU is faster with causal attention that needs no mask.
    packs = pack and samples.mask.is_cpu and getattr(model, "module", model).can_pack
    passes = [make_inputs(samples, rows, packs) for rows in order.split(size)]
    outputs = [
        run(model, inputs, begin_suppress, chunk_size, whole_vocabulary) for inputs in passes
    ]
    row = torch.cat([inputs.row for inputs in passes])
    t = torch.cat([inputs.t for inputs in passes])

    def in_rows(pieces: list[Tensor]) -> Tensor:
        tokens = torch.cat(pieces)
        rows = tokens.new_zeros(*samples.mask.shape, *tokens.shape[1:])
        return rows.index_put((row, t), tokens)

    return Outputs(
        logprobs=in_rows([output.logprobs for output in outputs]),
        values=in_rows([output.values for output in outputs]),
        entropies=in_rows([output.entropies for output in outputs]),
        all_logprobs=(
            in_rows([output.all_logprobs for output in outputs]) if whole_vocabulary else None
        ),
    )


def make_inputs(samples: Samples, rows: Tensor, packed: bool = False) -> Inputs:
    """Return the inputs for one pass over the samples ``rows`` (CPU indices).

    A sample's last token predicts no token of it, so it is left out. Otherwise each sample has a
    row, with padding on the right. If ``packed``, short samples share rows where that saves
    computation; here four samples a to d of 5, 3, 2 and 4 tokens are in two rows of T = 7::

        input_ids             position_ids      a token of row 2 attends to
        a0 a1 a2 a3 a4 c0 c1  0 1 2 3 4 0 1     d0  d0
        d0 d1 d2 d3 b0 b1 b2  0 1 2 3 0 1 2     d1  d0 d1
                                                d2  d0 d1 d2
                                                d3  d0 d1 d2 d3
                                                b0              b0
                                                b1              b0 b1
                                                b2              b0 b1 b2

    ``predicts`` stays on the host, where counting its tokens does not wait for a GPU.
    """
    lengths = samples.query_lengths[rows] + samples.response_lengths[rows] - 1
    longest = int(lengths.max())
    width = longest
    line = torch.arange(len(rows))
    start = torch.zeros_like(line)
    if packed:
        wide = longest + longest // 2  # short samples fit next to the longest
        wide_line, wide_start = first_fit(lengths.tolist(), wide)
        packed = (int(wide_line.max()) + 1) * wide < len(rows) * longest
        if packed:
            width = wide
            line = wide_line
            start = wide_start
    column = torch.arange(longest)
    is_token = column < lengths.unsqueeze(1)
    place = (line * width + start).unsqueeze(1) + column
    place = place[is_token]
    n_lines = int(line.max()) + 1

    def lay_out(values: Tensor, padding: int = 0) -> Tensor:
        """Return values (b, longest), one row per sample, where the model's rows have them."""
        laid = torch.full((n_lines * width,), padding)
        laid[place] = values.expand(is_token.shape)[is_token]
        return laid.view(n_lines, width)

    device = samples.mask.device
    ids = samples.input_ids[rows]
    input_ids = lay_out(ids[:, :longest]).to(device)
    arguments = {"attention_mask": torch.ones_like(input_ids)}
    if packed:
        number = lay_out(rows.unsqueeze(1), padding=-1)  # padding attends to padding
        arguments["attention_mask"] = packed_attention_mask(number).to(device)
        arguments["position_ids"] = lay_out(column).to(device)
    t = lay_out(column + 1 - samples.query_lengths[rows].unsqueeze(1), padding=-1)
    predicts = t >= 0
    return Inputs(
        input_ids=input_ids,
        arguments=arguments,
        predicts=predicts,
        labels=lay_out(ids[:, 1 : longest + 1])[predicts].to(device),
        row=lay_out(rows.unsqueeze(1))[predicts].to(device),
        t=t[predicts].to(device),
    )


def first_fit(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Put samples into rows of ``width`` tokens; return each sample's row and first column, (B,).

    The longest sample comes first, and each goes into the first row that has space for it.
    """
    rows = [0] * len(lengths)
    columns = [0] * len(lengths)
    filled = []  # tokens in each row
    for sample in sorted(range(len(lengths)), key=lambda sample: lengths[sample], reverse=True):
        length = lengths[sample]
        fits = (row for row, tokens in enumerate(filled) if tokens + length <= width)
        row = next(fits, len(filled))
        if row == len(filled):
            filled.append(0)
        rows[sample] = row
        columns[sample] = filled[row]
        filled[row] += length
    return torch.tensor(rows), torch.tensor(columns)


def run(
    model: nn.Module,
    inputs: Inputs,
    begin_suppress: Sequence[int],
    chunk_size: int | None,
    whole_vocabulary: bool,
) -> Outputs:
    """Return the outputs of one pass, (N,) each.

    A causal model ignores padding on the right, so the attention mask of samples in rows of their
    own is all ones, and transformers takes its fast path.
    """
    predictions, _, values = model(
        inputs.input_ids,
        **inputs.arguments,
        select=inputs.predicts,
        project=chunk_size is None,
        use_cache=False,
    )
    begins = inputs.t == 0
    if chunk_size is not None:  # the predictions are hidden states
        projection = getattr(model, "module", model).projection
        logprobs, entropies = chunked_logprobs(
            projection, predictions, inputs.labels, begins, begin_suppress, chunk_size
        )
        return Outputs(logprobs, values, entropies)
    logits = rule_out(predictions, begins, begin_suppress)
    logprobs, entropies = label_logprobs(logits, inputs.labels)
    all_logprobs = logits.detach().log_softmax(-1) if whole_vocabulary else None
    return Outputs(logprobs, values, entropies, all_logprobs)


def label_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of labels (N,) and, without a gradient, entropies (N,), in nats.

    The logits (N, V) are processed in pieces (see CPU_PIECE); probability 0 adds no entropy.
    """
    size = CPU_PIECE if logits.is_cpu else GPU_PIECE
    rows = max(1, size // logits.shape[-1])
    logprobs = []
    entropies = []
    for logits_piece, labels_piece in zip(logits.split(rows), labels.split(rows), strict=True):
        all_logprobs = logits_piece.log_softmax(-1)
        logprobs.append(all_logprobs.gather(-1, labels_piece.unsqueeze(-1)).squeeze(-1))
        with torch.no_grad():
            finite = all_logprobs.clamp(min=-1e9)  # 0 · −inf is NaN
            entropies.append(-torch.linalg.vecdot(all_logprobs.exp(), finite))
    return torch.cat(logprobs), torch.cat(entropies)


def chunked_logprobs(
    projection: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    begins: Tensor,
    begin_suppress: Sequence[int],
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (N,) of the labels from hidden states (N, H).

    The logits of one chunk are in memory at a time; the backward pass recomputes them.
    """

    def of_chunk(hidden: Tensor, labels: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        logits = rule_out(projection(hidden).float(), begins, begin_suppress)
        return label_logprobs(logits, labels)

    logprobs = []
    entropies = []
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        chunk = checkpoint(of_chunk, hidden[rows], labels[rows], begins[rows], use_reentrant=False)
        logprobs.append(chunk[0])
        entropies.append(chunk[1])
    return torch.cat(logprobs), torch.cat(entropies)


def rule_out(logits: Tensor, begins: Tensor, begin_suppress: Sequence[int]) -> Tensor:
    """Return logits (N, V) that forbid ``begin_suppress`` tokens where ``begins`` (N,) is true."""
    if not begin_suppress:
        return logits
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    for token in begin_suppress:
        forbidden[:, token] = begins
    return logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)  # 0 · −inf is NaN
