"""Log-probabilities of chosen tokens without a second tensor as large as the logits."""

import torch
from torch import Tensor

CPU_PIECE, GPU_PIECE = 2**19, 2**24  # logits looked at together: what a cache holds, or 64 MiB


class _LabelLogprobs(torch.autograd.Function):
    """Log-softmax at the labels, and entropies. Logits become probabilities in place, and those the
    gradient.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, found = max(1, (CPU_PIECE if logits.is_cpu else GPU_PIECE) // logits.shape[-1]), []
        for some, label in zip(logits.split(rows), labels.split(rows), strict=True):
            logprobs = some.log_softmax(-1)
            probabilities = torch.exp(logprobs, out=some)
            entropy = -torch.linalg.vecdot(
                probabilities, logprobs.clamp_(min=-1e9)
            )  # 0 · −inf would be NaN
            found.append((logprobs.gather(-1, label.unsqueeze(-1)).squeeze(-1), entropy))
        logprobs, entropy = (torch.cat(x) for x in zip(*found, strict=True))
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits, labels)
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # the third output never receives a gradient
        return logprobs, entropy, logits

    @staticmethod
    def backward(ctx, gradient: Tensor, *_) -> tuple[Tensor, None]:
        probabilities, labels = ctx.saved_tensors  # ∂ log p(label) / ∂ logits = onehot(label) − p
        gradient = gradient.unsqueeze(-1)
        return probabilities.mul_(-gradient).scatter_add_(-1, labels.unsqueeze(-1), gradient), None


def label_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels (N,), and entropies (N,) in nats without a gradient, from logits
    (N, V).

    The logits are overwritten, now and in the backward pass, which runs once: with a large
    vocabulary no tensor is larger. A forbidden token (−inf) counts 0 in the entropy.
    """
    return _LabelLogprobs.apply(logits, labels)[:2]
