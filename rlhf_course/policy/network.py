"""Define the policy (a causal language model with a value head) and helpers for any network."""

import inspect
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from pathlib import Path

import torch
from huggingface_hub import HfApi
from peft import PeftConfig, PeftMixedModel, PeftModel, PromptLearningConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_course.policy import save_load
from rlhf_course.runtime import old_names
from rlhf_course.runtime.files import atomic_folder, check_folder
from rlhf_course.runtime.hub import hub_errors

POLICY = "policy"  # the adapter that PPO trains
VALUE_HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
PROBE_TOKENS = 4
PROBE_TOLERANCE = 1e-4  # in standard deviations of the logits; float32 rounds far less
say_once = cache(print)


class FullPrecisionLinear(nn.Linear):
    """Apply a linear layer in at least float32; bfloat16's step near −100 (GPT-2's logits) is ½."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            if self.weight.dtype.itemsize >= 4:
                return super().forward(hidden.to(self.weight.dtype))
            products = [
                # The backward pass casts each piece again, instead of keeping a float32 copy.
                checkpoint(cast_product, hidden, piece, use_reentrant=False)
                for piece in self.weight.split(8192)
            ]
            product = torch.cat(products, dim=-1)
            return product if self.bias is None else product + self.bias

    @classmethod
    def sharing(cls, linear: nn.Linear) -> "FullPrecisionLinear":
        """Return a layer with the parameters of ``linear``, so that tied weights stay tied."""
        layer = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        layer.weight = linear.weight
        layer.bias = linear.bias
        return layer.train(linear.training)


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


class AutoModelForCausalLMWithValueHead(nn.Module):
    """Add a value head, ``v_head``, to a causal language model's last hidden state.

    Wrapping changes the given model: the vocabulary projection ignores autocast, and torch's
    fused kernel replaces GPT-2's activation.
    """

    def __init__(self, pretrained_model: nn.Module, **value_head_options) -> None:
        super().__init__()
        refuse_prompt_learning(getattr(pretrained_model, "peft_config", {}).values())
        refuse_several_adapters(pretrained_model)
        replace_layers(pretrained_model)
        switch_off_router_logits(pretrained_model)
        self.pretrained_model = pretrained_model
        self.config = pretrained_model.config
        self.reference_adapter: str | None = None  # the name of a trainer's reference
        self.v_head = ValueHead(self._hidden_size(), **value_head_options)
        self.v_head.to(next(pretrained_model.parameters()).device)
        self.logits_are_projections = self._compare_logits()

    def __getattr__(self, name: str):
        advice = old_names.advice(old_names.POLICY, name)
        if advice is not None:
            raise AttributeError(advice)
        return super().__getattr__(name)

    @property
    def is_peft_model(self) -> bool:
        """Return whether the network has adapters; after a merge it has none."""
        return isinstance(self.pretrained_model, PeftModel)

    @property
    def device(self) -> torch.device:
        """Return the value head's device."""
        return self.v_head.summary.weight.device

    @property
    def vocab_size(self) -> int:
        """Return the number of token embeddings."""
        return self.pretrained_model.get_input_embeddings().weight.shape[0]

    @property
    def network(self) -> nn.Module:
        """Return the language model without peft's wrapper; adapters' layers stay in it."""
        if self.is_peft_model:
            return self.pretrained_model.get_base_model()
        return self.pretrained_model

    @property
    def projection(self) -> nn.Module:
        """Return the layer that projects hidden states to logits."""
        return self.pretrained_model.get_output_embeddings()

    def _hidden_size(self) -> int:
        """Return the size of the hidden states that the projection reads.

        OPT-350m's is smaller than the config's. The weight has it: peft's copy of a tied projection
        has ``in_features`` and ``out_features`` exchanged. A 4-bit weight is packed.
        """
        weight = getattr(self.projection, "weight", None)
        if weight is not None and weight.is_floating_point():
            return weight.shape[1]
        size = self.config.get_text_config().hidden_size
        return getattr(self.projection, "in_features", size)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        select: Tensor | None = None,
        project: bool = True,
        labels: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return logits (B, T, V) in float32, loss or None, and values (B, T).

        Given ``select``, a boolean mask (B, T), return only the logits (N, V) and values (N,) of
        the N selected tokens. If not ``project``, return their hidden states (N, H) instead of
        logits, for projection in pieces; raise ``ValueError`` if the model changes its logits after
        the projection.
        """
        if not project and not self.logits_are_projections:
            raise ValueError(
                "This model changes its logits after the projection; set logprob_chunk_size=None."
            )
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask} | kwargs
        if self.logits_are_projections and labels is None:
            hidden = trunk(self.network)(**inputs).last_hidden_state
            if select is not None:
                hidden = hidden[select]
            logits = self.projection(hidden).float() if project else hidden
            loss = None
        else:
            output = self.pretrained_model(**inputs, labels=labels, output_hidden_states=True)
            hidden = output.hidden_states[-1]
            logits = output.logits.float()
            loss = output.loss
            if select is not None:
                hidden = hidden[select]
                logits = logits[select]
        values = self.v_head(hidden).squeeze(-1)
        return logits, loss, values

    def _autocast(self):
        """Return autocast if some weights have low precision: an adapter may be in float32."""
        for weight in self.pretrained_model.parameters():
            if weight.dtype in (torch.bfloat16, torch.float16):
                return torch.autocast(self.device.type, dtype=weight.dtype)
        return nullcontext()

    @torch.no_grad()
    def _compare_logits(self) -> bool:
        """Return whether the model's logits are the projections of its last hidden states.

        Gemma 2 caps its logits after the projection, and Cohere scales them. The comparison is
        exact: a cap barely changes small logits.
        """
        tokens = min(PROBE_TOKENS, self.vocab_size)
        input_ids = torch.arange(tokens, device=self.device).unsqueeze(0)
        with without_dropout(self.pretrained_model), self._autocast():
            logits = self.pretrained_model(input_ids=input_ids, use_cache=False).logits
            output = trunk(self.network)(input_ids=input_ids, use_cache=False)
            if not hasattr(output, "last_hidden_state"):
                return False
            projected = self.projection(output.last_hidden_state)
        return torch.equal(logits.float().nan_to_num(), projected.float().nan_to_num())

    @cached_property
    def can_pack(self) -> bool:
        """Return whether samples that share a row keep the logits that each has on its own.

        This is computed at the first use. The model must take position ids and a mask (B, 1, T, T).
        """
        if not accepts_argument(self, "position_ids"):
            return False
        if any(DynamicCache(config=self.config).is_sliding):  # the mask would replace the window
            return False
        try:
            return self._compare_packed()
        except (IndexError, RuntimeError, TypeError, ValueError):
            return False  # for example, Falcon's ALiBi takes only masks (B, T)

    @torch.no_grad()
    def _compare_packed(self) -> bool:
        """Return whether two samples have the same logits in one row and in rows of their own."""
        tokens = min(PROBE_TOKENS, self.vocab_size)
        input_ids = torch.arange(tokens, device=self.device)
        samples = [input_ids, input_ids.flip(0)]
        positions = torch.arange(tokens, device=self.device).repeat(len(samples))
        number = torch.arange(len(samples), device=self.device).repeat_interleave(tokens)
        with without_dropout(self.pretrained_model), self._autocast():
            separate = self.pretrained_model(
                input_ids=torch.stack(samples),
                attention_mask=torch.ones(len(samples), tokens, device=self.device),
                use_cache=False,
            ).logits
            packed = self.pretrained_model(
                input_ids=torch.cat(samples).unsqueeze(0),
                attention_mask=packed_attention_mask(number.unsqueeze(0)),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            ).logits
        error = (packed.view_as(separate) - separate).abs().max()
        return bool(error <= PROBE_TOLERANCE * separate.std())

    def next_token_logits(self, input_ids: Tensor, attention_mask: Tensor, **kwargs) -> Tensor:
        """Return the logits (B, V), in float32, of the token that follows the last column."""
        output = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=1, **kwargs
        )
        return output.logits[:, -1].float()

    def generate(self, *args, **kwargs):
        """Call the base model's ``generate``."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass, even in eval mode, which PPO uses."""
        options = {"use_reentrant": False}
        if hasattr(self.pretrained_model, "activation_checkpointing_enable"):
            self.pretrained_model.activation_checkpointing_enable(options)
        else:
            self.pretrained_model.gradient_checkpointing_enable(options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, peft_config=None, **kwargs):
        """Load a policy from a folder, hub id or model in memory; ``peft_config`` adds an adapter.

        Weights are float32 unless ``dtype`` (or ``torch_dtype``) is set, because PPO trains them
        directly. A saved value head is loaded; if there is none, a printed line reports a new head,
        which ``summary_dropout_prob``, ``v_head_init_strategy`` and ``v_head_initializer_range``
        configure. Other arguments go to transformers; without an accelerator, ``device_map`` does
        nothing. Raises ``ValueError`` for an argument of TRL that is not supported.
        """
        source = pretrained_model_name_or_path
        kwargs = old_names.without_old_arguments(kwargs)
        if not torch.accelerator.is_available():
            kwargs.pop("device_map", None)
        head_options = {key: kwargs.pop(key) for key in VALUE_HEAD_OPTIONS if key in kwargs}
        in_memory = isinstance(source, nn.Module)
        if in_memory:
            network = source
        else:
            defaults = {
                "dtype": kwargs.pop("torch_dtype", torch.float32),
                "adapter_name": POLICY,
                "is_trainable": True,
            }
            kwargs = defaults | kwargs
            network = save_load.load_model(AutoModelForCausalLM, source, **kwargs)
        if peft_config is not None:
            if not isinstance(peft_config, PeftConfig):
                raise ValueError(
                    f"peft_config is a {type(peft_config).__name__}; pass one of peft's configs,"
                    " such as LoraConfig(**settings)."
                )
            refuse_prompt_learning([peft_config])
            if getattr(network, "peft_config", None):
                raise ValueError(
                    "The model is an adapter. Omit peft_config to train it, or merge it."
                )
            network = save_load.add_adapter(network, peft_config, POLICY)
        policy = cls(network, **head_options).eval()
        if not in_memory:
            policy._load_value_head(source, kwargs)
        return policy

    def _load_value_head(self, source: str | Path, options: dict) -> None:
        file = save_load.local_folder(source, **options) / save_load.VALUE_HEAD_FILE
        if not file.exists():
            reason = f"{Path(source).name} has none"
            if (file.parent / save_load.OTHER_HEAD).exists():
                reason = f"{save_load.OTHER_HEAD} of LLaMA-Factory is not read"
            say_once(f"The value head is new: {reason}.")
            return
        with hub_errors(file.parent):
            weights = load_file(file)
        prefix = save_load.VALUE_HEAD_PREFIX
        self.v_head.load_state_dict({key.removeprefix(prefix): weights[key] for key in weights})

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        push_to_hub: bool = False,
        tokenizer=None,
        repo_id: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        **kwargs,
    ) -> None:
        """Save policy and ``tokenizer`` in a form that plain transformers (or peft) loads.

        A failure leaves the folder unchanged. With ``push_to_hub``, all files go to the repository
        ``repo_id`` (default: the folder's name), in one commit; ``commit_message``, ``revision``
        and ``create_pr`` go to huggingface_hub. Raises ``FloatingPointError`` if a weight is NaN or
        Inf, and ``ValueError`` if this policy is an adapter and the folder has a full model, or the
        reverse, because loading would always choose the adapter.
        """
        target = check_folder(save_directory)
        save_load.check_weights(self.state_dict())
        if self.is_peft_model:
            replaced = save_load.ADAPTER_FILES
            other_kind = "config.json"
        else:
            replaced = save_load.MODEL_FILES
            other_kind = save_load.ADAPTER_CONFIG
        if (target / other_kind).exists():
            raise ValueError(
                f"{target} has another kind of model ({other_kind}); use a new folder."
            )
        with atomic_folder(target, replaced) as folder:
            save_load.write_policy(self, folder)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)
            names = sorted(path.name for path in folder.iterdir())
        if push_to_hub:
            api = HfApi(token=token)
            repo = api.create_repo(repo_id or target.name, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo.repo_id, folder_path=target, allow_patterns=names, **kwargs
            )


