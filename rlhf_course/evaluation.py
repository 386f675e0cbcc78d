"""Measure a policy's score, KL, length and diversity, with intervals, on fixed held-out queries."""

import re
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rlhf_course.data import prompt_ids
from rlhf_course.policy.network import without_dropout
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.rollout import Samples, forward
from rlhf_course.ppo.sampling import end_tokens, pad_token_id
from rlhf_course.ppo.trainer import PPOTrainer
from rlhf_course.rewards import check_texts, require_finite


@torch.no_grad()
def evaluate(
    trainer: PPOTrainer,
    score: Callable[[Sequence[str], Sequence[str]], Tensor],
    queries: Sequence[str] | Sequence[Tensor],
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    batch_size: int = 256,
    **generation_kwargs,
) -> pd.DataFrame:
    """Sample one response per query and score it; return one row per query.

    Args:
        trainer: provides the policy, the reference for KL, and the precision.
        score: maps query texts and response texts to scores (B,).
        queries: texts (responses are then stripped) or token ids (responses stay as sampled).
        lengths: token limit for each response; default: ``max_new_tokens`` for all.
        seed: seeds sampling; the global generators' states are restored.
        generation_kwargs: passed to :meth:`PPOTrainer.generate`.

    Columns: query, response, kl, nll, length (tokens), finished (ends with EOS), score. ``nll`` is
    −log p(response) under the reference; ``kl`` is ``nll`` + log p(response) under the policy; both
    are in nats. Raises :func:`require_finite`'s errors.
    """
    tokenizer = trainer.tokenizer
    are_texts = isinstance(queries[0], str)
    if are_texts:
        query_texts = check_texts("queries", queries)
        queries = [torch.tensor(ids) for ids in prompt_ids(tokenizer, query_texts)]
    else:
        query_texts = tokenizer.batch_decode(queries)
    next_length = iter(lengths).__next__ if lengths is not None else None
    generation_options = {"return_prompt": False, **generation_kwargs}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        responses = trainer.generate(queries, next_length, batch_size, **generation_options)
    response_texts = tokenizer.batch_decode(responses, skip_special_tokens=are_texts)
    if are_texts:
        response_texts = [text.strip() for text in response_texts]
    table = pd.DataFrame({"query": query_texts, "response": response_texts})
    measured = _measure(trainer, queries, responses, generation_kwargs)
    scores = require_finite(score(query_texts, response_texts), response_texts)
    return table.join(measured).assign(score=scores.tolist())


def _measure(trainer: PPOTrainer, queries, responses, settings: dict) -> pd.DataFrame:
    """Return columns kl, nll, length and finished; queries and responses are token ids."""
    no_scores = torch.zeros(len(responses), device=trainer.policy.device)
    samples = Samples.from_lists(queries, responses, no_scores, pad_token_id(trainer.tokenizer))
    with without_dropout(trainer.policy), trainer.accelerator.autocast():
        logprobs = _token_logprobs(trainer.policy, samples, trainer.config)
        with trainer.reference() as reference:
            ref_logprobs = _token_logprobs(reference, samples, trainer.config)
    eos_ids = end_tokens(trainer.policy, settings)
    columns = {
        "kl": ((logprobs - ref_logprobs) * samples.mask).sum(1).tolist(),
        "nll": (-ref_logprobs * samples.mask).sum(1).tolist(),
        "length": [len(response) for response in responses],
        "finished": [bool((response[-1] == eos_ids).any()) for response in responses],
    }
    return pd.DataFrame(columns)


def _token_logprobs(model, samples: Samples, config: PPOConfig) -> Tensor:
    """Return the response tokens' log-probabilities (B, T) in nats."""
    logprobs, *_ = forward(
        model, samples, config.begin_suppress_tokens, at_most=config.mini_batch_size
    )
    return logprobs


@torch.no_grad()
def text_losses(trainer: PPOTrainer, texts: Sequence[str], max_tokens: int = 64) -> pd.DataFrame:
    """Return the losses of the reference and of the policy on given texts, in nats per token.

    There is a row per text, and it averages the text's tokens after the first, up to
    ``max_tokens``. A policy that forgets its language has a higher loss than the reference.
    """
    tokenizer = trainer.tokenizer
    rows = [torch.tensor(ids[:max_tokens]) for ids in tokenizer(list(texts))["input_ids"]]
    rows = [ids for ids in rows if len(ids) > 1]
    samples = Samples.from_lists(
        queries=[ids[:1] for ids in rows],
        responses=[ids[1:] for ids in rows],
        scores=torch.zeros(len(rows), device=trainer.policy.device),
        pad_token_id=pad_token_id(tokenizer),
    )
    tokens = samples.mask.sum(1)
    with without_dropout(trainer.policy), trainer.accelerator.autocast():
        policy_logprobs = _token_logprobs(trainer.policy, samples, trainer.config)
        with trainer.reference() as reference:
            reference_logprobs = _token_logprobs(reference, samples, trainer.config)
    losses = {
        "reference": -(reference_logprobs * samples.mask).sum(1) / tokens,
        "policy": -(policy_logprobs * samples.mask).sum(1) / tokens,
    }
    return pd.DataFrame({name: loss.tolist() for name, loss in losses.items()})


def mean_ci(values) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval (normal approximation)."""
    values = np.asarray(values, dtype=float)
    standard_error = values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(1.96 * standard_error)


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Return the share of word n-grams that are distinct (Li et al. 2016, arXiv:1510.03055).

    Return NaN if there are no n-grams, as in languages without spaces between words.
    """
    grams = []
    for text in texts:
        words = text.split()
        for start in range(len(words) - n + 1):
            grams.append(tuple(words[start : start + n]))
    return len(set(grams)) / len(grams) if grams else float("nan")


def perplexity(table: pd.DataFrame) -> float:
    """Return the responses' perplexity per token under the reference."""
    return float(np.exp(table["nll"].sum() / table["length"].sum()))


def words_of(text: str) -> list[str]:
    """Return a text's words (a to z) in lower case."""
    return re.findall("[a-z]+", text.lower())


def unknown_words(texts: Sequence[str], known: Collection[str]) -> float:
    """Return the share of words (a to z) that are not in ``known``; NaN if there are no words.

    Each text's last word does not count, because it may be cut off.
    """
    words = [word for text in texts for word in words_of(text)[:-1]]
    if not words:
        return float("nan")
    return sum(word not in known for word in words) / len(words)
