"""What a policy does on fixed held-out queries: score, KL, length and diversity, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rlhf_course.policy.value_head import AutoModelForCausalLMWithValueHead, without_dropout
from rlhf_course.ppo.rollout import Rollout, forward
from rlhf_course.ppo.sampling import generate, pad_token_id
from rlhf_course.rewards import finite


@torch.no_grad()
def evaluate(
    model: AutoModelForCausalLMWithValueHead,
    ref_model: AutoModelForCausalLMWithValueHead,
    tokenizer,
    queries: Sequence[Tensor],
    lengths: Sequence[int],
    reward: Callable[[Sequence[str]], Tensor],
    seed: int = 0,
    batch_size: int = 256,
    autocast: Callable = nullcontext,
    **generation_kwargs,
) -> pd.DataFrame:
    """One sampled response per query, dropout off: columns query, response, text, kl (nats), length (tokens), score.

    Random numbers come from ``seed`` alone and the global generators are left as they were, so that evaluating in
    the middle of a run does not change the run. ``autocast`` is the trainer's, where it trains at mixed precision, so
    that the distribution that is sampled is the one that is scored.
    """
    rows = []
    with torch.random.fork_rng(), without_dropout(model), without_dropout(ref_model):
        torch.manual_seed(seed)
        for start in range(0, len(queries), batch_size):
            part = slice(start, start + batch_size)
            with autocast():
                responses = generate(model, tokenizer, queries[part], lengths[part], **generation_kwargs)
            blank = torch.zeros(len(responses), device=model.device)
            rollout = Rollout.from_lists(queries[part], responses, blank, pad_token_id(tokenizer))
            difference = forward(model, rollout)[0] - forward(ref_model, rollout)[0]
            kl = (difference * rollout.mask).sum(1).tolist()
            for query, response, nats in zip(queries[part], responses, kl, strict=True):
                texts = tokenizer.decode(query), tokenizer.decode(response)
                rows.append((*texts, "".join(texts), nats, len(response)))
    table = pd.DataFrame(rows, columns=["query", "response", "text", "kl", "length"])
    table["score"] = finite(reward(table["text"].tolist()), table["text"]).cpu().numpy()
    return table


@torch.no_grad()
def evaluate_answers(
    trainer,
    reward: Callable[[Sequence[str], Sequence[str]], Tensor],
    prompts: Sequence[str],
    seed: int = 0,
    **generation,
) -> pd.DataFrame:
    """One sampled answer per prompt from a trainer's policy: columns prompt, answer, kl, length, finished, score.

    As :func:`evaluate`, but the reward takes prompts and answers, and the reference is the trainer's, adapter or model.
    ``finished`` says whether the answer ended by itself, with EOS.
    """
    tokenizer = trainer.tokenizer
    queries = [torch.tensor(ids) for ids in tokenizer(list(prompts))["input_ids"]]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        responses = trainer.generate(queries, return_prompt=False, **generation)
    model = trainer.accelerator.unwrap_model(trainer.model)
    blank = torch.zeros(len(responses), device=model.device)
    rollout = Rollout.from_lists(queries, responses, blank, pad_token_id(tokenizer))
    how = {"at_most": trainer.config.mini_batch_size, "begin_suppress": trainer.config.begin_suppress_tokens}
    with without_dropout(model), trainer.accelerator.autocast():
        logprobs = forward(model, rollout, **how)[0]
        with trainer.reference() as reference:
            difference = logprobs - forward(reference, rollout, **how)[0]
    answers = [text.strip() for text in tokenizer.batch_decode(responses, skip_special_tokens=True)]
    return pd.DataFrame(
        {
            "prompt": prompts,
            "answer": answers,
            "kl": (difference * rollout.mask).sum(1).tolist(),
            "length": [len(response) for response in responses],
            "finished": [bool(response[-1] == tokenizer.eos_token_id) for response in responses],
            "score": finite(reward(prompts, answers), answers).tolist(),
        }
    )


def mean_ci(values) -> tuple[float, float]:
    """Mean and half-width of its 95 % confidence interval (normal approximation)."""
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(1.96 * values.std(ddof=1) / np.sqrt(len(values)))


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Share of different n-grams of words among all n-grams (Li et al. 2016, arXiv:1510.03055); 1 is most diverse."""
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def summarise(table: pd.DataFrame) -> pd.Series:
    """Score, KL, length (mean ± 95 % interval) and distinct-1/2 of an evaluation, for display."""
    row = {name: "{:.2f} ± {:.2f}".format(*mean_ci(table[name])) for name in ("score", "kl", "length")}
    return pd.Series(row | {f"distinct-{n}": f"{distinct_n(table['response'], n):.2f}" for n in (1, 2)})
