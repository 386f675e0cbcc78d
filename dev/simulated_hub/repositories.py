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

from rlhf_course.course.presets import load_preset, prepare
from rlhf_course.synthetic.build import prepare_chat, prepare_reward_model
from rlhf_course.synthetic.cache import CHECKSUM

RAN = 'raise SystemExit("code from a repository was run")\n'
HC3_SUBSETS = ("baike", "finance", "law", "medicine", "nlpcc_dbqa", "open_qa", "psychology")
Files = dict[str, bytes | str | Path]


def repositories(scratch: Path) -> dict[str, Files]:
    """All of them, by id; ``scratch`` is a folder to write tokenizers to."""
    reviews = prepare(load_preset("04_gpt2_imdb_ppo", "tiny"))
    dialogues = prepare_reward_model(load_preset("01_reward_modeling", "tiny"))
    chat = prepare_chat(load_preset("05_lora_rlhf_baichuan", "tiny"))
    texts = rows(reviews.dataset, "train", 1000)["text"][:]
    answers = rows(chat.sft_dataset, "train", 200)
    pairs = Path(chat.dataset)
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
    """Only .bin weights, as before torch 1.6, with the mask buffers of that time; a config of
    2020.
    """
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    for layer in range(model.config.n_layer):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    names = "vocab_size n_positions n_embd n_layer n_head bos_token_id eos_token_id".split()
    config = {name: getattr(model.config, name) for name in names}
    config |= {"n_ctx": model.config.n_positions, "_num_labels": 1, "model_type": "gpt2"}
    config |= {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
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
    }


def distilbert_imdb(texts: list[str], scratch: Path) -> Files:
    """An uncased WordPiece, only .bin weights; it has learned nothing."""
    wordpiece = BertWordPieceTokenizer()
    wordpiece.train_from_iterator(texts, vocab_size=1000, show_progress=False)
    wordpiece.save_model(str(scratch))
    sizes = {"dim": 32, "hidden_dim": 64, "n_heads": 2, "n_layers": 1, "initializer_range": 0.2}
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}}
    labels |= {"label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    config = DistilBertConfig(vocab_size=wordpiece.get_vocab_size(), **sizes, **labels)
    model = DistilBertForSequenceClassification(config)
    special = {f"{name}_token": f"[{name.upper()}]" for name in "unk sep pad cls mask".split()}
    more = {"do_lower_case": True, "model_max_length": 512}
    return {
        "config.json": model.config.to_json_string(),
        "vocab.txt": (scratch / "vocab.txt").read_text(),
        "tokenizer.json": wordpiece.to_str(),
        "special_tokens_map.json": json.dumps(special),
        "tokenizer_config.json": json.dumps(
            special | more | {"tokenizer_class": "DistilBertTokenizer"}
        ),
        "pytorch_model.bin": as_bin(model.state_dict()),
        "training_args.bin": b"never read",
    }


def opt_350m(texts: list[str], scratch: Path) -> Files:
    """Embeddings of half the width, norms after the layers; only .bin weights, in float16."""
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    bpe.train_from_iterator(texts, 500, special_tokens=special, show_progress=False)
    bpe.save_model(str(scratch))
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 2048}
    ids = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    more = {"vocab_size": bpe.get_vocab_size() + 8, "do_layer_norm_before": False}
    model = OPTForCausalLM(OPTConfig(**sizes, **ids, **more)).half()
    config = model.config.to_dict() | {"prefix": "</s>", "torch_dtype": "float16"}
    config |= {"_remove_final_layer_norm": False}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    special |= {"pad_token": "<pad>"}
    more = {"add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    return {
        **{name: (scratch / name).read_text() for name in ("vocab.json", "merges.txt")},
        "config.json": json.dumps({key: value for key, value in config.items() if key != "dtype"}),
        "generation_config.json": json.dumps(ids),
        "special_tokens_map.json": json.dumps(special),
        "tokenizer_config.json": json.dumps(special | more),
        "pytorch_model.bin": as_bin(model.state_dict()),
        "tf_model.h5": b"never read",
    }


