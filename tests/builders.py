"""What tests set up: small models, tokenizers, folders of data, and processes of their own."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import (
    AutoModelForCausalLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_course.course.presets import ROOT
from rlhf_course.synthetic import small_models

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
EOS = 39
WORDS = "rain snow wind sun cloud storm fog river lake hill tree bird stone road".split()
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0}
GUARD = """
import os, socket
connect, lookup = socket.socket.connect, socket.getaddrinfo
def refuse(address):
    with open(os.environ["NETWORK_LOG"], "a") as log:
        log.write(f"{address}\\n")
    raise OSError(f"the network is blocked: {address}")
def guarded(self, address):
    local = not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost")
    return connect(self, address) if local else refuse(address)
def guarded_lookup(host, *rest, **options):
    local = host in (None, "127.0.0.1", "::1", "localhost")
    return lookup(host, *rest, **options) if local else refuse(host)
socket.socket.connect, socket.getaddrinfo = guarded, guarded_lookup
"""


class PadTokenizer:
    """All that the trainer asks of a tokenizer; padding is EOS, as with GPT-2."""

    pad_token_id = eos_token_id = EOS


def make_policy(seed: int = 0, dropout: float = 0.0, **config) -> AutoModelForCausalLMWithValueHead:
    """A random GPT-2 of 40 tokens with a value head; its distributions are uneven."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 40, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    special = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    shape |= {"initializer_range": 0.2}
    network = GPT2LMHeadModel(GPT2Config(**shape | special | rates | config))
    return AutoModelForCausalLMWithValueHead(network, summary_dropout_prob=dropout).eval()


def word_tokenizer(words: list[str], split, **special) -> PreTrainedTokenizerFast:
    """A token for each word that a text is split into; ``special`` goes to the tokenizer."""
    places = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(places, unk_token=special["unk_token"]))
    backend.pre_tokenizer = split
    ends = {"pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ends, **special)


def reviews(number: int) -> list[dict]:
    """The first of the openings that come with the course: text and label."""
    file = ROOT / "models/imdb-openings/train-00000-of-00001.parquet"
    return pd.read_parquet(file).head(number).to_dict("records")


def review_tokenizer() -> PreTrainedTokenizerFast:
    """A classifier's tokenizer, trained on some of the course's reviews."""
    texts = [review["text"] for review in reviews(60)]
    bpe = small_models.train_tokenizer(texts, 400).backend_tokenizer
    marks = {"cls_token": "[CLS]", "pad_token": "[PAD]", "eos_token": small_models.EOS}
    own = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=512, **marks)
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", own.cls_token_id)]
    )
    return own


def save_classifier(folder: Path, labels=("NEGATIVE", "POSITIVE"), tokenizer=None, **config) -> str:
    """A random DistilBERT with these label names, saved as the hub's are."""
    torch.manual_seed(0)
    tokenizer = tokenizer or review_tokenizer()
    sizes = {"n_layers": 1, "n_heads": 1, "dim": 16, "hidden_dim": 32, "vocab_size": len(tokenizer)}
    sizes |= {"max_position_embeddings": 512}
    names = {"id2label": dict(enumerate(labels)), "pad_token_id": tokenizer.pad_token_id}
    names |= {"label2id": {name: i for i, name in enumerate(labels)}}
    config = DistilBertConfig(**sizes | names | config)
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_base(folder: Path, tokenizer, kind=LlamaConfig, **config) -> PreTrainedModel:
    """A random language model of one layer without a padding token, with its tokenizer."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "pad_token_id": None}
    sizes |= {"intermediate_size": 48} if kind is LlamaConfig else {}
    model = AutoModelForCausalLM.from_config(kind(**sizes | ends | config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def invalid(message: str):
    """Expect a ValueError that says this, a pattern."""
    return pytest.raises(ValueError, match=message)


def write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content))


def edit_json(path: Path, **changes) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def make_samples(n: int = 8, seed: int = 0) -> tuple[list, list, list]:
    """Ragged queries (2-7 tokens), responses (1-10) and scores."""
    rng = np.random.default_rng(seed)
    queries = [torch.from_numpy(rng.integers(0, EOS, length)) for length in rng.integers(2, 8, n)]
    responses = [
        torch.from_numpy(rng.integers(0, EOS, length)) for length in rng.integers(1, 11, n)
    ]
    return queries, responses, list(torch.from_numpy(rng.normal(size=n)).float())


def make_trainer(policy=None, reference=None, optimizer=None, **config) -> PPOTrainer:
    """A trainer of these parts, for eight samples; the rest of ``config`` goes to PPOConfig."""
    names = ("lr_scheduler", "dataset", "num_shared_layers")
    parts = {name: config.pop(name) for name in names if name in config}
    config = PPOConfig(**{"batch_size": 8, "mini_batch_size": 8} | config)
    models = policy or make_policy(), reference
    return PPOTrainer(config, *models, PadTokenizer(), optimizer=optimizer, **parts)


def sgd(policy, lr: float = 0.05):
    return torch.optim.SGD(policy.parameters(), lr=lr)


def difference(before: dict, after: dict) -> float:
    """Largest absolute difference between two state dicts."""
    return max((before[name] - after[name]).abs().max().item() for name in before)


def snapshot(model) -> dict:
    """A copy of the model's state dict."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def latest_checkpoint(folder: Path) -> Path | None:
    """The undamaged checkpoint of the highest step, or None."""
    from rlhf_course.command_line.output import damage

    found = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    return next((path for path in reversed(found) if damage(path) is None), None)


def write_rows(folder: Path, rows: list[dict] | bytes, name: str = "train.jsonl") -> Path:
    """A dataset folder with one more file, of rows or of bytes; its name says the format."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return folder


def final_state(folder: Path) -> dict:
    """What a run's latest checkpoint holds of its trainer."""
    return torch.load(latest_checkpoint(folder) / "trainer_state.pt", weights_only=True)


def python(*arguments, **options) -> subprocess.CompletedProcess:
    """This Python with these arguments; ``options`` go to subprocess.run."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, **options
    )


def launch(script: Path, *arguments) -> subprocess.Popen:
    """A script in two processes over gloo; what both print comes together."""
    config = SCRIPTS / "accelerate/two_cpus.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    command += ["--num_processes=2", "--mixed_precision=no", "--main_process_port=0"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, (*command, script, *arguments))], env=environment, **pipes)


def launched(script: Path, *arguments) -> str:
    """What a script in two processes prints, which ends well."""
    process = launch(script, *arguments)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def guarded(folder: Path, environment=os.environ, at_start: str = "") -> dict[str, str]:
    """Variables for a process that reaches this machine only; network.log has what it asked for.

    ``at_start`` is code that the process runs first.
    """
    (folder / "guard").mkdir(exist_ok=True)
    (folder / "guard" / "sitecustomize.py").write_text(GUARD + at_start)
    path = os.pathsep.join(filter(None, (str(folder / "guard"), environment.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "NETWORK_LOG": str(folder / "network.log")}
