"""Implement PPO's arithmetic as tensor functions, without models, files or devices.

In every (B, R) tensor, column t belongs to the t-th response token.
``mask`` is 1.0 on the response tokens that count and 0.0 elsewhere. PPO follows Schulman et al.
2017 (arXiv:1707.06347), and Ziegler et al. 2019 (arXiv:1909.08593) for language models.
``total`` sums a tensor across the processes that share a batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]


def local(x: Tensor) -> Tensor:
    """Return x unchanged; with one process, x is already the total."""
    return x


def masked_mean(x: Tensor, mask: Tensor, total: Total = local) -> Tensor:
    """Return the mean of x (B, R) over the tokens in the mask."""
    return total((x * mask).sum()) / total(mask.sum())


def masked_var(x: Tensor, mask: Tensor, total: Total = local) -> Tensor:
    """Return the unbiased variance of x (B, R) across the mask's tokens, or 0 for one token."""
    n = total(mask.sum())
    squares = (x - masked_mean(x, mask, total)) ** 2
    return masked_mean(squares, mask, total) * n / (n - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, total: Total = local) -> Tensor:
    """Return x (B, R) scaled to variance 1 (mean 0 if shift_mean) in the mask, set to 0 elsewhere.

    Raises ``ValueError`` for a mask of fewer than two tokens, whose variance is undefined.
    """
    if total(mask.sum()) < 2:
        raise ValueError(
            "Whitening needs at least two response tokens in the batch. Use a larger batch_size, or"
            " forbid empty responses: PPOConfig(begin_suppress_tokens=[eos])."
        )
    mean = masked_mean(x, mask, total)
    white = (x - mean) * torch.rsqrt(masked_var(x, mask, total) + 1e-8)
    if not shift_mean:
        white = white + mean
    return white * mask


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "kl") -> Tensor:
    """Estimate the KL per token in nats, (B, R) → (B, R).

    ``kl``: lp − ref; ``abs``: |lp − ref|; ``mse``: ½(lp − ref)². ``full`` takes the
    log-probabilities of the whole vocabulary, (B, R, V): Σ_v p(v)·(log p(v) − log ref(v)).
    """
    difference = logprobs - ref_logprobs
    if kind == "full":
        return (logprobs.exp() * difference).sum(-1)
    if kind == "kl":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "mse":
        return 0.5 * difference.square()
    raise ValueError(f"Unknown KL penalty {kind!r}; choose kl, abs, mse or full.")


def compute_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor]:
    """Return per-token rewards and their KL term, (B, R) each, from scores (B,) and kl (B, R).

    Each token in the mask gets −kl_coef·kl; the last such token also gets the score (Ziegler
    et al. 2019, eq. 2).
    """
    non_score = -kl_coef * kl * mask
    rewards = non_score.clone()
    row = torch.arange(len(scores), device=scores.device)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rewards[row, last] += scores
    return rewards, non_score


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return advantages (not whitened) and returns, (B, R) each, 0 where the mask is 0.

    δ_t = r_t + γV_{t+1} − V_t;  A_t = δ_t + γλA_{t+1};  return = A + V, with V = 0 after the last
    token (Schulman et al. 2015, arXiv:1506.02438, eq. 16). Tokens outside the mask, such as
    tool output, are skipped: t + 1 is the next token in the mask.
    """
    values = values * mask
    in_mask = mask > 0
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(values[:, 0])
    columns = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(in_mask[:, t], advantage, next_advantage)
        next_value = torch.where(in_mask[:, t], values[:, t], next_value)
        columns.append(next_advantage * mask[:, t])
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, advantages + values


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clipped policy loss, the ratio, and where clipping is active; all (B, R).

    max(−A·ratio, −A·clip(ratio, 1 ± cliprange)), ratio = exp(lp − old lp) (Schulman et al. 2017,
    eq. 7).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(unclipped, clipped), ratio, clipped > unclipped


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss per token and where clipping is active; both (B, R).

    ½·max((v − R)², (v_clip − R)²) with v_clip = clip(v, V_old ± cliprange): moving v further
    than cliprange from V_old cannot lower the loss.
    """
    clipped_values = torch.minimum(values, old_values + cliprange)
    clipped_values = torch.maximum(clipped_values, old_values - cliprange)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


class AdaptiveKLController:
    """Adapt the KL coefficient to bring the KL to ``target`` nats (Ziegler et al. 2019, § 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Set β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon); KL is the mean of n samples."""
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """Keep the KL coefficient constant."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Leave the coefficient unchanged."""


class RunningMoments:
    """Track the mean and standard deviation (divisor n − 1) of all scores (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # the sum of squared differences from the mean

    @property
    def std(self) -> float:
        """Return the standard deviation; 1.0 until two scores have been added."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 1.0

    def update(self, scores: Tensor) -> None:
        """Add scores (n,)."""
        scores = scores.cpu().double()  # Apple's mps has no float64
        n = len(scores)
        mean = scores.mean().item()
        shift = mean - self.mean
        count = self.count + n
        self.squares += (scores - mean).square().sum().item() + shift**2 * self.count * n / count
        self.mean += shift * n / count
        self.count = count

    def scale(self, scores: Tensor, center: bool) -> Tensor:
        """Center scores (B,) if ``center``, and divide them by the standard deviation."""
        if center:
            scores = scores - self.mean
        epsilon = torch.finfo(scores.dtype).eps
        differs = self.std > epsilon * abs(self.mean)  # by more than rounding
        return scores / (self.std + epsilon) if differs else scores
