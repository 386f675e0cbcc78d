"""Make PPO's reference: a frozen copy of the policy, or of its adapter."""

import copy
import warnings

from peft.utils import get_peft_model_state_dict
from torch import nn

from rlhf_course.policy.adapters import REFERENCE, add_frozen, free_name
from rlhf_course.policy.network import AutoModelForCausalLMWithValueHead, refuse_several_adapters


def make_reference(model, ref_model=None, num_shared_layers: int | None = None):
    """Return the reference as a frozen policy; None if the reference is an adapter.

    Raises ``TypeError`` for a policy without a value head, and ``ValueError`` for shared weights
    and for several active adapters.
    """
    if not isinstance(model, AutoModelForCausalLMWithValueHead):
        raise TypeError(
            f"The policy is a {type(model).__name__}, without a value head. "
            "Load it with AutoModelForCausalLMWithValueHead.from_pretrained."
        )
    refuse_several_adapters(model.pretrained_model)
    if getattr(ref_model or model, "is_trained", False):
        warnings.warn(
            "PPO has trained this policy already; if a copy of it is the reference, KL restarts at "
            "0. Load the policy again, or pass its untrained copy as ref_model.",
            stacklevel=3,
        )
    if ref_model is None:
        if model.is_peft_model:
            return add_reference_adapter(model)
        return create_reference_model(model, num_shared_layers)
    if not isinstance(ref_model, AutoModelForCausalLMWithValueHead):
        ref_model = AutoModelForCausalLMWithValueHead(ref_model)
    trained = {p for p in model.parameters() if p.requires_grad}
    if not trained.isdisjoint(ref_model.parameters()):
        raise ValueError(
            "The reference shares weights that the policy trains, so the KL stays 0. Leave "
            "ref_model out for a frozen copy."
        )
    return ref_model.requires_grad_(False).eval()


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead, num_shared_layers: int | None = None
) -> AutoModelForCausalLMWithValueHead:
    """Return a frozen copy of the policy, in eval mode.

    If ``num_shared_layers`` is set, policy and copy share the embeddings and that many initial
    layers, all frozen.
    """
    shared = nn.ModuleList()
    if num_shared_layers:
        depth = model.config.get_text_config().num_hidden_layers
        if not 0 < num_shared_layers < depth:
            raise ValueError(f"num_shared_layers is {num_shared_layers}; use 1 to {depth - 1}.")
        modules = [*model.pretrained_model.modules()]
        layers = next(m for m in modules if isinstance(m, nn.ModuleList) and len(m) == depth)
        shared.extend(layers[:num_shared_layers])
        shared.extend(m for m in modules if isinstance(m, nn.Embedding))
        shared.requires_grad_(False)
    memo = {id(p): p for p in shared.parameters()}  # deepcopy treats these as already copied
    return copy.deepcopy(model, memo).requires_grad_(False).eval()


def add_reference_adapter(policy: AutoModelForCausalLMWithValueHead) -> None:
    """Add a frozen copy of the active adapter, replacing an earlier trainer's copy.

    Its name, ``policy.reference_adapter``, is ``ref`` unless the user's own adapter has that name.
    Raises ``ValueError`` if base weights are also trained, because the reference would change with
    them.
    """
    model = policy.pretrained_model
    source = model.active_adapter
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    trained_base = [name for name in trained if source not in name.split(".")]
    if trained_base:
        raise ValueError(
            f"{len(trained_base)} weights of the base, such as {trained_base[0]}, are trained, and"
            " the reference shares them. Freeze them, or pass ref_model."
        )
    if policy.reference_adapter is not None:
        model.delete_adapter(policy.reference_adapter)
    name = free_name(model, REFERENCE)
    weights = get_peft_model_state_dict(model, adapter_name=source)
    add_frozen(model, name, model.peft_config[source], weights, source)
    policy.reference_adapter = name
