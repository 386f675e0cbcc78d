"""Toy contents for the ids of preset ``full``, each in the layout that its repository really has;
see README.md.
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import datasets
import torch
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from transformers import (
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

from rlhf_course.course.presets import load_preset
from rlhf_course.course.shipped import prepare
from rlhf_course.worlds.build import prepare_chat, prepare_reward_model
from rlhf_course.worlds.cache import CHECKSUM

RAN = 'raise SystemExit("code from a repository was run")\n'
HC3_SUBSETS = ("baike", "finance", "law", "medicine", "nlpcc_dbqa", "open_qa", "psychology")
Files = dict[str, bytes | str | Path]


def repositories(scratch: Path) -> dict[str, Files]:
    """All of them, by id; ``scratch`` is a folder to write tokenizers to."""
    reviews = prepare(load_preset("04_gpt2_imdb_ppo", "tiny"))
    dialogues = prepare_reward_model(load_preset("01_reward_modeling", "tiny"))
    chat = prepare_chat(load_preset("05_lora_rlhf_baichuan", "tiny"))
    texts = rows(reviews.dataset, "train", 1000)["text"][:]
    answers, pairs = rows(chat.sft_dataset, "train", 200), Path(chat.dataset)
    return {
        "lvwerra/gpt2-imdb": gpt2_imdb(reviews.model, scratch),
        "lvwerra/distilbert-imdb": distilbert_imdb(texts, scratch),
        "datasets/stanfordnlp/imdb": imdb(Path(reviews.dataset)),
        "facebook/opt-350m": opt_350m(rows(dialogues.dataset, "train", 400)["chosen"][:], scratch),
        "datasets/Anthropic/hh-rlhf": hh_rlhf(dialogues.dataset),
        "baichuan-inc/Baichuan2-7B-Base": baichuan2(Path(chat.checkpoint)),
        "datasets/Hello-SimpleAI/HC3-Chinese": hc3_chinese(answers),
        "datasets/Hello-SimpleAI/HC3-Chinese@refs/convert/parquet": hc3_parquet(answers),
        "datasets/beyond/rlhf-reward-single-round-trans_chinese": single_round(pairs),
    }


def gpt2_imdb(folder: str, scratch: Path) -> Files:
    """Weights in .bin alone, as torch wrote them before 1.6, with the mask buffers of that time; a
    config of 2020.
    """
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    for layer in range(model.config.n_layer):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    names = (
        "vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "bos_token_id",
        "eos_token_id",
    )
    config = {name: getattr(model.config, name) for name in names} | {
        "n_ctx": model.config.n_positions
    }
    config |= {
        "_num_labels": 1,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "summary_type": "cls_index",
    }
    config |= {
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    config |= {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    AutoTokenizer.from_pretrained(folder).backend_tokenizer.model.save(str(scratch))
    return {
        **{name: (scratch / name).read_text() for name in ("vocab.json", "merges.txt")},
        "config.json": json.dumps(config),
        "special_tokens_map.json": json.dumps(special),
        "tokenizer_config.json": json.dumps({"model_max_length": 1024}),
        "pytorch_model.bin": as_bin(state, zipped=False),
        "training_args.bin": b"never read",
        "README.md": "# GPT2-IMDB\n",
    }


def distilbert_imdb(texts: list[str], scratch: Path) -> Files:
    """An uncased WordPiece, labels NEGATIVE and POSITIVE, weights in .bin alone; it has learnt
    nothing.
    """
    wordpiece = BertWordPieceTokenizer()
    wordpiece.train_from_iterator(texts, vocab_size=1000, show_progress=False)
    wordpiece.save_model(str(scratch))
    sizes = {
        "vocab_size": wordpiece.get_vocab_size(),
        "dim": 32,
        "hidden_dim": 64,
        "n_heads": 2,
        "n_layers": 1,
    }
    labels = {
        "id2label": {0: "NEGATIVE", 1: "POSITIVE"},
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
    }
    model = DistilBertForSequenceClassification(
        DistilBertConfig(**sizes, **labels, initializer_range=0.2)
    )
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")
    }
    more = {
        "do_lower_case": True,
        "model_max_length": 512,
        "tokenizer_class": "DistilBertTokenizer",
    }
    return {
        "config.json": model.config.to_json_string(),
        "vocab.txt": (scratch / "vocab.txt").read_text(),
        "tokenizer.json": wordpiece.to_str(),
        "special_tokens_map.json": json.dumps(special),
        "tokenizer_config.json": json.dumps(special | more),
        "pytorch_model.bin": as_bin(model.state_dict()),
        "training_args.bin": b"never read",
        "README.md": "# distilbert-imdb\n",
    }


def opt_350m(texts: list[str], scratch: Path) -> Files:
    """As the real one and no other OPT: embeddings of half the width, norms after the layers;
    float16 in .bin alone.
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, 500, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False
    )
    bpe.save_model(str(scratch))
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64, "num_hidden_layers": 1}
    sizes |= {
        "num_attention_heads": 2,
        "vocab_size": bpe.get_vocab_size() + 8,
        "max_position_embeddings": 2048,
    }
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>") | {
        "pad_token": "<pad>"
    }
    ids = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    model = OPTForCausalLM(
        OPTConfig(**sizes, **ids, do_layer_norm_before=False, dropout=0.1)
    ).half()
    config = model.config.to_dict() | {
        "prefix": "</s>",
        "torch_dtype": "float16",
        "_remove_final_layer_norm": False,
    }
    return {
        **{name: (scratch / name).read_text() for name in ("vocab.json", "merges.txt")},
        "config.json": json.dumps({key: value for key, value in config.items() if key != "dtype"}),
        "generation_config.json": json.dumps(ids),
        "special_tokens_map.json": json.dumps(special),
        "tokenizer_config.json": json.dumps(
            special | {"add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
        ),
        "pytorch_model.bin": as_bin(model.state_dict()),
        "flax_model.msgpack": b"never read",
        "tf_model.h5": b"never read",
        "LICENSE.md": "OPT-175B licence\n",
        "README.md": "---\nlicense: other\n---\n",
    }


def baichuan2(folder: Path) -> Files:
    """Two .bin shards with an index, a SentencePiece model, and code beside them that must never
    run.
    """
    left_out = ("generation_config.json", CHECKSUM)
    files = {path.name: path for path in folder.iterdir() if path.name not in left_out}
    modules = (
        "configuration_baichuan",
        "generation_utils",
        "modeling_baichuan",
        "quantizer",
        "tokenization_baichuan",
    )
    special = dict(
        zip(("bos_token", "eos_token", "unk_token"), ("<s>", "</s>", "<unk>"), strict=True)
    )
    return (
        files
        | {f"{name}.py": RAN for name in modules}
        | {"special_tokens_map.json": json.dumps(special)}
    )


def imdb(folder: Path) -> Files:
    """Three splits as parquet, the labels with their names; those of unsupervised are −1."""
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["neg", "pos"])
    )
    parts = {split: rows(folder, split, 600).cast(features) for split in ("train", "test")}
    unlabelled = {"text": parts["train"]["text"][:10], "label": [-1] * 10}
    parts["unsupervised"] = datasets.Dataset.from_dict(unlabelled, features=features)
    files = {
        f"plain_text/{split}-00000-of-00001.parquet": as_parquet(part)
        for split, part in parts.items()
    }
    lines = [f"  - split: {split}\n    path: plain_text/{split}-*\n" for split in parts]
    head = "---\nconfigs:\n- config_name: plain_text\n  default: true\n  data_files:\n" + "".join(
        lines
    )
    names = (
        "    dtype:\n      class_label:\n        names:\n          '0': neg\n          '1': pos\n"
    )
    info = (
        "dataset_info:\n  config_name: plain_text\n  features:\n  - name: text\n    dtype: string\n"
        "  - name: label\n"
    )
    return files | {"README.md": f"{head}{info}{names}---\n"}


