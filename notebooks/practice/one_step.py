"""Make exercise 7's data: six samples, and the trainer's PPO step on them."""

import copy
from types import SimpleNamespace

import torch
from rlhf_course import PPOConfig, PPOTrainer
from torch import Tensor

from tiny_world import EOS, SHAPE, random_policy

STATS = (  # in the order in which a step computes them
    "objective/kl",
    "ppo/returns/mean",
    "ppo/loss/policy",
    "ppo/loss/value",
    "beta",
)
RATE = 0.3


def make_batch(seed: int) -> SimpleNamespace:
    """Return six samples with ids, masks and scores, a policy, and a reference."""
    network, reference = (random_policy(seed, **SHAPE) for _ in range(2))
    for p in network.parameters():
        p.data += 0.03 * torch.randn(p.shape)
    queries = [torch.randint(EOS, (2 + i % 4,)) for i in range(6)]
    responses = [torch.randint(EOS, (3 + 3 * i % 5,)) for i in range(6)]
    for response in responses[::2]:
        response[-1] = EOS  # a sampled EOS belongs to the response
    q, r = (max(map(len, rows)) for rows in (queries, responses))
    b = SimpleNamespace(queries=queries, responses=responses, pad=EOS, beta=0.4)
    b.ids = torch.full((6, q + r), EOS)
    b.query_mask = torch.zeros(6, q, dtype=torch.long)
    for row, (query, response) in enumerate(zip(queries, responses)):
        b.ids[row, q - len(query) : q + len(response)] = torch.cat([query, response])
        b.query_mask[row, q - len(query) :] = 1
    b.response_ids, b.lengths = b.ids[:, q:], torch.tensor(list(map(len, responses)))
    b.network, b.reference, b.scores = network, reference, torch.randn(6)
    return b


def by_trainer(b: SimpleNamespace, ratio: float) -> SimpleNamespace:
    """Return the trainer's stats and weights; set b.config so KL / target = ratio."""
    kl = train(b, target=1.0)[0]["objective/kl"]
    if kl < 0:  # swap policy and reference, so that KL is positive
        b.network, b.reference = b.reference, b.network
    stats, weights = train(b, target=abs(kl) / ratio)
    return SimpleNamespace(stats=stats, weights=weights)


def train(b: SimpleNamespace, target: float) -> tuple[dict, list[Tensor]]:
    """Take the trainer's step on copies; return its statistics and the new weights."""
    sizes = {"batch_size": 6, "mini_batch_size": 6, "ppo_epochs": 3, "vf_coef": 0.3}
    near = {"cliprange_value": 0.1, "init_kl_coef": b.beta, "horizon": 100}
    near["accelerator_kwargs"] = {"cpu": True}  # the student's step runs on the CPU too
    b.config = PPOConfig(**sizes, **near, target=target)
    parts = copy.deepcopy((b.network, b.reference))
    tokenizer = SimpleNamespace(pad_token_id=EOS, eos_token_id=EOS)
    sgd = torch.optim.SGD(parts[0].parameters(), lr=RATE)
    trainer = PPOTrainer(b.config, *parts, tokenizer, optimizer=sgd)
    stats = trainer.step(b.queries, b.responses, b.scores)
    found = {name: stats[name] for name in STATS[:-1]} | {"beta": trainer.kl_ctl.value}
    return found, [p.detach().cpu() for p in parts[0].parameters()]
