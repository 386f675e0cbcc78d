"""Saved models, adapters and value heads: found in a folder or on the hub, checked to be whole, and brought there."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from zipfile import is_zipfile

import torch
from huggingface_hub import HfApi, snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file, find_adapter_config_file

from rlhf_course.runtime.files import atomic_folder, check_folder
from rlhf_course.runtime.hub import check_known, check_source, hub_errors

VALUE_HEAD_FILE, PREFIX = "v_head.safetensors", "v_head."
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
# With the value heads of this course and of old TRL, and the tokenizer, whose size peft looks at.
ADAPTER_FILES = ("adapter_*", VALUE_HEAD_FILE, "pytorch_model.bin", "tokenizer*", "*.model", "vocab*", "merges.txt")
ADAPTER_FILES += ("special_tokens_map.json", "added_tokens.json", "chat_template*")
CAUSAL = "A policy continues its text token by token: take a causal language model, such as GPT-2 or Llama."


def load_model(auto: type, source: str | Path, *args, new_head: bool = False, adapter_name: str = "default", **kwargs):
    """A whole model of the class that ``auto`` finds, from a folder or hub id; an adapter comes with its base.

    Code in the repository is never run. With ``new_head`` the tensors on top of the network may be missing, and are
    drawn; ``adapter_name`` and ``is_trainable`` are for an adapter alone, other arguments for transformers.

    Raises ``ValueError`` where a tensor is missing, which transformers would draw at random, or has another shape, and
    for damaged files, and ``OSError`` where there is no model.
    """
    trainable, options = kwargs.pop("is_trainable", False), kwargs | {"trust_remote_code": False}
    check_source(source)
    with hub_errors(Path(source, kwargs.get("subfolder") or "")):
        adapter = adapter_folder(source, options)
        if adapter is None:
            return _load_base(auto, source, *args, new_head=new_head, **options)
        config, weights = PeftConfig.from_pretrained(str(adapter)), load_peft_weights(str(adapter), device="cpu")
    kind = {"AutoModelForCausalLM": "CAUSAL_LM"}.get(auto.__name__, "SEQ_CLS")
    if (config.task_type or kind) != kind:
        raise ValueError(f"The adapter in {source} has task type {config.task_type}; this needs one of {kind}.")
    config.task_type, source = kind, config.base_model_name_or_path
    check_source(source)
    with hub_errors(source):
        own = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
        base = _load_base(
            auto,
            source,
            *args,
            new_head=new_head,
            own=own,
            where=f"{adapter} on {source}",
            revision=config.revision,
            **options,
        )
    with warnings.catch_warnings(action="ignore"):  # about what is checked below
        how = {"is_trainable": trainable, "ignore_mismatched_sizes": True}
        model = PeftModel.from_pretrained(base, str(adapter), adapter_name, config=config, **how)
    check_adapter(model, adapter_name, weights, adapter)
    return model


def _load_base(auto: type, source, *args, new_head: bool, own: dict[str, Tensor] | None = None, where="", **options):
    """A model without adapters; the adapter's ``own`` tensors may be missing in it, and set the embeddings' size."""
    config, _ = PreTrainedConfig.get_config_dict(str(source), **_hub(options))
    check_known(source, config)
    if auto is AutoModelForCausalLM and config.get("is_encoder_decoder"):
        raise ValueError(f"{source} has an encoder, which no policy has. {CAUSAL}")
    folder = Path(source, options.get("subfolder") or "")
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin")):
        raise FileNotFoundError(
            f"The model folder {folder} holds no weights: looked for *.safetensors and *.bin. "
            "Give a folder written by save_pretrained, or a hub id."
        )
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = auto.from_pretrained(str(source), *args, **how, **options)
    missing, other = found["missing_keys"] - (own or {}).keys(), found["mismatched_keys"]
    if new_head:
        trunk = f"{model.base_model_prefix}."
        missing, other = (x for x in missing if x.startswith(trunk)), (x for x in other if x[0].startswith(trunk))
    _refuse(where or source, type(model).__name__, missing, other)
    name = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    if rows := [len(own[key]) for key in (f"{name}.weight", f"{name}.base_layer.weight") if own and key in own]:
        model.resize_token_embeddings(rows[0])
    return model


def check_adapter(model: PeftModel, name: str, weights: dict[str, Tensor], source: str | Path) -> None:
    """Raise ``ValueError`` unless the weights read from ``source`` are all that the adapter has, in its shapes."""
    wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    both = [(key, weights[key].shape, value.shape) for key, value in wanted.items() if key in weights]
    _refuse(source, "adapter", wanted.keys() - weights.keys(), [row for row in both if row[1] != row[2]])


def _refuse(source: str | Path, kind: str, missing: Iterable[str], other: Iterable[tuple]) -> None:
    """Raise ``ValueError`` where a tensor is missing, or of another shape: it would be drawn at random."""
    judge = kind.endswith("SequenceClassification")
    if missing := sorted(missing):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        cure = " To train a new head on it, load it with new_head=True." if judge else ""
        raise ValueError(
            f"{source} holds no {missing[0]}{more}, which this {kind} needs: it is incomplete, or another kind of "
            f"model.{cure}"
        )
    for name, saved, wanted in sorted(other):
        cure = " A reward model has one label; SentimentReward takes one of several." if judge else ""
        raise ValueError(
            f"{name} in {source} has shape {tuple(saved)}, and this {kind} needs {tuple(wanted)}: it is a model of "
            f"another size.{cure}"
        )


def load_tokenizer(source: str | Path, **kwargs):
    """A folder's or a hub id's tokenizer. Raises ``ValueError`` where there is none, and as :func:`load_model` does."""
    check_source(source)
    with hub_errors(source):
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False, **kwargs)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes an empty one for a model alone
        raise ValueError(f"{source} holds no tokenizer. Save it there: tokenizer.save_pretrained(folder).")
    return tokenizer


def check_vocabulary(tokenizer, model: nn.Module) -> None:
    """Raise ``ValueError`` where the tokenizer has more tokens than the model."""
    tokens = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    if tokens > (known := known_tokens(model)):
        raise ValueError(
            f"The tokenizer has {tokens} tokens, and the model knows {known}. Take the tokenizer that was saved with "
            "it, or call resize_token_embeddings(len(tokenizer)) before training."
        )


def known_tokens(model: nn.Module) -> int:
    """How many tokens a model, or a policy, has embeddings of."""
    return getattr(model, "pretrained_model", model).get_input_embeddings().weight.shape[0]


@contextmanager
def model_folder(target: str | Path, adapter: bool) -> Iterator[Path]:
    """As ``atomic_folder``, for an adapter or a whole model; an earlier one's weights go.

    Raises ``ValueError`` where the folder holds the other kind: whoever loads a folder with both gets the adapter.
    """
    target = check_folder(target)
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
    with hub_errors(Path(source, hub.get("subfolder", ""))):
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
