"""The reference that KL is measured against, as a frozen copy of the policy; lora.py has it as an adapter."""

from __future__ import annotations

import copy

from torch import nn

from rlhf_course.policy.value_head import AutoModelForCausalLMWithValueHead


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead, num_shared_layers: int | None = None
) -> AutoModelForCausalLMWithValueHead:
    """A frozen copy of the policy, in eval mode.

    With ``num_shared_layers`` the embeddings and that many first layers are frozen in the policy too, and shared
    with the reference instead of copied.

    Raises ``ValueError`` when the policy has fewer layers, or none that can be found, and ``TypeError`` for others.
    """
    if not isinstance(model, AutoModelForCausalLMWithValueHead):
        raise TypeError(f"A reference is copied from a policy, not from {model!r:.60}: load one by from_pretrained.")
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