def refuse_prompt_learning(adapters: Iterable[PeftConfig]) -> None:
    """Raise ``ValueError`` for prompt, prefix or P-tuning, whose tokens take up positions."""
    for adapter in adapters:
        if isinstance(adapter, PromptLearningConfig):
            raise ValueError(
                f"{type(adapter).__name__} adds tokens before each query, so PPO would score other"
                " positions than it samples. Use an adapter that changes weights, such as"
                " LoraConfig."
            )


def refuse_several_adapters(network: nn.Module) -> None:
    """Raise ``ValueError`` if several adapters are active: PPO trains, copies and saves one."""
    if isinstance(network, PeftMixedModel):
        raise ValueError(
            "The policy is a PeftMixedModel, whose adapters cannot be saved one by one. Merge them"
            " with merge_and_unload, or use one adapter in a PeftModel."
        )
    if not getattr(network, "peft_config", None):
        return
    # A property of peft's models, and a method of transformers' models with adapters.
    active = network.active_adapters
    names = active() if callable(active) else active
    if len(names) > 1:
        raise ValueError(
            f"The adapters {', '.join(names)} are active, and PPO trains and saves one. Merge them"
            " with add_weighted_adapter and activate the result with set_adapter, or activate one."
        )


def replace_layers(network: nn.Module) -> None:
    """Replace the vocabulary projection and GPT-2's activation, in place.

    The network's own layer is replaced because transformers' ``generate`` also uses it: a token is
    sampled and scored with the same precision.
    """
    projection = network.get_output_embeddings()
    for parent in [*network.modules()]:
        for name, child in parent.named_children():
            if child is projection and type(child) is nn.Linear:
                setattr(parent, name, FullPrecisionLinear.sharing(child))
            elif isinstance(child, NewGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))


