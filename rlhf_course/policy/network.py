"""Define the policy (a causal language model with a value head) and helpers for any network."""

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_course.policy.saving import Saved


class FullPrecisionLinear(nn.Linear):
    """Apply a linear layer in at least float32; bfloat16's step near −100 (GPT-2's logits) is ½."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            if self.weight.dtype.itemsize >= 4:
                return super().forward(hidden.to(self.weight.dtype))
            pieces = self.weight.split(8192)  # the backward pass casts each piece again
            product = [checkpoint(cast_product, hidden, x, use_reentrant=False) for x in pieces]
            return torch.cat(product, -1) + (0 if self.bias is None else self.bias)


def cast_product(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.float() @ weight.float().T


class ValueHead(nn.Sequential):
    """Apply dropout and Linear(H, 1) to last hidden states: (B, T, H) → (B, T, 1), in float32."""

    def __init__(
        self,
        hidden_size: int,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        summary = FullPrecisionLinear(hidden_size, 1)
        super().__init__(OrderedDict(dropout=nn.Dropout(summary_dropout_prob), summary=summary))
        if v_head_init_strategy not in (None, "normal"):
            raise ValueError(
                f"v_head_init_strategy is {v_head_init_strategy!r}, not None or normal."
            )
        if v_head_init_strategy:
            nn.init.normal_(summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(summary.bias)


class AutoModelForCausalLMWithValueHead(Saved, nn.Module):
    """Add a value head, ``v_head``, to a causal language model's last hidden state.

    Wrapping changes the given model: the vocabulary projection ignores autocast, and torch's
    fused kernel replaces GPT-2's activation.
    """

    def __init__(self, pretrained_model: nn.Module, **value_head_options) -> None:
        super().__init__()
        head = pretrained_model.get_output_embeddings()
        if type(head) is nn.Linear:
            head.__class__ = FullPrecisionLinear
        for parent in [*pretrained_model.modules()]:
            for name, child in parent.named_children():
                if isinstance(child, NewGELUActivation):
                    setattr(parent, name, nn.GELU(approximate="tanh"))
        self.pretrained_model, self.config = pretrained_model, pretrained_model.config
        self.is_peft_model = isinstance(pretrained_model, PeftModel)
        size = self.config.get_text_config().hidden_size  # OPT-350m's projection is narrower
        self.v_head = ValueHead(getattr(head, "in_features", size), **value_head_options)
        self.v_head.to(next(pretrained_model.parameters()).device)

    @property
    def device(self) -> torch.device:
        """Return the value head's device."""
        return self.v_head.summary.weight.device

    @property
    def vocab_size(self) -> int:
        """Return the number of token embeddings."""
        return self.pretrained_model.get_input_embeddings().weight.shape[0]

    def forward(
        self, input_ids=None, attention_mask=None, positions=None, project: bool = True, **kwargs
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return logits (B, T, V) in float32, loss or None, and values (B, T).

        Given ``positions`` (N,), indices into the flattened B · T tokens, return only their logits
        (N, V) and values (N,). If not ``project``, return hidden states (N, H), not logits, for
        projection in pieces; raise ``ValueError`` if the model changes logits after projection.
        """
        hidden, head = None, self.pretrained_model.get_output_embeddings()

        def select(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            nonlocal hidden
            hidden = inputs[0]
            if positions is not None:
                hidden = hidden.flatten(0, 1).index_select(0, positions)
            return (hidden if project else hidden[:1],)

        with head.register_forward_pre_hook(select):
            output = self.pretrained_model(input_ids, attention_mask=attention_mask, **kwargs)
        if not project and not torch.allclose(output.logits, head(hidden[:1]), 0, 0, True):
            raise ValueError(
                "This model changes its logits after the projection; set logprob_chunk_size=None."
            )
        values = self.v_head(hidden).squeeze(-1)
        return output.logits.float() if project else hidden, output.loss, values


def accepts_argument(policy: AutoModelForCausalLMWithValueHead, argument: str) -> bool:
    """Return whether the forward pass of a policy's network accepts this argument."""
    network = policy.pretrained_model
    network = network.get_base_model() if isinstance(network, PeftModel) else network
    return argument in inspect.signature(network.forward).parameters


@contextmanager
def without_dropout(model: nn.Module, checkpointing: bool = False) -> Iterator[None]:
    """Run a model in eval mode, and restore every module's mode afterward.

    With ``checkpointing``, checkpointed layers are in training mode, as transformers requires, but
    without dropout.
    """
    found = {module: module.training for module in model.modules()}
    model.eval()
    for module in found if checkpointing else ():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
    try:
        yield
    finally:
        for module, training in found.items():
            module.training = training
