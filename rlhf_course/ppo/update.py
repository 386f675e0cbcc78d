"""The optimizer's part of a PPO step: epochs over mini-batches of a rollout."""

import warnings
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.device import to_host
from rlhf_course.ppo.rollout import FirstPass, Rollout, forward

# Statistics of a mini-batch that are means over its response tokens, and two variances; the last is
# no statistic of its own, but what ratio_threshold looks at.
LOSSES = ("loss/policy", "loss/value", "loss/total")
MEANS = (
    "policy/entropy",
    "policy/approxkl",
    "policy/policykl",
    "policy/clipfrac",
    "policy/advantages_mean",
)
MEANS += ("returns/mean", "val/vpred", "val/error", "val/clipfrac", "val/mean")
NUMBERS = (*LOSSES, *MEANS, "returns/var", "val/var", "mean ratio")
LOSS, POLICYKL, RATIO = (
    NUMBERS.index(name) for name in ("loss/total", "policy/policykl", "mean ratio")
)
RETURNS, VALUES = (NUMBERS.index(name) for name in ("returns/mean", "val/mean"))


class MiniBatch(NamedTuple):
    """What an update says of one mini-batch, on the device."""

    numbers: Tensor  # as in NUMBERS
    advantages: Tensor  # (b, R)
    ratio: Tensor  # (b, R)
    mask: Tensor  # (b, R)


def optimize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    rollout: Rollout,
    config: PPOConfig,
    step: int,
    first_pass: FirstPass | None = None,
) -> list[MiniBatch]:
    """ppo_epochs passes over the rollout, each in a fresh random order; returns every mini-batch's
    statistics.

    ``first_pass`` is a forward pass over the whole batch that already happened: when one mini-batch
    is the whole batch, the first epoch uses it instead of repeating it. With several processes,
    each has its own rollout, and what is averaged, skipped or stopped is decided on all of them
    together.

    Nothing here waits for the device, but for early stopping, for optimizers that cannot skip a
    step by themselves (and all under float16 autocast), and for transformers' look at the mask
    where samples do not share rows: what happened is read once, at the end. Raises
    ``FloatingPointError`` on a loss or a gradient of NaN or Inf.
    """
    total, collected, norms = partial(accelerator.reduce, reduction="sum"), [], []
    for _ in range(config.ppo_epochs):
        order = torch.from_numpy(np.random.permutation(len(rollout)))
        for rows in order.split(config.backward_batch_size):
            batches = [
                rollout if len(part) == len(rollout) else rollout.select(part)
                for part in rows.split(config.mini_batch_size)
            ]
            tokens = [total(part.mask.sum()) for part in batches] if len(batches) > 1 else [1.0]
            any_broken, all_unusable = False, True
            for part, count in zip(batches, tokens, strict=True):
                outputs = first_pass or forward(model, part, **config.passes())[:3]
                first_pass = None
                loss, seen = minibatch_loss(part, outputs, config, total)
                broken = ~(seen.numbers[LOSS].abs() < torch.inf)  # NaN too
                unusable = broken | (seen.numbers[RATIO] > config.ratio_threshold)
                any_broken, all_unusable = broken | any_broken, unusable & all_unusable
                # Weighted by tokens, so that k mini-batches of m samples give the gradient of one
                # of k·m. Data parallelism averages over processes what should be a sum, and
                # backward() divides by accelerate's own accumulation, which is none of PPO's.
                weight = (
                    count
                    / sum(tokens)
                    * accelerator.num_processes
                    * accelerator.gradient_accumulation_steps
                )
                accelerator.backward((loss * weight).masked_fill(unusable, 0.0))
                collected.append(seen)
            skipped = any_broken | all_unusable
            norm = accelerator.clip_grad_norm_(
                model.parameters(), config.max_grad_norm or torch.inf
            )
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms.append(norm.masked_fill(skipped, 0.0))
            _step(optimizer, skipped | ~norms[-1].isfinite())
            optimizer.zero_grad()
        if config.early_stopping and collected[-1].numbers[POLICYKL] > 1.5 * config.target_kl:
            break
    scaled = getattr(optimizer, "scaler", None)  # then an Inf halves the scale, as it should
    _report(collected, [] if scaled else norms, config, step)
    return collected