def baichuan2(folder: Path) -> Files:
    """Shards with an index, a SentencePiece model, and code beside them that must never run."""
    left_out = ("generation_config.json", CHECKSUM)
    files = {path.name: path for path in folder.iterdir() if path.name not in left_out}
    files |= {f"{name}_baichuan.py": RAN for name in ("configuration", "modeling", "tokenization")}
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return files | {"special_tokens_map.json": json.dumps(special)}


def imdb(folder: Path) -> Files:
    """Three splits as parquet, the labels with their names; those of unsupervised are −1."""
    label = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features(text=datasets.Value("string"), label=label)
    splits = {split: rows(folder, split, 600).cast(features) for split in ("train", "test")}
    unlabelled = {"text": splits["train"]["text"][:10], "label": [-1] * 10}
    splits["unsupervised"] = datasets.Dataset.from_dict(unlabelled, features=features)
    paths = {split: f"plain_text/{split}-00000-of-00001.parquet" for split in splits}
    files = [{"split": split, "path": f"plain_text/{split}-*"} for split in splits]
    named = {"class_label": {"names": {"0": "neg", "1": "pos"}}}
    fields = [{"name": "text", "dtype": "string"}, {"name": "label", "dtype": named}]
    config = {"config_name": "plain_text"}
    head = {"configs": [config | {"default": True, "data_files": files}]}
    head |= {"dataset_info": config | {"features": fields}}
    readme = f"---\n{json.dumps(head)}\n---\n"  # JSON is YAML
    return {paths[split]: as_parquet(splits[split]) for split in splits} | {"README.md": readme}


def hh_rlhf(folder: str) -> Files:
    """Gzipped lines in five folders; of these, four must not be read. One answer is too long."""
    files = {"red-team-attempts/red_team_attempts.jsonl.gz": gzip.compress(b"[]")}
    foreign = gzip.compress(b'{"chosen": "another folder", "rejected": ""}\n')
    for split in ("train", "test"):
        pairs = rows(folder, split, 400).select_columns(["chosen", "rejected"])
        pairs = pairs.map(lambda row, i: {"chosen": row["chosen"] + " Yes." * 600 * (not i)}, True)
        files[f"helpful-base/{split}.jsonl.gz"] = gzip.compress(as_lines(pairs).encode())
        for other in ("harmless-base", "helpful-online", "helpful-rejection-sampled"):
            files[f"{other}/{split}.jsonl.gz"] = foreign
    return files


def hc3_chinese(answers: datasets.Dataset) -> Files:
    """A loading script that datasets does not run any more, beside one file of lines per subset,
    and one of all.
    """
    answers = answers.select_columns(["question", "human_answers", "chatgpt_answers"])
    subsets = {name: answers.shard(len(HC3_SUBSETS), i) for i, name in enumerate(HC3_SUBSETS)}
    files = {f"{name}.jsonl": as_lines(part) for name, part in subsets.items()}
    sources = [name for name, part in subsets.items() for _ in part]
    files["all.jsonl"] = as_lines(answers.add_column("source", sources))
    return files | {"HC3-Chinese.py": RAN}


def hc3_parquet(answers: datasets.Dataset) -> Files:
    """What the hub's converter made of that: one folder per configuration."""
    few = as_parquet(answers.select(range(5)))
    files = {f"{subset}/train/0000.parquet": few for subset in HC3_SUBSETS}
    return files | {"all/train/0000.parquet": as_parquet(answers)}


def single_round(folder: Path) -> Files:
    """Two parquet files with hashes in their names, and the columns prompt, chosen and rejected."""
    names = ["prompt", "chosen", "rejected"]
    files = {}
    for split, name in (("train", "789dc5dece0f1fc1"), ("test", "8ecd46436fadcf7f")):
        pairs = rows(folder, split, 200).select_columns(names)
        files[f"data/{split}-00000-of-00001-{name}.parquet"] = as_parquet(pairs)
    return files


def rows(folder: str | Path, split: str, count: int) -> datasets.Dataset:
    """Return the first rows of a split of the synthetic world."""
    (file,) = Path(folder).glob(f"{split}-*.parquet")
    return datasets.Dataset.from_parquet(str(file)).select(range(count))


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
