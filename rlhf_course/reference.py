"""The reference that KL is measured against: a frozen copy of the policy, or a frozen adapter on the same base."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from rlhf_course.policy import AutoModelForCausalLMWithValueHead

REFERENCE_ADAPTER = "ref"


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead, num_shared_layers: int | None = None
) -> AutoModelForCausalLMWithValueHead:
    """A frozen copy of the policy, in eval mode.

    With ``num_shared_layers`` the embeddings and that many first layers are frozen in the policy too, and shared
    with the reference instead of copied.

    Raises ``ValueError`` when the policy has fewer layers, or none that can be found.
    """
    memo = {}
    if num_shared_layers:
        layers = _transformer_layers(model.pretrained_model)
        if num_shared_layers > len(layers):
            raise ValueError(f"num_shared_layers is {num_shared_layers}, but the model has {len(layers)} layers.")
        shared = [
            *layers[:num_shared_layers],
            *(m for m in model.pretrained_model.modules() if isinstance(m, nn.Embedding)),
        ]
        parameters = [p for module in shared for p in module.parameters()]
        for parameter in parameters:
            parameter.requires_grad_(False)
        memo = {id(parameter): parameter for parameter in parameters}  # deepcopy takes these as already copied
    return copy.deepcopy(model, memo).requires_grad_(False).eval()


def _transformer_layers(model: nn.Module) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.get_text_config().num_hidden_layers:
            return module
    raise ValueError(f"Found no list of transformer layers in {type(model).__name__}; leave num_shared_layers out.")


def add_reference_adapter(model: AutoModelForCausalLMWithValueHead) -> None:
    """Keep a frozen copy of the active adapter under the name ``ref``, on the same base."""
    peft_model = model.pretrained_model
    policy = peft_model.active_adapter
    state = get_peft_model_state_dict(peft_model, adapter_name=policy)
    state = {key: value.clone() for key, value in state.items()}
    if REFERENCE_ADAPTER in peft_model.peft_config:
        peft_model.delete_adapter(REFERENCE_ADAPTER)  # an earlier trainer's: the reference is the policy as it is now
    peft_model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(peft_model.peft_config[policy]))
    set_peft_model_state_dict(peft_model, state, adapter_name=REFERENCE_ADAPTER)
    with reference_adapter(model):
        pass  # leaves the copy frozen and the policy's adapter active


@contextmanager
def reference_adapter(
    model: AutoModelForCausalLMWithValueHead,
) -> Iterator[AutoModelForCausalLMWithValueHead]:
    """The same model with the frozen reference adapter switched on; afterwards the policy's is on again."""
    peft_model = model.pretrained_model
    policy = peft_model.active_adapter
    peft_model.set_adapter(REFERENCE_ADAPTER, inference_mode=True)
    try:
        yield model
    finally:
        peft_model.set_adapter(policy)
