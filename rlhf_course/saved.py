"""A saved policy's adapter and value head: found in a folder or on the hub, and brought there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from zipfile import is_zipfile

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file, find_adapter_config_file

from rlhf_course.files import atomic_folder
from rlhf_course.hub import check_source

VALUE_HEAD_FILE, PREFIX = "v_head.safetensors", "v_head."
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
# With the value heads of this course and of old TRL, and the tokenizer, whose size peft looks at.
ADAPTER_FILES = ("adapter_*", VALUE_HEAD_FILE, "pytorch_model.bin", "tokenizer*", "*.model", "vocab*", "merges.txt")
ADAPTER_FILES += ("special_tokens_map.json", "added_tokens.json", "chat_template*")


@contextmanager
def model_folder(target: str | Path, adapter: bool) -> Iterator[Path]:
    """As :func:`~rlhf_course.files.atomic_folder`, for an adapter or a whole model; an earlier one's weights go.

    Raises ``ValueError`` where the folder holds the other kind: whoever loads a folder with both gets the adapter.
    """
    here, other = ("an adapter", "a whole model") if adapter else ("a whole model", "an adapter")
    if Path(target, "config.json" if adapter else "adapter_config.json").exists():
        raise ValueError(f"{target} holds {other}; {here} beside it would hide one of them. Save to another folder.")
    stale = ("adapter_model.*",) if adapter else ("model*.safetensors*", "pytorch_model*.bin*")
    with atomic_folder(target, stale) as folder:
        yield folder


def adapter_folder(source: str | Path, options: dict) -> Path | None:
    """The folder with the files of the adapter in ``source``, a folder or hub id; None where there is no adapter.

    ``options`` are those of ``from_pretrained``. What says where the adapter is, and not its base, is taken out.
    """
    check_source(source)
    hub = _hub(options)
    if (config := find_adapter_config_file(str(source), **hub)) is None:
        return None
    for key in ("revision", "subfolder"):
        options.pop(key, None)
    subfolder = hub.pop("subfolder", "")
    if Path(source).is_dir():
        return Path(config).parent
    patterns = [os.path.join(subfolder, name) for name in ADAPTER_FILES]
    return Path(snapshot_download(str(source), allow_patterns=patterns, **hub), subfolder)


def value_head(source: str | Path, **options) -> dict[str, Tensor]:
    """The saved value head without its prefix, {} where there is none; ``options`` are those of ``from_pretrained``.

    Old checkpoints keep it among the base model's weights. Of these nothing else is read, and nothing is downloaded
    that was not loaded before.
    """
    hub = _hub(options) | {"_raise_exceptions_for_missing_entries": False}
    loaded = hub | {"local_files_only": True, "force_download": False}

    def read(name: str, where: dict) -> dict[str, Tensor]:
        path = cached_file(str(source), name, **where)
        if path is None:
            return {}
        if path.endswith(".json"):
            places = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
            shards = {shard for key, shard in places.items() if key.startswith(PREFIX)}
            return {key: value for shard in shards for key, value in read(shard, where).items()}
        if path.endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys() if key.startswith(PREFIX)}
        state = torch.load(path, mmap=is_zipfile(path), map_location="cpu", weights_only=True)
        return {key: value for key, value in state.items() if key.startswith(PREFIX)}

    places = [(VALUE_HEAD_FILE, hub), *((name, loaded) for name in WEIGHTS)]
    head = next(filter(None, (read(*place) for place in places)), {})
    return {key.removeprefix(PREFIX): value for key, value in head.items()}


@cache
def say_new_value_head(source: str) -> None:
    """One line per source: right before the first PPO run, and a loss to whoever goes on with a saved policy."""
    print(f"The value head is new: {Path(source).name if Path(source).is_dir() else source} holds none.")


def upload(folder: Path, names: list[str], repo_id: str, token=None, private: bool | None = None, **commit) -> None:
    """These files of a folder as one commit to a hub repository, made if there is none; ``commit`` as huggingface_hub's
    ``upload_folder`` takes it (``commit_message``, ``revision``, ``create_pr``)."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=names, **commit)


def _hub(options: dict) -> dict:
    return {key: options[key] for key in HUB_OPTIONS if options.get(key) is not None}
