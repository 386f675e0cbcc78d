"""Load models, adapters and tokenizers; check that they are complete and fit their bases."""

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_WEIGHTS
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlhf_course.runtime.hub import check_source, download, hub_errors

OTHER_HEAD = "value_head.safetensors"
VALUE_HEAD_FILE = "v_head.safetensors"
VALUE_HEAD_PREFIX = "v_head."
ADAPTER_CONFIG = "adapter_config.json"
# A new model or adapter replaces these files, which would load instead; other files are kept.
MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-0????-of-0????.safetensors",
)
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
VOCABULARY_FILES = ("*.model", "*token*", "*vocab*")
BASE_FILE = "adapter_base.txt"
# Initializations of LoRA that leave the base's weights as they are.
KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
FINGERPRINT_SIZE = 64  # numbers per tensor
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


def load_model(
    auto: type,
    source: str | Path,
    new_head: bool = False,
    adapter_name: str = "default",
    is_trainable: bool = False,
    **kwargs,
):
    """Return a model of the class that ``auto`` chooses, from a folder or hub id.

    An adapter is loaded onto its base; only adapters use ``adapter_name`` and ``is_trainable``.
    If ``new_head``, a missing head is initialized at random. Raises ``ValueError`` for damaged
    files, tensors that do not fit, or another base's adapter, and ``OSError`` for a missing model.
    """
    folder = local_folder(source, **kwargs)
    if not (folder / ADAPTER_CONFIG).exists():
        return _load_base(auto, source, label=str(source), new_head=new_head, **kwargs)
    config, weights = read_adapter(folder)
    config.task_type = "CAUSAL_LM" if auto is AutoModelForCausalLM else "SEQ_CLS"
    config.inference_mode = not is_trainable
    base = config.base_model_name_or_path
    kwargs["revision"] = config.revision
    # The base may lack tensors that the adapter has, such as a head.
    in_adapter = {key.removeprefix("base_model.model.") for key in weights}
    network = _load_base(
        auto,
        base,
        label=f"{source} on {base}",
        new_head=new_head,
        in_adapter=in_adapter,
        **kwargs,
    )
    model = add_adapter(network, config, adapter_name)
    check_base(folder, model)  # now: PiSSA and OLoRA change the base when the adapter is made
    set_adapter_weights(model, adapter_name, weights, source)
    return model.eval()


def moves_base(config: PeftConfig) -> bool:
    """Return whether making an adapter changes the base's weights, as PiSSA and OLoRA do."""
    return getattr(config, "init_lora_weights", True) not in KEEPS_BASE


def add_adapter(network: nn.Module, config: PeftConfig, name: str) -> PeftModel:
    """Return the network with a new adapter; it is the same each time if it changes the base.

    ``pissa_niter_N`` draws random numbers to split the base's weights; loading must split them in
    the same way as training did.
    """
    if not moves_base(config):
        return get_peft_model(network, config, name)
    devices = [network.device] if network.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        return get_peft_model(network, config, name)


def _load_base(
    auto: type, source, label: str, new_head: bool, in_adapter: Collection[str] = (), **kwargs
) -> PreTrainedModel:
    """Load a model that has no adapters; error messages call it ``label``.

    Tensors in ``in_adapter`` may be missing; so may the head, if ``new_head``.
    """
    kwargs |= {"trust_remote_code": False, "ignore_mismatched_sizes": True}
    with hub_errors(source):
        # First load on the meta device, using no memory: a wrong config may describe a huge model.
        options = {key: kwargs[key] for key in kwargs if key != "quantization_config"}
        options |= {"device_map": "meta", "output_loading_info": True}
        model, report = auto.from_pretrained(str(source), **options)
    kind = type(model).__name__
    faults = _loading_faults(model, report, in_adapter)
    if new_head:  # faults of the head do not count
        prefix = f"{model.base_model_prefix}."
        faults = {key: fault for key, fault in faults.items() if key.startswith(prefix)}
    if faults:
        refuse_several_labels(model, report, faults, source, label, **kwargs)
        first_fault = faults[min(faults)]
        text = (
            f"{label} is incomplete, or not a {kind} of this size: {first_fault}."
            " Download it again, or choose another model."
        )
        if kind.endswith("Classification"):
            text += " Use new_head=True to train a new head."
        if (Path(source) / OTHER_HEAD).exists():
            text = (
                f"{source} has its score head in {OTHER_HEAD}, as LLaMA-Factory saves it. Save a"
                f" {kind} with score.weight = v_head.summary.weight; docs/troubleshooting.md has"
                " the code."
            )
        raise ValueError(text)
    with hub_errors(source):
        return auto.from_pretrained(str(source), **kwargs)


