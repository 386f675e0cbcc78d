"""Take a PPO step on a rollout: fill in its tensors, run the epochs, compute the statistics."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.checks import check_outputs
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.rollout import FirstPass, Rollout, forward


class MiniBatch(NamedTuple):
    """Store one mini-batch's statistics, on the device."""

    stats: dict[str, Tensor]  # means over its response tokens
    advantages: Tensor  # (b, R)
    ratio: Tensor  # (b, R)
    mask: Tensor  # (b, R)


def add_logprobs(
    rollout: Rollout, policy, reference: Callable, config: PPOConfig, step: int
) -> FirstPass | None:
    """Fill in log-probabilities, values and KL; ``with reference()`` yields the reference.

    If ``fast`` is set and a mini-batch is as large as the batch, return the policy's outputs with
    their graph: no weight has changed yet, so the first epoch reuses the outputs. Raises
    ``FloatingPointError`` for NaN or Inf.
    """
    one_batch = config.fast and config.mini_batch_size == config.batch_size
    whole, mask = config.kl_penalty == "full", rollout.mask
    how = config.begin_suppress_tokens, config.logprob_chunk_size, config.mini_batch_size, whole
    with torch.no_grad(), reference() as model:
        ref_logprobs, _, _, ref_all = forward(model, rollout, *how)
    with nullcontext() if one_batch else torch.no_grad():
        logprobs, values, entropy, all_logprobs = forward(policy, rollout, *how)
    rollout.logprobs, rollout.ref_logprobs = logprobs.detach() * mask, ref_logprobs * mask
    rollout.values = values.detach() * mask
    outputs = {"policy's logits": rollout.logprobs, "reference's logits": rollout.ref_logprobs}
    check_outputs(outputs | {"value head's values": rollout.values}, step)
    pair = (all_logprobs, ref_all) if whole else (rollout.logprobs, rollout.ref_logprobs)
    rollout.kl = ppo.kl_per_token(*pair, config.kl_penalty) * mask
    return (logprobs, values, entropy) if one_batch else None


def add_rewards(
    rollout: Rollout, config: PPOConfig, kl_coef: float, total: ppo.Total = ppo.local
) -> None:
    """Fill in rewards per token, whitened if ``whiten_rewards`` is set."""
    given = rollout.scores, rollout.kl, rollout.mask, kl_coef
    rollout.rewards, rollout.non_score_rewards = ppo.compute_rewards(*given)
    if config.whiten_rewards:
        rollout.rewards = ppo.masked_whiten(rollout.rewards, rollout.mask, False, total)


def add_advantages(rollout: Rollout, config: PPOConfig, total: ppo.Total = ppo.local) -> None:
    """Fill in returns, and advantages whitened over all response tokens in the batch."""
    mask, how = rollout.mask, (config.gamma, config.lam)
    advantages, rollout.returns = ppo.gae(rollout.rewards, rollout.values, mask, *how)
    rollout.advantages = ppo.masked_whiten(advantages, mask, total=total)


def minibatch_loss(
    part: Rollout, outputs: FirstPass, config: PPOConfig, total: ppo.Total = ppo.local
) -> tuple[Tensor, MiniBatch]:
    """Return policy loss + vf_coef · value loss, averaged over response tokens, and the statistics.

    With several processes, the loss is this process's share: the shares add up to the mean over all
    tokens. Statistics cover all processes; advantages and ratios cover only this process.
    """
    logprobs, values, entropy = outputs
    mask, tokens = part.mask, total(part.mask.sum())
    how = logprobs, part.logprobs, part.advantages, config.cliprange
    pg, ratio, pg_clipped = config.policy_loss(*how)
    vf, vf_clipped = ppo.value_loss(values, part.values, part.returns, config.cliprange_value)
    per_token = pg + config.vf_coef * vf
    per_stat = {
        "loss/policy": pg,
        "loss/value": vf,
        "loss/total": per_token,
        "policy/entropy": entropy,
        "policy/approxkl": 0.5 * (logprobs - part.logprobs).square(),
        "policy/policykl": part.logprobs - logprobs,
        "policy/clipfrac": pg_clipped.float(),
        "policy/advantages_mean": part.advantages,
        "returns/mean": part.returns,
        "val/vpred": values,
        "val/error": (values - part.returns).square(),
        "val/clipfrac": vf_clipped.float(),
        "val/mean": part.values,
        "ratio": ratio,
    }
    with torch.no_grad():
        stats = {name: total((x * mask).sum()) / tokens for name, x in per_stat.items()}
        stats["returns/var"] = ppo.masked_var(part.returns, mask, total)
        stats["val/var"] = ppo.masked_var(part.values, mask, total)
    loss = (per_token * mask).sum() / tokens
    return loss, MiniBatch(stats, part.advantages, ratio.detach(), mask)


