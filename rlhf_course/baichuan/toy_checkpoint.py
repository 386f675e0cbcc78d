"""Small checkpoints that are laid out as Baichuan2's: packed q, k and v, a NormHead, a SentencePiece model."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from sentencepiece import SentencePieceTrainer
from sentencepiece import sentencepiece_model_pb2 as spm
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LlamaForCausalLM

from rlhf_course.runtime.files import atomic_file, atomic_folder

USER, ASSISTANT = "<reserved_106>", "<reserved_107>"
USER_ID = 195  # and the assistant's is the next, as in Baichuan2
SPECIAL = {"pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPTIONS = {"model_type": "bpe", "hard_vocab_limit": False, "character_coverage": 0.9999, "byte_fallback": True}
OPTIONS |= {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False}
OPTIONS |= {
    "max_sentencepiece_length": 6,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "user_defined_symbols": [USER, ASSISTANT],
}
OPTIONS |= {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, "max_sentence_length": 1 << 20}
OPTIONS |= {"num_threads": 1, "minloglevel": 2}  # the same pieces every time, and quietly


def train_sentencepiece(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Path:
    """Train a BPE with Baichuan2's options on the lines of the texts; returns the path of ``folder/tokenizer.model``.

    No normalisation, no dummy prefix, digits apart, bytes for what is not known. Has at most ``vocab_size`` pieces,
    fewer where the texts do not give as many. Raises ``ValueError`` when their characters alone are more.
    """
    lines = [line for text in texts for line in text.splitlines() if line]
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **OPTIONS)
    except RuntimeError as error:
        if "Vocabulary size" not in str(error):
            raise
        raise ValueError(
            f"{vocab_size} pieces are too few for the characters of these texts; raise vocab_size."
        ) from None
    proto = spm.ModelProto.FromString(model.getvalue())
    pieces = list(proto.pieces)
    reserved, others = pieces[3:5], pieces[:3] + pieces[5:]  # the trainer puts them before the 256 bytes
    del proto.pieces[:]
    proto.pieces.extend(others[:USER_ID] + reserved + others[USER_ID:])
    path = Path(folder) / "tokenizer.model"
    with atomic_file(path) as aside:
        aside.write_bytes(proto.SerializeToString(deterministic=True))
    return path


class _UnitRows(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.normalize(weight, dim=1)


def norm_head(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Make the head a NormHead: logits = h · normalize(W, dim=1)ᵀ, where W is trained; returns the same model."""
    parametrize.register_parametrization(model.lm_head, "weight", _UnitRows())
    return model


def write_baichuan_checkpoint(
    model: LlamaForCausalLM, spm_model: str | Path, folder: str | Path, shards: int = 2
) -> Path:
    """Write a Llama with a ``norm_head`` as Baichuan2 checkpoints are laid out; ``ValueError`` without that head."""
    if not parametrize.is_parametrized(model.lm_head, "weight"):
        raise ValueError(
            "This model's head is plain, Baichuan2's is a NormHead: call norm_head(model) before training."
        )
    tensors = _packed(model)
    files = [f"pytorch_model-{i:05d}-of-{shards:05d}.bin" for i in range(1, shards + 1)]
    weight_map = {name: files[i * shards // len(tensors)] for i, name in enumerate(tensors)}
    with atomic_folder(folder) as new:
        for file in files:
            torch.save({name: tensors[name] for name, place in weight_map.items() if place == file}, new / file)
        shutil.copyfile(spm_model, new / "tokenizer.model")
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        contents = _configs(model) | {"pytorch_model.bin.index.json": index}
        for name, content in contents.items():
            (new / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return Path(folder)


def _packed(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The model's tensors under Baichuan's names; the head as it is before its rows are scaled."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "q_proj" in name:
            attention = model.get_submodule(name.removesuffix(".q_proj.weight"))
            parts = [getattr(attention, f"{letter}_proj").weight.detach() for letter in "qkv"]
            tensors[name.replace("q_proj", "W_pack")] = torch.cat(parts).cpu()
        elif not any(part in name for part in ("k_proj", "v_proj")):
            tensors[name.replace("parametrizations.weight.original", "weight")] = tensor.detach().cpu()
    return tensors


def _configs(model: LlamaForCausalLM) -> dict[str, dict]:
    """File name → content of the three JSON files beside the weights; their remote classes are named, not there."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {key: getattr(model.config, key) for key in (*sizes, "rms_norm_eps", "max_position_embeddings")}
    length, dtype = config["max_position_embeddings"], str(model.dtype).removeprefix("torch.")
    classes = {"AutoConfig": "configuration_baichuan.BaichuanConfig"}
    classes |= {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"}
    config |= {"architectures": ["BaichuanForCausalLM"], "auto_map": classes, "model_type": "baichuan"} | SPECIAL_IDS
    config |= {"hidden_act": "silu", "model_max_length": length, "tie_word_embeddings": False, "torch_dtype": dtype}
    config |= {"tokenizer_class": "BaichuanTokenizer", "z_loss_weight": 0}
    tokenizer = SPECIAL | {"add_bos_token": False, "add_eos_token": False, "model_max_length": length}
    tokenizer |= {"auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]}}
    tokenizer |= {"tokenizer_class": "BaichuanTokenizer"}
    return {"config.json": config, "tokenizer_config.json": tokenizer, "generation_config.json": SPECIAL_IDS}
