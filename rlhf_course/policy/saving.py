"""Saving a policy: weights or adapter, config, value head and tokenizer in one folder."""

import os
import shutil
from pathlib import Path

from huggingface_hub import HfApi
from safetensors.torch import save_file

from rlhf_course.policy import save_load
from rlhf_course.runtime.files import check_folder


def save_policy(
    policy, save_directory: str | os.PathLike, tokenizer=None, push_to_hub: bool = False, **kwargs
) -> None:
    """Save so that plain transformers (or peft) loads the folder.

    A failure leaves what the folder held before. With ``push_to_hub`` all files go to the
    repository ``repo_id`` (default: the folder's name), too, in one commit; ``token``, ``private``,
    ``commit_message``, ``revision`` and ``create_pr`` are huggingface_hub's. Raises
    ``FloatingPointError`` for weights of NaN or Inf.
    """
    save_directory = check_folder(save_directory)
    check_weights(policy.state_dict())
    with save_load.model_folder(save_directory, policy.is_peft_model) as folder:
        _write(policy, folder)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        names = sorted(path.name for path in folder.iterdir())
    if push_to_hub:
        api, name = HfApi(token=kwargs.pop("token", None)), kwargs.pop("repo_id", None)
        private = kwargs.pop("private", None)
        repo = api.create_repo(name or save_directory.name, private=private, exist_ok=True)
        where = {"folder_path": save_directory, "allow_patterns": names}
        api.upload_folder(repo_id=repo.repo_id, **where, **kwargs)


def _write(policy, folder: Path) -> None:
    state = policy.state_dict()
    head = {name: w.contiguous() for name, w in state.items() if name.startswith(save_load.PREFIX)}
    save_file(head, folder / save_load.VALUE_HEAD_FILE)
    if policy.is_peft_model:
        adapter = policy.pretrained_model.active_adapter
        policy.pretrained_model.save_pretrained(folder, selected_adapters=[adapter])
        for path in [*folder.glob(f"{adapter}/*")]:  # where peft puts an adapter with a name
            path.rename(folder / path.name)
        shutil.rmtree(folder / adapter, ignore_errors=True)
    else:
        base = {name: weight for name, weight in state.items() if name not in head}
        policy.pretrained_model.save_pretrained(folder, state_dict=base)


def check_weights(weights: dict) -> None:
    """Raise ``FloatingPointError``, naming one, unless all weights are finite."""
    if bad := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
        raise FloatingPointError(
            f"The weight {bad} has NaN or Inf; nothing was saved. Go back to the last checkpoint, "
            "with a lower learning rate."
        )