def switch_off_router_logits(network: nn.Module) -> None:
    """Set a mixture of experts' ``output_router_logits`` to False; with a cache, it fails."""
    for config in (network.config, network.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
            say_once("output_router_logits is switched off: PPO does not use the router's loss.")


def trunk(network: nn.Module) -> nn.Module:
    """Return a language model without its projection.

    Llama 4's ``base_model`` is the whole network; its trunk is the model inside.
    """
    if network.base_model is not network:
        return network.base_model
    inner = (child for child in network.children() if isinstance(child, PreTrainedModel))
    return next(inner, network)


def accepts_argument(policy: AutoModelForCausalLMWithValueHead, argument: str) -> bool:
    """Return whether the forward pass of a policy's network accepts this argument."""
    return argument in inspect.signature(policy.network.forward).parameters


def packed_attention_mask(sample: Tensor) -> Tensor:
    """Return the mask (b, 1, T, T), to be added to attention scores, for samples that share rows.

    ``sample`` (b, T) has the number of each token's sample. A token attends to itself and to the
    earlier tokens of its own sample.
    """
    is_same = sample.unsqueeze(2) == sample.unsqueeze(1)
    masked = torch.finfo(torch.float32).min
    return torch.where(is_same.tril(), 0.0, masked).unsqueeze(1)


@contextmanager
def without_dropout(model: nn.Module, checkpointing: bool = False) -> Iterator[None]:
    """Run a model in eval mode, and restore every module's mode afterward.

    With ``checkpointing``, checkpointed layers are in training mode, as transformers requires, but
    without dropout.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    if checkpointing:
        for module in modes:
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = True
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