def hh_rlhf(folder: str) -> Files:
    """Gzipped lines in five folders; of these, four must not be read."""
    files = {"README.md": "---\nlicense: mit\ntags:\n- human-feedback\n---\n"}
    for split in ("train", "test"):
        pairs = rows(folder, split, 400).select_columns(["chosen", "rejected"])
        files[f"helpful-base/{split}.jsonl.gz"] = gzip.compress(as_lines(pairs).encode())
        for other in ("harmless-base", "helpful-online", "helpful-rejection-sampled"):
            files[f"{other}/{split}.jsonl.gz"] = gzip.compress(
                b'{"chosen": "another folder", "rejected": ""}\n'
            )
    return files | {"red-team-attempts/red_team_attempts.jsonl.gz": gzip.compress(b"[]")}


def hc3_chinese(answers: datasets.Dataset) -> Files:
    """A loading script that datasets does not run any more, beside one file of lines per subset,
    and one of all.
    """
    answers = answers.select_columns(["question", "human_answers", "chatgpt_answers"])
    files = {
        "HC3-Chinese.py": RAN,
        "README.md": "---\nlanguage:\n- zh\nlicense: cc-by-sa-4.0\n---\n",
    }
    for number, subset in enumerate(HC3_SUBSETS):
        files[f"{subset}.jsonl"] = as_lines(answers.shard(len(HC3_SUBSETS), number))
    sources = [
        subset
        for number, subset in enumerate(HC3_SUBSETS)
        for _ in answers.shard(len(HC3_SUBSETS), number)
    ]
    return files | {"all.jsonl": as_lines(answers.add_column("source", sources))}


def hc3_parquet(answers: datasets.Dataset) -> Files:
    """What the hub's converter made of that: one folder per configuration; their rows are those of
    ``all`` again.
    """
    return {
        "all/train/0000.parquet": as_parquet(answers),
        **{
            f"{subset}/train/0000.parquet": as_parquet(answers.select(range(5)))
            for subset in HC3_SUBSETS
        },
    }


def single_round(folder: Path) -> Files:
    """Two parquet files with hashes in their names, and the columns prompt, chosen and rejected."""
    hashes = {"train": "789dc5dece0f1fc1", "test": "8ecd46436fadcf7f"}
    files: Files = {"README.md": "---\ndataset_info:\n  features:\n"}
    files["README.md"] += (
        "".join(f"  - name: {n}\n    dtype: string\n" for n in ("prompt", "chosen", "rejected"))
        + "---\n"
    )
    for split, name in hashes.items():
        pairs = rows(folder, split, 200).select_columns(["prompt", "chosen", "rejected"])
        files[f"data/{split}-00000-of-00001-{name}.parquet"] = as_parquet(pairs)
    return files


def rows(folder: str | Path, split: str, count: int) -> datasets.Dataset:
    """The first rows of a split of the embedded world."""
    return datasets.Dataset.from_parquet(str(next(Path(folder).glob(f"{split}-*.parquet")))).select(
        range(count)
    )


def as_lines(table: datasets.Dataset) -> str:
    """JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)


def as_parquet(table: datasets.Dataset) -> bytes:
    """The bytes of a parquet file."""
    table.to_parquet(buffer := io.BytesIO())
    return buffer.getvalue()


def as_bin(state: dict[str, torch.Tensor], zipped: bool = True) -> bytes:
    """What torch.save writes; without ``zipped``, as before torch 1.6."""
    torch.save(state, buffer := io.BytesIO(), _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()
