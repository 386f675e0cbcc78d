"""Train a language model with PPO in one file: a GPT-2 learns to write positive film reviews.

    python scripts/ppo_minimal.py         # the repository's small models, one CPU; --help: options
    python scripts/ppo_minimal.py --model gpt2 --reward lvwerra/distilbert-imdb \
        --dataset stanfordnlp/imdb --learning-rate 1.41e-5 --batch-size 128 --steps 200

We have not run the second command. This file does not import the course's package, and its step
matches PPOTrainer.step (tests/test_ppo_minimal.py). It omits adapters, several processes, mixed
precision and checkpoints. Its lines cite these sources: [PPO] Schulman et al., arXiv:1707.06347;
[GAE] Schulman et al., arXiv:1506.02438; [Z19] Ziegler et al., arXiv:1909.08593; [37] core details
of "The 37 Implementation Details of PPO"; [N] "The N Implementation Details of RLHF with PPO".
"""

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from matplotlib.figure import Figure
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, set_seed


def parse_args(argv=None):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, models = parser.add_argument, Path(__file__).resolve().parents[1] / "models"
    add("--model", default=str(models / "gpt2-imdb-mini"), help="causal language model")
    add("--reward", default=str(models / "distilbert-imdb-mini"), help="scorer with label POSITIVE")
    add("--dataset", default=str(models / "imdb-openings"), help="splits train, test; column text")
    add("--output", default="runs/ppo_minimal.png", help="plot of the statistics")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    add("--seed", type=int, default=0, help="seed of numpy and torch")
    add("--steps", type=int, default=20, help="PPO steps")
    add("--eval-queries", type=int, default=256, help="held-out queries")
    add("--response-length", type=int, default=16, help="maximum, in tokens")
    add("--batch-size", type=int, default=32, help="samples per step")
    add("--mini-batch-size", type=int, default=32, help="samples per optimizer step")
    add("--ppo-epochs", type=int, default=2, help="passes over a batch")
    add("--learning-rate", type=float, default=5e-4, help="Adam step size")
    add("--max-grad-norm", type=float, default=float("inf"), help="gradient norm to clip to")
    add("--init-kl-coef", type=float, default=0.1, help="KL coefficient at the first step")
    add("--target", type=float, default=6.0, help="desired KL, nats per response")
    add("--horizon", type=float, default=10_000, help="samples over which the coefficient adapts")
    add("--gamma", type=float, default=1.0, help="discount")  # [N] policy training 6
    add("--lam", type=float, default=0.95, help="lambda of GAE")
    add("--cliprange", type=float, default=0.2, help="clip range of the ratio")
    add("--cliprange-value", type=float, default=0.2, help="clip range of the values")
    add("--vf-coef", type=float, default=0.1, help="weight of the value loss")
    return parser.parse_args(argv)


class ActorCritic(nn.Module):
    """Combine a language model and a value head; both read query and response; [N] general 1."""

    def __init__(self, lm):
        super().__init__()
        self.lm, self.value = lm, nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)  # openai/lm-human-preferences, language/model.py, scale=0

    def forward(self, batch):
        """Return log-probabilities, entropies and values (B, R) of the response tokens."""
        width = batch["mask"].shape[1]
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        hidden = self.lm.base_model(**inputs).last_hidden_state
        hidden = hidden[:, -width - 1 : -1]  # the token before a response token predicts it
        logprobs = self.lm.get_output_embeddings()(hidden).float().log_softmax(-1)
        entropy = -torch.linalg.vecdot(logprobs.detach().exp(), logprobs.detach())  # not in loss
        chosen = logprobs.gather(-1, batch["input_ids"][:, -width:].unsqueeze(-1)).squeeze(-1)
        return chosen, entropy, self.value(hidden).squeeze(-1)


def collate(queries, responses, device):
    """Pad queries on the left and responses on the right: input_ids (B, Q + R), mask (B, R)."""
    ids = torch.cat([pad_sequence(queries, True, 0, "left"), pad_sequence(responses, True)], 1)
    # Masks come from lengths: padding is often EOS, and a sampled EOS belongs to the response.
    ones = [[torch.ones_like(x) for x in rows] for rows in (queries, responses)]
    real = torch.cat([pad_sequence(ones[0], True, 0, "left"), pad_sequence(ones[1], True)], 1)
    position_ids = (real.cumsum(1) - 1).clamp(min=0)  # 0 at the first real token; [N] general 3
    batch = {"input_ids": ids, "attention_mask": real, "position_ids": position_ids}
    batch["mask"] = real[:, max(map(len, queries)) :].float()
    return {key: x.to(device) for key, x in batch.items()}


