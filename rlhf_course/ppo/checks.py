"""What would go wrong silently in a PPO step: bad samples raise or warn, symptoms warn once.

Notebook 06 provokes every symptom in ``DETECTORS``.
"""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

FIRST = 3  # steps that stand for how the run began


def check_samples(
    policy, size: int, queries, responses, scores, masks=None
) -> tuple[list[Tensor], list[Tensor]]:
    """Queries and responses as :func:`token_ids`; raises ``ValueError`` unless all can be used."""
    given = {"queries": queries, "responses": responses, "scores": scores}
    given |= {} if masks is None else {"response_masks": masks}
    for name, rows in given.items():
        if len(rows) != size:
            raise ValueError(f"{name} has {len(rows)} entries, but batch_size is {size}.")
    queries = token_ids(policy.vocab_size, "query", queries)
    responses = token_ids(policy.vocab_size, "response", responses)
    for i, (keep, response) in enumerate(zip(masks or (), responses, strict=masks is not None)):
        if len(keep) != len(response) or {*torch.as_tensor(keep).tolist()} not in ({0, 1}, {1}):
            raise ValueError(
                f"response_masks {i} must hold a 0 or 1 for each of {len(response)} response "
                f"tokens, and at least one 1; got {torch.as_tensor(keep).tolist()}."
            )
    longest = max(len(q) + len(r) for q, r in zip(queries, responses, strict=True))
    check_length(longest, policy.config)
    return queries, responses


def token_ids(known: int, name: str, rows: Sequence) -> list[Tensor]:
    """The rows (lists or tensors) as 1-D int64 tensors on the host.

    Raises ``ValueError`` with the name and number of one that is empty or no list of tokens, or
    that has tokens beyond the ``known`` ones.
    """
    rows = [torch.as_tensor(row) for row in rows]
    for i, row in enumerate(rows):
        if row.dim() != 1 or row.is_floating_point() and len(row):
            what = f"{row.dtype} of shape {tuple(row.shape)}"
            raise ValueError(f"{name} {i} must be a 1-D tensor of token ids; got {what}.")
        if not len(row):
            raise ValueError(
                f"{name} {i} is empty: PPO predicts each response token from what stands before it "
                "and gives the score to the last one. Sample at least one token "
                "(min_new_tokens=1), or leave this sample out."
            )
    together = torch.cat([row.to(rows[0].device) for row in rows]).cpu().long()
    rows = [*together.split([len(row) for row in rows])]
    if together.min() < 0 or together.max() >= known:
        i = next(i for i, row in enumerate(rows) if row.min() < 0 or row.max() >= known)
        raise ValueError(
            f"{name} {i} has the token {rows[i].min() if rows[i].min() < 0 else rows[i].max()}, and"
            f" the model knows 0 to {known - 1}: is it another tokenizer's?"
        )
    return rows


def check_length(tokens: int, config) -> None:
    """Raise ``ValueError`` when a query with its response needs more positions than a model has.

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
    """Scores as float32 (B,) on ``device``; raises for shapes and numbers that cannot be used."""
    scores = [torch.as_tensor(score).detach() for score in scores]
    for i, score in enumerate(scores):
        if score.numel() != 1:
            shape = tuple(score.shape)
            raise ValueError(f"score {i} has shape {shape}; a score is one number per sample.")
    stacked = torch.stack([score.reshape(()).float() for score in scores]).to(device)
    if not stacked.isfinite().all():
        i = int((~stacked.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"Step {step + 1}: the score of sample {i} is {stacked[i].item()}. Look at its text,"
            " and at the reward model's dtype (float16 overflows where bfloat16 and float32 do"
            " not)."
        )
    return stacked


def check_outputs(outputs: dict[str, Tensor], step: int) -> None:
    """Raise ``FloatingPointError``, naming which and for which sample, unless all are finite."""
    for name, tensor in outputs.items():
        samples = tensor.isfinite().all(-1)
        if not samples.all():
            raise FloatingPointError(
                f"Step {step + 1}: the {name} for sample {int((~samples).nonzero()[0])} are NaN or"
                " Inf; no weight was changed in this step. Train float32 weights (with bf16"
                " autocast if you like), lower the learning rate, or go back to the last"
                " checkpoint."
            )


def warn_about_samples(queries, responses, masks, tokenizer) -> None:
    """Warn of padding, repeated prompts and masked EOS, which PPO would learn like the rest."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    pad = eos if pad is None else pad
    padded = {"queries": [len(q) > 1 and bool((q[:2] == pad).all()) for q in queries]}
    padded["responses"] = [eos is not None and bool((r[:-1] == eos).any()) for r in responses]
    messages = [
        f"{sum(rows)} of {len(rows)} {name} are padded (token {pad}), and padding is learnt like"
        f" any other token. Give step each of the {name} without it, as generate returns them."
        for name, rows in padded.items()
        if any(rows)
    ]
    pairs = zip(queries, responses, strict=True)
    if all(len(r) > len(q) > 1 and r[: len(q)].equal(q) for q, r in pairs):
        messages.append(
            "Each response begins with its query, as generate gives it without "
            "return_prompt=False: the policy would learn to repeat its queries."
        )
    ends = zip(responses, masks or (), strict=False)
    if hidden := sum(bool(r[-1] == eos) and not bool(mask[-1]) for r, mask in ends):
        messages.append(
            f"response_masks leave out the final EOS of {hidden} of {len(responses)} responses, as"
            " a mask made from ids != pad does where the pad token is EOS. Make masks from"
            " lengths: otherwise the policy learns nothing about stopping."
        )
    for message in messages:
        warnings.warn(message, stacklevel=3)


