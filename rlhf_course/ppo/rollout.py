"""Batch queries and responses as samples; compute a model's outputs per response token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlhf_course.policy.network import packed_attention_mask

# Logits per softmax: 0.5 MiB (fits a core's cache), 64 MiB.
CPU_PIECE = 2**17
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


def make_inputs(samples: Samples, rows: Tensor, pack: bool = False) -> Inputs:
    """Return the inputs for one pass over the samples ``rows`` (CPU indices).

    A sample's last token predicts no token of it, so it is left out. If ``pack`` is set, samples
    share rows where that leaves fewer tokens to compute. ``predicts`` stays on the host, where
    counting its tokens does not wait for a GPU.
    """
    query_lengths = samples.query_lengths[rows].unsqueeze(1)
    lengths = samples.query_lengths[rows] + samples.response_lengths[rows] - 1
    longest = int(lengths.max())
    layout = Layout(line=torch.arange(len(rows)), start=torch.zeros_like(rows), width=longest)
    is_packed = False
    if pack:
        packed_layout = pack_samples(lengths)
        is_packed = packed_layout.n_tokens < layout.n_tokens
        if is_packed:
            layout = packed_layout
    column = torch.arange(longest)
    is_token = column < lengths.unsqueeze(1)
    place = (layout.line * layout.width + layout.start).unsqueeze(1) + column
    place = place[is_token]

    def lay_out(values: Tensor, padding: int = 0) -> Tensor:
        """Return values (b, longest), which have a row per sample, in the layout's rows."""
        tokens = torch.full((layout.n_tokens,), padding)
        tokens[place] = values.expand(is_token.shape)[is_token]
        return tokens.view(-1, layout.width)

    device = samples.mask.device
    ids = samples.input_ids[rows]
    input_ids = lay_out(ids[:, :longest]).to(device)
    arguments = {"attention_mask": torch.ones_like(input_ids)}
    if is_packed:
        sample = lay_out(rows.unsqueeze(1), padding=-1)  # padding attends to padding
        arguments["attention_mask"] = packed_attention_mask(sample).to(device)
        arguments["position_ids"] = lay_out(column).to(device)
    t = lay_out(column + 1 - query_lengths, padding=-1)  # of the next token; negative in a query
    predicts = t >= 0
    return Inputs(
        input_ids=input_ids,
        arguments=arguments,
        predicts=predicts,
        labels=lay_out(ids[:, 1 : longest + 1])[predicts].to(device),
        row=lay_out(rows.unsqueeze(1))[predicts].to(device),
        t=t[predicts].to(device),
    )


class Layout(NamedTuple):
    """Store where b samples are in the rows, ``width`` tokens wide, of one pass."""

    line: Tensor  # (b,): each sample's row
    start: Tensor  # (b,): the column of its first token
    width: int

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens in all rows, padding included."""
        return (int(self.line.max()) + 1) * self.width


def pack_samples(lengths: Tensor) -> Layout:
    """Return a layout in which samples of these ``lengths`` (b,) share rows.

    Rows are 1.5 times as wide as the longest sample, so that a short one fits next to it. The
    longest sample is placed first; each goes into the first row with space for it (first fit).
    Here samples a to d have 5, 3, 2 and 4 tokens, and a row has T = 7. Positions begin at 0 in each
    sample, and a token attends only to its own sample::

        input_ids             position_ids      a token of row 2 attends to
        a0 a1 a2 a3 a4 c0 c1  0 1 2 3 4 0 1     d0  d0
        d0 d1 d2 d3 b0 b1 b2  0 1 2 3 0 1 2     d1  d0 d1
                                                d2  d0 d1 d2
                                                d3  d0 d1 d2 d3
                                                b0              b0
                                                b1              b0 b1
                                                b2              b0 b1 b2
    """
    longest = int(lengths.max())
    width = longest + longest // 2
    line = [0] * len(lengths)
    start = [0] * len(lengths)
    used = []  # tokens in each row so far
    sizes = lengths.tolist()
    for sample in lengths.argsort(descending=True, stable=True).tolist():
        size = sizes[sample]
        has_space = (row for row, tokens in enumerate(used) if tokens + size <= width)
        row = next(has_space, len(used))
        if row == len(used):
            used.append(0)
        line[sample] = row
        start[sample] = used[row]
        used[row] += size
    return Layout(torch.tensor(line), torch.tensor(start), width)


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
    all_logprobs = logits.detach().log_softmax(-1) if whole_vocabulary else None
    logprobs, entropies = label_logprobs(logits, inputs.labels)
    return Outputs(logprobs, values, entropies, all_logprobs)


class LabelLogprobs(torch.autograd.Function):
    """Compute log-probabilities and entropies of labels in the memory of the logits.

    The forward pass replaces the logits (N, V) with probabilities p, and the backward pass replaces
    these with the gradient, d log p(label) / d logits = onehot(label) - p. A further tensor of this
    size would cost a CPU a tenth of the step. So backward can run only once.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = rows_per_piece(logits)
        logprobs = []
        entropies = []
        for logits_piece, labels_piece in zip(logits.split(size), labels.split(size), strict=True):
            all_logprobs = logits_piece.log_softmax(-1)
            logprobs.append(all_logprobs.gather(-1, labels_piece.unsqueeze(-1)).squeeze(-1))
            probabilities = torch.exp(all_logprobs, out=logits_piece)
            all_logprobs.clamp_(min=-1e9)  # 0 · −inf is NaN
            entropies.append(-torch.linalg.vecdot(probabilities, all_logprobs))
        entropy = torch.cat(entropies)
        ctx.mark_dirty(logits)  # so autograd requires that it is returned
        ctx.save_for_backward(logits, labels)
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # the overwritten logits receive no gradient
        return torch.cat(logprobs), entropy, logits

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor, *_) -> tuple[Tensor, None]:
        probabilities, labels = ctx.saved_tensors
        gradient = gradient.unsqueeze(-1)
        logits_gradient = probabilities.mul_(-gradient)
        logits_gradient.scatter_add_(-1, labels.unsqueeze(-1), gradient)
        return logits_gradient, None


def rows_per_piece(logits: Tensor) -> int:
    """Return how many rows of logits (N, V) are processed together (see CPU_PIECE)."""
    size = CPU_PIECE if logits.is_cpu else GPU_PIECE
    return max(1, size // logits.shape[-1])


def label_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of labels (N,) and, without a gradient, entropies (N,), in nats.

    Overwrites the logits (N, V), in pieces (see CPU_PIECE). Probability 0 adds no entropy.
    """
    logprobs, entropies, _ = LabelLogprobs.apply(logits, labels)
    return logprobs, entropies


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
