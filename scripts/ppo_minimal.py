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

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from datasets import load_dataset
from matplotlib.figure import Figure
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, set_seed

MODELS = Path(__file__).resolve().parents[1] / "models"


@dataclass
class Settings:
    """Train a language model with PPO to write positive film reviews."""

    model: str = str(MODELS / "gpt2-imdb-mini")  # causal language model
    reward: str = str(MODELS / "distilbert-imdb-mini")  # scorer with label POSITIVE
    dataset: str = str(MODELS / "imdb-openings")  # splits train, test; column text
    output: str = "runs/ppo_minimal.png"  # plot of the statistics
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # torch device
    seed: int = 0  # seed of numpy and torch

    steps: int = 20  # PPO steps
    eval_queries: int = 256  # held-out queries
    response_length: int = 16  # maximum, in tokens
    batch_size: int = 32  # samples per PPO step
    mini_batch_size: int = 32  # samples per optimizer step
    ppo_epochs: int = 2  # passes over a batch
    learning_rate: float = 5e-4  # Adam step size
    max_grad_norm: float = float("inf")  # gradient norm to clip to

    init_kl_coef: float = 0.1  # KL coefficient at the first step
    target: float = 6.0  # desired KL, nats per response
    horizon: float = 10_000  # samples over which the KL coefficient adapts
    # [N] policy training 6
    gamma: float = 1.0  # discount
    lam: float = 0.95  # lambda of GAE
    cliprange: float = 0.2  # clip range of the ratio
    cliprange_value: float = 0.2  # clip range of the values
    vf_coef: float = 0.1  # weight of the value loss


@dataclass(frozen=True)
class Samples:
    """Hold B queries, padded on the left to Q tokens, and responses, on the right to R.

    input_ids: (B, Q + R), a query and its response.
    attention_mask: (B, Q + R), 1 at real tokens and 0 at padding.
    position_ids: (B, Q + R), 0 at the first real token.
    response_mask: (B, R), 1.0 at real response tokens.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    response_mask: torch.Tensor


@dataclass(frozen=True)
class Experience(Samples):
    """Add what learning needs to samples: numbers for each response token, (B, R) each.

    kl: log-probability under the policy minus log-probability under the reference.
    old_logprobs, old_values: outputs of the policy before the update.
    returns: targets of the values.
    advantages: whitened.
    """

    kl: torch.Tensor
    old_logprobs: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor

    def select(self, rows):
        """Return the experience in these rows."""
        columns = {name: column[rows] for name, column in vars(self).items()}
        return Experience(**columns)


@dataclass(frozen=True)
class Outputs:
    """Hold log-probability, entropy and value of each response token, (B, R) each."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Evaluation:
    """Hold the mean held-out score, and the half-width of its 95 % confidence interval."""

    score: float
    half_width: float


class ActorCritic(nn.Module):
    """Combine a language model and a value head; both read query and response; [N] general 1."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.value = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)  # openai/lm-human-preferences, language/model.py, scale=0

    def forward(self, samples):
        """Return the outputs for the response tokens."""
        hidden = self.lm.base_model(
            input_ids=samples.input_ids,
            attention_mask=samples.attention_mask,
            position_ids=samples.position_ids,
        ).last_hidden_state
        width = samples.response_mask.shape[1]
        hidden = hidden[:, -width - 1 : -1]  # the token before a response token predicts it

        all_logprobs = self.lm.get_output_embeddings()(hidden).float().log_softmax(-1)
        response_ids = samples.input_ids[:, -width:]
        logprobs = all_logprobs.gather(-1, response_ids.unsqueeze(-1)).squeeze(-1)
        detached = all_logprobs.detach()  # the loss has no entropy term
        entropy = -torch.linalg.vecdot(detached.exp(), detached)
        values = self.value(hidden).squeeze(-1)
        return Outputs(logprobs=logprobs, entropy=entropy, values=values)


def pad(rows, side):
    """Return rows of token ids as one tensor (B, L), and the mask (B, L) of real tokens."""
    ids = pad_sequence(rows, batch_first=True, padding_side=side)
    # The mask comes from lengths: padding is often EOS, and a sampled EOS belongs to the response.
    ones = [torch.ones_like(row) for row in rows]
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return ids, mask


def collate(queries, responses, device):
    """Return queries and responses, lists of B tensors of token ids each, as samples."""
    query_ids, query_mask = pad(queries, side="left")
    response_ids, response_mask = pad(responses, side="right")
    attention_mask = torch.cat([query_mask, response_mask], dim=1)
    # Positions start at 0 at the first real token; [N] general 3.
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return Samples(
        input_ids=torch.cat([query_ids, response_ids], dim=1).to(device),
        attention_mask=attention_mask.to(device),
        position_ids=position_ids.to(device),
        response_mask=response_mask.float().to(device),
    )


def sample(model, queries, max_tokens, eos_token_id):
    """Return one response per query, sampled from the policy and cut after its first EOS."""
    model.eval()  # no dropout; [N] policy training 4
    device = model.value.weight.device
    query_ids, query_mask = pad(queries, side="left")
    sequences = model.lm.generate(
        query_ids.to(device),
        attention_mask=query_mask.to(device),
        max_new_tokens=max_tokens,
        pad_token_id=eos_token_id,
        do_sample=True,
        top_k=0,  # all tokens; [N] general 4
        top_p=1.0,
    )
    width = query_ids.shape[1]
    responses = sequences[:, width:].cpu()
    is_before_eos = (responses == eos_token_id).cumsum(1) == 0
    lengths = is_before_eos.sum(1) + 1
    return [response[:length] for response, length in zip(responses, lengths)]


def masked_mean(x, mask):
    """Return the mean over the response tokens."""
    return x[mask.bool()].mean()


def masked_whiten(x, mask):
    """Scale to mean 0 and variance 1 across the batch's response tokens; [37] 7."""
    real = x[mask.bool()]
    return (x - real.mean()) * torch.rsqrt(real.var() + 1e-8) * mask


