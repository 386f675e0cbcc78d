"""PPO for a language model in one file, read from top to bottom; nothing is imported from the
package.

    python scripts/ppo_minimal.py [STEPS]

A small GPT-2 learns to write film reviews that a sentiment classifier calls positive. Left out, and
in the package: adapters, several processes, mixed precision, checkpoints, early stopping, the other
KL penalties, forty statistics, and checks of what comes in. One step equals PPOTrainer.step, which
tests/test_ppo_minimal.py holds.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

MODELS = Path(__file__).resolve().parents[1] / "models"


@dataclass
class Config:
    learning_rate: float = 3e-4
    batch_size: int = 64
    mini_batch_size: int = 64
    epochs: int = 4
    beta: float = 0.16  # KL coefficient at the start
    kl_target: float = 6.0  # nats per response
    kl_horizon: float = 10_000  # samples
    gamma: float = 1.0
    lam: float = 0.95
    clip: float = 0.2
    clip_value: float = 0.2
    vf_coef: float = 0.1


class ActorCritic(nn.Module):
    """A causal language model, and one linear layer that reads a value off its last hidden state."""

    def __init__(self, lm):
        super().__init__()
        self.lm, self.value = lm, nn.Linear(lm.config.hidden_size, 1)

    def forward(self, ids, attention_mask, position_ids):
        """Logits (B, T, V) and values (B, T)."""
        hidden = self.lm.base_model(
            ids, attention_mask=attention_mask, position_ids=position_ids
        ).last_hidden_state
        return self.lm.get_output_embeddings()(hidden), self.value(hidden).squeeze(-1)


def lay_out(queries, responses, pad):
    """Queries padded on the left, responses on the right: ids, attention_mask, position_ids (B, Q +
    R), mask (B, R).
    """
    q, r = max(map(len, queries)), max(map(len, responses))
    ids = torch.full((len(queries), q + r), pad)
    real = torch.zeros_like(
        ids
    )  # from lengths, not from ids != pad: the padding token is EOS, and EOS can be sampled
    for row, (query, response) in enumerate(zip(queries, responses)):
        ids[row, q - len(query) : q + len(response)] = torch.cat([query, response])
        real[row, q - len(query) : q + len(response)] = 1
    return ids, real, (real.cumsum(1) - 1).clamp(min=0), real[:, q:].float()


@torch.no_grad()
def sample(model, queries, length, eos):
    """Responses from the policy's own distribution: transformers would otherwise keep the 50
    likeliest tokens alone.
    """
    model.eval()
    q = max(map(len, queries))
    ids = torch.stack(
        [nn.functional.pad(query, (q - len(query), 0), value=eos) for query in queries]
    )
    mask = torch.stack([torch.arange(q) >= q - len(query) for query in queries]).long()
    how = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": length,
        "pad_token_id": eos,
    }
    rows = model.lm.generate(input_ids=ids, attention_mask=mask, **how)[:, q:]
    ends = [(row == eos).nonzero()[:1, 0].tolist() for row in rows]
    return [row[: end[0] + 1] if end else row for row, end in zip(rows, ends)]


def evaluate(model, batch):
    """Log-probabilities and values (B, R) at the positions that predict the response's tokens."""
    ids, attention_mask, position_ids, mask = batch
    first = (
        ids.shape[1] - mask.shape[1] - 1
    )  # the last query token predicts the first response token
    logits, values = model(ids, attention_mask, position_ids)
    logits, labels = logits[:, first:-1].float(), ids[:, first + 1 :]
    return (
        logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1),
        values[:, first:-1],
    )


def mean(x, mask):
    return (x * mask).sum() / mask.sum()


def whiten(x, mask):
    """Mean 0 and variance 1 over the response tokens of the whole batch."""
    centred = x - mean(x, mask)
    variance = mean(centred**2, mask) * mask.sum() / (mask.sum() - 1)
    return centred * torch.rsqrt(variance + 1e-8) * mask