def optimize(
    model, optimizer, accelerator, rollout: Rollout, config: PPOConfig, step: int, first_pass=None
) -> list[MiniBatch]:
    """Run ppo_epochs passes over the rollout in random order; return every mini-batch's statistics.

    ``first_pass`` has the first epoch's outputs, if already computed. Processes have their own
    rollouts, but skip the same mini-batches and stop early together. Raises
    ``FloatingPointError`` for a NaN or Inf loss or gradient, before its update changes a weight.
    """
    total, collected = partial(accelerator.reduce, reduction="sum"), []
    size = config.mini_batch_size * config.gradient_accumulation_steps
    how = config.begin_suppress_tokens, config.logprob_chunk_size
    for _ in range(config.ppo_epochs):
        order = torch.from_numpy(np.random.permutation(len(rollout)))
        for rows in order.split(size):
            optimizer.zero_grad()
            some = rows.split(config.mini_batch_size)
            parts = [rollout if len(x) == len(rollout) else rollout.select(x) for x in some]
            tokens, usable = [total(part.mask.sum()) for part in parts], False
            for part, count in zip(parts, tokens, strict=True):
                outputs = first_pass or forward(model, part, *how)[:3]
                first_pass = None
                loss, seen = minibatch_loss(part, outputs, config, total)
                collected.append(seen)
                if is_usable(seen, config, step, len(collected)):
                    # Weight by tokens: k mini-batches of m samples act like one of k·m samples.
                    # Undo DDP's averaging and backward()'s division by accumulation.
                    weight = count / sum(tokens) * accelerator.num_processes
                    accelerator.backward(loss * weight * accelerator.gradient_accumulation_steps)
                    usable = True
            if usable:
                move(model, optimizer, accelerator, config, step)
        if config.early_stopping and seen.stats["policy/policykl"] > 1.5 * config.target_kl:
            break
    return collected


def is_usable(seen: MiniBatch, config: PPOConfig, step: int, number: int) -> bool:
    """Return whether a mini-batch may change weights; warn if its mean ratio is too large.

    A skipped mini-batch adds 0 to the loss statistics. Raises ``FloatingPointError`` for a loss of
    NaN or Inf.
    """
    loss, ratio = seen.stats["loss/total"].item(), seen.stats["ratio"].item()
    if ratio > config.ratio_threshold:
        seen.stats.update({k: x.new_zeros(()) for k, x in seen.stats.items() if "loss/" in k})
        warnings.warn(
            f"Step {step + 1}: mini-batch {number} moved no weight: its mean ratio is {ratio:.2f},"
            f" above ratio_threshold {config.ratio_threshold}. If it recurs, lower learning_rate.",
            stacklevel=4,
        )
        return False
    if not np.isfinite(loss):
        raise FloatingPointError(
            f"Step {step + 1}: the loss is {loss} in mini-batch {number}; earlier ones have moved"
            " weights. Lower the learning rate, or clip (max_grad_norm, score_clip)."
        )
    return True


def move(model, optimizer, accelerator: Accelerator, config: PPOConfig, step: int) -> None:
    """Take one optimizer step; raise ``FloatingPointError`` for a gradient of NaN or Inf."""
    norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm or torch.inf)
    if not norm.isfinite() and accelerator.scaler is None:  # a scaler lowers its scale instead
        optimizer.zero_grad()
        raise FloatingPointError(
            f"Step {step + 1}: the gradient norm is {norm.item()}; earlier updates stay"
            " applied. Lower the learning rate, or train float32 weights."
        )
    optimizer.step()


def step_stats(
    rollout: Rollout, minibatches: list[MiniBatch], kl_coef: float, accelerator: Accelerator
) -> dict:
    """Return one step's statistics as numbers and numpy arrays, without times and learning rate.

    Mini-batch statistics average all mini-batches of all epochs; ``kl_coef`` is the coefficient in
    the rewards. Advantages and ratios omit padding; log-probabilities are (B, R), 0 on padding.
    Numbers and per-sample arrays cover all processes; per-token arrays cover only this process.
    """
    mask, total = rollout.mask, partial(accelerator.reduce, reduction="sum")
    kl, entropy = (rollout.kl * mask).sum(1), -(rollout.logprobs * mask).sum(1)
    kl, entropy, scores = (accelerator.gather(x) for x in (kl, entropy, rollout.scores))
    stats = {
        "objective/kl": kl.mean(),
        "objective/kl_coef": kl_coef,
        "objective/entropy": entropy.mean(),
        "ppo/mean_non_score_reward": ppo.masked_mean(rollout.non_score_rewards, mask, total),
        "ppo/mean_scores": scores.mean(),
        "ppo/std_scores": scores.std(correction=min(1, len(scores) - 1)),
    }
    arrays = {f"objective/{key}": getattr(rollout, key) for key in ("logprobs", "ref_logprobs")}
    arrays["objective/kl_dist"] = kl
    lengths = {"queries": rollout.query_lengths, "responses": rollout.response_lengths}
    for name, given in lengths.items():
        found = accelerator.gather(given.float().to(mask.device))
        stats[f"tokens/{name}_len_mean"] = found.mean()
        stats[f"tokens/{name}_len_std"] = found.std(correction=min(1, len(found) - 1))
        arrays[f"tokens/{name}_dist"] = found
    for name in [name for name in minibatches[0].stats if name != "ratio"]:
        stats[f"ppo/{name}"] = torch.stack([seen.stats[name] for seen in minibatches]).mean()
    for name in ("advantages", "ratio"):
        tokens = [getattr(seen, name)[seen.mask > 0] for seen in minibatches]
        arrays[f"ppo/policy/{name}"] = torch.cat(tokens)
    error = ppo.masked_mean((rollout.values - rollout.returns).square(), mask, total)
    variance = ppo.masked_var(rollout.returns, mask, total)
    stats["ppo/val/var_explained_before"] = 1 - error / variance if variance else 0.0
    error, variance = stats["ppo/val/error"], stats["ppo/returns/var"]
    stats["ppo/val/var_explained"] = 1 - error / variance if variance else 0.0
    stats = {name: float(value) for name, value in stats.items()}
    return stats | {name: array.cpu().numpy() for name, array in arrays.items()}
