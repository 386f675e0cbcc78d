"""Baichuan-7B and Baichuan2-7B as native Llama checkpoints, without running any code that came with
them.

The architecture is Llama's with q, k and v packed into one matrix. Baichuan2 also scales the rows
of its output head to length 1 in every forward pass (NormHead); here that is done once, on the
weights.
"""

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import load_state_dict

from rlhf_course.baichuan.sentencepiece import sentencepiece_to_fast
from rlhf_course.runtime.files import atomic_folder, check_room, read_json
from rlhf_course.runtime.hub import check_source

ARCHITECTURES = (
    "BaiChuanForCausalLM",
    "BaichuanForCausalLM",
)  # the first generation's alone, and both
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)
ROTARY = "rotary_emb.inv_freq"  # in some checkpoints; Llama computes it
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENIZER = ("unk_token", "bos_token", "eos_token", "pad_token", "add_bos_token", "add_eos_token")
TOKENIZER += (
    "model_max_length",
    "padding_side",
    "chat_template",
)  # what is taken from tokenizer_config.json


def convert_to_llama(
    source: str | Path, target: str | Path, norm_head: bool | None = None, report=print
) -> Path:
    """Write the Baichuan checkpoint in ``source`` as a LlamaForCausalLM with a fast tokenizer;
    returns ``target``.

    A 7B takes 15 GB more on the disk, and about 5 GB of memory, as its files are mapped (20 GB
    where they are .bin of torch before 1.6, which cannot be). Nothing is written before all is
    checked.

    Args:
        source: a folder with config.json, tokenizer.model and the weights, as safetensors or .bin.
        target: a folder that does not exist, or is empty.
        norm_head: whether the head is a NormHead; default guessed from config.json, and reported by
            ``report``.

    Raises ``ValueError`` or ``FileNotFoundError``, with a sentence, for what is not a Baichuan of
    the 7B kind, and for files that are missing or damaged; ``OSError`` when the disk is too small.
    """
    source, target = Path(source), Path(target).expanduser().absolute()
    config = read_config(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"{target} exists already and is not an empty folder; name another target, or"
            " remove it."
        )
    said = "As asked"
    if norm_head is None:
        said, norm_head = "Guessed from config.json", guess_norm_head(config)
    kind = (
        "a NormHead (Baichuan2): its rows are scaled to length 1"
        if norm_head
        else "a plain head: copied as it is"
    )
    report(f"{said}: {kind}.")
    tokenizer = read_tokenizer(source, config)
    llama = LlamaConfig(
        **{key: config[key] for key in (*SIZES, *SPECIAL_IDS, "max_position_embeddings")},
        architectures=["LlamaForCausalLM"],
        num_key_value_heads=config["num_attention_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
    )
    tensors = read_weights(source, llama)
    check_room(target, sum(tensor.nbytes for tensor in tensors.values()))
    llama.dtype = tensors["lm_head.weight"].dtype
    if norm_head:
        tensors["lm_head.weight"] = torch.nn.functional.normalize(tensors["lm_head.weight"], dim=1)
    with atomic_folder(target) as new:
        save_torch_state_dict(unpack(tensors), new)
        llama.save_pretrained(new)
        tokenizer.save_pretrained(new)
        if (source / "generation_config.json").exists():
            shutil.copyfile(source / "generation_config.json", new / "generation_config.json")
    return target


def read_config(source: Path) -> dict:
    """The checkpoint's config.json; raises for what is not a Baichuan that can be written as a
    Llama.
    """
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} is not a folder, or has no config.json.")
    check_source(source)
    config = SPECIAL_IDS | {
        key: value for key, value in read_json(source / "config.json").items() if value is not None
    }
    found = config.get("architectures", ["nothing"])[0]
    if found == "LlamaForCausalLM":
        raise ValueError(f"{source} is a Llama checkpoint already; load it as it is.")
    if found not in ARCHITECTURES:
        raise ValueError(
            f"{source} is not a Baichuan checkpoint: its config.json names {found} as its"
            " architecture."
        )
    # The 13B configs have no max_position_embeddings, since ALiBi has no positions to embed, only
    # model_max_length.
    large = config.get("hidden_size") == 5120 or config.get("num_hidden_layers") == 40
    if large or "alibi" in json.dumps(config).lower() or "max_position_embeddings" not in config:
        raise ValueError(
            f"{source} looks like a 13B model, with ALiBi in place of Llama's positions; only 7B"
            " will do."
        )
    if missing := [key for key in SIZES if key not in config]:
        raise ValueError(
            f"The config.json in {source} lacks {', '.join(missing)}; download it again."
        )
    return config


