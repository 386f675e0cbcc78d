"""A small chat model and data in English, as toys under their ids; see README.md."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import datasets
import torch
from safetensors.torch import save
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dev.simulated_hub.repositories import Files, as_lines, as_parquet
from rlhf_course.data import as_messages, last_question
from rlhf_course.synthetic.dialogues import make_pairs

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_repositories(scratch: Path) -> dict[str, Files]:
    """Two chat models, and answers and pairs for them, by id."""
    pairs = [vars(pair) for pair in make_pairs(200, seed=2)]
    bpe = ByteLevelBPETokenizer()
    texts = [f"{pair['prompt']} {pair['chosen']}" for pair in pairs]
    bpe.train_from_iterator(texts, 600, special_tokens=SPECIAL, show_progress=False)
    bpe.save_model(str(scratch))
    splits = {"train": pairs[60:], "test": pairs[:60]}
    return {
        "HuggingFaceTB/SmolLM2-135M-Instruct": smollm2(bpe, scratch),
        "Qwen/Qwen3-0.6B": qwen3(bpe, scratch),
        "datasets/Hello-SimpleAI/HC3": {"all.jsonl": as_lines(answers(pairs))},
        "datasets/trl-lib/ultrafeedback_binarized": {
            f"data/{split}-00000-of-00001.parquet": as_parquet(messages(part))
            for split, part in splits.items()
        },
    }


def verifiable_repositories(scratch: Path) -> dict[str, Files]:
    """Return notebook 08's chat model and word problems at preset full, by id."""
    problems = {split: word_problems(count) for split, count in (("train", 60), ("test", 20))}
    bpe = ByteLevelBPETokenizer()
    texts = [f"{row['question']} {row['answer']}" for row in problems["train"]]
    bpe.train_from_iterator(texts, 400, special_tokens=SPECIAL, show_progress=False)
    bpe.save_model(str(scratch))
    configs = []
    for name in ("main", "socratic"):
        paths = [{"split": split, "path": f"{name}/{split}-*"} for split in problems]
        configs.append({"config_name": name, "data_files": paths})
    files = {"README.md": f"---\n{json.dumps({'configs': configs})}\n---\n"}
    for split, rows in problems.items():
        table = datasets.Dataset.from_list(rows)
        files[f"main/{split}-00000-of-00001.parquet"] = as_parquet(table)
        socratic = table.rename_column("answer", "not_read")
        files[f"socratic/{split}-00000-of-00001.parquet"] = as_parquet(socratic)
    return {
        "Qwen/Qwen2.5-0.5B-Instruct": qwen2_5(bpe, scratch),
        "datasets/openai/gsm8k": files,
    }


def word_problems(count: int) -> list[dict[str, str]]:
    """Return rows in GSM8K's format: steps with calculator marks, and the answer after ####."""
    rows = []
    for i in range(count):
        first = 10 + i
        second = 990 + 7 * i
        total = first + second
        question = f"Ann has {first} apples and buys {second} more. How many does she have?"
        steps = f"Ann has {first}+{second}=<<{first}+{second}={total}>>{total} apples."
        rows.append({"question": question, "answer": f"{steps}\n#### {total:,}"})
    return rows


def smollm2(bpe: ByteLevelBPETokenizer, scratch: Path) -> Files:
    """A Llama; its padding token is its end-of-turn token."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    special = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    special |= {"pad_token": SPECIAL[2], "chat_template": TEMPLATE}
    special |= {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 8192}
    return chat_model(LlamaForCausalLM, LlamaConfig, bpe, scratch, ids, ids, special)


def qwen3(bpe: ByteLevelBPETokenizer, scratch: Path) -> Files:
    """Norms on queries and keys; it thinks by default, and its sampling is not plain."""
    template = files("trl").joinpath("chat_templates", "qwen3.jinja").read_text(encoding="utf-8")
    special = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": template}
    special |= {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 131072}
    ids = {"bos_token_id": 0, "eos_token_id": 2}
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    sampling |= ids | {"eos_token_id": [2, 0], "pad_token_id": 0}
    return chat_model(Qwen3ForCausalLM, Qwen3Config, bpe, scratch, ids, sampling, special)


def qwen2_5(bpe: ByteLevelBPETokenizer, scratch: Path) -> Files:
    """Return Qwen2 with the saved sampling settings of Qwen2.5-0.5B-Instruct, which are not plain.

    There the end of a turn is 151645 and the end of a text 151643; here they are 2 and 0.
    """
    template = files("trl").joinpath("chat_templates", "qwen2_5.jinja").read_text(encoding="utf-8")
    special = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": template}
    special |= {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 131072}
    ids = {"bos_token_id": 0, "eos_token_id": 2}
    sampling = ids | {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True}
    sampling |= {"repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    return chat_model(Qwen2ForCausalLM, Qwen2Config, bpe, scratch, ids, sampling, special)


def chat_model(kind, config, bpe, scratch: Path, ids: dict, sampling: dict, special: dict) -> Files:
    """Two layers with fewer key heads than heads and a tied head; it often ends its turn."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2}
    sizes = {"vocab_size": bpe.get_vocab_size(), "hidden_size": 48, "intermediate_size": 96}
    torch.manual_seed(0)
    more = {"tie_word_embeddings": True, "head_dim": 16}
    model = kind(config(**ids, **heads, **sizes, **more)).to(torch.bfloat16)
    embedding = model.get_input_embeddings().weight.data
    embedding[:, 0] = 1.0  # in every hidden state, and largest in the end-of-turn token's row
    embedding[2, 0] = 1.8
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    architecture = {"architectures": [kind.__name__], "torch_dtype": "bfloat16"}
    return {
        **{name: (scratch / name).read_text() for name in ("vocab.json", "merges.txt")},
        "config.json": json.dumps(model.config.to_dict() | architecture),
        "generation_config.json": json.dumps(sampling),
        "tokenizer.json": bpe.to_str(),
        "tokenizer_config.json": json.dumps(special),
        "model.safetensors": save(state, {"format": "pt"}),
    }


def answers(pairs: list[dict]) -> datasets.Dataset:
    """HC3's columns."""
    rows = [
        {"question": last_question(pair["prompt"]), "human_answers": [pair["chosen"]]}
        | {"chatgpt_answers": [], "source": "open_qa"}
        for pair in pairs
    ]
    return datasets.Dataset.from_list(rows)


def messages(pairs: list[dict]) -> datasets.Dataset:
    """Whole dialogues as messages, with the scores of both answers."""
    rows = [
        {side: as_messages(f"{pair['prompt']} {pair[side]}") for side in ("chosen", "rejected")}
        | {"score_chosen": 8.0, "score_rejected": 5.0}
        for pair in pairs
    ]
    return datasets.Dataset.from_list(rows)
