"""Plant one wrong line, chosen by seed, in the algorithm of scripts/ppo_minimal.py."""

import ast
import random

from rlhf_course.course.presets import ROOT

SOURCE = (ROOT / "scripts" / "ppo_minimal.py").read_text(encoding="utf-8")
PARTS = (
    "collate masked_whiten gae policy_loss value_loss add_advantages loss_and_stats"
    " ppo_step next_kl_coef ActorCritic"
).split()
MUTATIONS = [  # text of a right line, and the wrong text that replaces it
    ("values[:, 1:], (0, 1)", "values[:, :-1], (1, 0)"),
    ("gamma * lam * running", "gamma * running"),
    ("real = x[mask.bool()]", "real = x.flatten()"),
    ("return (torch.maximum(unclipped", "return (torch.minimum(unclipped"),
    ("(logprobs - old_logprobs).exp()", "(old_logprobs - logprobs).exp()"),
    ("old_values + (values - old_values)", "returns + (values - returns)"),
    ("rewards = -kl_coef * kl", "rewards = kl_coef * kl"),
    ("mask.sum(1).long() - 1]", "-1]"),
    ("= advantages + old_values", "= masked_whiten(advantages, mask) + old_values"),
    ("x[real].mean()", "x.mean()"),
    ("(real.cumsum(1) - 1)", "(torch.ones_like(real).cumsum(1) - 1)"),
    ("kl / args.target - 1", "1 - kl / args.target"),
]


def clean_source(seed: int) -> str:
    """Return the algorithm without comments, with functions in this seed's order."""
    nodes = {getattr(node, "name", ""): node for node in ast.parse(SOURCE).body}
    order = random.Random(seed).sample(PARTS, len(PARTS))
    start = "import numpy as np\nimport torch\nfrom torch import nn\n"
    start += "from torch.nn.utils.rnn import pad_sequence"
    return "\n\n\n".join([start, *(ast.unparse(nodes[name]) for name in order)]) + "\n"


def planted(seed: int) -> int:
    """Return the number of the wrong line; the first line is 1."""
    pairs = zip(source(seed).splitlines(), clean_source(seed).splitlines())
    return next(i for i, (one, other) in enumerate(pairs, start=1) if one != other)


def source(seed: int = 0) -> str:
    """Return the algorithm with the wrong line of this seed."""
    right, wrong = random.Random(f"line {seed}").choice(MUTATIONS)
    clean = clean_source(seed)
    assert clean.count(right) == 1, right
    return clean.replace(right, wrong)


def numbered(text: str) -> str:
    """Return a source with a number before each line."""
    return "\n".join(
        f"{i:3} {line}" for i, line in enumerate(text.splitlines(), start=1)
    )
