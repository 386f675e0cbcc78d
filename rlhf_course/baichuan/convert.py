"""Convert Baichuan-7B and Baichuan2-7B, without running their code, to native Llama checkpoints.

Both are Llamas with q, k and v packed into one matrix. Baichuan2 also scales the rows of its output
head to length 1 in every forward pass (NormHead); here the weights are scaled once.
"""

import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import load_state_dict

from rlhf_course.baichuan.sentencepiece import sentencepiece_to_fast
from rlhf_course.runtime.files import atomic_folder, read_json

# Baichuan-7B may have either name, Baichuan2-7B only the second.
ARCHITECTURES = ("BaiChuanForCausalLM", "BaichuanForCausalLM")
# Vocabulary sizes of the published models.
BAICHUAN_TOKENS = 64_000
BAICHUAN2_TOKENS = 125_696
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)
ROTARY = "rotary_emb.inv_freq"  # some checkpoints store it; Llama computes it
# A checkpoint is loaded from the first of these files that it has.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
COPIED = ("generation_config.json", "tokenizer.model")
# Files that the Llama checkpoint replaces, or whose code it does not need.
REPLACED = ("config.json", "tokenizer_config.json", "special_tokens_map.json", *WEIGHT_FILES)
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Options that are read from tokenizer_config.json.
TOKENIZER_OPTIONS = (
    "unk_token",
    "bos_token",
    "eos_token",
    "pad_token",
    "add_bos_token",
    "add_eos_token",
    "model_max_length",
    "padding_side",
    "chat_template",
)


def convert_to_llama(
    source: str | Path, target: str | Path, norm_head: bool | None = None, report=print
) -> Path:
    """Write a Baichuan checkpoint as a LlamaForCausalLM with a fast tokenizer; return ``target``.

    Copies ``COPIED`` unchanged: the ids of Baichuan's user and assistant tokens, and what llama.cpp
    reads. ``report`` is called with a line that names the files that are left out.

    A 7B model needs 15 GB of free disk space and about 5 GB of memory (20 GB if its files cannot
    be mapped: .bin files from torch before 1.6). The target must be new or empty. By default,
    ``norm_head`` is guessed from config.json; ``report`` is also called with a line about it.

    Raises ``ValueError``, before writing, for another kind of checkpoint, such as a 13B model
    (ALiBi), for damaged or missing tensors, and for a tokenizer whose ids would change.
    """
    source = Path(source)
    target = Path(target).expanduser().absolute()
    config = read_config(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} already exists and is not an empty folder; choose another.")
    if norm_head is None:
        reason = "Guessed from config.json"
        norm_head = guess_norm_head(config)
    else:
        reason = "As requested"
    if norm_head:
        report(f"{reason}: a NormHead (Baichuan2), with rows scaled to length 1.")
    else:
        report(f"{reason}: a plain head, copied unchanged.")
    tokenizer = read_tokenizer(source, config)
    llama = llama_config(config)
    tensors = read_weights(source, llama)
    llama.dtype = tensors["lm_head.weight"].dtype
    if norm_head:
        tensors["lm_head.weight"] = torch.nn.functional.normalize(tensors["lm_head.weight"], dim=1)
    with atomic_folder(target) as new:
        save_torch_state_dict(unpack(tensors), new)
        llama.save_pretrained(new)
        tokenizer.save_pretrained(new)
        for name in COPIED:
            if (source / name).exists():
                shutil.copy(source / name, new / name)
    left_out = name_left_out(source)
    if left_out:
        report(f"Not copied: {', '.join(left_out)}.")
    return target


def name_left_out(source: Path) -> list[str]:
    """Return the source's files that are neither copied, converted nor code."""
    names = []
    for path in sorted(source.glob("[!.]*")):
        is_used = path.name in (*COPIED, *REPLACED)
        is_weights = path.suffix in (".safetensors", ".bin")
        if path.is_file() and not (is_used or is_weights or path.suffix == ".py"):
            names.append(path.name)
    return names