def gae(rewards, values, gamma, lam):
    """Return advantages (B, R); [GAE] eq. 16, [37] 5. The value after the last token is 0."""
    next_values = nn.functional.pad(values[:, 1:], (0, 1))
    advantages = torch.zeros_like(rewards)
    running = 0.0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values[:, t] - values[:, t]
        running = delta + gamma * lam * running
        advantages[:, t] = running
    return advantages


def policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """Return the loss per token, the ratio, and where clipping is active; [PPO] eq. 7, [37] 8."""
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    loss = torch.maximum(unclipped, clipped)
    return loss, ratio, clipped > unclipped


def value_loss(values, old_values, returns, cliprange):
    """Return the clipped value loss per token; [37] 9, [N] policy training 10."""
    clipped_values = old_values + (values - old_values).clamp(-cliprange, cliprange)
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(unclipped, clipped)


@torch.no_grad()
def make_experience(model, ref_model, samples, scores, kl_coef, settings):
    """Return the experience from samples and their scores (B,)."""
    mask = samples.response_mask
    outputs = model(samples)
    old_logprobs = outputs.logprobs * mask
    old_values = outputs.values * mask
    kl = (old_logprobs - ref_model(samples).logprobs) * mask

    rewards = -kl_coef * kl  # per token; [Z19] eq. 2, [N] policy training 8
    last_token = mask.sum(1).long() - 1
    rewards[torch.arange(len(rewards)), last_token] += scores  # [Z19] eq. 2

    advantages = gae(rewards, old_values, settings.gamma, settings.lam)
    returns = advantages + old_values  # whitening is only for the policy
    return Experience(
        **vars(samples),
        kl=kl,
        old_logprobs=old_logprobs,
        old_values=old_values,
        returns=returns,
        advantages=masked_whiten(advantages, mask),
    )


def loss_and_stats(model, experience, settings):
    """Return a mini-batch's loss, and statistics averaged over response tokens."""
    mask = experience.response_mask
    outputs = model(experience)
    policy_losses, ratio, is_clipped = policy_loss(
        logprobs=outputs.logprobs,
        old_logprobs=experience.old_logprobs,
        advantages=experience.advantages,
        cliprange=settings.cliprange,
    )
    value_losses = value_loss(
        values=outputs.values,
        old_values=experience.old_values,
        returns=experience.returns,
        cliprange=settings.cliprange_value,
    )
    mean_policy_loss = masked_mean(policy_losses, mask)
    mean_value_loss = masked_mean(value_losses, mask)
    loss = mean_policy_loss + settings.vf_coef * mean_value_loss  # [37] 10, without entropy

    approx_kl = 0.5 * (outputs.logprobs - experience.old_logprobs) ** 2  # [37] 12
    squared_error = (outputs.values - experience.returns) ** 2
    stats = {
        "policy_loss": mean_policy_loss.item(),
        "value_loss": mean_value_loss.item(),
        "entropy": masked_mean(outputs.entropy, mask).item(),
        "ratio": masked_mean(ratio, mask).item(),
        "approxkl": masked_mean(approx_kl, mask).item(),
        "clipfrac": masked_mean(is_clipped.float(), mask).item(),  # [37] 12
        "squared_error": masked_mean(squared_error, mask).item(),
        "variance": experience.returns[mask.bool()].var().item(),
    }
    return loss, stats


def ppo_step(model, ref_model, optimizer, samples, scores, kl_coef, settings):
    """Take one PPO step on samples and their scores (B,); return the step's statistics."""
    model.eval()  # with dropout the ratio would not start at 1; [N] policy training 4
    experience = make_experience(model, ref_model, samples, scores, kl_coef, settings)
    updates = []
    for _ in range(settings.ppo_epochs):
        order = torch.from_numpy(np.random.permutation(len(scores))).to(scores.device)
        for rows in order.split(settings.mini_batch_size):  # [37] 6, [N] policy training 7
            loss, stats = loss_and_stats(model, experience.select(rows), settings)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)  # [37] 11
            optimizer.step()
            updates.append(stats)

    means = {name: float(np.mean([stats[name] for stats in updates])) for name in updates[0]}
    unexplained_var = means.pop("squared_error") / means.pop("variance")
    return {
        "score": scores.mean().item(),
        "kl": experience.kl.sum(1).mean().item(),
        **means,
        "explained_var": 1 - unexplained_var,
    }


