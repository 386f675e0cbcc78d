"""Make small checkpoints in Baichuan2's layout: packed q, k and v, NormHead, SentencePiece."""

import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from sentencepiece import SentencePieceTrainer
from sentencepiece import sentencepiece_model_pb2 as spm
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LlamaForCausalLM

from rlhf_course.baichuan.convert import SIZES, SPECIAL_IDS, pack
from rlhf_course.runtime.files import atomic_file, atomic_folder

USER = "<reserved_106>"
ASSISTANT = "<reserved_107>"
USER_ID = 195  # the assistant's id follows, as in Baichuan2
SPECIAL = {"pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TRAINER_OPTIONS = dict(
    model_type="bpe",
    hard_vocab_limit=False,
    character_coverage=0.9999,
    byte_fallback=True,
    normalization_rule_name="identity",
    add_dummy_prefix=False,
    remove_extra_whitespaces=False,
    max_sentencepiece_length=6,
    allow_whitespace_only_pieces=True,
    split_digits=True,
    user_defined_symbols=[USER, ASSISTANT],
    unk_id=0,
    bos_id=1,
    eos_id=2,
    pad_id=-1,
    max_sentence_length=1 << 20,
    num_threads=1,  # makes the same pieces every time
    minloglevel=2,
)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Path:
    """Train a BPE model of at most ``vocab_size`` pieces, with Baichuan2's options, on texts.

    Return the path of ``folder/tokenizer.model``.
    """
    lines = (line for text in texts for line in text.splitlines() if line)
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=vocab_size, **TRAINER_OPTIONS
    )
    proto = spm.ModelProto.FromString(model.getvalue())
    # The trainer puts the user and assistant pieces (3 and 4) before the 256 byte pieces.
    pieces = [*proto.pieces[:3], *proto.pieces[5:]]
    pieces[USER_ID:USER_ID] = proto.pieces[3:5]
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    target = Path(folder) / "tokenizer.model"
    with atomic_file(target) as aside:
        aside.write_bytes(proto.SerializeToString(deterministic=True))
    return target


class _UnitRows(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.normalize(weight, dim=1)


def norm_head(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Make the head a NormHead (logits = h · normalize(W, dim=1)ᵀ, W trained); return the model."""
    parametrize.register_parametrization(model.lm_head, "weight", _UnitRows())
    return model


def write_baichuan_checkpoint(
    model: LlamaForCausalLM, spm_model: str | Path, folder: str | Path
) -> Path:
    """Write a Llama with a ``norm_head`` in Baichuan2's layout; return ``folder``."""
    head = "parametrizations.weight.original"  # W before its rows are scaled
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[name.replace(head, "weight")] = tensor.cpu()
    with atomic_folder(folder) as new:
        save_torch_state_dict(pack(tensors), new)
        shutil.copyfile(spm_model, new / "tokenizer.model")
        for name, content in _configs(model).items():
            (new / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return Path(folder)


def _configs(model: LlamaForCausalLM) -> dict[str, dict]:
    """Map JSON file names to contents; auto_map names classes that do not exist."""
    sizes = {key: getattr(model.config, key) for key in (*SIZES, "max_position_embeddings")}
    length = model.config.max_position_embeddings
    config = {
        **sizes,
        **SPECIAL_IDS,
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_baichuan.BaichuanConfig",
            "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
        },
        "model_type": "baichuan",
        "hidden_act": "silu",
        "model_max_length": length,
        "tie_word_embeddings": False,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer_class": "BaichuanTokenizer",
        "z_loss_weight": 0,
    }
    tokenizer = {
        **SPECIAL,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": length,
        "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]},
        "tokenizer_class": "BaichuanTokenizer",
    }
    return {
        "config.json": config,
        "tokenizer_config.json": tokenizer,
        "generation_config.json": SPECIAL_IDS,
    }
