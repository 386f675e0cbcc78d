"""Take a PPO step on samples: make the experience, run the epochs, compute the statistics."""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.checks import check_outputs
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.rollout import Outputs, Samples, forward


@dataclass(frozen=True, eq=False)
class Experience:
    """Store what learning needs of one batch of samples, on the device.

    All are (B, R), float32 and 0 on padding; the log-probabilities and the KL are in nats.
    """

    mask: Tensor  # 1.0 on the response tokens that count
    logprobs: Tensor  # of the policy that sampled, before any update
    ref_logprobs: Tensor  # of the reference
    values: Tensor  # of the policy that sampled
    kl: Tensor
    rewards: Tensor  # the KL penalty and, on the last token, the score
    non_score_rewards: Tensor  # the KL penalty
    advantages: Tensor  # whitened
    returns: Tensor

    def select(self, rows: Tensor, width: int) -> Self:
        """Return the experience of ``rows`` (CPU indices), cut to ``width`` response tokens."""
        rows = rows.to(self.mask.device)
        return Experience(
            **{field.name: getattr(self, field.name)[rows, :width] for field in fields(self)}
        )


class MiniBatch(NamedTuple):
    """Store one mini-batch's statistics, on the device."""

    stats: dict[str, Tensor]  # means over its response tokens
    advantages: Tensor  # (b, R)
    ratio: Tensor  # (b, R)
    mask: Tensor  # (b, R)


def scale_scores(
    scores: Tensor, running: ppo.RunningMoments, config: PPOConfig, accelerator: Accelerator
) -> tuple[Tensor, ppo.RunningMoments]:
    """Return scaled, clipped scores (B,), and the new moments to keep if the step succeeds."""
    running = copy.copy(running)
    if config.use_score_scaling:
        running.update(accelerator.gather(scores))
        scores = running.scale(scores, center=config.use_score_norm)
    if config.score_clip is not None:
        scores = scores.clamp(-config.score_clip, config.score_clip)
    return scores, running


def make_experience(
    samples: Samples,
    policy,
    reference: Callable,
    config: PPOConfig,
    kl_coef: float,
    step: int = 0,
    total: ppo.Total = ppo.local,
    seconds: dict[str, float] | None = None,
    compute_rewards: Callable | None = None,
) -> tuple[Experience, Outputs | None]:
    """Return the samples' experience, and the policy's outputs if the first epoch can reuse them.

    ``with reference()`` yields the reference. The outputs keep their graph; they are reused if
    ``fast`` is set and a mini-batch is as large as the batch, because no weight has changed yet.
    Each phase's time goes into ``seconds``. ``compute_rewards(scores, logprobs, ref_logprobs,
    mask)`` is :func:`penalized_rewards` by default. Raises ``FloatingPointError`` for NaN or Inf,
    and ``ValueError`` if ``compute_rewards`` does not return three tensors.
    """
    seconds = {} if seconds is None else seconds
    if compute_rewards is None:
        compute_rewards = partial(penalized_rewards, config=config, kl_coef=kl_coef)
    mask = samples.mask
    can_reuse = config.fast and config.mini_batch_size == config.batch_size
    compute = partial(
        forward,
        samples=samples,
        begin_suppress=config.begin_suppress_tokens,
        chunk_size=config.logprob_chunk_size,
        at_most=config.mini_batch_size,
        whole_vocabulary=config.kl_penalty == "full",
        pack=config.fast,
    )
    with timed(seconds, "forward_pass"):
        with torch.no_grad(), reference() as model:
            ref_outputs = compute(model)
        with nullcontext() if can_reuse else torch.no_grad():
            outputs = compute(policy)
        logprobs = outputs.logprobs.detach() * mask
        ref_logprobs = ref_outputs.logprobs * mask
        values = outputs.values.detach() * mask
        check_outputs("policy's logits", logprobs, step)
        check_outputs("reference's logits", ref_logprobs, step)
        check_outputs("value head's values", values, step)
    with timed(seconds, "compute_rewards"):
        pair = (logprobs, ref_logprobs)
        if config.kl_penalty == "full":
            pair = (outputs.all_logprobs, ref_outputs.all_logprobs)
        computed = compute_rewards(samples.scores, *pair, mask)
        if len(computed) != 3:
            raise ValueError(
                f"compute_rewards returned {len(computed)} tensors. Return three, (B, R) each: the"
                " rewards, their KL term, and the KL."
            )
        rewards, non_score_rewards, kl = computed
        if config.whiten_rewards:
            rewards = ppo.masked_whiten(rewards, mask, shift_mean=False, total=total)
    with timed(seconds, "compute_advantages"):
        advantages, returns = ppo.gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
        advantages = ppo.masked_whiten(advantages, mask, total=total)
    experience = Experience(
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        kl=kl,
        rewards=rewards,
        non_score_rewards=non_score_rewards,
        advantages=advantages,
        returns=returns,
    )
    return experience, outputs._replace(all_logprobs=None) if can_reuse else None


