"""The policy: a causal language model with a value head; and questions to any network."""

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.activations import NewGELUActivation
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_course.policy import save_load, saving

POLICY = "policy"  # the adapter that PPO trains
VALUE_HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
say_once = cache(print)


class FullPrecisionLinear(nn.Linear):
    """A projection out of autocast: at GPT-2's logits, about −100, bfloat16 has steps of ½."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


class ValueHead(nn.Sequential):
    """Dropout → Linear(H, 1) on the last hidden state: (B, T, H) → (B, T, 1), in float32."""

    def __init__(
        self,
        hidden_size: int,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        summary = FullPrecisionLinear(hidden_size, 1)
        super().__init__(OrderedDict(dropout=nn.Dropout(summary_dropout_prob), summary=summary))
        if v_head_init_strategy == "normal":
            nn.init.normal_(summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(summary.bias)
        elif v_head_init_strategy is not None:
            raise ValueError(
                f"v_head_init_strategy {v_head_init_strategy!r}; give 'normal' or None."
            )


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model with a value head, ``v_head``, on its last hidden state.

    The state dict holds the base model's keys as they are, and ``v_head.summary.{weight,bias}``.
    The model that is passed in is changed: its vocabulary projection leaves autocast, and GPT-2's
    activation becomes torch's single kernel for the same function.
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
        width = getattr(head, "in_features", None)  # OPT-350m's is not hidden_size
        width = width or self.config.get_text_config().hidden_size
        self.v_head = ValueHead(width, **value_head_options)
        self.v_head.to(next(pretrained_model.parameters()).device)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, peft_config=None, **kwargs):
        """Load from a folder, a hub id, or a model in memory; ``peft_config`` adds an adapter.

        Weights are float32 unless ``dtype`` (or ``torch_dtype``) says otherwise: PPO trains them
        directly. A saved value head is loaded; otherwise a line says that a new one was made, from
        ``summary_dropout_prob``, ``v_head_init_strategy`` and ``v_head_initializer_range``. Other
        arguments go to transformers. Raises as ``save_load.load_model`` does.
        """
        source = base = pretrained_model_name_or_path
        head_options = {key: kwargs.pop(key) for key in VALUE_HEAD_OPTIONS if key in kwargs}
        if not isinstance(source, nn.Module):
            dtype = kwargs.pop("torch_dtype", torch.float32)
            kwargs = {"dtype": dtype, "adapter_name": POLICY, "is_trainable": True} | kwargs
            base = save_load.load_model(AutoModelForCausalLM, source, **kwargs)
        adapted = base if peft_config is None else get_peft_model(base, peft_config, POLICY)
        model = cls(adapted, **head_options).eval()
        if base is source:
            return model
        if head := save_load.read_value_head(source, **kwargs):
            save_load.check_state_dict(source, "value head", head, model.v_head.state_dict())
            model.v_head.load_state_dict(head)
        else:
            name = Path(source).name if Path(source).is_dir() else source
            say_once(f"The value head is new: {name} holds none.")
        return model

    @property
    def device(self) -> torch.device:
        """Where the value head is."""
        return self.v_head.summary.weight.device

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has embeddings for."""
        return self.pretrained_model.get_input_embeddings().weight.shape[0]

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        positions: Tensor | None = None,
        project: bool = True,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(logits (B, T, V) in float32, loss or None, values (B, T)).

        With ``positions`` (N,), places in the flattened (B · T), logits (N, V) and values (N,) of
        these alone. Without ``project``, hidden states (N, H) take the place of logits, to be
        projected in pieces; raises ``ValueError`` where logits are more than a projection.
        """
        hidden, head = None, self.pretrained_model.get_output_embeddings()

        def select(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            """The last hidden state on its way into the vocabulary projection."""
            nonlocal hidden
            hidden = inputs[0]
            if positions is not None:
                hidden = hidden.flatten(0, 1).index_select(0, positions)
            return (hidden if project else hidden[:1],)

        with head.register_forward_pre_hook(select):
            output = self.pretrained_model(input_ids, attention_mask=attention_mask, **kwargs)
        same = {"rtol": 0, "atol": 0, "equal_nan": True}
        if not project and not torch.allclose(output.logits, head(hidden[:1]), **same):
            raise ValueError(
                "This model changes its logits after the projection: no logprob_chunk_size for it."
            )
        values = self.v_head(hidden).squeeze(-1)
        return output.logits.float() if project else hidden, output.loss, values

    def generate(self, *args, **kwargs):
        """As the base model's ``generate``."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass, also in eval mode, where PPO runs."""
        self.pretrained_model.gradient_checkpointing_enable({"use_reentrant": False})

    def state_dict(self, *args, prefix: str = "", **kwargs) -> dict[str, Tensor]:
        """The base model's state dict, and ``v_head.*``."""
        state = self.pretrained_model.state_dict(*args, prefix=prefix, **kwargs)
        state.update(self.v_head.state_dict(*args, prefix=f"{prefix}{save_load.PREFIX}", **kwargs))
        return state

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Load what :meth:`state_dict` gave."""
        own = {
            key if key.startswith(save_load.PREFIX) else f"pretrained_model.{key}": value
            for key, value in state_dict.items()
        }
        return super().load_state_dict(own, strict=strict, assign=assign)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs) -> None:
        """As :func:`rlhf_course.policy.saving.save_policy`."""
        saving.save_policy(self, save_directory, push_to_hub=push_to_hub, **kwargs)


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the forward pass of a network, or of a policy's, has this argument."""
    model = getattr(model, "module", model)  # under data parallelism
    network = getattr(model, "pretrained_model", model)
    network = network.get_base_model() if isinstance(network, PeftModel) else network
    return argument in inspect.signature(network.forward).parameters


def can_pack(model: nn.Module) -> bool:
    """Whether several samples can share a row: positions are given, and all layers follow one mask
    of (T, T). Sliding windows and recurrent states do not, nor does Falcon's ALiBi."""
    config = getattr(model, "module", model).config
    one_mask = all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    plain = config._attn_implementation == "sdpa" and not getattr(config, "alibi", False)
    return plain and one_mask and takes(model, "position_ids")


@contextmanager
def without_dropout(model: nn.Module, checkpointing: bool = False) -> Iterator[None]:
    """Run a model in eval mode and put every module back into the mode it was found in.

    With ``checkpointing``, layers under it are in training mode, which transformers asks for; their
    dropout is not.
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