def sample(model, queries, length, eos_token_id):
    """Return one response per query, sampled from the policy and cut after its first EOS."""
    model.eval()  # no dropout; [N] policy training 4
    no_responses, device = [query[:0] for query in queries], model.value.weight.device
    ids, mask, *_ = collate(queries, no_responses, device).values()
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0}  # all tokens; [N] general 4
    options |= {"max_new_tokens": length, "pad_token_id": eos_token_id}
    rows = model.lm.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :].cpu()
    lengths = ((rows == eos_token_id).cumsum(1) == 0).sum(1) + 1
    return [row[:n] for row, n in zip(rows, lengths)]


def masked_whiten(x, mask):
    """Scale to mean 0 and variance 1 across the batch's response tokens; [37] 7."""
    real = x[mask.bool()]
    return (x - real.mean()) * torch.rsqrt(real.var() + 1e-8) * mask


def gae(rewards, values, gamma, lam):
    """Return advantages (B, R); [GAE] eq. 16, [37] 5. The value after the last token is 0."""
    advantages, running = torch.zeros_like(rewards), 0.0
    next_values = nn.functional.pad(values[:, 1:], (0, 1))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values[:, t] - values[:, t]
        advantages[:, t] = running = delta + gamma * lam * running
    return advantages


def policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """Return the loss per token, the ratio, and where clipping is active; [PPO] eq. 7, [37] 8."""
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(unclipped, clipped), ratio, (clipped > unclipped).float()


def value_loss(values, old_values, returns, cliprange):
    """Return the clipped value loss per token; [37] 9, [N] policy training 10."""
    near = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@torch.no_grad()
def add_advantages(batch, model, ref_model, scores, kl_coef, args):
    """Return the batch with KL, old log-probabilities, old values, returns, and advantages."""
    mask = batch["mask"]
    old_logprobs, _, old_values = (x * mask for x in model(batch))
    kl = (old_logprobs - ref_model(batch)[0]) * mask
    rewards = -kl_coef * kl  # per token; [Z19] eq. 2, [N] policy training 8
    rewards[torch.arange(len(kl)), mask.sum(1).long() - 1] += scores  # last token; [Z19] eq. 2
    advantages = gae(rewards, old_values, args.gamma, args.lam)
    batch = batch | {"kl": kl, "old_logprobs": old_logprobs, "old_values": old_values}
    batch["returns"] = advantages + old_values  # whitening is only for the policy
    return batch | {"advantages": masked_whiten(advantages, mask)}


def loss_and_stats(model, batch, args):
    """Return a mini-batch's loss, and statistics averaged over response tokens."""
    real, returns, old_logprobs = batch["mask"].bool(), batch["returns"], batch["old_logprobs"]
    logprobs, entropy, values = model(batch)
    pg, ratio, clipped = policy_loss(logprobs, old_logprobs, batch["advantages"], args.cliprange)
    vf = value_loss(values, batch["old_values"], returns, args.cliprange_value)
    stats = {"policy_loss": pg, "value_loss": vf, "entropy": entropy, "ratio": ratio}
    stats["approxkl"] = 0.5 * (logprobs - old_logprobs) ** 2  # [37] 12
    stats |= {"clipfrac": clipped, "error": (values - returns) ** 2}  # [37] 12
    stats = {key: x[real].mean() for key, x in stats.items()}
    loss = stats["policy_loss"] + args.vf_coef * stats["value_loss"]  # [37] 10, without entropy
    stats["variance"] = returns[real].var()
    return loss, {key: x.item() for key, x in stats.items()}


def ppo_step(model, ref_model, optimizer, batch, scores, kl_coef, args):
    """Take one PPO step on ``collate``'s batch and scores (B,); return the step's statistics."""
    model.eval()  # with dropout the ratio would not start at 1; [N] policy training 4
    batch, seen = add_advantages(batch, model, ref_model, scores, kl_coef, args), []
    for _ in range(args.ppo_epochs):
        order = torch.from_numpy(np.random.permutation(len(scores))).to(scores.device)
        for rows in order.split(args.mini_batch_size):  # [37] 6, [N] policy training 7
            loss, stats = loss_and_stats(model, {key: x[rows] for key, x in batch.items()}, args)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # [37] 11
            optimizer.step()
            seen.append(stats)
    stats = {key: float(np.mean([stats[key] for stats in seen])) for key in seen[0]}
    stats["explained_var"] = 1 - stats.pop("error") / stats.pop("variance")
    return {"score": scores.mean().item(), "kl": batch["kl"].sum(1).mean().item()} | stats


