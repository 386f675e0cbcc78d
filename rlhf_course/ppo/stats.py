"""Explain each statistic of a PPO step. (B,) marks one number per sample, (B, R) one per token."""

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
        "clipped policy loss, mean over epochs and mini-batches; a skipped mini-batch counts as 0"
    ),
    "ppo/loss/value": (
        "clipped value loss before vf_coef, mean over epochs and mini-batches; a "
        "skipped mini-batch counts as 0"
    ),
    "ppo/loss/total": (
        "policy + vf_coef · value loss, mean over epochs and mini-batches; a skipped "
        "mini-batch counts as 0"
    ),
    "ppo/policy/entropy": "entropy of the next-token distribution, nats per token",
    "ppo/policy/approxkl": (
        "½ mean (new − old log-probability)²: second-order estimate of KL(old, new), never negative"
    ),
    "ppo/policy/policykl": (
        "mean (old − new log-probability): KL(old, new) on the fitted samples, for early stopping"
    ),
    "ppo/policy/clipfrac": "share of tokens where clipping removed the gradient",
    "ppo/policy/advantages": "whitened advantages of all mini-batches, response tokens only",
    "ppo/policy/advantages_mean": (
        "mean of the whitened advantages per mini-batch, averaged: about 0"
    ),
    "ppo/policy/ratio": (
        "ratio of new to old probability, for the response tokens of all mini-batches"
    ),
    "ppo/returns/mean": "mean return, the value head's target",
    "ppo/returns/var": "variance of the returns",
    "ppo/val/vpred": "mean value predicted during the updates",
    "ppo/val/error": "mean squared error of the value head",
    "ppo/val/clipfrac": "share of tokens where value clipping was active",
    "ppo/val/mean": "mean value before the update",
    "ppo/val/var": "variance of the values before the update",
    "ppo/val/var_explained_before": (
        "1 − error / variance of returns, before the update: how good the values behind "
        "the advantages were; 1 is perfect, 0 is as good as the mean"
    ),
    "ppo/val/var_explained": (
        "the same during the update, where the value head has begun to fit these returns"
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
