"""What one PPO step reports: the classic keys, brought to the host in one transfer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate import Accelerator

from rlhf_course.ppo.algorithm import masked_mean
from rlhf_course.ppo.rollout import Rollout

MEANING = {
    "objective/kl": "KL to the reference: mean over samples of the sum over response tokens, nats",
    "objective/kl_dist": "KL to the reference per sample, (B,): the sum over its response tokens, nats",
    "objective/logprobs": "log-probabilities of the response tokens under the policy that sampled, (B, R)",
    "objective/ref_logprobs": "log-probabilities of the response tokens under the reference, (B, R)",
    "objective/kl_coef": "the coefficient β that this step's rewards used",
    "objective/entropy": "mean over samples of the sum of −log-probability, nats",
    "ppo/mean_non_score_reward": "mean per token of the KL part of the reward, −β·KL",
    "ppo/mean_scores": "mean score, after scaling and clipping",
    "ppo/std_scores": "standard deviation of the scores",
    "ppo/learning_rate": "the optimizer's learning rate in this step",
    "ppo/loss/policy": "clipped policy loss, mean over epochs and mini-batches; a skipped one counts as 0",
    "ppo/loss/value": "clipped value loss before vf_coef, mean over epochs and mini-batches; a skipped one counts as 0",
    "ppo/loss/total": "policy + vf_coef · value loss, mean over epochs and mini-batches; a skipped one counts as 0",
    "ppo/policy/entropy": "entropy of the next-token distribution, nats per token",
    "ppo/policy/approxkl": "½ mean (new − old log-probability)²: second-order estimate of KL(old, new), never negative",
    "ppo/policy/policykl": "mean (old − new log-probability): first-order estimate of KL(old, new), for early stopping",
    "ppo/policy/clipfrac": "share of tokens where clipping took the gradient away",
    "ppo/policy/advantages": "whitened advantages of all mini-batches, response tokens only",
    "ppo/policy/advantages_mean": "mean of the whitened advantages per mini-batch, averaged: about 0",
    "ppo/policy/ratio": "new over old probability of all mini-batches, response tokens only",
    "ppo/returns/mean": "mean return: what the value head should predict",
    "ppo/returns/var": "variance of the returns",
    "ppo/val/vpred": "mean value predicted during the updates",
    "ppo/val/error": "mean squared error of the value head",
    "ppo/val/clipfrac": "share of tokens where value clipping was active",
    "ppo/val/mean": "mean value before the update",
    "ppo/val/var": "variance of the values before the update",
    "ppo/val/var_explained": "1 − error / variance of returns: 1 is a perfect value head, 0 as good as the mean",
    "tokens/queries_len_mean": "mean query length, tokens",
    "tokens/queries_len_std": "standard deviation of the query lengths, tokens",
    "tokens/queries_dist": "query lengths, (B,)",
    "tokens/responses_len_mean": "mean response length, tokens",
    "tokens/responses_len_std": "standard deviation of the response lengths, tokens",
    "tokens/responses_dist": "response lengths, (B,)",
    "time/ppo/forward_pass": "seconds for log-probabilities and values of policy and reference",
    "time/ppo/compute_rewards": "seconds for rewards per token",
    "time/ppo/compute_advantages": "seconds for advantages and whitening",
    "time/ppo/optimize_step": "seconds for all epochs",
    "time/ppo/calc_stats": "seconds for these statistics",
    "time/ppo/total": "seconds for the whole step",
}


def step_stats(rollout: Rollout, minibatches: list[dict], kl_coef: float, accelerator: Accelerator) -> dict:
    """The stats of one step (numbers, and numpy arrays for distributions), time and learning rate left out.

    Loss-type stats are averages over all mini-batches of all epochs; ``kl_coef`` is the one the rewards used.
    Distributions hold response tokens only; logprobs and ref_logprobs are (B, R), 0 on padding. With several processes
    numbers, and what has one value per sample, are those of all; what has one per token is this process's own.
    """
    mask, device = rollout.mask, rollout.mask.device
    lengths = [x.to(device, torch.float32) for x in (rollout.query_lengths, rollout.response_lengths)]
    per_sample = [(rollout.kl * mask).sum(1), -(rollout.logprobs * mask).sum(1), rollout.scores, *lengths]
    per_sample = accelerator.gather(torch.stack(per_sample, 1)).unbind(1)
    kl_per_sample, entropy_per_sample, scores, query_lengths, response_lengths = per_sample
    total = partial(accelerator.reduce, reduction="sum")
    scalars = {
        "objective/kl": kl_per_sample.mean(),
        "objective/kl_coef": torch.tensor(kl_coef),
        "objective/entropy": entropy_per_sample.mean(),
        "ppo/mean_non_score_reward": masked_mean(rollout.non_score_rewards, mask, total),
        "ppo/mean_scores": scores.mean(),
        "ppo/std_scores": _std(scores),
    }
    for name, lengths in (("queries", query_lengths), ("responses", response_lengths)):
        scalars[f"tokens/{name}_len_mean"] = lengths.mean()
        scalars[f"tokens/{name}_len_std"] = _std(lengths)
    for name, value in minibatches[0].items():
        if value.dim() == 0:
            scalars[f"ppo/{name}"] = torch.stack([m[name] for m in minibatches]).mean()
    scalars["ppo/val/var_explained"] = 1 - scalars["ppo/val/error"] / scalars["ppo/returns/var"]

    numbers = torch.stack([value.to(device, torch.float32) for value in scalars.values()]).tolist()
    arrays = {
        "objective/kl_dist": kl_per_sample,
        "objective/logprobs": rollout.logprobs,
        "objective/ref_logprobs": rollout.ref_logprobs,
        "ppo/policy/advantages": torch.cat([m["policy/advantages"][m["mask"] > 0] for m in minibatches]),
        "ppo/policy/ratio": torch.cat([m["policy/ratio"][m["mask"] > 0] for m in minibatches]),
        "tokens/queries_dist": query_lengths,
        "tokens/responses_dist": response_lengths,
    }
    return dict(zip(scalars, numbers, strict=True)) | {k: v.cpu().numpy() for k, v in arrays.items()}


def _std(x: torch.Tensor) -> torch.Tensor:
    """Unbiased standard deviation of (B,), 0 for a single sample."""
    return x.std() if len(x) > 1 else x.new_zeros(())


class Clock:
    """Seconds per phase, as the host sees them: on a GPU, work still queued counts for the phase that waits for it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started
