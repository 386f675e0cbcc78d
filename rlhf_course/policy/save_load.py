"""Load models, adapters and value heads, and check that they are complete and on their own base."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course.runtime.files import atomic_folder, check_folder, read_json
from rlhf_course.runtime.hub import check_known, check_source, hub_errors

VALUE_HEAD_FILE, PREFIX, ADAPTER_CONFIG = "v_head.safetensors", "v_head.", "adapter_config.json"
# What would be loaded in place of a model that is saved later; a backup beside it is not.
MODEL_FILES = (
    *("model.safetensors", "model.safetensors.index.json", "model-0????-of-0????.safetensors"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-0????-of-0????.bin"),
)
BASE_FILE, SAMPLES = "adapter_base.txt", 64  # numbers of each tensor that a fingerprint is made of
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


def load_model(
    auto: type,
    source: str | Path,
    new_head: bool = False,
    adapter_name: str = "default",
    is_trainable=False,
    **kwargs,
):
    """Return a model of the class that ``auto`` finds, from a folder or hub id.

    An adapter comes on its base; ``adapter_name`` and ``is_trainable`` are for adapters only. Code
    in the repository is never run. With ``new_head`` tensors on top of the network may be missing,
    and are drawn. Raises ``ValueError`` for missing keys, mismatched shapes, damaged files, and an
    adapter of another base; ``OSError`` without a model.
    """
    folder = local_folder(source, **kwargs)
    if not (folder / ADAPTER_CONFIG).exists():
        return _load_base(auto, source, folder, new_head, **kwargs)
    task = "CAUSAL_LM" if auto is AutoModelForCausalLM else "SEQ_CLS"
    config, weights = read_adapter(folder)
    if config.task_type not in (None, task):
        raise ValueError(
            f"The adapter in {source} has task type {config.task_type}; this needs one of {task}."
        )
    config.task_type, config.inference_mode = task, not is_trainable
    base = config.base_model_name_or_path
    kwargs |= {"revision": config.revision, "subfolder": ""}
    own = {k.removeprefix("base_model.model."): v for k, v in weights.items()}  # a score head's
    label, where = f"{source} on {base}", local_folder(base, **kwargs)
    network = _load_base(auto, base, where, new_head, own, label, **kwargs)
    check_base(folder, network)
    modules = network.named_modules()
    embeddings = next(n for n, module in modules if module is network.get_input_embeddings())
    for key in {f"{embeddings}.weight", f"{embeddings}.base_layer.weight"} & own.keys():
        network.resize_token_embeddings(len(own[key]))
    model = get_peft_model(network, config, adapter_name)
    set_adapter_weights(model, adapter_name, weights, source)
    return model.eval()


def _load_base(
    auto, source, folder: Path, new_head: bool, own: Iterable[str] = (), label: str = "", **kwargs
):
    """Return a model without adapters; tensors that an adapter has as its ``own`` may miss."""
    place = folder if Path(source).is_dir() else source
    with hub_errors(place):
        config = read_json(file) if (file := folder / "config.json").exists() else {}
        check_known(source, config)
        kwargs |= dict.fromkeys(("output_loading_info", "ignore_mismatched_sizes"), True)
        kwargs["trust_remote_code"] = False
        # First on the meta device, which allocates nothing: the config may be of a larger model.
        plain = {key: kwargs[key] for key in kwargs if key != "quantization_config"}
        model, report = auto.from_pretrained(str(source), **plain | {"device_map": "meta"})
    needed = f"{model.base_model_prefix}." if new_head else ""
    missing = [key for key in report["missing_keys"] if key.startswith(needed) and key not in own]
    mismatched = [row for row in report["mismatched_keys"] if row[0].startswith(needed)]
    hint = (
        " For a new head take new_head=True; for one of several labels SentimentReward."
        if auto is not AutoModelForCausalLM
        else ""
    )
    _check_loaded(label or source, type(model).__name__, missing, mismatched, hint)
    with hub_errors(place):
        return auto.from_pretrained(str(source), **kwargs)[0]


def _check_loaded(
    source, kind: str, missing: Iterable[str], mismatched: Iterable[tuple], hint: str = ""
) -> None:
    """Raise ``ValueError`` where keys are missing, or shapes mismatched: (key, saved, wanted)."""
    found = [f"it holds no {key}" for key in sorted(missing)] + [
        f"{key} has shape {tuple(saved)}, and this {kind} needs {tuple(wanted)}"
        for key, saved, wanted in sorted(mismatched)
    ]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(
            f"{source} is incomplete, or no {kind} of this size: {found[0]}{more}.{hint}"
        )


def check_state_dict(
    source, kind: str, saved: dict[str, Tensor], wanted: dict[str, Tensor]
) -> None:
    """Raise ``ValueError`` unless ``saved`` has all keys that are wanted, in their shapes."""
    shapes = [(key, saved[key].shape, wanted[key].shape) for key in wanted.keys() & saved.keys()]
    mismatched = [row for row in shapes if row[1] != row[2]]
    _check_loaded(source, kind, wanted.keys() - saved.keys(), mismatched)


def local_folder(source: str | Path, subfolder: str | None = None, **kwargs) -> Path:
    """Return the folder of a model's config and value head, or an adapter; download a hub id's."""
    check_source(source)
    prefix = f"{subfolder}/" if subfolder else ""
    if Path(source).is_dir():
        return Path(source, prefix)
    options = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
    names = [prefix + name for name in ("config.json", "adapter_*", VALUE_HEAD_FILE)]
    with hub_errors(source):
        return Path(snapshot_download(str(source), allow_patterns=names, **options), prefix)


def read_adapter(folder: str | Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Return config and weights of a saved adapter."""
    with hub_errors(folder):
        return PeftConfig.from_pretrained(str(folder)), load_peft_weights(str(folder), device="cpu")