def penalized_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: PPOConfig,
    kl_coef: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return per-token rewards, their KL term and the KL, (B, R) each, 0 where the mask is 0.

    Log-probabilities are (B, R), or (B, R, V) if ``kl_penalty`` is ``full``.
    """
    kl = ppo.kl_per_token(logprobs, ref_logprobs, config.kl_penalty) * mask
    rewards, non_score_rewards = ppo.compute_rewards(scores, kl, mask, kl_coef)
    return rewards, non_score_rewards, kl


def minibatch_loss(
    experience: Experience, outputs: Outputs, config: PPOConfig, total: ppo.Total = ppo.local
) -> tuple[Tensor, MiniBatch]:
    """Return policy loss + vf_coef · value loss, averaged over response tokens, and the statistics.

    ``outputs`` are the current policy's. With several processes, the loss is this process's share:
    the shares add up to the mean over all tokens. Statistics cover all processes; advantages and
    ratios cover only this process.
    """
    mask = experience.mask
    tokens = total(mask.sum())
    policy_loss, ratio, policy_clipped = config.policy_loss(
        outputs.logprobs, experience.logprobs, experience.advantages, config.cliprange
    )
    value_loss, value_clipped = ppo.value_loss(
        outputs.values, experience.values, experience.returns, config.cliprange_value
    )
    per_token = policy_loss + config.vf_coef * value_loss
    columns = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "loss/total": per_token,
        "policy/entropy": outputs.entropies,
        "policy/approxkl": 0.5 * (outputs.logprobs - experience.logprobs).square(),
        "policy/policykl": experience.logprobs - outputs.logprobs,
        "policy/clipfrac": policy_clipped.float(),
        "policy/advantages_mean": experience.advantages,
        "returns/mean": experience.returns,
        "val/vpred": outputs.values,
        "val/error": (outputs.values - experience.returns).square(),
        "val/clipfrac": value_clipped.float(),
        "val/mean": experience.values,
        "ratio": ratio,
    }
    with torch.no_grad():
        stats = {name: total((x * mask).sum()) / tokens for name, x in columns.items()}
        stats["returns/var"] = ppo.masked_var(experience.returns, mask, total)
        stats["val/var"] = ppo.masked_var(experience.values, mask, total)
    loss = (per_token * mask).sum() / tokens
    return loss, MiniBatch(stats, experience.advantages, ratio.detach(), mask)


def optimize(
    model,
    optimizer,
    accelerator: Accelerator,
    samples: Samples,
    experience: Experience,
    config: PPOConfig,
    step: int = 0,
    first_pass: Outputs | None = None,
) -> list[MiniBatch]:
    """Run ppo_epochs passes over the samples in random order; return each mini-batch's statistics.

    ``first_pass`` has the first epoch's outputs, if already computed. A mini-batch whose mean ratio
    is too large moves no weight. Processes have their own samples, but skip the same mini-batches
    and stop early together. Raises ``FloatingPointError`` for a NaN or Inf loss or gradient, before
    its update changes a weight.
    """
    total = partial(accelerator.reduce, reduction="sum")
    weights = list(model.parameters())  # a walk over a LoRA model's modules takes milliseconds
    minibatches = []
    for _ in range(config.ppo_epochs):
        order = torch.from_numpy(np.random.permutation(len(samples)))
        for rows in order.split(config.mini_batch_size * config.gradient_accumulation_steps):
            optimizer.zero_grad()
            accumulated = split(samples, experience, rows, config.mini_batch_size)
            counts = [total(part.mask.sum()) for _, part in accumulated]
            has_gradient = False
            for (mini_samples, mini_experience), count in zip(accumulated, counts, strict=True):
                outputs = first_pass or forward(
                    model,
                    mini_samples,
                    config.begin_suppress_tokens,
                    config.logprob_chunk_size,
                    pack=config.fast,
                )
                first_pass = None
                loss, minibatch = minibatch_loss(mini_experience, outputs, config, total)
                minibatches.append(minibatch)
                if ratio_is_large(minibatch, config, step, len(minibatches)):
                    minibatches[-1] = without_losses(minibatch)
                    continue
                check_loss(minibatch, step, len(minibatches))
                # Weight by tokens: k mini-batches of m samples act like one of k·m samples.
                # Undo DDP's averaging and backward()'s division by accumulation.
                weight = count / sum(counts) * accelerator.num_processes
                accelerator.backward(loss * weight * accelerator.gradient_accumulation_steps)
                has_gradient = True
            if has_gradient:
                take_optimizer_step(weights, optimizer, accelerator, config, step)
        policykl = minibatches[-1].stats["policy/policykl"]
        if config.early_stopping and policykl > 1.5 * config.target_kl:
            break
    return minibatches


def split(
    samples: Samples, experience: Experience, rows: Tensor, size: int
) -> list[tuple[Samples, Experience]]:
    """Return mini-batches of ``size`` rows; if one is the whole batch, its order is unchanged."""
    if size == len(samples):
        return [(samples, experience)]
    minibatches = []
    for mini_rows in rows.split(size):
        mini_samples = samples.select(mini_rows)
        width = mini_samples.mask.shape[1]
        minibatches.append((mini_samples, experience.select(mini_rows, width)))
    return minibatches


def ratio_is_large(minibatch: MiniBatch, config: PPOConfig, step: int, number: int) -> bool:
    """Return whether a mini-batch's mean ratio exceeds the threshold; if so, warn."""
    ratio = minibatch.stats["ratio"].item()
    if not ratio > config.ratio_threshold:  # NaN is left to check_loss
        return False
    warnings.warn(
        f"Step {step + 1}: mini-batch {number} moved no weight: its mean ratio is {ratio:.2f},"
        f" above ratio_threshold {config.ratio_threshold}. If it recurs, lower learning_rate.",
        stacklevel=4,
    )
    return True


