"""Switch between adapters on one base; make a reward model that is an adapter on it.

LoRA is from Hu et al. 2021, arXiv:2106.09685. All adapters share one base; one adapter is active at
a time.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from rlhf_course.policy.network import (
    AutoModelForCausalLMWithValueHead,
    trunk,
    without_dropout,
)
from rlhf_course.policy.save_load import (
    check_base,
    moves_base,
    read_adapter,
    set_adapter_weights,
)

REFERENCE = "ref"
REWARD = "reward"


@contextmanager
def use_adapter(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Use a frozen adapter in the with block; then reactivate the previous adapter as trainable."""
    network = model.pretrained_model
    previous = network.active_adapter
    network.set_adapter(name, inference_mode=True)
    try:
        yield model
    finally:
        network.set_adapter(previous)


def quantization(kind: str) -> BitsAndBytesConfig:
    """Return the ``quantization_config`` for a frozen base in ``8bit`` or ``4bit``.

    Adapters stay in float32. 4bit is NF4 (Dettmers et al. 2023, arXiv:2305.14314). Raises
    ``ValueError`` for a kind that is unknown or unavailable.
    """
    if kind not in ("8bit", "4bit"):
        raise ValueError(f"quantization {kind!r} is unknown; choose 8bit or 4bit.")
    if kind == "4bit" and not torch.cuda.is_available():
        raise ValueError("On a CPU, bitsandbytes has no gradient at 4bit. Use a GPU.")
    options = {f"load_in_{kind}": True, "bnb_4bit_quant_type": "nf4"}
    return BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.bfloat16)


class RewardAdapter(nn.Module):
    """Add a reward model to the policy's own base: the adapter ``reward`` and a score head.

    ``folder`` has an adapter of task type SEQ_CLS and its score head. Raises ``ValueError`` if
    the adapter belongs to another base, or does not have exactly one output.
    """

    def __init__(self, policy: AutoModelForCausalLMWithValueHead, folder: str | Path) -> None:
        super().__init__()
        self.pretrained_model = policy.pretrained_model
        if REWARD in self.pretrained_model.peft_config:
            raise ValueError("This policy already has a reward adapter; load the policy again.")
        config, weights = read_adapter(folder)
        score_keys = [key for key in weights if key.endswith("score.weight")]
        score_weights = [weights.pop(key) for key in score_keys]
        if len(score_weights) != 1 or len(score_weights[0]) != 1:
            raise ValueError(f"{folder} has no score head with one output; set num_labels=1.")
        base_keys = [key for key in weights if "lora_" not in key]
        if base_keys:
            raise ValueError(
                f"{folder} also trains {base_keys[0]}, which belongs to the policy's base."
            )
        for adapter in (config, *self.pretrained_model.peft_config.values()):
            if moves_base(adapter):
                raise ValueError(
                    f"init_lora_weights={adapter.init_lora_weights!r} changes the base's weights,"
                    " which policy and reward model share. Train both adapters with the default."
                )
        config.task_type = "CAUSAL_LM"
        config.modules_to_save = None
        check_base(Path(folder), policy)
        add_frozen(self.pretrained_model, REWARD, config, weights, folder)
        self.config = copy.deepcopy(policy.config)
        self.config.num_labels = 1
        score = score_weights[0].float().to(self.device)
        self.score = nn.Linear(score.shape[1], 1, bias=False)
        self.score.weight = nn.Parameter(score, requires_grad=False)

    @property
    def device(self) -> torch.device:
        return self.pretrained_model.device

    @torch.no_grad()
    def compute_reward_score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_
    ) -> Tensor:
        """Return the score head's output at each token, (B, T, 1), as TRL's method does.

        A text's score is the one at its last token. A mask that pads on the left sets positions.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        positions = {}
        if not attention_mask[:, 0].all():
            positions["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
        with without_dropout(self):
            return self.score(self._hidden_states(input_ids, attention_mask, **positions))

    def _hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor, **positions: Tensor
    ) -> Tensor:
        """Return the reward model's last hidden states (B, T, H), in the score head's dtype."""
        network = trunk(self.pretrained_model.get_base_model())
        with use_adapter(self, REWARD):
            output = network(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions
            )
        hidden = output.last_hidden_state
        self.score.to(hidden.device)  # the trainer may have moved the base since
        return hidden.to(self.score.weight.dtype)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, **positions: Tensor
    ) -> SequenceClassifierOutput:
        """Return ``logits`` (B, 1) at the last token that is not padding, as transformers does."""
        hidden = self._hidden_states(input_ids, attention_mask, **positions)
        is_token = input_ids != self.config.get_text_config().pad_token_id
        column = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = column.where(is_token, 0).argmax(1)
        row = torch.arange(len(last), device=last.device)
        return SequenceClassifierOutput(logits=self.score(hidden[row, last]))


def free_name(model: PeftModel, name: str) -> str:
    """Return ``name``, with a number if the model has an adapter of this name."""
    number = 2
    chosen = name
    while chosen in model.peft_config:
        chosen = f"{name}_{number}"
        number += 1
    return chosen


def add_frozen(
    model: PeftModel, name: str, config: PeftConfig, weights: dict[str, Tensor], source
) -> None:
    """Add a frozen adapter with weights read from ``source``; do not activate it.

    The base keeps its weights: an initialization such as PiSSA's, which would move them, is off.
    """
    config = copy.deepcopy(config)
    config.inference_mode = True  # AdaLoRA allows one trainable adapter
    if moves_base(config):
        config.init_lora_weights = False
    model.add_adapter(name, config)
    set_adapter_weights(model, name, weights, source)
    model.set_requires_grad(name, requires_grad=False)
