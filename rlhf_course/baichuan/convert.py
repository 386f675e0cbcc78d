"""Baichuan-7B and Baichuan2-7B as native Llama checkpoints, without running any code that came with them.

The architecture is Llama's with q, k and v packed into one matrix. Baichuan2 also scales the rows of its output head to
length 1 in every forward pass (NormHead); here that is done once, on the weights.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LlamaConfig

from rlhf_course.baichuan.sentencepiece import sentencepiece_to_fast
from rlhf_course.runtime.files import atomic_file

ARCHITECTURES = ("BaiChuanForCausalLM", "BaichuanForCausalLM")
PLAIN_VOCABULARY, NORM_VOCABULARY = 64_000, 125_696  # of Baichuan-7B and Baichuan2-7B
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROTARY = "rotary_emb.inv_freq"  # in some checkpoints; Llama computes it


def convert_to_llama(source: str | Path, target: str | Path, norm_head: bool | None = None, report=print) -> Path:
    """Write the Baichuan checkpoint in ``source`` as a LlamaForCausalLM with a fast tokenizer; returns ``target``.

    Goes shard by shard: memory for about one shard is enough. Nothing is at ``target`` until all is; what is finished
    waits beside it, in ``.TARGET.partial``, and a second call goes on from there.

    Args:
        source: a folder with config.json, tokenizer.model and the weights, as safetensors or .bin.
        target: a folder that does not exist, or is empty.
        norm_head: whether the head is a NormHead; default guessed from config.json, and reported.
        report: receives the lines about what is done.

    Raises ``ValueError`` or ``FileNotFoundError``, with a sentence, for what is not a Baichuan of the 7B kind, and for
    files that are missing or damaged; ``OSError`` when the disk is too small.
    """
    source, target = Path(source), Path(target).expanduser().absolute()
    config = read_config(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already and is not an empty folder; name another target, or remove it.")
    guessed = norm_head is None
    norm_head = guess_norm_head(config) if guessed else norm_head
    kind = "a NormHead (Baichuan2): its rows are scaled to length 1" if norm_head else "a plain head: copied as it is"
    report(f"{'Guessed from config.json' if guessed else 'As asked'}: {kind}.")
    shards = find_shards(source, config)
    given = {"model_max_length": config["max_position_embeddings"]}
    if (source / "tokenizer_config.json").exists():
        given |= _read_json(source / "tokenizer_config.json")
    special = {"unk_token": 0} | {key.removesuffix("_id"): config[key] for key in SPECIAL}
    tokenizer = sentencepiece_to_fast(source / "tokenizer.model", given, special)
    if len(tokenizer) > config["vocab_size"]:
        raise ValueError(f"{source}: the tokenizer has {len(tokenizer)} pieces, the model {config['vocab_size']} rows.")

    partial = target.parent / f".{target.name}.partial"
    settings = {"config": config, "norm_head": norm_head, "shards": list(shards)}
    content = partial / "content"
    headers = _convert_shards(source, shards, settings, partial, report)
    names = {name: (file, *header) for file, tensors in headers.items() for name, header in tensors.items()}
    size = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in names.values())
    index = {"metadata": {"total_size": size}, "weight_map": {name: place[0] for name, place in sorted(names.items())}}
    _write_json(content / "model.safetensors.index.json", index)
    write_config(content, config, DTYPES[names["lm_head.weight"][1]])
    tokenizer.save_pretrained(content)
    if (source / "generation_config.json").exists():
        shutil.copyfile(source / "generation_config.json", content / "generation_config.json")
    for left_over in content.glob(".*"):  # of a process that was killed while it wrote
        left_over.unlink()
    os.rename(content, target)
    shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert_shards(source: Path, shards: dict, settings: dict, partial: Path, report: Callable) -> dict[str, dict]:
    """Converts what ``partial`` does not hold yet; returns name → (dtype, shape) of the tensors in every new file."""
    manifest, shapes = partial / "manifest.json", tensor_shapes(settings["config"])
    try:
        known = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    finished = known["finished"] if known.get("settings") == settings else {}
    if not finished:  # nothing there, or of another source
        shutil.rmtree(partial, ignore_errors=True)
    (partial / "content").mkdir(parents=True, exist_ok=True)
    headers = {}
    for number, (name, listed) in enumerate(tqdm(shards.items(), desc="converting", unit="shard"), start=1):
        output = partial / "content" / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        status = (source / name).stat()
        stamp = [status.st_size, status.st_mtime_ns]
        if finished.get(name) == stamp and _read_header(output):
            report(f"{name} was converted before; going on.")
        else:
            if status.st_size > (free := shutil.disk_usage(partial).free):
                raise OSError(
                    f"{name} needs {status.st_size / 1e9:.1f} GB, {partial.parent} has {free / 1e9:.1f} GB left."
                )
            with atomic_file(output) as path:
                tensors = convert_shard(source / name, listed, shapes, settings["norm_head"])
                save_file(tensors, path, metadata={"format": "pt"})
                del tensors  # before the next shard is read
            finished[name] = stamp
            _write_json(manifest, {"settings": settings, "finished": finished})
        headers[output.name] = _read_header(output)
    return headers


def read_config(source: Path) -> dict:
    """The checkpoint's config.json; raises for what is not a Baichuan that can be written as a Llama."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder.")
    config = _read_json(source / "config.json")
    found = (config.get("architectures") or ["nothing"])[0]
    if found == "LlamaForCausalLM":
        raise ValueError(f"{source} is a Llama checkpoint already; load it as it is.")
    if found not in ARCHITECTURES:
        raise ValueError(f"{source} is not a Baichuan checkpoint: its config.json names {found} as its architecture.")
    # The 13B configs have no max_position_embeddings, since ALiBi has no positions to embed, only model_max_length.
    large = config.get("hidden_size") == 5120 or config.get("num_hidden_layers") == 40
    if large or "alibi" in json.dumps(config).lower() or "max_position_embeddings" not in config:
        raise ValueError(
            f"{source} looks like a 13B model, with ALiBi in place of Llama's rotary positions; only 7B will do."
        )
    if missing := [key for key in SIZES if key not in config]:
        raise ValueError(f"The config.json in {source} lacks {_some(missing)}; download it again.")
    return SPECIAL | {key: value for key, value in config.items() if value is not None}


