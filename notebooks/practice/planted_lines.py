"""Plant one wrong line, chosen by seed, in the algorithm of scripts/ppo_minimal.py."""

import ast
import io
import random
import tokenize

from rlhf_course.course.presets import ROOT

SOURCE = (ROOT / "scripts" / "ppo_minimal.py").read_text(encoding="utf-8")
IMPORTS = """\
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence"""
CLASSES = ["Samples", "Experience", "Outputs"]  # each builds on those before it
SHUFFLED = (
    "pad collate masked_mean masked_whiten gae policy_loss value_loss make_experience"
    " loss_and_stats ppo_step next_kl_coef ActorCritic"
).split()
MUTATIONS = [  # text of a right line, and the wrong text that replaces it
    ("values[:, 1:], (0, 1)", "values[:, :-1], (1, 0)"),
    ("gamma * lam * running", "gamma * running"),
    ("real = x[mask.bool()]", "real = x.flatten()"),
    ("loss = torch.maximum(unclipped", "loss = torch.minimum(unclipped"),
    ("(logprobs - old_logprobs).exp()", "(old_logprobs - logprobs).exp()"),
    ("old_values + (values - old_values)", "returns + (values - returns)"),
    ("rewards = -kl_coef * kl", "rewards = kl_coef * kl"),
    ("mask.sum(1).long() - 1", "-1"),
    ("= advantages + old_values", "= masked_whiten(advantages, mask) + old_values"),
    ("x[mask.bool()].mean()", "x.mean()"),
    (
        "(attention_mask.cumsum(1) - 1)",
        "(torch.ones_like(attention_mask).cumsum(1) - 1)",
    ),
    ("kl / settings.target - 1", "1 - kl / settings.target"),
]


def without_comments(text: str) -> str:
    """Return Python source without its comments."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            code = lines[row - 1][:column].rstrip()
            lines[row - 1] = code or None  # None: the line is only a comment
    return "\n".join(line for line in lines if line is not None)


def source_of(node: ast.stmt) -> str:
    """Return the source of a class or function, with its decorators."""
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    return "\n".join(SOURCE.splitlines()[first - 1 : node.end_lineno])


def clean_source(seed: int) -> str:
    """Return the algorithm without comments, with functions in this seed's order."""
    definitions = (ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.parse(SOURCE).body if isinstance(node, definitions)]
    sources = {node.name: without_comments(source_of(node)) for node in nodes}
    order = CLASSES + random.Random(seed).sample(SHUFFLED, len(SHUFFLED))
    return "\n\n\n".join([IMPORTS, *(sources[name] for name in order)]) + "\n"


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
