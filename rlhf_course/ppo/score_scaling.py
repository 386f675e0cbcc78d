"""Scale and clip scores, as the config specifies."""

import copy

import torch
from accelerate import Accelerator
from torch import Tensor

from rlhf_course.ppo.config import PPOConfig


class RunningMoments:
    """Track the mean and standard deviation (divisor n − 1) of all scores (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Return the standard deviation; 1.0 until two scores have been added."""
        return (self.m2 / (self.count - 1)) ** 0.5 if self.count > 1 else 1.0

    def update(self, scores: Tensor) -> None:
        scores = scores.cpu().double()  # Apple's mps has no float64
        n, mean = len(scores), scores.mean().item()
        shift, total = mean - self.mean, self.count + n
        self.m2 += (scores - mean).square().sum().item() + shift**2 * self.count * n / total
        self.mean += shift * n / total
        self.count = total

    def scale(self, scores: Tensor, center: bool) -> Tensor:
        """Center scores (B,) if ``center``, and divide them by the standard deviation."""
        eps = torch.finfo(scores.dtype).eps
        has_scale = self.std > eps * abs(self.mean)  # the scores differ by more than rounding
        return (scores - (self.mean if center else 0.0)) / (self.std + eps if has_scale else 1.0)


def scale_scores(
    scores: Tensor, running: RunningMoments, config: PPOConfig, accelerator: Accelerator
) -> tuple[Tensor, RunningMoments]:
    """Return scaled, clipped scores (B,), and the new moments to keep if the step succeeds."""
    running = copy.copy(running)
    if config.use_score_scaling:
        running.update(accelerator.gather(scores))
        scores = running.scale(scores, config.use_score_norm)
    if config.score_clip is not None:
        scores = scores.clamp(-config.score_clip, config.score_clip)
    return scores, running
