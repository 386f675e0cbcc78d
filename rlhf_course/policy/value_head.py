"""The policy: a causal language model with a value head."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.activations import NewGELUActivation
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_course.policy.saved import (
    CAUSAL,
    VALUE_HEAD_FILE,
    load_model,
    model_folder,
    say_new_value_head,
    upload,
    value_head,
)
from rlhf_course.runtime.files import check_folder

POLICY = "policy"  # the adapter that PPO trains
LARGE = 100.0  # times a hidden state: logits that any cap would change
VALUE_HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")


class ValueHead(nn.Module):
    """Dropout → Linear(H, 1) on the last hidden state: (B, T, H) → (B, T, 1), in float32."""

    def __init__(
        self,
        hidden_size: int,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(summary_dropout_prob)
        self.summary = nn.Linear(hidden_size, 1)
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.summary.bias)
        elif v_head_init_strategy is not None:
            raise ValueError(f"v_head_init_strategy {v_head_init_strategy!r} is unknown; give 'normal' or None.")

    def forward(self, hidden: Tensor) -> Tensor:
        """Values (B, T, 1) of hidden states (B, T, H)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.summary(self.dropout(hidden.to(self.summary.weight.dtype)))


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model with a value head, ``v_head``, on its last hidden state.

    The state dict holds the base model's keys as they are, and ``v_head.summary.{weight,bias}`` beside them. Raises
    ``ValueError`` for a network whose tokens see those that follow, like BERT.
    """

    def __init__(self, pretrained_model: nn.Module, **value_head_options) -> None:
        super().__init__()
        self.pretrained_model = _adapt(pretrained_model)
        self.config = pretrained_model.config
        width = getattr(pretrained_model.get_output_embeddings(), "in_features", None)  # OPT-350m's is not hidden_size
        self.v_head = ValueHead(width or self.config.get_text_config().hidden_size, **value_head_options)
        self.v_head.to(next(pretrained_model.parameters()).device)
        self._check_causal()
        self._only_projects = False  # until a forward pass has shown that logits are a projection and no more

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, peft_config=None, **kwargs):
        """Load from a folder, a hub id, or a model already in memory; with ``peft_config``, add an adapter to it.

        Weights are float32 unless ``dtype`` (or ``torch_dtype``) says otherwise, because PPO trains them directly.
        A value head saved with the weights is loaded; otherwise a new one is made from ``summary_dropout_prob``,
        ``v_head_init_strategy`` and ``v_head_initializer_range``, and a line says so. Other arguments go to
        transformers; ``revision``, ``subfolder`` and ``token`` hold for adapter and value head, too.

        Raises ``FileNotFoundError`` for a folder without weights, and ``ValueError`` where one is missing or damaged.
        """
        head_options = {key: kwargs.pop(key) for key in VALUE_HEAD_OPTIONS if key in kwargs}
        source, saved_head = pretrained_model_name_or_path, None
        if isinstance(source, nn.Module):
            base = source
        else:
            kwargs["dtype"] = kwargs.pop("torch_dtype", kwargs.pop("dtype", torch.float32))
            how = {"adapter_name": POLICY, "is_trainable": True} | kwargs
            base, saved_head = load_model(AutoModelForCausalLM, source, *args, **how), value_head(source, **kwargs)
        if peft_config is not None:
            base = get_peft_model(base, peft_config, adapter_name=POLICY)
        model = cls(base, **head_options)
        if saved_head:
            try:
                model.v_head.load_state_dict(saved_head)
            except RuntimeError:
                shapes = {name: tuple(value.shape) for name, value in saved_head.items()}
                raise ValueError(f"The value head in {source} is of another model: it holds {shapes}.") from None
        elif saved_head is not None:
            say_new_value_head(str(source))
        return model.eval()

    @torch.no_grad()
    def _check_causal(self) -> None:
        """Raise ``ValueError`` where another second token changes what is predicted behind the first."""
        ids = torch.tensor([[0, 0], [0, 1]], device=self.device)
        with without_dropout(self.pretrained_model):
            logits = self.pretrained_model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        change, rounding = (logits[0, 0] - logits[1, 0]).abs().max(), torch.finfo(logits.dtype).eps * logits.abs().max()
        if change > 10 * rounding:
            raise ValueError(f"In a {type(self.pretrained_model).__name__} tokens see those that follow. {CAUSAL}")

    @property
    def _no_split_modules(self):
        """The classes of its layers: what accelerate shards one by one."""
        return self.pretrained_model._no_split_modules

    @property
    def is_peft_model(self) -> bool:
        """Whether the base carries adapters."""
        return isinstance(self.pretrained_model, PeftModel)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        return_past_key_values=False,
        positions: Tensor | None = None,
        project: bool = True,
        **kwargs,
    ):
        """(logits (B, T, V) in float32, loss or None, values (B, T)).

        ``positions`` (N,) are places in the flattened (B · T): then logits (N, V) and values (N,) of these alone, and
        no vocabulary projection is spent on others. Without ``project`` hidden states (N, H) come in place of logits,
        for whoever projects them piece by piece; raises ``ValueError`` where logits are more than a projection.
        """
        seen = []

        def look(head: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            """The last hidden state on its way into the vocabulary projection."""
            hidden = arguments[0]
            if positions is not None:
                hidden = hidden.flatten(0, 1).index_select(0, positions)
            seen.append(hidden)
            return (hidden if project else LARGE * hidden[:1],)

        hook = self.pretrained_model.get_output_embeddings().register_forward_pre_hook(look)
        try:
            output = self.pretrained_model(
                input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
            )
        finally:
            hook.remove()
        result = output.logits.float(), output.loss, torch.squeeze_copy(self.v_head(seen[0]), -1)
        if not project:
            if not self._only_projects:
                self._check_projection(LARGE * seen[0][:1], output.logits.float())
            result = seen[0], *result[1:]
        return (*result, output.past_key_values) if return_past_key_values else result

    @torch.no_grad()
    def _check_projection(self, hidden: Tensor, logits: Tensor) -> None:
        """Once per model, because it waits for the device; NaN passes here and is named where it is looked for."""
        alone = self.pretrained_model.get_output_embeddings()(hidden).float()
        if not torch.allclose(alone, logits, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ValueError("This model changes its logits after the projection: no logprob_chunk_size for it.")
        self._only_projects = True

    def generate(self, *args, **kwargs):
        """As the base model's ``generate``."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass, also in eval mode: PPO's updates run without dropout."""
        network = self.pretrained_model
        enable = getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)
        enable({"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        """Where the value head lives."""
        return self.v_head.summary.weight.device

    def state_dict(self, *args, **kwargs) -> dict[str, Tensor]:
        """The base model's state dict, and ``v_head.*``."""
        prefix = kwargs.pop("prefix", "")
        state = self.pretrained_model.state_dict(*args, prefix=prefix, **kwargs)
        state.update(self.v_head.state_dict(*args, prefix=f"{prefix}v_head.", **kwargs))
        return state

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Load what :meth:`state_dict` gave."""
        head = {k.removeprefix("v_head."): v for k, v in state_dict.items() if k.startswith("v_head.")}
        base = {k: v for k, v in state_dict.items() if not k.startswith("v_head.")}
        self.v_head.load_state_dict(head, strict=strict, assign=assign)
        return self.pretrained_model.load_state_dict(base, strict=strict, assign=assign)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Save so that plain transformers (or peft) loads the folder; the value head goes into a file beside.

        All files are written aside first and renamed at the end: a failure leaves what stood there before. With
        ``push_to_hub`` they go to the repository ``repo_id`` (default: the folder's name) in one commit, too;
        ``token``, ``private``, ``commit_message``, ``revision`` and ``create_pr`` are huggingface_hub's.
        """
        save_directory = check_folder(save_directory)
        with model_folder(save_directory, self.is_peft_model) as folder:
            self.write_files(folder)
            names = sorted(path.name for path in folder.iterdir())
        if push_to_hub:
            repository = kwargs.pop("repo_id", None) or save_directory.name
            upload(save_directory, names, repository, **kwargs)

    def write_files(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write weights (of ``state``, or else its own), config and value head into an existing folder."""
        state = self.state_dict() if state is None else state
        head = {name: value.contiguous() for name, value in state.items() if name.startswith("v_head.")}
        if self.is_peft_model:
            adapter = self.pretrained_model.active_adapter
            self.pretrained_model.save_pretrained(folder, selected_adapters=[adapter])
            for path in [*folder.glob(f"{adapter}/*")]:  # peft puts an adapter with a name into a folder of its own
                path.rename(folder / path.name)
            shutil.rmtree(folder / adapter, ignore_errors=True)
        else:
            base = {name: value for name, value in state.items() if name not in head}
            self.pretrained_model.save_pretrained(folder, state_dict=base)
        save_file(head, folder / VALUE_HEAD_FILE)


class _FullPrecisionHead(nn.Linear):
    """A vocabulary projection out of autocast: GPT-2's logits are about −100, where bfloat16 has steps of ½."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


def _adapt(model: nn.Module) -> nn.Module:
    """Logits in full precision, and GPT-2's activation as torch's one kernel for it instead of eight operations."""
    if type(head := model.get_output_embeddings()) is nn.Linear:
        head.__class__ = _FullPrecisionHead
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
    return model


def takes(model: nn.Module, argument: str) -> bool:
    """Whether a policy's network, or a network, has this argument; ``position_ids``, for one, is unknown to ALiBi."""
    model = getattr(model, "module", model)  # under data parallelism
    network = getattr(model, "pretrained_model", model)
    network = network.get_base_model() if isinstance(network, PeftModel) else network
    return argument in inspect.signature(network.forward).parameters


def can_pack(model: nn.Module) -> bool:
    """Whether several samples can share a row: positions are given, and all layers follow one mask of (T, T).

    A layer with a sliding window or a recurrent state would not, nor would Falcon's with ALiBi, which takes
    position_ids and reads positions off a mask of (B, T) all the same.
    """
    model = getattr(model, "module", model)
    layers = DynamicCache(config=model.config).layers
    follow = model.config._attn_implementation == "sdpa" and all(type(layer) is DynamicLayer for layer in layers)
    return follow and takes(model, "position_ids") and not getattr(model.config, "alibi", False)


@contextmanager
def without_dropout(model: nn.Module, checkpointing: bool = False) -> Iterator[None]:
    """Run a model in eval mode and put every module back into the mode it was found in.

    With ``checkpointing``, layers under gradient checkpointing keep their own training flag up, which in transformers
    is what switches checkpointing on (and the cache of generation off); their dropout modules stay off.
    """
    found = {module: module.training for module in model.modules()}
    model.eval()
    for module in model.modules():
        if checkpointing and isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
    try:
        yield
    finally:
        for module, training in found.items():
            module.training = training