def refuse_several_labels(
    model: PreTrainedModel, report: Mapping, faults: Mapping, source, label: str, **kwargs
) -> None:
    """Raise ``ValueError`` if a reward model's only faults are a head for several labels."""
    mismatched = {key for key, *_ in report["mismatched_keys"]}
    in_head = {key for key in mismatched if not key.startswith(f"{model.base_model_prefix}.")}
    if getattr(model.config, "num_labels", None) != 1 or not faults.keys() <= in_head:
        return
    options = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
    with hub_errors(source):
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=False, **options)
    if config.num_labels == 1:
        return
    names = ", ".join(map(str, config.id2label.values()))
    raise ValueError(
        f"{label} has {config.num_labels} labels ({names}); a reward model has one output. Score"
        " one of the labels with check_reward_model.py --label NAME, or with SentimentReward(...,"
        " label=NAME)."
    )


def _loading_faults(
    model: PreTrainedModel, report: Mapping, in_adapter: Collection[str]
) -> dict[str, str]:
    """Return a sentence per tensor that is missing, misshaped, or of a layer beyond the last."""
    kind = type(model).__name__
    faults = {}
    for key in report["missing_keys"]:
        if key not in in_adapter:
            faults[key] = f"it has no {key}"
    for key, saved, expected in report["mismatched_keys"]:
        faults[key] = f"{key} has shape {tuple(saved)}, and this {kind} needs {tuple(expected)}"
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if layers:
        for key in report["unexpected_keys"]:
            number = re.search(r"\.(\d+)\..*weight$", key)
            if number and int(number[1]) >= layers:
                faults[key] = f"config.json has {layers} layers, but there is a {key}"
    return faults


def local_folder(source: str | Path, **kwargs) -> Path:
    """Return the folder of a model or adapter; a download uses only kwargs in HUB_OPTIONS."""
    return download(source, **{key: kwargs[key] for key in HUB_OPTIONS if key in kwargs})


