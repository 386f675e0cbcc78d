"""What one PPO step reports: the classic keys, brought to the host in one transfer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_course.ppo.algorithm import masked_mean
from rlhf_course.ppo.rollout import Rollout


def step_stats(rollout: Rollout, minibatches: list[dict], kl_coef: float) -> dict:
    """The stats of one step (numbers, and numpy arrays for distributions), time and learning rate left out.

    Loss-type stats are averages over all mini-batches of all epochs; ``kl_coef`` is the one the rewards used.
    Distributions hold response tokens only; logprobs and ref_logprobs are (B, R), 0 on padding.
    """
    mask = rollout.mask
    query_lengths, response_lengths = rollout.query_lengths.float(), rollout.response_lengths.float()
    kl_per_sample = (rollout.kl * mask).sum(1)
    scalars = {
        "objective/kl": kl_per_sample.mean(),
        "objective/kl_coef": torch.tensor(kl_coef),
        "objective/entropy": -(rollout.logprobs * mask).sum(1).mean(),
        "ppo/mean_non_score_reward": masked_mean(rollout.non_score_rewards, mask),
        "ppo/mean_scores": rollout.scores.mean(),
        "ppo/std_scores": rollout.scores.std(),
    }
    for name, lengths in (("queries", query_lengths), ("responses", response_lengths)):
        scalars[f"tokens/{name}_len_mean"] = lengths.mean()
        scalars[f"tokens/{name}_len_std"] = lengths.std()
    for name, value in minibatches[0].items():
        if value.dim() == 0:
            scalars[f"ppo/{name}"] = torch.stack([m[name] for m in minibatches]).mean()
    scalars["ppo/val/var_explained"] = 1 - scalars["ppo/val/error"] / scalars["ppo/returns/var"]

    device = mask.device
    numbers = torch.stack([value.to(device, torch.float64) for value in scalars.values()]).tolist()
    arrays = {
        "objective/kl_dist": kl_per_sample,
        "objective/logprobs": rollout.logprobs,
        "objective/ref_logprobs": rollout.ref_logprobs,
        "ppo/policy/advantages": torch.cat([m["policy/advantages"] for m in minibatches]),
        "ppo/policy/ratio": torch.cat([m["policy/ratio"] for m in minibatches]),
        "tokens/queries_dist": query_lengths,
        "tokens/responses_dist": response_lengths,
    }
    return dict(zip(scalars, numbers, strict=True)) | {k: v.cpu().numpy() for k, v in arrays.items()}


class Clock:
    """Seconds per phase, as the host sees them: on a GPU, work still queued counts for the phase that waits for it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started