def without_losses(minibatch: MiniBatch) -> MiniBatch:
    """Return the statistics of a skipped mini-batch, which adds 0 to the losses."""
    stats = {
        name: torch.zeros_like(value) if name.startswith("loss/") else value
        for name, value in minibatch.stats.items()
    }
    return minibatch._replace(stats=stats)


def check_loss(minibatch: MiniBatch, step: int, number: int) -> None:
    """Raise ``FloatingPointError`` for a loss of NaN or Inf."""
    loss = minibatch.stats["loss/total"].item()
    if not np.isfinite(loss):
        raise FloatingPointError(
            f"Step {step + 1}: the loss is {loss} in mini-batch {number}; earlier ones have moved"
            " weights. Lower the learning rate, or clip (max_grad_norm, score_clip)."
        )


def take_optimizer_step(
    weights: list[Tensor], optimizer, accelerator: Accelerator, config: PPOConfig, step: int
) -> None:
    """Take one optimizer step; raise ``FloatingPointError`` for a gradient of NaN or Inf."""
    norm = accelerator.clip_grad_norm_(weights, config.max_grad_norm or torch.inf)
    if not norm.isfinite() and accelerator.scaler is None:  # a scaler lowers its scale instead
        optimizer.zero_grad()
        raise FloatingPointError(
            f"Step {step + 1}: the gradient norm is {norm.item()}; earlier updates stay"
            " applied. Lower the learning rate, or train float32 weights."
        )
    optimizer.step()