def set_adapter_weights(
    model: PeftModel, name: str, weights: dict[str, Tensor], source: str | Path
) -> list[str]:
    """Put all weights of an adapter, read from ``source``, into it; return unexpected keys."""
    wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    check_state_dict(source, "adapter", weights, wanted)
    return set_peft_model_state_dict(model, weights, adapter_name=name).unexpected_keys


def read_value_head(source: str | Path, **kwargs) -> dict[str, Tensor]:
    """Return the state dict of the value head that was saved with a model, {} without one."""
    file = local_folder(source, **kwargs) / VALUE_HEAD_FILE
    with hub_errors(file.parent):
        state = load_file(file) if file.exists() else {}
    return {key.removeprefix(PREFIX): value for key, value in state.items()}


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> str:
    """Return a hash of a few numbers of each layer's weights, "" where they depend on the loading.

    Numbers are rounded to bfloat16, so that a base in float32 has the hash of the same base in
    bfloat16. In float16 and in 8 or 4 bits other numbers would come out. Adapters, heads and
    embeddings, which may be resized, are left out.
    """
    model = getattr(model, "pretrained_model", model)
    adapters = {*getattr(model, "peft_config", {})}
    network = model.get_base_model() if isinstance(model, PeftModel) else model
    skipped = {id(p) for p in network.get_input_embeddings().parameters()}
    digest = hashlib.sha256()
    for name, parameter in network.base_model.named_parameters():
        parts = [part for part in name.split(".") if part not in ("base_layer", "original_module")]
        if id(parameter) in skipped or adapters & {*parts}:
            continue
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            return ""
        some = parameter.flatten()[:: max(1, parameter.numel() // SAMPLES)].bfloat16().cpu()
        digest.update(f"{'.'.join(parts)} {[*parameter.shape]}".encode())
        digest.update(some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def write_base(folder: Path, model: nn.Module) -> None:
    """Record which base a policy's adapter was trained on."""
    if found := base_fingerprint(model):
        (folder / BASE_FILE).write_text(found + "\n", encoding="utf-8")


def check_base(folder: Path, model: nn.Module) -> None:
    """Raise ``ValueError`` where the record in ``folder`` names another base than this one."""
    file, found = folder / BASE_FILE, base_fingerprint(model)
    if found and file.exists() and file.read_text(encoding="utf-8").strip() != found:
        raise ValueError(
            f"The adapter in {folder} was trained on a base with other weights. Name its own base:"
            f" base_model_name_or_path in its {ADAPTER_CONFIG}."
        )


def load_tokenizer(source: str | Path, **kwargs):
    """Return a tokenizer. Raises ``ValueError`` without one, and as :func:`load_model` does."""
    check_source(source)
    with hub_errors(source):
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False, **kwargs)
    # transformers makes an empty one for a folder that holds only a model
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            f"{source} holds no tokenizer. Save it there: tokenizer.save_pretrained(folder)."
        )
    return tokenizer


def check_vocabulary(tokenizer, model: nn.Module) -> None:
    """Raise ``ValueError`` where the tokenizer has more tokens than the model."""
    tokens = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    known = getattr(model, "pretrained_model", model).get_input_embeddings().weight.shape[0]
    if tokens > known:
        raise ValueError(
            f"The tokenizer has {tokens} tokens, and the model knows {known}. Take the tokenizer"
            " that was saved with it, or call resize_token_embeddings(len(tokenizer)) before"
            " training."
        )


@contextmanager
def model_folder(target: str | Path, adapter: bool) -> Iterator[Path]:
    """Write an adapter or a whole model as ``atomic_folder`` does; an earlier one's weights go.

    Raises ``ValueError`` where the folder holds the other kind: of both, the adapter would load.
    """
    target = check_folder(target)
    if (target / ("config.json" if adapter else ADAPTER_CONFIG)).exists():
        here, other = ("adapter", "model") if adapter else ("model", "adapter")
        raise ValueError(f"{target} holds a saved {other}; save the {here} to another folder.")
    stale = ("adapter_model.safetensors", "adapter_model.bin") if adapter else MODEL_FILES
    with atomic_folder(target, stale) as folder:
        yield folder
