"""What ``PPOTrainer`` accepts: checks that say which part, sample or number is wrong, and the
processing of scores.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_course.policy.save_load import known_tokens
from rlhf_course.ppo.algorithm import RunningMoments
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.device import to_device, to_host


def check_parts(model, ref_model, optimizer, config: PPOConfig, dataset) -> None:
    """Raise ``ValueError`` or ``TypeError`` where a trainer's parts do not fit; None stands for
    what is made later.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(
            "All of the policy's weights are frozen: call requires_grad_(True) on those to be"
            " trained."
        )
    if optimizer is not None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizer is {optimizer!r:.60}; give an optimizer made of the policy's"
                " parameters()."
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if missing := [name for name, p in trained.items() if id(p) not in held]:
            raise ValueError(
                f"The optimizer does not hold the policy's weight {missing[0]} ({len(missing)} of"
                f" {len(trained)} are missing): make it of this policy's parameters(), after"
                " loading, or freeze what is not to be trained."
            )
    known = known_tokens(model)
    if ref_model is not None:
        if {id(p) for p in trained.values()} & {id(p) for p in ref_model.parameters()}:
            raise ValueError(
                "The reference has weights that the policy trains, so the KL would stay 0: leave"
                " ref_model out for a frozen copy, or load the reference apart."
            )
        if known_tokens(ref_model) != known:
            raise ValueError(
                f"The policy knows {known} tokens, and the reference {known_tokens(ref_model)}:"
                " they must have one vocabulary."
            )
    if max(config.begin_suppress_tokens, default=0) >= known:
        raise ValueError(
            f"begin_suppress_tokens is {config.begin_suppress_tokens}, but the policy knows {known}"
            " tokens."
        )
    if isinstance(dataset, dict):
        raise ValueError(
            f"The dataset has the splits {', '.join(dataset)}: give one of them, dataset[split]."
        )


def check_samples(
    policy, size: int, queries, responses, scores, response_masks=None
) -> tuple[list[Tensor], ...]:
    """Queries and responses as :func:`token_ids`; raises ``TypeError`` or ``ValueError`` unless all
    can be used.
    """
    given = {"queries": queries, "responses": responses, "scores": scores}
    given |= {} if response_masks is None else {"response_masks": response_masks}
    for name, rows in given.items():
        if not isinstance(rows, list | tuple | Tensor):
            raise TypeError(f"{name} is a {type(rows).__name__}; give a list of {size} tensors.")
        if len(rows) != size:
            raise ValueError(f"{name} has {len(rows)} entries, but batch_size is {size}.")
    tokens = token_ids(known_tokens(policy), query=queries, response=responses)
    queries, responses = tokens[:size], tokens[size:]
    if response_masks is not None:
        fits = [
            isinstance(k, Tensor) and k.shape == r.shape
            for k, r in zip(response_masks, responses, strict=True)
        ]
        kept = to_host(response_masks) if all(fits) else response_masks
        for i, (fit, keep, tokens) in enumerate(zip(fits, kept, responses, strict=True)):
            if not fit or all(fits) and not keep.any():
                raise ValueError(
                    f"response_masks {i} must be a tensor of {len(tokens)} zeros and ones, not all"
                    " zero."
                )
    check_length(
        max(len(q) + len(r) for q, r in zip(queries, responses, strict=True)), policy.config
    )
    return queries, responses


def token_ids(known: int, **sequences: Sequence) -> list[Tensor]:
    """All the sequences, lists, numpy's or tensors on either side, as 1-D int64 tensors on the
    host.

    Raises ``ValueError`` with the name and number of one that is empty, none, or has tokens beyond
    the ``known`` ones.
    """
    found = {}
    for name, i, given in (
        (name, i, x) for name, group in sequences.items() for i, x in enumerate(group)
    ):
        try:
            found[f"{name} {i}"] = tokens = (
                given if isinstance(given, Tensor) else torch.as_tensor(given)
            )
        except (TypeError, ValueError, RuntimeError):
            tokens = torch.tensor(0)
        if tokens.dim() != 1 or tokens.is_floating_point() and tokens.numel():
            what = (
                f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            )
            what = str(tokens.dtype) if tokens.dim() == 1 else what
            raise ValueError(f"{name} {i} must be a 1-D tensor of token ids; got {what}.")
        if not tokens.numel():
            raise ValueError(
                f"{name} {i} is empty: PPO predicts each response token from what stands before it"
                " and gives the score to the last one. Sample at least one token"
                " (min_new_tokens=1), or leave this sample out."
            )
    together = torch.cat(to_host([*found.values()])).long()
    tokens, (least, most) = (
        [*together.split([x.numel() for x in found.values()])],
        together.aminmax(),
    )
    if least < 0 or most >= known:
        named = ((name, x) for name, ids in zip(found, tokens, strict=True) for x in ids.tolist())
        where, bad = next((name, x) for name, x in named if not 0 <= x < known)
        raise ValueError(
            f"{where} has the token {bad}, and the model knows 0 to {known - 1}: is it another"
            " tokenizer's?"
        )
    return tokens


