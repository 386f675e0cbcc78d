"""Adapters on one base: policy, reference and reward model with a single copy of the base model in memory.

LoRA is Hu et al. 2021, arXiv:2106.09685. All adapters live in one PeftModel; the active one decides what it computes.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from rlhf_course.policy.saved import check_adapter
from rlhf_course.policy.value_head import AutoModelForCausalLMWithValueHead
from rlhf_course.runtime.hub import hub_errors

REFERENCE, REWARD = "ref", "reward"


def quantization(kind: str) -> BitsAndBytesConfig:
    """The ``quantization_config`` of a frozen base in ``8bit`` or ``4bit``; adapters on it stay in float32.

    4 bits are NF4 (Dettmers et al. 2023, arXiv:2305.14314). Raises ``ValueError`` for another kind, where bitsandbytes
    is not installed, and for 4 bits without a GPU.
    """
    if kind not in ("8bit", "4bit"):
        raise ValueError(f"quantization {kind!r} is unknown; choose 8bit or 4bit.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"A base in {kind} needs bitsandbytes, which is not installed: pip install bitsandbytes.")
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if not torch.cuda.is_available():
        raise ValueError("A base in 4bit needs a GPU: on a CPU no gradient passes through bitsandbytes' kernels.")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


@contextmanager
def use_adapter(model: PeftModel, name: str) -> Iterator[None]:
    """The adapter ``name`` switched on, frozen; afterwards the one found is on again, and trainable."""
    found = model.active_adapter
    model.set_adapter(name, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(found)


@contextmanager
def reference_adapter(policy: AutoModelForCausalLMWithValueHead) -> Iterator[AutoModelForCausalLMWithValueHead]:
    """The same model with its frozen adapter ``ref`` switched on."""
    with use_adapter(policy.pretrained_model, REFERENCE):
        yield policy


def add_reference_adapter(policy: AutoModelForCausalLMWithValueHead) -> None:
    """Keep a frozen copy of the active adapter as ``ref``; one left by an earlier trainer is replaced."""
    model = policy.pretrained_model
    source = model.active_adapter
    weights = {key: value.clone() for key, value in get_peft_model_state_dict(model, adapter_name=source).items()}
    _add_frozen(model, REFERENCE, copy.deepcopy(model.peft_config[source]), weights)


class RewardAdapter(nn.Module):
    """A reward model on the policy's own base: an adapter (``reward``; a second one ``reward2``) and a score head.

    A classifier with one output, as :class:`~rlhf_course.rewards.RewardModel` takes it. ``folder`` holds what training
    a LoRA reward model left there: an adapter of task type SEQ_CLS, with the head among its weights.

    Raises ``ValueError`` when the policy has no adapters, or the folder no head with one output, or not all of one.
    """

    def __init__(self, policy: AutoModelForCausalLMWithValueHead, folder: str | Path) -> None:
        super().__init__()
        if not policy.is_peft_model:
            raise ValueError("A reward adapter shares the base of a policy with adapters; this policy has none.")
        self.pretrained_model = policy.pretrained_model
        with hub_errors(folder):
            config, weights = PeftConfig.from_pretrained(str(folder)), load_peft_weights(str(folder), device="cpu")
        head = {key: weights.pop(key) for key in [*weights] if key.endswith("score.weight")}
        if len(head) != 1:
            raise ValueError(
                f"The adapter in {folder} holds no score head, so it is no reward model. Train it with task type "
                "SEQ_CLS and modules_to_save score, as train_reward_model.py --use_peft does."
            )
        head = next(iter(head.values()))
        if len(head) != 1:
            raise ValueError(f"The adapter in {folder} scores {len(head)} labels, and a reward model has one output.")
        config.task_type, config.modules_to_save, config.inference_mode = "CAUSAL_LM", None, True
        names = (REWARD, *(f"{REWARD}{number}" for number in range(2, 100)))
        self.name = next(name for name in names if name not in self.pretrained_model.peft_config)
        _add_frozen(self.pretrained_model, self.name, config, weights)
        check_adapter(self.pretrained_model, self.name, weights, folder)
        self.config = copy.deepcopy(policy.config)
        self.config.num_labels = 1
        self.score = nn.Linear(self.config.get_text_config().hidden_size, 1, bias=False)
        self.score.weight = nn.Parameter(head.float(), requires_grad=False)
        self.score.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.pretrained_model.device

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **positions: Tensor) -> SequenceClassifierOutput:
        """``logits`` (B, 1) at the last token that is not padding, as transformers' classifiers choose it."""
        trunk = self.pretrained_model.get_base_model().base_model  # without the vocabulary projection
        with use_adapter(self.pretrained_model, self.name):
            output = trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions)
        column = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (column * (input_ids != self.config.get_text_config().pad_token_id)).argmax(1)
        hidden = output.last_hidden_state[torch.arange(len(last), device=last.device), last]
        return SequenceClassifierOutput(logits=self.score(hidden.to(self.score.weight)))


def _add_frozen(model: PeftModel, name: str, config: PeftConfig, weights: dict[str, Tensor]) -> None:
    """Add (or replace) an adapter with these weights; the active adapter stays the one that trains."""
    if name in model.peft_config:
        model.delete_adapter(name)
    model.add_adapter(name, config)
    with warnings.catch_warnings(action="ignore"):  # about shapes, which check_adapter looks at
        result = set_peft_model_state_dict(model, weights, adapter_name=name, ignore_mismatched_sizes=True)
    if result.unexpected_keys:
        raise ValueError(
            f"The adapter {name!r} was trained on another base: {result.unexpected_keys[0]} has no place in this one."
        )
    with use_adapter(model, name):
        pass  # leaves it frozen