def llama_config(config: dict) -> LlamaConfig:
    """Return the config of a Llama that gives the same outputs as a Baichuan with ``config``."""
    shared = {key: config[key] for key in (*SIZES, *SPECIAL_IDS, "max_position_embeddings")}
    return LlamaConfig(
        **shared,
        architectures=["LlamaForCausalLM"],
        num_key_value_heads=config["num_attention_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
    )


def read_config(source: Path) -> dict:
    """Return the checkpoint's config.json; raise ``ValueError`` unless it is a 7B Baichuan's."""
    content = read_json(source / "config.json")
    config = SPECIAL_IDS | {key: value for key, value in content.items() if value is not None}
    # The 13B configs have no max_position_embeddings, since ALiBi has no positions to embed.
    if config.get("hidden_size") == 5120 or "max_position_embeddings" not in config:
        raise ValueError(
            f"{source} looks like a 13B model, which uses ALiBi; only 7B models can be converted."
        )
    is_baichuan = config.get("architectures", [""])[0] in ARCHITECTURES
    has_sizes = all(size in config for size in SIZES)
    uses_silu = config.get("hidden_act", "silu") == "silu"
    if not (is_baichuan and has_sizes and uses_silu):
        raise ValueError(
            f"{source} has no Baichuan checkpoint (see its config.json); choose another folder."
        )
    return config


def guess_norm_head(config: dict) -> bool:
    """Return whether the config is Baichuan2's; raise ``ValueError`` if it is ambiguous."""
    if "z_loss_weight" in config or config["vocab_size"] == BAICHUAN2_TOKENS:
        return True
    if config["architectures"][0] == ARCHITECTURES[0] or config["vocab_size"] == BAICHUAN_TOKENS:
        return False
    raise ValueError(
        "The head could be plain (Baichuan) or a NormHead (Baichuan2): set norm_head= or"
        " --norm-head."
    )


def read_tokenizer(source: Path, config: dict) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer with options from tokenizer_config.json."""
    path = source / "tokenizer_config.json"
    options = {"model_max_length": config["max_position_embeddings"]}
    for key, value in (read_json(path) if path.exists() else {}).items():
        if key not in TOKENIZER_OPTIONS:
            continue
        is_added_token = isinstance(value, dict)  # {"content": "<s>", "lstrip": false, …}
        options[key] = value["content"] if is_added_token else value
    options = {key: value for key, value in options.items() if value is not None}
    tokenizer = sentencepiece_to_fast(source / "tokenizer.model", **options)
    if not 0.9 <= len(tokenizer) / config["vocab_size"] <= 1:  # vocabularies may be padded
        raise ValueError(
            f"{source} has a tokenizer.model of {len(tokenizer)} tokens, and a model of"
            f" {config['vocab_size']}. Download both from the same repository."
        )
    return tokenizer


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a Llama's tensors under Baichuan's names, with q, k and v packed into W_pack."""
    packed = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            q_k_v = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            packed[name.replace("q_proj", "W_pack")] = torch.cat(q_k_v)
        elif "k_proj" not in name and "v_proj" not in name:
            packed[name] = tensor
    return packed


def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Invert :func:`pack`; copy q, k and v, because saved tensors must own their memory."""
    unpacked = {}
    for name, tensor in tensors.items():
        if "W_pack" in name:
            for letter, matrix in zip("qkv", tensor.chunk(3), strict=True):
                unpacked[name.replace("W_pack", f"{letter}_proj")] = matrix.clone()
        else:
            unpacked[name] = tensor
    return unpacked


def read_weights(source: Path, llama: LlamaConfig) -> dict[str, Tensor]:
    """Return the tensors under Baichuan's names, memory-mapped if the format allows it.

    Safetensors take precedence over .bin. Raises ``ValueError`` unless the tensors fit ``llama``.
    """
    tensors = _load_tensors(source)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(ROTARY)}
    with torch.device("meta"):
        expected = pack(LlamaForCausalLM(llama).state_dict())
    actual_shapes = _shapes(tensors)
    expected_shapes = _shapes(expected)
    for name in sorted(actual_shapes.keys() | expected_shapes.keys()):
        actual_shape = actual_shapes.get(name)
        expected_shape = expected_shapes.get(name)
        if actual_shape != expected_shape:
            raise ValueError(
                f"In {source}, the shape of {name} is {actual_shape}, but config.json needs"
                f" {expected_shape} (None: no tensor). Download the checkpoint again."
            )
    return tensors


def _load_tensors(source: Path) -> dict[str, Tensor]:
    """Load all weight files; raise ``ValueError`` if one is missing or damaged."""
    present = [source / name for name in WEIGHT_FILES if (source / name).is_file()]
    if not present:
        raise ValueError(f"{source} has no weights, such as {WEIGHT_FILES[0]}. Download it again.")
    first = present[0]  # WEIGHT_FILES is in order of preference
    files = [first]
    if first.suffix == ".json":
        weight_map = read_json(first)["weight_map"]  # tensor name: file name
        files = [source / name for name in sorted(set(weight_map.values()))]
    tensors = {}
    for file in files:
        try:
            tensors |= load_state_dict(file, weights_only=True)  # a pickle can run code
        except Exception as error:  # a truncated file can raise any error
            raise ValueError(
                f"{file} was not loaded: it is missing or damaged, or would run code. Download it"
                " again."
            ) from error
    return tensors


def _shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    """Return the shapes of the floating-point tensors."""
    return {name: list(x.shape) for name, x in tensors.items() if x.is_floating_point()}
