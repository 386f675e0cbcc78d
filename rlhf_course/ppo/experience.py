"""The columns of a rollout before any weight moves: log-probabilities, values and KL, then rewards,
then advantages.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.input_checks import check_outputs
from rlhf_course.ppo.rollout import FirstPass, Rollout, forward


def add_logprobs(
    rollout: Rollout, policy, reference: Callable, config: PPOConfig, step: int
) -> FirstPass | None:
    """Fill in log-probabilities, values and KL; ``reference()`` is a context that gives the
    reference.

    When one mini-batch is the batch, the policy's pass keeps its graph and is returned: it *is* the
    first epoch's forward pass, because no weight has moved yet. Raises ``FloatingPointError`` for
    NaN or Inf.
    """
    one_batch = config.fast and config.mini_batch_size == config.batch_size
    whole = config.kl_penalty == "full"
    how = config.passes() | {"at_most": config.mini_batch_size, "whole_vocabulary": whole}
    with torch.no_grad(), reference() as model:
        ref_logprobs, _, _, ref_all = forward(model, rollout, **how)
    with nullcontext() if one_batch else torch.no_grad():
        logprobs, values, entropy, all_logprobs = forward(policy, rollout, **how)
    rollout.ref_logprobs = ref_logprobs * rollout.mask
    rollout.logprobs = logprobs.detach() * rollout.mask
    rollout.values = values.detach() * rollout.mask
    outputs = {"policy's logits": rollout.logprobs, "reference's logits": rollout.ref_logprobs}
    check_outputs(outputs | {"value head's values": rollout.values}, step)
    pair = (all_logprobs.detach(), ref_all) if whole else (rollout.logprobs, rollout.ref_logprobs)
    rollout.kl = ppo.kl_per_token(*pair, config.kl_penalty) * rollout.mask
    return (logprobs, values, entropy) if one_batch else None


def add_rewards(
    rollout: Rollout, config: PPOConfig, kl_coef: float, total: ppo.Total = ppo.alone
) -> None:
    """Fill in rewards per token, whitened where the config asks for it."""
    rewards, rollout.non_score_rewards = ppo.compute_rewards(
        rollout.scores, rollout.kl, rollout.mask, kl_coef
    )
    if config.whiten_rewards:
        rewards = ppo.masked_whiten(rewards, rollout.mask, shift_mean=False, total=total)
    rollout.rewards = rewards


def add_advantages(rollout: Rollout, config: PPOConfig, total: ppo.Total = ppo.alone) -> None:
    """Fill in returns, and advantages whitened over all response tokens of the batch."""
    advantages, rollout.returns = ppo.gae(
        rollout.rewards, rollout.values, rollout.mask, config.gamma, config.lam
    )
    rollout.advantages = ppo.masked_whiten(advantages, rollout.mask, total=total)