def guess_norm_head(config: dict) -> bool:
    """Whether this config is Baichuan2's; raises ``ValueError`` when it could be either generation."""
    is_second = "z_loss_weight" in config
    if config["architectures"][0] == ARCHITECTURES[0] or (
        config["vocab_size"] == 64_000 and not is_second
    ):
        return False
    if is_second or config["vocab_size"] == 125_696:
        return True
    raise ValueError(
        "The head can be plain (Baichuan) or a NormHead (Baichuan2): say norm_head=, or"
        " --norm-head."
    )


def read_tokenizer(source: Path, config: dict) -> PreTrainedTokenizerFast:
    """The fast tokenizer, with what tokenizer_config.json says of it."""
    path = source / "tokenizer_config.json"
    given = {"model_max_length": config["max_position_embeddings"]} | (
        read_json(path) if path.exists() else {}
    )
    options = {key: given[key] for key in TOKENIZER if given.get(key) is not None}
    options = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in options.items()
    }
    tokenizer = sentencepiece_to_fast(source / "tokenizer.model", **options)
    if len(tokenizer) > config["vocab_size"]:
        raise ValueError(
            f"{source}: the tokenizer has {len(tokenizer)} pieces, the model {config['vocab_size']}"
            " rows."
        )
    return tokenizer


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Llama's tensors under Baichuan's names: q, k and v (each hidden × hidden) in one, W_pack."""
    packed = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            packed[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            packed[name] = tensor
    return packed


def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of :func:`pack`; q, k and v are copied, because what is saved must own its
    memory.
    """
    unpacked = {}
    for name, tensor in tensors.items():
        parts = [part.clone() for part in tensor.chunk(3)] if "W_pack" in name else [tensor]
        unpacked |= {
            name.replace("W_pack", f"{letter}_proj"): part
            for letter, part in zip("qkv", parts, strict=False)
        }
    return unpacked


def read_weights(source: Path, llama: LlamaConfig) -> dict[str, Tensor]:
    """The tensors under Baichuan's names; raises unless they are those of such a Llama. Safetensors
    go before .bin.
    """
    known = [
        f"{name}{end}"
        for name in ("model.safetensors", "pytorch_model.bin")
        for end in (".index.json", "")
    ]
    first = next((name for name in known if (source / name).is_file()), None)
    if first is None:
        raise FileNotFoundError(f"{source} has no weights: none of {', '.join(known)}.")
    places = (
        read_json(source / first).get("weight_map", {}) if first.endswith(".json") else {}
    )  # name → file
    tensors = {}
    for file in sorted(set(places.values())) or [first]:
        found = {
            name: tensor
            for name, tensor in read_shard(source / file).items()
            if not name.endswith(ROTARY)
        }
        tensors |= found
        places |= dict.fromkeys(found, file)
    with torch.device("meta"):
        wanted = {
            name: list(tensor.shape)
            for name, tensor in pack(LlamaForCausalLM(llama).state_dict()).items()
        }
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{places.get(name, first)} has {name} {found.get(name, 'not at all')}, not"
        f" {wanted.get(name, 'wanted')}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{source} does not hold the tensors of its config.json: {'; '.join(wrong[:3])}{more}."
        )
    return tensors


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped into memory where its format allows; raises unless it holds
    tensors by names.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which the index names; download it.")
    try:
        tensors = dict(
            load_state_dict(path, weights_only=True)
        )  # without, a pickle can call any function
    except Exception as error:  # half a file can fail in any way
        raise ValueError(
            f"{path} is damaged, or would run code; it was not loaded. Download it again."
        ) from error
    for name, tensor in tensors.items():
        if getattr(tensor, "dtype", None) not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"{path}: {name} is no tensor of float32, float16 or bfloat16, as a Baichuan-7B"
                " has."
            )
    return tensors