def check_length(tokens: int, config: PreTrainedConfig) -> None:
    """Raise ``ValueError`` when a query with its response needs more positions than a model knows.

    Their last token needs none: nothing is predicted from it.
    """
    known = getattr(config.get_text_config(), "max_position_embeddings", None) or tokens
    if tokens - 1 > known:
        raise ValueError(
            f"The longest query and response are {tokens} tokens together, but the model knows"
            f" {known} positions. Sample fewer tokens (max_new_tokens, or the LengthSampler), or"
            " cut the queries."
        )


def stack_scores(scores: Sequence[Tensor] | Tensor, device: torch.device, step: int) -> Tensor:
    """Scores, from either side, as float32 (B,) on ``device``; raises for shapes and numbers that
    cannot be used.
    """
    scores = [*(to_host([scores])[0] if isinstance(scores, Tensor) else scores)]
    for i, score in enumerate(scores):
        try:
            scores[i] = torch.as_tensor(score)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"score {i} is {score!r:.60}; a score is one number per sample. A pipeline's is the"
                " probability of whichever label won: take the score of one label (top_k=None), or"
                " SentimentReward."
            ) from None
        if scores[i].numel() != 1:
            raise ValueError(
                f"score {i} has {scores[i].numel()} elements; a score is one number per sample."
            )
    stacked = torch.stack([score.detach().reshape(()).float() for score in to_host(scores)])
    if not stacked.isfinite().all():
        i = int((~stacked.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"Step {step + 1}: the score of sample {i} is {stacked[i].item()}. Look at its text,"
            " and at the reward model's dtype (float16 overflows where bfloat16 and float32 do"
            " not)."
        )
    return to_device([stacked], device)[0]


def check_outputs(outputs: dict[str, Tensor], step: int) -> None:
    """Raise ``FloatingPointError``, naming which and for which sample, unless all tensors (B, R)
    are finite.
    """
    finite = torch.stack([*outputs.values()]).isfinite().all(-1).cpu()  # one sync for all
    for name, samples in zip(outputs, finite, strict=True):
        if not samples.all():
            raise FloatingPointError(
                f"Step {step + 1}: the {name} for sample {int((~samples).nonzero()[0])} are NaN or"
                " Inf; no weight was changed in this step. Train float32 weights (with bf16"
                " autocast if you like), lower the learning rate, or go back to the last"
                " checkpoint."
            )


def check_rates(kl_coef: float, learning_rate: float, step: int) -> None:
    """Raise ``FloatingPointError``, naming which, unless the two are finite."""
    for name, value, where in (
        ("KL coefficient", kl_coef, "init_kl_coef, and target and horizon, which move it"),
        ("learning rate", float(learning_rate), "learning_rate, and the schedule, which moves it"),
    ):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"Step {step + 1}: the {name} is {value}; no weight was changed. Look at {where}."
            )


def check_weights(weights: dict[str, Tensor], step: int) -> None:
    """Raise ``FloatingPointError``, naming one, unless all weights are finite: others are never
    written.
    """
    if bad := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
        raise FloatingPointError(
            f"After step {step}, the weight {bad} has NaN or Inf; nothing was saved. Go back to the"
            " last checkpoint, with a lower learning rate."
        )


def process_scores(
    scores: Tensor, config: PPOConfig, running: RunningMoments, gather=lambda x: x
) -> Tensor:
    """Scores (B,) scaled (and centred) by the running moments and clipped, as the config asks.

    ``gather`` brings together the scores of all processes, whose moments they are.
    """
    if config.use_score_scaling:
        running.update(gather(scores))
        centre, eps = running.mean if config.use_score_norm else 0.0, torch.finfo(scores.dtype).eps
        constant = running.std <= eps * abs(running.mean)  # but for rounding: they have no scale
        scores = (scores - centre) / (1.0 if constant else running.std + eps)
    return (
        scores if config.score_clip is None else scores.clamp(-config.score_clip, config.score_clip)
    )
