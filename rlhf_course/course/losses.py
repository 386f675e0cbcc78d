"""The losses of notebook 07, for the notebooks and scripts that continue it.

Notebook 07 defines and explains each of them; a test checks that the definitions are the same.
"""

import torch
from torch.nn.functional import logsigmoid

METHODS = ["RLOO", "GRPO", "Dr. GRPO", "Dr. GRPO, KL in reward"]


def clipped(ratio, advantage, cliprange=0.2):
    """Return PPO's clipped objective; larger is better."""
    near = ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.minimum(ratio * advantage, near * advantage)


def leave_one_out(rewards):
    """Return advantages (P, G) from the rewards of G responses to each prompt."""
    others = rewards.sum(1, keepdim=True) - rewards
    return rewards - others / (rewards.shape[1] - 1)


def rloo_loss(new, old, mask, advantage, cliprange=0.2):
    """Return RLOO's loss from log-probabilities (B, T) and advantages (B,)."""
    ratio = ((new - old) * mask).sum(1).exp()
    return -clipped(ratio, advantage, cliprange).mean()


def group_advantages(rewards, divide=True):
    """Subtract each group's mean; if `divide`, divide by its std: (P, G) → (P, G)."""
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-4) if divide else centered


def grpo_loss(new, old, ref, mask, advantage, beta, longest=None, cliprange=0.2):
    """Return GRPO's loss from log-probabilities (B, T) and advantages (B,).

    Each response's loss is divided by its own length, or by `longest` if given.
    """
    log_rho = ref - new
    k3 = log_rho.exp() - 1 - log_rho
    gain = clipped((new - old).exp(), advantage.unsqueeze(1), cliprange)
    loss = (beta * k3 - gain) * mask
    if longest:
        return loss.sum() / (len(mask) * longest)
    return (loss.sum(1) / mask.sum(1)).mean()


def dpo_loss(chosen, rejected, beta):
    """Return one loss per pair, given log(π/π_ref) for both responses."""
    return -logsigmoid(beta * (chosen - rejected))


def loss_of(method, new, old, ref, mask, rewards, beta, cliprange=0.2):
    """Return a method's loss from log-probabilities (P·G, T) and rewards (P, G)."""
    kl = ((old - ref) * mask).sum(1).view_as(rewards)
    penalized = rewards - beta * kl
    longest = mask.shape[1]
    if method == "RLOO":
        advantage = leave_one_out(penalized).flatten()
        return rloo_loss(new, old, mask, advantage, cliprange)
    if method == "GRPO":
        advantage = group_advantages(rewards).flatten()
        return grpo_loss(new, old, ref, mask, advantage, beta, cliprange=cliprange)
    in_reward = method == "Dr. GRPO, KL in reward"
    advantage = group_advantages(penalized if in_reward else rewards, divide=False)
    beta = 0.0 if in_reward else beta
    return grpo_loss(new, old, ref, mask, advantage.flatten(), beta, longest, cliprange)
