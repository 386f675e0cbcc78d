"""The policy: a causal language model with a value head."""

import inspect
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from huggingface_hub import HfApi
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.activations import NewGELUActivation
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_course.policy import save_load
from rlhf_course.runtime.files import check_folder

POLICY = "policy"  # the adapter that PPO trains
LARGE = 100.0  # times a hidden state: logits that any cap would change
VALUE_HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
say_once = cache(print)


class FullPrecisionLinear(nn.Linear):
    """A projection out of autocast: GPT-2's logits are about −100, where bfloat16 has steps of ½."""

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
                f"v_head_init_strategy {v_head_init_strategy!r} is unknown; give 'normal' or None."
            )


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model with a value head, ``v_head``, on its last hidden state.

    The state dict holds the base model's keys as they are, and ``v_head.summary.{weight,bias}``.
    Raises ``ValueError`` for a network whose tokens see those that follow, like BERT.
    """

    def __init__(self, pretrained_model: nn.Module, **value_head_options) -> None:
        super().__init__()
        _adapt(pretrained_model)
        self.pretrained_model, self.config = pretrained_model, pretrained_model.config
        self.is_peft_model = isinstance(pretrained_model, PeftModel)
        self._no_split_modules = pretrained_model._no_split_modules  # the layers, for FSDP
        width = getattr(
            pretrained_model.get_output_embeddings(), "in_features", None
        )  # OPT-350m's is not hidden_size
        self.v_head = ValueHead(
            width or self.config.get_text_config().hidden_size, **value_head_options
        )
        self.v_head.to(next(pretrained_model.parameters()).device)
        self._only_projects = self._check_network()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, peft_config=None, **kwargs):
        """Load from a folder, a hub id, or a model already in memory; with ``peft_config``, add an
        adapter to it.

        Weights are float32 unless ``dtype`` (or ``torch_dtype``) says otherwise, because PPO trains
        them directly. A saved value head is loaded; otherwise a line says that a new one was made,
        from ``summary_dropout_prob``, ``v_head_init_strategy`` and ``v_head_initializer_range``.
        Other arguments go to transformers; ``revision``, ``subfolder`` and ``token`` hold for
        adapter and value head, too. Raises as ``load_model`` does.
        """
        source = base = pretrained_model_name_or_path
        head_options = {key: kwargs.pop(key) for key in VALUE_HEAD_OPTIONS if key in kwargs}
        if not isinstance(source, nn.Module):
            dtype = kwargs.pop("torch_dtype", torch.float32)
            kwargs = {"dtype": dtype, "adapter_name": POLICY, "is_trainable": True} | kwargs
            base = save_load.load_model(AutoModelForCausalLM, source, **kwargs)
        model = cls(
            base if peft_config is None else get_peft_model(base, peft_config, POLICY),
            **head_options,
        )
        if base is source:
            return model.eval()
        if head := save_load.read_value_head(source, **kwargs):
            save_load.check_state_dict(source, "value head", head, model.v_head.state_dict())
            model.v_head.load_state_dict(head)
        else:
            name = Path(source).name if Path(source).is_dir() else source
            say_once(f"The value head is new: {name} holds none.")
        return model.eval()

    @torch.no_grad()
    def _check_network(self) -> bool:
        """Whether logits are a projection of hidden states and no more, neither capped nor scaled.

        Raises ``ValueError`` where another second token changes the hidden state of the first. NaN
        passes.
        """
        network, head, hidden = (
            self.pretrained_model,
            self.pretrained_model.get_output_embeddings(),
            None,
        )
        ids = torch.tensor([[0, 0], [0, 1]], device=self.device)

        def enlarge(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            nonlocal hidden
            hidden = inputs[0]
            return (LARGE * hidden,)

        with without_dropout(network), head.register_forward_pre_hook(enlarge):
            logits = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        change, rounding = (
            (hidden[0, 0] - hidden[1, 0]).abs().max(),
            torch.finfo(hidden.dtype).eps * hidden.abs().max(),
        )
        if change > 10 * rounding:
            raise ValueError(
                f"In a {type(network).__name__} tokens see those that follow. {save_load.CAUSAL}"
            )
        return torch.allclose(
            head(LARGE * hidden).float(), logits.float(), rtol=1e-3, atol=1e-3, equal_nan=True
        )

    @property
    def device(self) -> torch.device:
        """Where the value head lives."""
        return self.v_head.summary.weight.device

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
        these alone. Without ``project`` hidden states (N, H) in place of logits, for whoever
        projects them piece by piece; raises ``ValueError`` where logits are more than a projection.
        """
        if not (project or self._only_projects):
            raise ValueError(
                "This model changes its logits after the projection: no logprob_chunk_size for it."
            )
        hidden = None

        def select(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            """The last hidden state on its way into the vocabulary projection."""
            nonlocal hidden
            hidden = (
                inputs[0]
                if positions is None
                else inputs[0].flatten(0, 1).index_select(0, positions)
            )
            return (hidden if project else hidden[:1],)

        with self.pretrained_model.get_output_embeddings().register_forward_pre_hook(select):
            output = self.pretrained_model(
                input_ids=input_ids, attention_mask=attention_mask, **kwargs
            )
        values = torch.squeeze_copy(self.v_head(hidden), -1)
        return output.logits.float() if project else hidden, output.loss, values

    def generate(self, *args, **kwargs):
        """As the base model's ``generate``."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass, also in eval mode: PPO's updates run without
        dropout.
        """
        network = self.pretrained_model
        enable = getattr(
            network, "activation_checkpointing_enable", network.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})

    def state_dict(self, *args, prefix: str = "", **kwargs) -> dict[str, Tensor]:
        """The base model's state dict, and ``v_head.*``."""
        state = self.pretrained_model.state_dict(*args, prefix=prefix, **kwargs)
        state.update(self.v_head.state_dict(*args, prefix=f"{prefix}{save_load.PREFIX}", **kwargs))
        return state

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Load what :meth:`state_dict` gave."""
        own = {
            k if k.startswith(save_load.PREFIX) else f"pretrained_model.{k}": v
            for k, v in state_dict.items()
        }
        return super().load_state_dict(own, strict=strict, assign=assign)

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs
    ) -> None:
        """Save so that plain transformers (or peft) loads the folder; a failure leaves what stood
        there before.

        With ``push_to_hub`` all files go to the repository ``repo_id`` (default: the folder's name)
        in one commit, too; ``token``, ``private``, ``commit_message``, ``revision`` and
        ``create_pr`` are huggingface_hub's.
        """
        save_directory = check_folder(save_directory)
        with save_load.model_folder(save_directory, self.is_peft_model) as folder:
            self.write_files(folder)
            names = sorted(path.name for path in folder.iterdir())
        if push_to_hub:
            api, name = (
                HfApi(token=kwargs.pop("token", None)),
                kwargs.pop("repo_id", None) or save_directory.name,
            )
            repo_id = api.create_repo(
                name, private=kwargs.pop("private", None), exist_ok=True
            ).repo_id
            api.upload_folder(
                repo_id=repo_id, folder_path=save_directory, allow_patterns=names, **kwargs
            )

    def write_files(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write weights (of ``state``, or else its own), config and value head into an existing
        folder.
        """
        state = self.state_dict() if state is None else state
        head = {
            name: value.contiguous()
            for name, value in state.items()
            if name.startswith(save_load.PREFIX)
        }
        save_file(head, folder / save_load.VALUE_HEAD_FILE)
        if self.is_peft_model:
            adapter = self.pretrained_model.active_adapter
            self.pretrained_model.save_pretrained(folder, selected_adapters=[adapter])
            for path in [
                *folder.glob(f"{adapter}/*")
            ]:  # peft puts an adapter with a name into a folder of its own
                path.rename(folder / path.name)
            shutil.rmtree(folder / adapter, ignore_errors=True)
        else:
            base = {name: value for name, value in state.items() if name not in head}
            self.pretrained_model.save_pretrained(folder, state_dict=base)


def _adapt(model: nn.Module) -> None:
    """Logits in full precision, and GPT-2's activation as torch's one kernel for it instead of
    eight operations.
    """
    if type(head := model.get_output_embeddings()) is nn.Linear:
        head.__class__ = FullPrecisionLinear
    for parent in [*model.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the forward pass of a network, or of a policy's, has this argument."""
    model = getattr(model, "module", model)  # under data parallelism
    network = getattr(model, "pretrained_model", model)
    network = network.get_base_model() if isinstance(network, PeftModel) else network
    return argument in inspect.signature(network.forward).parameters


def can_pack(model: nn.Module) -> bool:
    """Whether several samples can share a row: positions are given, and all layers follow one mask
    of (T, T).

    Sliding windows and recurrent states do not, nor does Falcon's ALiBi, which reads positions off
    a mask of (B, T).
    """
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
    for module in found:
        if (
            checkpointing
            and isinstance(module, GradientCheckpointingLayer)
            and module.gradient_checkpointing
        ):
            module.training = True
    try:
        yield
    finally:
        for module, training in found.items():
            module.training = training
