"""Checkpoints laid out as Baichuan's: tensors, config, tokenizer, and files of each format."""

import shutil

import pytest
import torch
from builders import reviews, write_json
from safetensors.torch import save_file

from rlhf_course.baichuan.toy_checkpoint import train_sentencepiece

LAYERS, HEADS, HIDDEN, INNER, VOCABULARY, EPS = 3, 4, 32, 48, 640, 1e-6
TEXTS = [review["text"] for review in reviews(60)]
TEXTS += ["你好，世界。今天天气怎么样？", "def f(x):\n    return  x + 12345"] * 8


def make_tensors(dtype=torch.float32):
    torch.manual_seed(0)

    def draw(*shape):
        return (torch.randn(shape) * 0.2).to(dtype)

    w = {"model.embed_tokens.weight": draw(VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        part = f"model.layers.{i}."
        w[f"{part}self_attn.W_pack.weight"] = draw(3 * HIDDEN, HIDDEN)
        w[f"{part}self_attn.o_proj.weight"] = draw(HIDDEN, HIDDEN)
        w[f"{part}self_attn.rotary_emb.inv_freq"] = torch.rand(4)  # in some checkpoints; of no use
        w[f"{part}mlp.gate_proj.weight"], w[f"{part}mlp.up_proj.weight"] = (
            draw(INNER, HIDDEN),
            draw(INNER, HIDDEN),
        )
        w[f"{part}mlp.down_proj.weight"] = draw(HIDDEN, INNER)
        w[f"{part}input_layernorm.weight"] = 1 + draw(HIDDEN)
        w[f"{part}post_attention_layernorm.weight"] = 1 + draw(HIDDEN)
    return w | {"model.norm.weight": 1 + draw(HIDDEN), "lm_head.weight": draw(VOCABULARY, HIDDEN)}


def make_config(second: bool = True, **changes):
    name = "BaichuanForCausalLM" if second else "BaiChuanForCausalLM"
    config = {"architectures": [name], "model_type": "baichuan", "hidden_act": "silu"}
    config |= {"auto_map": {"AutoModelForCausalLM": f"modeling_baichuan.{name}"}}
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS}
    config |= {"num_hidden_layers": LAYERS, "rms_norm_eps": EPS, "vocab_size": VOCABULARY}
    config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    config |= {"model_max_length": 4096, "z_loss_weight": 0} if second else {}
    return config | {"max_position_embeddings": 4096} | changes


def save_source(folder, tokenizer_model, tensors=None, config=None, kind="bin", shards=3):
    """A checkpoint of one file (``shards`` = 0) or of several with an index; a zip, or the format
    before it.
    """
    folder.mkdir(parents=True)
    tensors = tensors or make_tensors()
    shutil.copyfile(tokenizer_model, folder / "tokenizer.model")
    write_json(folder / "config.json", config or make_config())
    write_json(
        folder / "tokenizer_config.json", {"bos_token": {"__type": "AddedToken", "content": "<s>"}}
    )
    write_json(folder / "generation_config.json", {"pad_token_id": 0, "user_token_id": 195})
    (folder / "modeling_baichuan.py").write_text("raise RuntimeError('remote code ran')")
    stem, end = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    names, files = list(tensors), {}
    for i in range(max(shards, 1)):
        file = f"{stem}-{i + 1:05d}-of-{shards:05d}.{end}" if shards else f"{stem}.{end}"
        part = {name: tensors[name].clone() for name in names[i :: max(shards, 1)]}
        files |= dict.fromkeys(part, file)
        if end == "bin":
            torch.save(part, folder / file, _use_new_zipfile_serialization=kind == "bin")
        else:
            save_file(part, folder / file)
    if shards:
        write_json(folder / f"{stem}.{end}.index.json", {"metadata": {}, "weight_map": files})
    return folder


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    return train_sentencepiece(TEXTS, 600, tmp_path_factory.mktemp("spm"))


@pytest.fixture
def source(tmp_path, tokenizer_model):
    return save_source(tmp_path / "source", tokenizer_model)