def _step(optimizer, skipped: Tensor) -> None:
    """An optimizer step, unless ``skipped`` (a tensor on the device) is true: then none of its
    moments moves.

    Gradients are unscaled, as clipping leaves them.
    """
    plain = getattr(optimizer, "optimizer", optimizer)  # under accelerate's
    scaler = getattr(optimizer, "scaler", None)  # of float16 autocast; it uses found_inf itself
    if getattr(plain, "_step_supports_amp_scaling", False) and scaler is None:  # torch's fused ones
        plain.grad_scale, plain.found_inf = (
            None,
            skipped.float(),
        )  # as when a scaled loss overflowed
        optimizer.step()
        del plain.grad_scale, plain.found_inf
    elif not skipped:
        optimizer.step()
    elif scaler is not None:  # it would not unscale again before its update
        scaler.update()


def _report(collected: list[MiniBatch], norms: list[Tensor], config: PPOConfig, step: int) -> None:
    """Say which mini-batches moved no weight, from one transfer of what was found on the device.

    The losses of those count 0 in the statistics. ``norms`` are those of the gradients.
    """
    numbers, *norms = to_host([torch.stack([seen.numbers for seen in collected]), *norms])
    for number, found in enumerate(numbers.tolist(), start=1):
        loss, ratio = found[LOSS], found[RATIO]
        if ratio > config.ratio_threshold:
            collected[number - 1].numbers[: len(LOSSES)] = 0
            warnings.warn(
                f"Step {step + 1}: the mean ratio of mini-batch {number} of {len(collected)} is"
                f" {ratio:.2f}, above ratio_threshold {config.ratio_threshold}, so it moved no"
                " weight. If this goes on, lower the learning rate.",
                stacklevel=4,
            )
        elif not np.isfinite(loss):
            raise FloatingPointError(
                f"Step {step + 1}: the loss is {loss} for mini-batch {number} of {len(collected)}"
                " (all epochs); it moved no weight, others of this step may have. Lower the"
                " learning rate, clip with max_grad_norm, or look at the size of the scores"
                " (score_clip)."
            )
    for number, norm in enumerate(norms, start=1):
        if not norm.isfinite():
            raise FloatingPointError(
                f"Step {step + 1}: the norm of the gradient is {norm.item()} in update {number} of"
                f" {len(norms)}; it moved no weight, others of this step may have. Lower the"
                " learning rate, or train float32 weights."
            )


def minibatch_loss(
    part: Rollout, outputs: FirstPass, config: PPOConfig, total: ppo.Total = ppo.alone
) -> tuple[Tensor, MiniBatch]:
    """policy loss + vf_coef · value loss of a mini-batch, averaged over its response tokens, and
    its statistics.

    With several processes the loss is this one's share: the shares add up to the mean over all
    tokens. Statistics that are numbers are those of all processes, brought together in two
    reductions; the two histograms are of this one.
    """
    logprobs, values, entropy = outputs
    mask = part.mask
    tokens = total(mask.sum())
    pg, ratio, pg_clipped = ppo.policy_loss(
        logprobs, part.logprobs, part.advantages, config.cliprange
    )
    vf, vf_clipped = ppo.value_loss(values, part.values, part.returns, config.cliprange_value)
    per_token = pg + config.vf_coef * vf
    loss = (per_token * mask).sum() / tokens
    with torch.no_grad():
        moved, error = logprobs - part.logprobs, values - part.returns
        columns = [
            pg,
            vf,
            per_token,
            entropy,
            0.5 * moved.square(),
            -moved,
            pg_clipped.float(),
            part.advantages,
        ]
        columns += [part.returns, values, error.square(), vf_clipped.float(), part.values, ratio]
        means = total((torch.stack(columns) * mask).sum((1, 2)) / tokens)
        both = torch.stack([part.returns, part.values])
        centre = torch.stack([means[RETURNS], means[VALUES]]).view(2, 1, 1)
        squares = total(((both - centre).square() * mask).sum((1, 2)))
        variances = squares / (tokens - 1).clamp(min=1)
        numbers = torch.cat([means[:-1], variances, means[-1:]])
    return loss, MiniBatch(numbers, part.advantages, ratio.detach(), mask)
