"""The optimizer's part of a PPO step: epochs over mini-batches of a rollout."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.rollout import Rollout, forward

FirstPass = tuple[Tensor, Tensor, Tensor]  # log-probabilities, values, entropies: (B, R) each, with their graph


def optimize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    rollout: Rollout,
    config: PPOConfig,
    step: int,
    first_pass: FirstPass | None = None,
) -> list[dict[str, Tensor]]:
    """ppo_epochs passes over the rollout, each in a fresh random order; returns every mini-batch's statistics.

    ``first_pass`` is a forward pass over the whole batch that already happened: when one mini-batch is the whole
    batch, the first epoch uses it instead of repeating it. Raises ``FloatingPointError`` on a loss of NaN or Inf.
    """
    collected = []
    for _ in range(config.ppo_epochs):
        order = torch.from_numpy(np.random.permutation(len(rollout)))
        for rows in order.split(config.backward_batch_size):
            tokens, any_usable = rollout.mask[rows].sum(), False
            for mini_rows in rows.split(config.mini_batch_size):
                part = rollout if first_pass else rollout.select(mini_rows)
                outputs = first_pass or forward(model, part, begin_suppress=config.begin_suppress_tokens)[:3]
                loss, stats = minibatch_loss(part, outputs, config)
                collected.append(stats)
                if _usable(loss, stats, config, step, mini_rows, optimizer):
                    any_usable = True
                    # Weighted by tokens, so that k mini-batches of m samples give the gradient of one of k·m.
                    accelerator.backward(loss * (part.mask.sum() / tokens))
                first_pass = None
            if any_usable:
                if config.max_grad_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                optimizer.step()
            optimizer.zero_grad()
        if config.early_stopping and collected[-1]["policy/policykl"] > 1.5 * config.target_kl:
            break
    return collected


def minibatch_loss(part: Rollout, outputs: FirstPass, config: PPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """policy loss + vf_coef · value loss, averaged over a mini-batch's response tokens, and its statistics."""
    logprobs, values, entropy = outputs
    mask = part.mask

    def mean(x: Tensor) -> Tensor:
        return ppo.masked_mean(x, mask)

    pg, ratio, pg_clipped = ppo.policy_loss(logprobs, part.logprobs, part.advantages, config.cliprange)
    vf, vf_clipped = ppo.value_loss(values, part.values, part.returns, config.cliprange_value)
    pg_loss, vf_loss = mean(pg), mean(vf)
    loss = pg_loss + config.vf_coef * vf_loss
    with torch.no_grad():
        moved = logprobs - part.logprobs
        stats = {
            "loss/policy": pg_loss,
            "loss/value": vf_loss,
            "loss/total": loss,
            "policy/entropy": mean(entropy),
            "policy/approxkl": 0.5 * mean(moved.square()),
            "policy/policykl": -mean(moved),
            "policy/clipfrac": mean(pg_clipped.float()),
            "policy/advantages_mean": mean(part.advantages),
            "returns/mean": mean(part.returns),
            "returns/var": ppo.masked_var(part.returns, mask),
            "val/vpred": mean(values),
            "val/error": mean((values - part.returns).square()),
            "val/clipfrac": mean(vf_clipped.float()),
            "val/mean": mean(part.values),
            "val/var": ppo.masked_var(part.values, mask),
            "policy/advantages": part.advantages[mask > 0],
            "policy/ratio": ratio[mask > 0],
        }
    return loss, {name: value.detach() for name, value in stats.items()}


def _usable(loss: Tensor, stats: dict, config: PPOConfig, step: int, rows: Tensor, optimizer) -> bool:
    """Whether a mini-batch may move the weights; one whose mean ratio passed the threshold may not."""
    mean_ratio, value = torch.stack([stats["policy/ratio"].mean(), loss.detach()]).tolist()
    if mean_ratio > config.ratio_threshold:
        warnings.warn(
            f"Step {step}: the mean ratio of a mini-batch is {mean_ratio:.2f}, above ratio_threshold "
            f"{config.ratio_threshold}, so it moved no weight. If this goes on, lower the learning rate.",
            stacklevel=4,
        )
        for name in ("loss/policy", "loss/value", "loss/total"):
            stats[name] = torch.zeros_like(stats[name])
        return False
    if not np.isfinite(value):
        optimizer.zero_grad()  # what earlier mini-batches accumulated must not leak into a later update
        raise FloatingPointError(
            f"Step {step}: the loss is {value} for the mini-batch of samples {rows.tolist()[:8]}…; its update was not "
            "applied (updates before it in this step were). Lower the learning rate, or clip with max_grad_norm."
        )
    return True
