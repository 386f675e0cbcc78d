"""Save and load a policy: weights or adapter, config, value head, tokenizer."""

import os
from functools import cache
from pathlib import Path

import torch
from huggingface_hub import HfApi
from peft import get_peft_model, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_WEIGHTS
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_course.policy import save_load
from rlhf_course.runtime.files import atomic_folder, check_folder
from rlhf_course.runtime.hub import hub_errors

POLICY = "policy"  # the adapter that PPO trains
PREFIX = "v_head."
VALUE_HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
say_once = cache(print)


class Saved:
    """Give a policy methods for loading, saving, generation and gradient checkpointing."""

    def generate(self, *args, **kwargs):
        """Call the base model's ``generate``."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass, even in eval mode, which PPO uses."""
        network = self.pretrained_model
        enable = getattr(network, "activation_checkpointing_enable", None)
        (enable or network.gradient_checkpointing_enable)({"use_reentrant": False})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, peft_config=None, **kwargs):
        """Load a policy from a folder, hub id or model in memory; ``peft_config`` adds an adapter.

        Weights are float32 unless ``dtype`` (or ``torch_dtype``) is set, because PPO trains them
        directly. A saved value head is loaded; if there is none, a printed line reports a new head,
        which ``summary_dropout_prob``, ``v_head_init_strategy`` and ``v_head_initializer_range``
        configure. Other arguments go to transformers.
        """
        source = base = pretrained_model_name_or_path
        head_options = {key: kwargs.pop(key) for key in VALUE_HEAD_OPTIONS if key in kwargs}
        if not isinstance(source, nn.Module):
            kwargs = {
                "dtype": kwargs.pop("torch_dtype", torch.float32),
                "adapter_name": POLICY,
                "is_trainable": True,
            } | kwargs
            base = save_load.load_model(AutoModelForCausalLM, source, **kwargs)
        if peft_config is not None and getattr(base, "peft_config", None):
            raise ValueError("The model is an adapter. Omit peft_config to train it, or merge it.")
        adapted = base if peft_config is None else get_peft_model(base, peft_config, POLICY)
        model = cls(adapted, **head_options).eval()
        if base is source:
            return model
        file = save_load.local_folder(source, **kwargs) / save_load.VALUE_HEAD_FILE
        if file.exists():
            with hub_errors(file.parent):
                head = load_file(file)
            model.v_head.load_state_dict({key.removeprefix(PREFIX): head[key] for key in head})
        else:
            say_once(f"The value head is new: {Path(source).name} has none.")
        return model

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
        check_weights(self.state_dict())
        stale, other = save_load.MODEL_FILES, save_load.ADAPTER_CONFIG
        if self.is_peft_model:
            stale, other = ("adapter_model.safetensors", "adapter_model.bin"), "config.json"
        if (target / other).exists():
            raise ValueError(f"{target} has another kind of model ({other}); use a new folder.")
        with atomic_folder(target, stale) as folder:
            _write(self, folder)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)
            names = sorted(path.name for path in folder.iterdir())
        if push_to_hub:
            api = HfApi(token=token)
            repo = api.create_repo(repo_id or target.name, private=private, exist_ok=True).repo_id
            api.upload_folder(repo_id=repo, folder_path=target, allow_patterns=names, **kwargs)


def _write(policy, folder: Path) -> None:
    save_file(policy.v_head.state_dict(prefix=PREFIX), folder / save_load.VALUE_HEAD_FILE)
    model = policy.pretrained_model
    if policy.is_peft_model:  # peft's method would put a named adapter into a subfolder
        name = model.active_adapter
        save_file(get_peft_model_state_dict(model, adapter_name=name), folder / ADAPTER_WEIGHTS)
        model.peft_config[name].save_pretrained(folder)
        save_load.write_base(folder, policy)
    else:
        model.save_pretrained(folder)


def check_weights(weights: dict) -> None:
    """Raise ``FloatingPointError``, with a bad weight's name, unless all weights are finite."""
    if bad := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
        raise FloatingPointError(
            f"The weight {bad} has NaN or Inf; nothing was saved. Go back to the last checkpoint."
        )
