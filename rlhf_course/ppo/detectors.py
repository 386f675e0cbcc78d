"""What goes wrong in PPO on language models, recognised by its symptoms while it happens.

Each detector reads the statistics of a step; the trainer warns once per detector, and the warning
names the cure. Notebook 06 provokes every one of them. Below them are warnings about what ``step``
is given.
"""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.device import to_host

FIRST = 3  # steps that stand for how the run began


def reference_differs(history: list[dict], config: PPOConfig) -> str | None:
    """KL at the first step, where policy and reference are one model, is not 0."""
    kl = history[0]["objective/kl"]
    if history[0]["step"] == 0 and len(history) == 1 and abs(kl) > 0.05:
        return (
            f"the KL is {kl:.2f} nats although nothing has been trained yet: the reference is not"
            " the model that the policy started as. A common cause is an adapter that the"
            " reference lacks. Leave ref_model out, and the trainer keeps a frozen copy of the"
            " policy; where another reference is what you want, ignore this."
        )


def negative_kl(history: list[dict], config: PPOConfig) -> str | None:
    """The mean KL of a step is below 0 by more than chance: samples do not come from the policy
    that is scored.
    """
    kl = np.asarray(history[-1]["objective/kl_dist"])
    bound = -3 * kl.std() / np.sqrt(len(kl)) - 0.05
    if config.kl_penalty == "kl" and kl.mean() < bound:
        return (
            f"the KL is {kl.mean():.2f} nats; below 0 it measures nothing. The samples do not come"
            " from the distribution that is scored: generate with top_k=0, top_p=1.0 and no"
            " penalties or suppressed tokens, and score every token that was sampled."
        )


def empty_answers(history: list[dict], config: PPOConfig) -> str | None:
    """Most responses are EOS alone, or with one token before it (a space, say), which they were not
    at first.
    """
    lengths = (np.asarray(row["tokens/responses_dist"]) for row in (history[0], history[-1]))
    at_first, now = (float((x <= 2).mean()) for x in lengths)
    if at_first < 0.25 and now > 0.5:
        return (
            f"{now:.0%} of the responses are one or two tokens ({at_first:.0%} at first), most"
            " likely EOS. The reward model scores empty answers high: audit it and train it with"
            " empty answers as rejected ones. PPOConfig(begin_suppress_tokens=[eos]) only rules"
            " out the worst of it."
        )


def shorter_answers(history: list[dict], config: PPOConfig) -> str | None:
    """Responses have lost more than a third of their length."""
    lengths = [np.mean(row["tokens/responses_dist"]) for row in history]
    before, now = np.mean(lengths[:FIRST]), np.mean(lengths[-FIRST:])
    if len(lengths) > FIRST and now < 0.65 * before:
        return (
            f"responses have shrunk from {before:.0f} to {now:.0f} tokens. Read some: where they"
            " got worse, the reward model pays for brevity. Audit it with truncated answers and"
            " add such pairs; a larger init_kl_coef slows the drift down."
        )


def far_from_reference(history: list[dict], config: PPOConfig) -> str | None:
    """The KL is far above its target, where a proxy reward no longer means anything."""
    kl = history[-1]["objective/kl"]
    if kl > 3 * config.target:
        return (
            f"the KL is {kl:.1f} nats per response, three times the target of {config.target:g}."
            " This far from the reference the score mostly measures the reward model's mistakes"
            " (Gao et al. 2022, arXiv:2210.10760). Raise init_kl_coef, lower the learning rate or"
            " stop earlier; compare samples, not scores."
        )


DETECTORS: dict[str, Callable[[list[dict], PPOConfig], str | None]] = {
    "reference differs": reference_differs,
    "negative KL": negative_kl,
    "empty answers": empty_answers,
    "shorter answers": shorter_answers,
    "far from the reference": far_from_reference,
}


class Detectors:
    """All detectors over the steps of one run. ``fired``: name → the step at which it first had
    something to say.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config, self.history, self.fired = config, [], {}

    def check(self, stats: dict, step: int) -> None:
        """Take in a step's statistics; warns (``UserWarning``) once per detector."""
        row = {
            key: stats[key]
            for key in ("objective/kl", "objective/kl_dist", "tokens/responses_dist")
        }
        self.history.append(
            {"step": step} | {key: np.asarray(value).tolist() for key, value in row.items()}
        )
        del self.history[FIRST : -FIRST - 1]  # how the run began, and its latest steps
        for name, detect in DETECTORS.items():
            if name not in self.fired and (message := detect(self.history, self.config)):
                self.fired[name] = step
                warnings.warn(f"Step {step + 1}, {name}: {message}", stacklevel=3)

    def state_dict(self) -> dict:
        """What has been seen and said so far, in plain numbers and words."""
        return {"history": self.history, "fired": self.fired}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.history, self.fired = list(state["history"]), dict(state["fired"])


def warn_about_float16(model: torch.nn.Module) -> None:
    """Warn of trainable float16 weights: updates of 1e-5 round to nothing, and large ones overflow
    at 65,504 to NaN.
    """
    if any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters()):
        warnings.warn(
            "The policy's trainable weights are float16, which ends in NaN sooner or later. Load"
            " the model with dtype=torch.float32 and let mixed_precision='bf16' make it fast, or"
            " train an adapter in float32.",
            stacklevel=3,
        )


def warn_about_samples(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    masks: Sequence[Tensor] | None,
    tokenizer,
) -> None:
    """Warn of samples that teach something else than their responses.

    These are padding (two tokens before a query, any behind a response's EOS), prompts that are
    repeated (of more than a token), and a final EOS that is masked.
    """
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    messages = []
    padded = {"queries": [len(q) > 1 and bool((q[:2] == pad).all()) for q in queries]}
    padded["responses"] = [eos is not None and bool((r[:-1] == eos).any()) for r in responses]
    for name, rows in padded.items():
        if any(rows):
            messages.append(
                f"{sum(rows)} of {len(rows)} {name} are padded (token {pad}), and padding is learnt"
                f" like any other token. Give step each of the {name} without it, as generate"
                " returns them for a list of queries."
            )
    if all(
        len(r) > len(q) > 1 and r[: len(q)].equal(q)
        for q, r in zip(queries, responses, strict=True)
    ):
        messages.append(
            "Each response begins with its query, as generate gives it without return_prompt=False:"
            " the policy would learn to repeat its queries. Give step the response tokens alone."
        )
    ends = zip(responses, [] if masks is None else to_host(masks), strict=False)
    if hidden := sum(
        bool(response[-1] == tokenizer.eos_token_id) and not bool(mask[-1])
        for response, mask in ends
    ):
        messages.append(
            f"response_masks leave out the final EOS of {hidden} of {len(responses)} responses, as"
            " a mask made from ids != pad does where the pad token is EOS. Make masks from"
            " lengths; otherwise the policy learns nothing about stopping."
        )
    for message in messages:
        warnings.warn(message, stacklevel=3)