def next_kl_coef(kl_coef, kl, args):
    """Return the adaptive KL coefficient; [Z19] section 2.2, [N] policy training 11."""
    error = float(np.clip(kl / args.target - 1, -0.2, 0.2))
    return kl_coef * (1 + error * args.batch_size / args.horizon)


def draw_queries(split, n, tokenizer):
    """Return the first 2 to 8 tokens of each of n different texts."""
    texts = split[np.random.choice(len(split), n, replace=False)]["text"]
    return [torch.tensor(ids[: np.random.randint(2, 9)]) for ids in tokenizer(texts)["input_ids"]]


def rollout(model, tokenizer, classify, queries, args):
    """Return a batch of sampled responses, their scores (B,) (logits of POSITIVE), and texts."""
    responses = sample(model, queries, args.response_length, tokenizer.eos_token_id)
    whole = [torch.cat(pair) for pair in zip(queries, responses)]
    texts = tokenizer.batch_decode(whole, skip_special_tokens=True)
    rows = classify(texts, top_k=None, function_to_apply="none", truncation=True, batch_size=64)
    scores = [x["score"] for row in rows for x in row if x["label"] == "POSITIVE"]
    batch = collate(queries, responses, args.device)
    return batch, torch.tensor(scores, device=args.device), texts


@torch.no_grad()
def evaluate(model, ref_model, tokenizer, classify, queries, args):
    """Print held-out score and KL; return the mean score and its 95 % interval's half-width."""
    torch.manual_seed(args.seed)  # same random numbers in each call
    batch, scores, texts = rollout(model, tokenizer, classify, queries, args)
    kl = ((model(batch)[0] - ref_model(batch)[0]) * batch["mask"]).sum(1).mean().item()
    mean, half = scores.mean().item(), 1.96 * scores.std().item() / len(scores) ** 0.5
    print(f"held-out score {mean:.2f} ± {half:.2f}, KL {kl:.2f} nats", *texts[:3], sep="\n    ")
    return mean, half


def plot(history, before, after, path):
    """Save a plot of each step's statistics, and of held-out scores before and after training."""
    units = {"score": "logit", "kl": "nats per response", "entropy": "nats", "approxkl": "nats"}
    steps, figure = range(1, len(history) + 1), Figure((11, 7), layout="constrained")
    for axis, key in zip(figure.subplots(3, 3, sharex=True).flat, history[0]):
        axis.plot(steps, [stats[key] for stats in history], ".-", label="training batch")
        axis.set(title=key, ylabel=units.get(key, ""))
        axis.grid(alpha=0.3)
    (means, halves), ends = zip(before, after), [0.5, len(history) + 0.5]
    figure.axes[0].errorbar(ends, means, halves, fmt="s", capsize=4, label="held out, 95 %")
    figure.axes[0].legend(fontsize="small")
    figure.supxlabel("PPO step")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv=None):
    args = parse_args(argv)
    set_seed(args.seed)  # numpy draws queries and mini-batches, torch draws tokens
    data, tokenizer = load_dataset(args.dataset), AutoTokenizer.from_pretrained(args.model)
    classify = pipeline("text-classification", args.reward, device=args.device, dtype="float32")
    model = ActorCritic(AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"))
    ref_model = copy.deepcopy(model.to(args.device))
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate, eps=1e-8)  # 1e-5 in [37] 3
    held_out = draw_queries(data["test"], args.eval_queries, tokenizer)
    before = evaluate(model, ref_model, tokenizer, classify, held_out, args)
    kl_coef, history = args.init_kl_coef, []
    for step in range(1, args.steps + 1):
        queries = draw_queries(data["train"], args.batch_size, tokenizer)
        batch, scores, _ = rollout(model, tokenizer, classify, queries, args)
        stats = ppo_step(model, ref_model, optimizer, batch, scores, kl_coef, args)
        print(f"step {step:3}", *(f"{key} {x:.3f}" for key, x in stats.items()), sep="  ")
        kl_coef = next_kl_coef(kl_coef, stats["kl"], args)
        history.append(stats)
    after = evaluate(model, ref_model, tokenizer, classify, held_out, args)
    plot(history, before, after, args.output)
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