def gae(rewards, values, gamma, lam):
    """Advantages by generalised advantage estimation; 0 comes after the last token."""
    advantages, running = torch.zeros_like(rewards), 0.0
    following = nn.functional.pad(values[:, 1:], (0, 1))
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * following[:, t] - values[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages


def losses(logprobs, values, old_logprobs, old_values, advantages, returns, config):
    """Clipped policy loss and clipped value loss per token, (B, R) each."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    near = torch.maximum(
        torch.minimum(values, old_values + config.clip_value), old_values - config.clip_value
    )
    policy = torch.maximum(-advantages * ratio, -advantages * clipped)
    return policy, 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def ppo_step(model, reference, optimizer, queries, responses, scores, beta, pad, config):
    """One PPO step on a batch: queries and responses lists of token tensors, scores (B,). Returns
    statistics.
    """
    model.eval()  # dropout would make the ratio differ from 1 before anything was learnt
    batch = lay_out(queries, responses, pad)
    mask = batch[-1]
    with torch.no_grad():
        old_logprobs, old_values = (x * mask for x in evaluate(model, batch))
        kl = (old_logprobs - evaluate(reference, batch)[0]) * mask
    rewards = -beta * kl  # every token pays for its distance from the reference
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += (
        scores  # the score comes with the last one
    )
    advantages = gae(rewards, old_values, config.gamma, config.lam)
    returns = advantages + old_values  # before whitening
    advantages = whiten(advantages, mask)
    seen = []
    for _ in range(config.epochs):
        for rows in torch.from_numpy(np.random.permutation(len(scores))).split(
            config.mini_batch_size
        ):
            logprobs, values = evaluate(model, [x[rows] for x in batch])
            columns = [x[rows] for x in (old_logprobs, old_values, advantages, returns)]
            policy, value = (
                mean(x, mask[rows]) for x in losses(logprobs, values, *columns, config)
            )
            optimizer.zero_grad()
            (policy + config.vf_coef * value).backward()
            optimizer.step()
            seen.append((policy.item(), value.item()))
    policy, value = np.mean(seen, axis=0)
    kl = kl.sum(1).mean().item()
    return {"kl": kl, "score": scores.mean().item(), "policy loss": policy, "value loss": value}


def next_beta(beta, kl, n, config):
    """The adaptive KL coefficient: a little up when KL is above its target, a little down when
    below.
    """
    return beta * (1 + float(np.clip(kl / config.kl_target - 1, -0.2, 0.2)) * n / config.kl_horizon)


def main(steps=20):
    config = Config()
    torch.manual_seed(0)
    np.random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "gpt2-imdb-mini")
    model = ActorCritic(
        AutoModelForCausalLM.from_pretrained(MODELS / "gpt2-imdb-mini", dtype=torch.float32)
    )
    reference = copy.deepcopy(model).eval()
    judge = AutoModelForSequenceClassification.from_pretrained(
        MODELS / "distilbert-imdb-mini", dtype=torch.float32
    )
    reader = AutoTokenizer.from_pretrained(MODELS / "distilbert-imdb-mini")
    openings = tokenizer(load_dataset(str(MODELS / "imdb-openings"), split="train")["text"][:])[
        "input_ids"
    ]
    optimizer, beta = torch.optim.Adam(model.parameters(), lr=config.learning_rate), config.beta
    for step in range(1, steps + 1):
        chosen = np.random.choice(len(openings), config.batch_size, replace=False)
        queries = [torch.tensor(openings[row][: np.random.randint(2, 9)]) for row in chosen]
        responses = sample(model, queries, 16, tokenizer.eos_token_id)
        texts = [
            tokenizer.decode(torch.cat(pair), skip_special_tokens=True)
            for pair in zip(queries, responses)
        ]
        with torch.no_grad():
            logits = judge.eval()(**reader(texts, padding=True, return_tensors="pt")).logits
        scores = logits[:, judge.config.label2id["POSITIVE"]].float()
        stats = ppo_step(
            model,
            reference,
            optimizer,
            queries,
            responses,
            scores,
            beta,
            tokenizer.pad_token_id,
            config,
        )
        beta = next_beta(beta, stats["kl"], len(queries), config)
        print(
            f"{step:3}  "
            + "  ".join(f"{name} {value:6.3f}" for name, value in stats.items())
            + f"  {texts[0]!r}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
