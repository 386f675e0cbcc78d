"""The optimizer's part of a PPO step: epochs over mini-batches of a rollout."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.rollout import Rollout, forward

RATIO = "mean ratio"  # no statistic of its own: what ratio_threshold looks at
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
    batch, the first epoch uses it instead of repeating it. With several processes, each has its own rollout, and what
    is averaged, skipped or stopped is decided on all of them together.

    Nothing here waits for the device, but for early stopping, for optimizers that cannot skip a step by themselves,
    and for transformers' look at the mask where samples do not share rows: what happened is read once, at the end.
    Raises ``FloatingPointError`` on a loss of NaN or Inf.
    """
    total, collected, verdicts = partial(accelerator.reduce, reduction="sum"), [], []
    for _ in range(config.ppo_epochs):
        order = torch.from_numpy(np.random.permutation(len(rollout)))
        for rows in order.split(config.backward_batch_size):
            tokens, window = total(rollout.mask[rows].sum()), len(verdicts)
            for mini_rows in rows.split(config.mini_batch_size):
                part = rollout if len(mini_rows) == len(rollout) else rollout.select(mini_rows)
                outputs = first_pass or forward(model, part, **config.passes())[:3]
                loss, stats = minibatch_loss(part, outputs, config, total)
                verdicts.append(torch.stack([stats.pop(RATIO), stats["loss/total"]]))
                _, usable = _usable(verdicts[-1:], config)
                for name in ("loss/policy", "loss/value", "loss/total"):
                    stats[name] = torch.where(usable, stats[name], 0.0)
                # Weighted by tokens, so that k mini-batches of m samples give the gradient of one of k·m; and data
                # parallelism averages over processes what should be a sum.
                weight = total(part.mask.sum()) / tokens * accelerator.num_processes
                accelerator.backward(torch.where(usable, loss * weight, 0.0))
                collected.append(stats)
                first_pass = None
            if config.max_grad_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            finite, usable = _usable(verdicts[window:], config)
            _step(optimizer, finite & usable)
            optimizer.zero_grad()
        if config.early_stopping and collected[-1]["policy/policykl"] > 1.5 * config.target_kl:
            break
    _report(verdicts, config, step)
    return collected


def _usable(verdicts: list[Tensor], config: PPOConfig) -> tuple[Tensor, Tensor]:
    """Of mini-batches' (mean ratio, loss): whether all losses are finite, and any may move the weights (bool tensors).

    One with a mean ratio above the threshold, or a loss of NaN or Inf, may not.
    """
    ratio, loss = torch.stack(verdicts).unbind(1)
    return loss.isfinite().all(), (loss.isfinite() & (ratio <= config.ratio_threshold)).any()


def _step(optimizer, usable: Tensor) -> None:
    """An optimizer step where ``usable`` (a tensor on the device) is true, and none of its moments moved where not."""
    plain = getattr(optimizer, "optimizer", optimizer)  # under accelerate's
    if getattr(plain, "_step_supports_amp_scaling", False):  # torch's fused ones: as when a scaled loss overflowed
        plain.grad_scale, plain.found_inf = None, (~usable).float()
        optimizer.step()
        del plain.grad_scale, plain.found_inf
    elif usable:
        optimizer.step()


def _report(verdicts: list[Tensor], config: PPOConfig, step: int) -> None:
    """Say which mini-batches moved no weight, from one transfer of what was found on the device."""
    for number, (ratio, loss) in enumerate(torch.stack(verdicts).tolist(), start=1):
        if ratio > config.ratio_threshold:
            warnings.warn(
                f"Step {step}: the mean ratio of mini-batch {number} of {len(verdicts)} is {ratio:.2f}, above "
                f"ratio_threshold {config.ratio_threshold}, so it moved no weight. If this goes on, lower the learning "
                "rate.",
                stacklevel=4,
            )
        elif not np.isfinite(loss):
            raise FloatingPointError(
                f"Step {step}: the loss is {loss} for mini-batch {number} of {len(verdicts)} (all epochs); it moved no "
                "weight, others of this step may have. Lower the learning rate, or clip with max_grad_norm."
            )


def minibatch_loss(
    part: Rollout, outputs: FirstPass, config: PPOConfig, total: ppo.Total = ppo.alone
) -> tuple[Tensor, dict[str, Tensor]]:
    """policy loss + vf_coef · value loss of a mini-batch, averaged over its response tokens, and its statistics.

    With several processes the loss is this one's share: the shares add up to the mean over all tokens. Statistics that
    are numbers are those of all processes, brought together in one reduction; the two histograms are of this one.
    """
    logprobs, values, entropy = outputs
    mask = part.mask
    tokens = total(mask.sum())

    def share(x: Tensor) -> Tensor:
        return (x * mask).sum() / tokens

    pg, ratio, pg_clipped = ppo.policy_loss(logprobs, part.logprobs, part.advantages, config.cliprange)
    vf, vf_clipped = ppo.value_loss(values, part.values, part.returns, config.cliprange_value)
    pg_loss, vf_loss = share(pg), share(vf)
    loss = pg_loss + config.vf_coef * vf_loss
    with torch.no_grad():
        moved = logprobs - part.logprobs
        shares = {
            "loss/policy": pg_loss,
            "loss/value": vf_loss,
            "loss/total": loss,
            "policy/entropy": share(entropy),
            "policy/approxkl": 0.5 * share(moved.square()),
            "policy/policykl": -share(moved),
            "policy/clipfrac": share(pg_clipped.float()),
            "policy/advantages_mean": share(part.advantages),
            "returns/mean": share(part.returns),
            "val/vpred": share(values),
            "val/error": share((values - part.returns).square()),
            "val/clipfrac": share(vf_clipped.float()),
            "val/mean": share(part.values),
            RATIO: share(ratio),
        }
        stats = dict(zip(shares, total(torch.stack([x.detach() for x in shares.values()])).unbind(), strict=True))
        for name, x in (("returns", part.returns), ("val", part.values)):
            squares = total(share((x - stats[f"{name}/mean"]).square()))
            stats[f"{name}/var"] = squares * tokens / (tokens - 1).clamp(min=1)
        stats |= {"policy/advantages": part.advantages, "policy/ratio": ratio.detach(), "mask": mask}
    return loss, stats