def reference_differs(history: list[dict], target: float) -> str | None:
    """KL at the first step, where policy and reference are one model, is not 0."""
    kl = history[0]["objective/kl"]
    if history[0]["step"] == 0 and len(history) == 1 and abs(kl) > 0.05:
        return (
            f"the KL is {kl:.2f} nats although nothing has been trained: is an adapter missing from"
            " the reference? Leave ref_model out for a frozen copy of the policy."
        )


def negative_kl(history: list[dict], target: float) -> str | None:
    """The mean KL of a step is below 0 by more than chance."""
    kl = np.asarray(history[-1]["objective/kl_dist"])
    if kl.mean() < -3 * kl.std() / np.sqrt(len(kl)) - 0.05:
        return (
            f"the KL is {kl.mean():.2f} nats; below 0 it measures nothing. Sample from the"
            " distribution that is scored: top_k=0, top_p=1.0, no penalties; score every token."
        )


def empty_answers(history: list[dict], target: float) -> str | None:
    """Most responses are EOS alone, or with one token before it, which they were not at first."""
    lengths = (np.asarray(row["tokens/responses_dist"]) for row in (history[0], history[-1]))
    at_first, now = (float((x <= 2).mean()) for x in lengths)
    if at_first < 0.25 and now > 0.5:
        return (
            f"{now:.0%} of the responses are one or two tokens ({at_first:.0%} at first). The"
            " reward model scores empty answers high: train it with empty answers as rejected"
            " ones."
        )


def shorter_answers(history: list[dict], target: float) -> str | None:
    """Responses have lost more than a third of their length."""
    lengths = [np.mean(row["tokens/responses_dist"]) for row in history]
    before, now = np.mean(lengths[:FIRST]), np.mean(lengths[-FIRST:])
    if len(lengths) > FIRST and now < 0.65 * before:
        return (
            f"responses have shrunk from {before:.0f} to {now:.0f} tokens. Read some: where they"
            " got worse, the reward model pays for brevity. Add truncated answers as rejected"
            " ones."
        )


def far_from_reference(history: list[dict], target: float) -> str | None:
    """The KL is far above its target, where a proxy reward no longer means anything."""
    kl = history[-1]["objective/kl"]
    if kl > 3 * target:
        return (
            f"the KL is {kl:.1f} nats per response, the target {target:g}. Here the score measures"
            " the reward model's mistakes (Gao et al. 2022, arXiv:2210.10760): raise init_kl_coef"
            " or stop earlier."
        )


DETECTORS: dict[str, Callable[[list[dict], float], str | None]] = {
    "reference differs": reference_differs,
    "negative KL": negative_kl,
    "empty answers": empty_answers,
    "shorter answers": shorter_answers,
    "far from the reference": far_from_reference,
}


class Detectors:
    """All detectors over the steps of one run; ``fired``: name → step of its first warning.

    ``target`` is the KL controller's, in nats; KL penalties other than ``kl`` are never negative.
    """

    def __init__(self, target: float) -> None:
        self.target, self.history, self.fired = target, [], {}

    def check(self, stats: dict, step: int) -> None:
        """Take in a step's statistics; warns (``UserWarning``) once per detector."""
        keys = ("objective/kl", "objective/kl_dist", "tokens/responses_dist")
        row = {key: np.asarray(stats[key]).tolist() for key in keys}
        self.history.append({"step": step} | row)
        del self.history[FIRST : -FIRST - 1]  # how the run began, and its latest steps
        for name, detect in DETECTORS.items():
            if name not in self.fired and (message := detect(self.history, self.target)):
                self.fired[name] = step
                warnings.warn(f"Step {step + 1}, {name}: {message}", stacklevel=3)

    def state_dict(self) -> dict:
        """What has been seen and said so far, in plain numbers and words."""
        return {"history": self.history, "fired": self.fired}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.history, self.fired = list(state["history"]), dict(state["fired"])