def step_stats(
    samples: Samples,
    experience: Experience,
    minibatches: list[MiniBatch],
    kl_coef: float,
    accelerator: Accelerator,
) -> dict:
    """Return one step's statistics as numbers and numpy arrays, without times and learning rate.

    Mini-batch statistics average all mini-batches of all epochs; ``kl_coef`` is the coefficient in
    the rewards. Advantages and ratios omit padding; log-probabilities are (B, R), 0 on padding.
    Numbers and per-sample arrays cover all processes; per-token arrays cover only this process.
    """
    mask = experience.mask
    total = partial(accelerator.reduce, reduction="sum")
    scores = accelerator.gather(samples.scores)
    kl = accelerator.gather((experience.kl * mask).sum(1))
    entropy = accelerator.gather(-(experience.logprobs * mask).sum(1))
    stats = {
        "objective/kl": kl.mean(),
        "objective/entropy": entropy.mean(),
        "ppo/mean_non_score_reward": ppo.masked_mean(experience.non_score_rewards, mask, total),
        "ppo/mean_scores": scores.mean(),
        "ppo/std_scores": standard_deviation(scores),
    }
    arrays = {
        "objective/kl_dist": kl,
        "objective/logprobs": experience.logprobs,
        "objective/ref_logprobs": experience.ref_logprobs,
        "ppo/policy/advantages": tokens_of(minibatches, "advantages"),
        "ppo/policy/ratio": tokens_of(minibatches, "ratio"),
    }
    lengths = {"queries": samples.query_lengths, "responses": samples.response_lengths}
    for name, counts in lengths.items():
        counts = accelerator.gather(counts.float().to(mask.device))
        stats[f"tokens/{name}_len_mean"] = counts.mean()
        stats[f"tokens/{name}_len_std"] = standard_deviation(counts)
        arrays[f"tokens/{name}_dist"] = counts
    for name in minibatches[0].stats:
        if name != "ratio":
            per_minibatch = torch.stack([minibatch.stats[name] for minibatch in minibatches])
            stats[f"ppo/{name}"] = per_minibatch.mean()
    errors = (experience.values - experience.returns).square()
    stats["ppo/val/var_explained_before"] = explained_variance(
        ppo.masked_mean(errors, mask, total), ppo.masked_var(experience.returns, mask, total)
    )
    stats["ppo/val/var_explained"] = explained_variance(
        stats["ppo/val/error"], stats["ppo/returns/var"]
    )
    values = torch.stack(list(stats.values())).tolist()  # one copy from a GPU for all
    numbers = dict(zip(stats, values, strict=True)) | {"objective/kl_coef": kl_coef}
    return numbers | {name: array.cpu().numpy() for name, array in arrays.items()}


def standard_deviation(x: Tensor) -> Tensor:
    """Return the standard deviation of x (n,), divisor n − 1; 0 for one number."""
    return x.std(correction=min(1, len(x) - 1))


def explained_variance(error: Tensor, variance: Tensor) -> Tensor:
    """Return the share of the returns' variance that the values explain; 0 without variance."""
    return torch.where(variance == 0, 0.0, 1 - error / variance)


def tokens_of(minibatches: list[MiniBatch], name: str) -> Tensor:
    """Return a tensor's numbers on the response tokens of all mini-batches, (n,)."""
    columns = [getattr(minibatch, name)[minibatch.mask > 0] for minibatch in minibatches]
    return torch.cat(columns)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record a phase's time on the host's clock; queued GPU work may count in a later phase."""
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
