"""What goes wrong in PPO on language models, recognised by its symptoms while it happens.

Each detector looks at the statistics of a step; the trainer warns once per detector, and the warning names the cure.
Notebook 05 provokes every one of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.transfer import to_host

FIRST = 3  # steps that stand for how the run began


def reference_differs(history: list[dict], config: PPOConfig) -> str | None:
    """KL at the first step, where policy and reference are one model, is not 0."""
    kl = history[0]["objective/kl"]
    if history[0]["step"] == 0 and len(history) == 1 and abs(kl) > 0.05:
        return (
            f"the KL is {kl:.2f} nats although nothing has been trained yet: the reference is not the model that the "
            "policy started as. A common cause is an adapter that the reference lacks. Leave ref_model out, and the "
            "trainer keeps a frozen copy of the policy; where another reference is what you want, ignore this."
        )


def negative_kl(history: list[dict], config: PPOConfig) -> str | None:
    """The mean KL of a step is below 0 by more than chance: samples do not come from the policy that is scored."""
    kl = history[-1]["kl_dist"]
    bound = -3 * kl.std() / np.sqrt(len(kl)) - 0.05
    if config.kl_penalty == "kl" and kl.mean() < bound:
        return (
            f"the KL is {kl.mean():.2f} nats; below 0 it measures nothing. The samples do not come from the "
            "distribution that is scored: generate with top_k=0, top_p=1.0 and no penalties or suppressed tokens, and "
            "score every token that was sampled."
        )


def empty_answers(history: list[dict], config: PPOConfig) -> str | None:
    """Most responses are EOS alone, or with one token before it (a space, say), which they were not at first."""
    share = [float((row["lengths"] <= 2).mean()) for row in (history[0], history[-1])]
    if share[0] < 0.25 and share[1] > 0.5:
        return (
            f"{share[1]:.0%} of the responses are one or two tokens ({share[0]:.0%} at first), most likely EOS. The "
            "reward model scores empty answers high: audit it and train it with empty answers as rejected ones. "
            "PPOConfig(begin_suppress_tokens=[eos]) only rules out the worst of it."
        )


def shorter_answers(history: list[dict], config: PPOConfig) -> str | None:
    """Responses have lost more than a third of their length."""
    lengths = [row["lengths"].mean() for row in history]
    before, now = np.mean(lengths[:FIRST]), np.mean(lengths[-FIRST:])
    if len(lengths) > FIRST and now < 0.65 * before:
        return (
            f"responses have shrunk from {before:.0f} to {now:.0f} tokens. Read some: where they got worse, the reward "
            "model pays for brevity. Audit it with truncated answers and add such pairs; a larger init_kl_coef slows "
            "the drift down."
        )


def far_from_reference(history: list[dict], config: PPOConfig) -> str | None:
    """The KL is far above its target, where a proxy reward no longer means anything."""
    kl = history[-1]["objective/kl"]
    if kl > 3 * config.target:
        return (
            f"the KL is {kl:.1f} nats per response, three times the target of {config.target:g}. This far from the "
            "reference the score mostly measures the reward model's mistakes (Gao et al. 2022, arXiv:2210.10760). "
            "Raise init_kl_coef, lower the learning rate or stop earlier; compare samples, not scores."
        )


DETECTORS: dict[str, Callable[[list[dict], PPOConfig], str | None]] = {
    "reference differs": reference_differs,
    "negative KL": negative_kl,
    "empty answers": empty_answers,
    "shorter answers": shorter_answers,
    "far from the reference": far_from_reference,
}


class Detectors:
    """All detectors over the steps of one run. ``fired``: name → the step at which it first had something to say."""

    def __init__(self, config: PPOConfig) -> None:
        self.config, self.history, self.fired = config, [], {}

    def look(self, stats: dict, step: int) -> None:
        """Take in a step's statistics; warns (``UserWarning``) once per detector."""
        keys = {"objective/kl": "objective/kl", "kl_dist": "objective/kl_dist", "lengths": "tokens/responses_dist"}
        self.history.append({"step": step} | {name: stats[key] for name, key in keys.items()})
        del self.history[FIRST : -FIRST - 1]  # how the run began, and its latest steps
        for name, detect in DETECTORS.items():
            if name not in self.fired and (message := detect(self.history, self.config)):
                self.fired[name] = step
                warnings.warn(f"Step {step}, {name}: {message}", stacklevel=3)

    def state_dict(self) -> dict:
        """What has been seen and said so far, in numbers, words and tensors."""
        rows = [
            {k: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in self.history
        ]
        return {"history": rows, "fired": self.fired}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.history = [
            {k: v.numpy() if isinstance(v, Tensor) else v for k, v in row.items()} for row in state["history"]
        ]
        self.fired = dict(state["fired"])


def warn_about_float16(model: torch.nn.Module) -> None:
    """Warn when weights that will be trained are float16: an update of 1e-5 rounds to nothing, and large ones overflow.

    float16 ends at 65,504; the next step's probabilities are then NaN.
    """
    if any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters()):
        warnings.warn(
            "The policy's trainable weights are float16, which ends in NaN sooner or later. Load the model with "
            "dtype=torch.float32 and let mixed_precision='bf16' make it fast, or train an adapter in float32.",
            stacklevel=3,
        )


def warn_about_prompts(queries: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    """Warn when all responses begin with their queries, of more than a token: the policy learns to repeat them."""
    if all(len(r) > len(q) > 1 and r[: len(q)].equal(q) for q, r in zip(queries, responses, strict=True)):
        warnings.warn(
            "Each response begins with its query, as generate gives it without return_prompt=False: the policy would "
            "learn to repeat its queries. Give step the response tokens alone.",
            stacklevel=3,
        )


def warn_about_padding(queries: Sequence[Tensor], responses: Sequence[Tensor], tokenizer) -> None:
    """Warn when a query begins, or a response ends, with two padding tokens: PPO would learn them like any others."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for name, ends in (("queries", [q[:2] for q in queries]), ("responses", [r[-2:] for r in responses])):
        if padded := sum(len(end) == 2 and bool((end == pad).all()) for end in ends):
            warnings.warn(
                f"{padded} of {len(ends)} {name} are padded (token {pad}), and padding is learnt like any other token. "
                f"Give step each of the {name} without it, as generate returns them for a list of queries.",
                stacklevel=3,
            )


def warn_about_masked_eos(responses: Sequence[Tensor], masks: Sequence[Tensor] | None, tokenizer) -> None:
    """Warn when masks leave out the final EOS of responses: then nothing ever learns when to stop."""
    if masks is None:
        return
    both = zip(responses, to_host(masks), strict=True)
    hidden = sum(bool(response[-1] == tokenizer.eos_token_id) and not bool(mask[-1]) for response, mask in both)
    if hidden:
        warnings.warn(
            f"response_masks leave out the final EOS of {hidden} of {len(responses)} responses, as a mask made from "
            "ids != pad does where the pad token is EOS. Make masks from lengths; otherwise the policy learns "
            "nothing about stopping.",
            stacklevel=3,
        )