def read_adapter(folder: str | Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Return a saved adapter's config and its weights, on the CPU."""
    with hub_errors(folder):
        return PeftConfig.from_pretrained(str(folder)), load_peft_weights(str(folder), device="cpu")


def set_adapter_weights(
    model: PeftModel, name: str, weights: dict[str, Tensor], source: str | Path
) -> None:
    """Copy weights, read from ``source``, into an adapter.

    Raises ``ValueError`` for missing weights, or weights for another model or task.
    """
    expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        advice = "Merge it into its base." if "score" in missing[0] else "Copy it again."
        raise ValueError(f"The adapter in {source} has no {missing[0]}. {advice}")
    unknown = set_peft_model_state_dict(model, weights, adapter_name=name).unexpected_keys
    if unknown:
        raise ValueError(
            f"The adapter in {source} does not fit this model: {unknown[0]}. Load its own base."
        )


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> str:
    """Return a hash of numbers from each base weight; "" if a weight is not float32 or bfloat16.

    The numbers are rounded to bfloat16, so a base has the same hash in either type.
    """
    model = getattr(model, "pretrained_model", model)
    adapters = set(getattr(model, "peft_config", {}))
    network = model.get_base_model() if isinstance(model, PeftModel) else model
    weights = [
        weight.flatten()
        for name, weight in network.base_model.named_parameters()
        if adapters.isdisjoint(name.split("."))
    ]
    if not {weight.dtype for weight in weights} <= {torch.float32, torch.bfloat16}:
        return ""
    numbers = [
        weight[:: max(1, len(weight) // FINGERPRINT_SIZE)].bfloat16().cpu() for weight in weights
    ]
    return hashlib.sha256(torch.cat(numbers).view(torch.int16).numpy().tobytes()).hexdigest()


def write_base(folder: Path, model: nn.Module) -> None:
    """Write into ``folder`` the fingerprint of the base that an adapter was trained on."""
    (folder / BASE_FILE).write_text(base_fingerprint(model), encoding="utf-8")


def check_base(folder: Path, model: nn.Module) -> None:
    """Raise ``ValueError`` if ``folder`` has another base's fingerprint."""
    file = folder / BASE_FILE
    saved = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    actual = base_fingerprint(model)
    if saved and actual and saved != actual:
        raise ValueError(
            f"The adapter in {folder} was trained on a base whose weights differ from this base's."
            f" Name that base in base_model_name_or_path, in {ADAPTER_CONFIG}."
        )


def write_policy(policy, folder: Path) -> None:
    """Write a policy's value head, and its model or active adapter, into ``folder``."""
    value_head = policy.v_head.state_dict(prefix=VALUE_HEAD_PREFIX)
    save_file(value_head, folder / VALUE_HEAD_FILE)
    model = policy.pretrained_model
    if not policy.is_peft_model:
        model.save_pretrained(folder)
        return
    # peft's save_pretrained would put a named adapter into a subfolder.
    name = model.active_adapter
    weights = get_peft_model_state_dict(model, adapter_name=name)
    # Layers may share a weight (layer_replication, RandLora), which the file's format forbids.
    weights = {key: weight.contiguous().clone() for key, weight in weights.items()}
    save_file(weights, folder / ADAPTER_WEIGHTS)
    model.peft_config[name].save_pretrained(folder)
    write_base(folder, policy)


def check_weights(weights: Mapping[str, Tensor]) -> None:
    """Raise ``FloatingPointError``, with a bad weight's name, unless all weights are finite."""
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise FloatingPointError(
                f"The weight {name} has NaN or Inf; nothing was saved. Go back to the last"
                " checkpoint."
            )


def load_tokenizer(source: str | Path, **kwargs):
    """Return a tokenizer; raise ``load_model``'s errors, and ``ValueError`` if it is missing."""
    check_source(source)
    missing = f"{source} has no tokenizer; call tokenizer.save_pretrained(folder)."
    try:
        with hub_errors(source):
            tokenizer = AutoTokenizer.from_pretrained(
                str(source), trust_remote_code=False, **kwargs
            )
    except ValueError as error:
        # For an adapter's folder, transformers asks for sentencepiece or tiktoken.
        has_vocabulary = any(
            file for pattern in VOCABULARY_FILES for file in Path(source).glob(pattern)
        )
        if "backend tokenizer" in str(error) and not has_vocabulary:
            raise ValueError(missing) from None
        raise
    # transformers makes an empty tokenizer for a folder with only a model
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(missing)
    return tokenizer


def check_vocabulary(tokenizer, model: nn.Module) -> None:
    """Raise ``ValueError`` if a tokenizer has more tokens than the model, or under half as many.

    An added token needs no row of the model unless it is the padding, begin or end token: Gemma 3's
    text model has none for its image token. ``generate`` and ``step`` refuse texts that contain it.
    """
    tokens = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    needed = tokens
    if hasattr(tokenizer, "added_tokens_decoder"):
        ends = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        needed = max([tokenizer.vocab_size, *(token + 1 for token in ends if token is not None)])
    known = getattr(model, "pretrained_model", model).get_input_embeddings().weight.shape[0]
    if tokens and (tokens < known / 2 or needed > known):
        raise ValueError(
            f"The tokenizer has {tokens} tokens, but the model has {known}. Use the model's own"
            " tokenizer, or call resize_token_embeddings(len(tokenizer)) before training."
        )