def next_kl_coef(kl_coef, kl, settings):
    """Return the adaptive KL coefficient; [Z19] section 2.2, [N] policy training 11."""
    error = float(np.clip(kl / settings.target - 1, -0.2, 0.2))
    return kl_coef * (1 + error * settings.batch_size / settings.horizon)


def draw_queries(split, n, tokenizer):
    """Return the first 2 to 8 tokens of each of n different texts."""
    rows = np.random.choice(len(split), n, replace=False)
    texts = split[rows]["text"]
    queries = []
    for ids in tokenizer(texts)["input_ids"]:
        length = np.random.randint(2, 9)
        queries.append(torch.tensor(ids[:length]))
    return queries


def rollout(model, tokenizer, classify, queries, settings):
    """Return samples of responses, their scores (B,) (logits of POSITIVE), and their texts."""
    responses = sample(model, queries, settings.response_length, tokenizer.eos_token_id)
    sequences = [torch.cat([query, response]) for query, response in zip(queries, responses)]
    texts = tokenizer.batch_decode(sequences, skip_special_tokens=True)

    results = classify(texts, top_k=None, function_to_apply="none", truncation=True, batch_size=64)
    scores = []
    for labels in results:
        logits = {label["label"]: label["score"] for label in labels}
        scores.append(logits["POSITIVE"])

    samples = collate(queries, responses, settings.device)
    return samples, torch.tensor(scores, device=settings.device), texts


@torch.no_grad()
def evaluate(model, ref_model, tokenizer, classify, queries, settings):
    """Print the held-out score, KL and three texts; return the score with its interval."""
    torch.manual_seed(settings.seed)  # same random numbers in each call
    samples, scores, texts = rollout(model, tokenizer, classify, queries, settings)
    log_ratio = model(samples).logprobs - ref_model(samples).logprobs
    kl = (log_ratio * samples.response_mask).sum(1).mean().item()
    score = scores.mean().item()
    half_width = 1.96 * scores.std().item() / len(scores) ** 0.5

    print(f"held-out score {score:.2f} ± {half_width:.2f}, KL {kl:.2f} nats")
    for text in texts[:3]:
        print(f"    {text}")
    return Evaluation(score=score, half_width=half_width)


def plot(history, before, after, path):
    """Save a plot of each step's statistics, and of held-out scores before and after training."""
    units = {"score": "logit", "kl": "nats per response", "entropy": "nats", "approxkl": "nats"}
    steps = range(1, len(history) + 1)
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(nrows=3, ncols=3, sharex=True)
    for axis, name in zip(axes.flat, history[0]):
        axis.plot(steps, [stats[name] for stats in history], ".-", label="training batch")
        axis.set(title=name, ylabel=units.get(name, ""))
        axis.grid(alpha=0.3)
        if name == "score":
            axis.errorbar(
                x=[0.5, len(history) + 0.5],
                y=[before.score, after.score],
                yerr=[before.half_width, after.half_width],
                fmt="s",
                capsize=4,
                label="held out, 95 %",
            )
            axis.legend(fontsize="small")
    figure.supxlabel("PPO step")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv=None):
    settings = tyro.cli(Settings, args=argv)
    set_seed(settings.seed)  # numpy draws queries and mini-batches, torch draws tokens
    data = load_dataset(settings.dataset)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    device = settings.device
    classify = pipeline("text-classification", settings.reward, device=device, dtype="float32")
    lm = AutoModelForCausalLM.from_pretrained(settings.model, dtype="float32")
    model = ActorCritic(lm).to(device)
    ref_model = copy.deepcopy(model)
    # [37] 3 has eps=1e-5.
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, eps=1e-8)

    held_out = draw_queries(data["test"], settings.eval_queries, tokenizer)
    before = evaluate(model, ref_model, tokenizer, classify, held_out, settings)

    kl_coef = settings.init_kl_coef
    history = []
    for step in range(1, settings.steps + 1):
        queries = draw_queries(data["train"], settings.batch_size, tokenizer)
        samples, scores, _ = rollout(model, tokenizer, classify, queries, settings)
        stats = ppo_step(model, ref_model, optimizer, samples, scores, kl_coef, settings)
        kl_coef = next_kl_coef(kl_coef, stats["kl"], settings)
        history.append(stats)
        numbers = [f"{name} {value:.3f}" for name, value in stats.items()]
        print(f"step {step:3}", *numbers, sep="  ")

    after = evaluate(model, ref_model, tokenizer, classify, held_out, settings)
    plot(history, before, after, settings.output)
    print(f"saved {settings.output}")


if __name__ == "__main__":
    main()