def guess_norm_head(config: dict) -> bool:
    """Whether this config is Baichuan2's; raises ``ValueError`` when it could be either generation."""
    if config["architectures"][0] == ARCHITECTURES[0]:
        return False
    if "z_loss_weight" in config or config["vocab_size"] == NORM_VOCABULARY:
        return True
    if config["vocab_size"] == PLAIN_VOCABULARY:
        return False
    raise ValueError(
        "From config.json it cannot be told whether the head is a NormHead, as in Baichuan2, or plain, as in Baichuan; "
        "say which (norm_head in Python, --norm-head on the command line)."
    )


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a Baichuan checkpoint with this config holds."""
    hidden, inner, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    layer = {
        "self_attn.W_pack": (3 * hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def find_shards(source: Path, config: dict) -> dict[str, set[str]]:
    """The files with weights, and the tensors that each should hold; safetensors are preferred to .bin."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = source / f"{single}.index.json"
        if index.exists():
            weight_map = _read_json(index).get("weight_map", {})
            weight_map = {key: file for key, file in weight_map.items() if not key.endswith(ROTARY)}
            _check_names(index.name, weight_map, tensor_shapes(config))
            files = sorted(set(weight_map.values()))
            if missing := [file for file in files if not (source / file).is_file()]:
                raise FileNotFoundError(f"{index} names {_some(missing)}, not there; download what is missing.")
            return {file: {key for key, place in weight_map.items() if place == file} for file in files}
        if (source / single).exists():
            return {single: set(tensor_shapes(config))}
    raise FileNotFoundError(f"{source} has no weights: no model.safetensors, pytorch_model.bin or .index.json of them.")


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU; raises ``ValueError`` when it is damaged or holds more than tensors."""
    with open(path, "rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is only git-lfs's note of where the weights are; run git lfs pull in its folder.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # weights_only: a pickle can name any function to be called. mmap: a tensor is read when it is needed.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is damaged, or would run code; it was not loaded. Download it again.") from error
    except Exception as error:  # half a file can fail in any way
        raise ValueError(f"{path} is damaged or incomplete; download it again.") from error


def convert_shard(path: Path, listed: Collection[str], shapes: dict, norm_head: bool) -> dict[str, Tensor]:
    """One file's tensors under Llama's names; raises ``ValueError`` unless they are those listed, in these shapes."""
    tensors = read_shard(path)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} does not hold tensors by their names, as a checkpoint does.")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(ROTARY)}
    _check_names(path, tensors, listed)
    converted = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, config.json wants {list(shapes[name])}.")
        if tensor.dtype not in DTYPES.values():
            raise ValueError(f"{path}: {name} has {tensor.dtype}; only float32, float16 and bfloat16 can be converted.")
        if "W_pack" in name:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                converted[name.replace("W_pack", f"{letter}_proj")] = part.clone()
        elif name == "lm_head.weight" and norm_head:
            converted[name] = torch.nn.functional.normalize(tensor, dim=1)
        else:
            converted[name] = tensor.clone(memory_format=torch.contiguous_format)  # safetensors wants no shared memory
    return converted


def write_config(folder: Path, config: dict, dtype: torch.dtype) -> None:
    """Llama's config.json for these weights."""
    LlamaConfig(
        **{key: config[key] for key in (*SIZES, *SPECIAL, "max_position_embeddings")},
        architectures=["LlamaForCausalLM"],
        num_key_value_heads=config["num_attention_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        dtype=dtype,
    ).save_pretrained(folder)


def _check_names(where, found: Collection[str], wanted: Collection[str]) -> None:
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{where} lacks {_some(missing)}; download it again.")
    if more := [name for name in found if name not in wanted]:
        raise ValueError(f"{where} holds {_some(more)}, which a Baichuan-7B of this config.json does not have.")


def _some(names: Collection[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Name → (dtype, shape) of a safetensors file; empty when it is not there, or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError):
        return {}


def _read_json(path: Path) -> dict:
    """Raises ``FileNotFoundError`` or ``ValueError`` with a sentence when there is no such object to read."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}; it does not hold a whole checkpoint.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON; download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object; download it again.")
    return content


def _write_json(path: Path, content: dict) -> None:
    with atomic_file(path) as aside:
        aside.write_text(json.dumps(content, indent=2), encoding="utf-8")
