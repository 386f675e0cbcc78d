"""What one PPO step reports: the classic keys, brought to the host in one transfer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate import Accelerator

from rlhf_course.ppo.algorithm import masked_mean
from rlhf_course.ppo.device import to_device, to_host
from rlhf_course.ppo.rollout import Rollout
from rlhf_course.ppo.update import NUMBERS, MiniBatch

MEANING = {
    "objective/kl": "KL to the reference: mean over samples of the sum over response tokens, nats",
    "objective/kl_dist": (
        "KL to the reference per sample, (B,): the sum over its response tokens, nats"
    ),
    "objective/logprobs": (
        "log-probabilities of the response tokens under the policy that sampled, (B, R)"
    ),
    "objective/ref_logprobs": (
        "log-probabilities of the response tokens under the reference, (B, R)"
    ),
    "objective/kl_coef": "the coefficient β that this step's rewards used",
    "objective/entropy": "mean over samples of the sum of −log-probability, nats",
    "ppo/mean_non_score_reward": "mean per token of the KL part of the reward, −β·KL",
    "ppo/mean_scores": "mean score, after scaling and clipping",
    "ppo/std_scores": "standard deviation of the scores",
    "ppo/learning_rate": "the optimizer's learning rate in this step",
    "ppo/loss/policy": (
        "clipped policy loss, mean over epochs and mini-batches; a skipped one counts as 0"
    ),
    "ppo/loss/value": (
        "clipped value loss before vf_coef, mean over epochs and mini-batches; a skipped one counts"
        " as 0"
    ),
    "ppo/loss/total": (
        "policy + vf_coef · value loss, mean over epochs and mini-batches; a skipped one counts"
        " as 0"
    ),
    "ppo/policy/entropy": "entropy of the next-token distribution, nats per token",
    "ppo/policy/approxkl": (
        "½ mean (new − old log-probability)²: second-order estimate of KL(old, new), never negative"
    ),
    "ppo/policy/policykl": (
        "mean (old − new log-probability): first-order estimate of KL(old, new), for early stopping"
    ),
    "ppo/policy/clipfrac": "share of tokens where clipping took the gradient away",
    "ppo/policy/advantages": "whitened advantages of all mini-batches, response tokens only",
    "ppo/policy/advantages_mean": (
        "mean of the whitened advantages per mini-batch, averaged: about 0"
    ),
    "ppo/policy/ratio": "new over old probability of all mini-batches, response tokens only",
    "ppo/returns/mean": "mean return: what the value head should predict",
    "ppo/returns/var": "variance of the returns",
    "ppo/val/vpred": "mean value predicted during the updates",
    "ppo/val/error": "mean squared error of the value head",
    "ppo/val/clipfrac": "share of tokens where value clipping was active",
    "ppo/val/mean": "mean value before the update",
    "ppo/val/var": "variance of the values before the update",
    "ppo/val/var_explained": (
        "1 − error / variance of returns: 1 is a perfect value head, 0 as good as the mean"
    ),
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


def step_stats(
    rollout: Rollout, minibatches: list[MiniBatch], kl_coef: float, accelerator: Accelerator
) -> dict:
    """The stats of one step (numbers, and numpy arrays for distributions), time and learning rate
    left out.

    Loss-type stats are averages over all mini-batches of all epochs; ``kl_coef`` is the one the
    rewards used. Distributions hold response tokens only; logprobs and ref_logprobs are (B, R), 0
    on padding. With several processes numbers, and what has one value per sample, are those of all;
    what has one per token is this process's own.
    """
    mask, device = rollout.mask, rollout.mask.device
    lengths = to_device([rollout.query_lengths.float(), rollout.response_lengths.float()], device)
    per_sample = [
        (rollout.kl * mask).sum(1),
        -(rollout.logprobs * mask).sum(1),
        rollout.scores,
        *lengths,
    ]
    per_sample = accelerator.gather(torch.stack(per_sample, 1)).T
    mean, std = (
        per_sample.mean(1),
        per_sample.std(1) if per_sample.shape[1] > 1 else torch.zeros_like(per_sample[:, 0]),
    )
    total = partial(accelerator.reduce, reduction="sum")
    numbers = {
        "objective/kl": mean[0],
        "objective/entropy": mean[1],
        "ppo/mean_non_score_reward": masked_mean(rollout.non_score_rewards, mask, total),
        "ppo/mean_scores": mean[2],
        "ppo/std_scores": std[2],
        "tokens/queries_len_mean": mean[3],
        "tokens/queries_len_std": std[3],
        "tokens/responses_len_mean": mean[4],
        "tokens/responses_len_std": std[4],
    }
    averages = torch.stack([m.numbers for m in minibatches]).mean(0)
    arrays = [per_sample, rollout.logprobs, rollout.ref_logprobs]
    arrays += [x for m in minibatches for x in (m.mask, m.advantages, m.ratio)]
    found, averages, per_sample, logprobs, ref_logprobs, *parts = to_host(
        [torch.stack([*numbers.values()]), averages, *arrays]
    )
    stats = dict(zip(numbers, found.tolist(), strict=True)) | {"objective/kl_coef": kl_coef}
    stats |= {
        f"ppo/{name}": value for name, value in zip(NUMBERS[:-1], averages.tolist(), strict=False)
    }
    variance = stats[
        "ppo/returns/var"
    ]  # 0 where nothing is rewarded or all is alike: there is nothing to explain
    stats["ppo/val/var_explained"] = 1 - stats["ppo/val/error"] / variance if variance else 0.0
    masks = [x > 0 for x in parts[::3]]
    return stats | {
        "objective/kl_dist": per_sample[0].numpy(),
        "objective/logprobs": logprobs.numpy(),
        "objective/ref_logprobs": ref_logprobs.numpy(),
        "ppo/policy/advantages": (
            torch.cat([x[keep] for x, keep in zip(parts[1::3], masks, strict=True)]).numpy()
        ),
        "ppo/policy/ratio": (
            torch.cat([x[keep] for x, keep in zip(parts[2::3], masks, strict=True)]).numpy()
        ),
        "tokens/queries_dist": per_sample[3].numpy(),
        "tokens/responses_dist": per_sample[4].numpy(),
    }


class Clock:
    """Seconds per phase, as the host sees them: on a GPU, work still queued counts for the phase
    that waits for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started
