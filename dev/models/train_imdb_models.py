"""Train the small models in models/ on real film reviews.

    python dev/models/train_imdb_models.py FOLDER
    python dev/models/train_imdb_models.py FOLDER --parts openings judge

FOLDER contains IMDB in the hub's layout. The parts, in the order in which they are made, are
openings, judge, classifier and policy; the last two resume from build/imdb_models. The policy
learns from a larger teacher and needs a GPU (a quarter of an hour on an H100).
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers as hf
from safetensors.torch import save_file
from tokenizers import processors
from torch.nn.functional import binary_cross_entropy_with_logits

from dev.models.spelling import DistillationLoss, SpellingLoss
from rlhf_course.course.presets import ROOT
from rlhf_course.data import load_reviews
from rlhf_course.evaluation import words_of
from rlhf_course.rewards import NgramSentiment
from rlhf_course.runtime.files import atomic_folder
from rlhf_course.synthetic.small_models import train_tokenizer

SEED = 0
PARTS = ("openings", "judge", "classifier", "policy")
HELD_OUT = 5000  # reviews that no model is trained on
OPENING = 64  # shipped words per held-out review; tokens per review in the policy's last passes
VOCABULARY = 16_000
PASSES = {"judge": 6, "classifier": 8, "teacher": 4, "long": 8, "short": 3, "spelling": 1}
LONG = {"teacher": 512, "long": 256, "short": OPENING, "spelling": OPENING}  # tokens per review
SPELLING = 10.0  # weight of the misspelling loss
TEMPERATURE = 0.8  # of the shipped policy; measure_imdb_models.py measures its effect
TEACHER = {"n_layer": 8, "n_embd": 512, "n_head": 8}
STUDENT = {"n_layer": 6, "n_embd": 288, "n_head": 6}
LABELS = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}


def load_split(folder: Path) -> datasets.DatasetDict:
    """Return all distinct reviews, with HTML removed: held_out, and the rest in two halves."""
    rows = datasets.concatenate_datasets([load_reviews(folder, part) for part in ("train", "test")])
    rows = rows.map(lambda row: {"text": re.sub(r"\s*(<br\s*/?>\s*)+", " ", row["text"]).strip()})
    first = {text: place for place, text in reversed([*enumerate(rows["text"])])}
    rows = rows.select(sorted(first.values())).shuffle(seed=SEED)
    half = (HELD_OUT + len(rows)) // 2
    ends = {"held_out": (0, HELD_OUT), "first": (HELD_OUT, half), "second": (half, len(rows))}
    return datasets.DatasetDict(
        {name: rows.select(range(start, end)) for name, (start, end) in ends.items()}
    )


def save_openings(reviews: datasets.Dataset, folder: Path) -> None:
    """Write every held-out review's label and first 64 words; 1,000 reviews are the test split."""
    rows = reviews.map(lambda row: {"text": " ".join(row["text"].split()[:OPENING])})
    splits = {"train": range(4000), "test": range(4000, len(rows))}
    for split, part in splits.items():
        rows.select(part).to_parquet(folder / f"{split}-00000-of-00001.parquet")


def cut(text: str, rng: np.random.Generator) -> str:
    """Return the text or, half of the time, its first 4 to 48 words; PPO's texts are also short."""
    return text if rng.random() < 0.5 else " ".join(text.split()[: rng.integers(4, 49)])


def train_judge(reviews: datasets.Dataset, folder: Path) -> None:
    """Train and save a logistic regression on words and word pairs of reviews."""
    torch.manual_seed(SEED)
    judge = NgramSentiment(torch.zeros(2**19, 1), torch.zeros(1))
    rng = np.random.default_rng(SEED)
    weights = [judge.weight.requires_grad_(), judge.bias.requires_grad_()]
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    texts = reviews["text"][:]
    labels = torch.tensor(reviews["label"][:]).float()
    for _ in range(PASSES["judge"]):
        for rows in torch.randperm(len(texts)).split(128):
            logits = judge([cut(texts[row], rng) for row in rows.tolist()])
            binary_cross_entropy_with_logits(logits, labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    tensors = {name: tensor.detach().half() for name, tensor in vars(judge).items()}
    with atomic_folder(folder) as new:
        save_file(tensors, new / "model.safetensors")


def train_classifier(reviews: datasets.DatasetDict, tokenizer, folder: Path) -> None:
    """Train a small DistilBERT on reviews of up to 512 tokens and on short openings; save it."""

    def rows(part: datasets.Dataset, texts: Sequence[str]) -> datasets.Dataset:
        ids = tokenizer(texts, truncation=True, max_length=512)["input_ids"]
        return datasets.Dataset.from_dict({"input_ids": ids, "labels": part["label"][:]})

    rng = np.random.default_rng(SEED)
    part = reviews["first"]
    passes = [rows(part, [cut(t, rng) for t in part["text"]]) for _ in range(PASSES["classifier"])]
    sizes = {"n_layers": 2, "n_heads": 2, "dim": 128, "hidden_dim": 512, "dropout": 0.2}
    sizes |= {"attention_dropout": 0.0, "seq_classif_dropout": 0.2, "vocab_size": len(tokenizer)}
    hf.set_seed(SEED)
    config = hf.DistilBertConfig(pad_token_id=tokenizer.pad_token_id, **sizes, **LABELS)
    model = hf.DistilBertForSequenceClassification(config)
    test = reviews["held_out"]
    test = rows(test.select(range(1000)), test["text"][:1000])
    train = datasets.concatenate_datasets(passes)
    collate = hf.DataCollatorWithPadding(tokenizer)
    fit(model, train, test, collate, "classifier", learning_rate=1e-3)
    save(model, tokenizer, folder)


def classifier_tokenizer(tokenizer) -> hf.PreTrainedTokenizerFast:
    """Return the BPE tokenizer with a leading [CLS] and a padding token, as DistilBERT expects."""
    marks = {"cls_token": "[CLS]", "pad_token": "[PAD]", "eos_token": tokenizer.eos_token}
    reader = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **marks)
    reader.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", reader.cls_token_id)]
    )
    reader.model_max_length = 512
    return reader


def policy_rows(texts: Sequence[str], tokenizer, length: int) -> datasets.Dataset:
    """Return each text's first ``length`` tokens; an end-of-text token follows a shorter text."""
    rows = tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"]
    rows = [row[:length] for row in rows]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def train_policy(texts: Sequence[str], held_out: Sequence[str], tokenizer, folder: Path) -> None:
    """Train a large GPT-2, distill it into a small one, and save the small one.

    The teacher's probabilities carry more information than the actual next token. The last pass
    penalizes misspelling.
    """
    rows = {part: policy_rows(texts, tokenizer, length) for part, length in LONG.items()}
    test = policy_rows(held_out[:1000], tokenizer, OPENING)
    collate = hf.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    common = {"n_positions": 512, "vocab_size": len(tokenizer)}
    marks = ("bos_token_id", "eos_token_id", "pad_token_id")
    common |= dict.fromkeys(marks, tokenizer.eos_token_id)
    hf.set_seed(SEED)
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    teacher = hf.GPT2LMHeadModel(hf.GPT2Config(**TEACHER, **common, **dropped))
    options = {"batch": 64, "num_train_epochs": PASSES["teacher"], "learning_rate": 1e-3}
    fit(teacher, rows["teacher"], test, collate, "teacher", **options)
    dropped = dict.fromkeys(dropped, 0.0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**STUDENT, **common | {"n_positions": 256}, **dropped))
    loss = DistillationLoss(teacher)
    for part, rate in (("long", 2e-3), ("short", 1e-3)):
        options = {"batch": 128, "num_train_epochs": PASSES[part], "learning_rate": rate}
        fit(model, rows[part], test, collate, part, loss, **options)
    loss = SpellingLoss(texts, tokenizer, SPELLING, loss)
    fit(model, rows["spelling"], test, collate, "spelling", loss, batch=64, learning_rate=3e-4)
    sharpen(model, TEMPERATURE)
    save(model, tokenizer, folder)


@torch.no_grad()
def sharpen(model, temperature: float) -> None:
    """Divide the model's logits by a temperature, in place.

    The head is linear without bias, so dividing the final layer norm divides the logits. PPO then
    samples from and scores the same distribution.
    """
    for parameter in model.transformer.ln_f.parameters():
        parameter /= temperature


def fit(model, train, held_out, collate, name: str, loss=None, batch=32, **options) -> None:
    """Train the model with transformers' Trainer, one epoch by default; resume if possible."""
    work = ROOT / "build/imdb_models" / name
    options = {"num_train_epochs": 1} | options
    options |= {f"per_device_{part}_batch_size": batch for part in ("train", "eval")}
    options |= {"lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 300}
    options |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.05}, "weight_decay": 0.05}
    options |= {"adam_beta2": 0.95, "bf16": True, "use_cpu": not torch.cuda.is_available()}
    options |= {"train_sampling_strategy": "group_by_length", "save_total_limit": 1, "seed": SEED}
    arguments = hf.TrainingArguments(str(work), eval_strategy="steps", report_to="none", **options)
    trainer = hf.Trainer(model, arguments, collate, train, held_out, compute_loss_func=loss)
    trainer.train(resume_from_checkpoint=any(work.glob("checkpoint-*")))


def save(model, tokenizer, folder: Path) -> None:
    """Write a model in bfloat16, and its tokenizer without indentation, to ``folder``."""
    for part in (model.to(torch.bfloat16), tokenizer):
        part.save_pretrained(folder)
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(rules, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, help="folder of IMDB in the hub's layout")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--output", type=Path, default=ROOT / "models")
    chosen = parser.parse_args()
    datasets.disable_progress_bars()
    reviews = load_split(chosen.dataset)
    output = chosen.output
    texts = [*reviews["first"]["text"], *reviews["second"]["text"]]
    policy = output / "gpt2-imdb-mini"
    if "openings" in chosen.parts:
        save_openings(reviews["held_out"], output / "imdb-openings")
    if "judge" in chosen.parts:
        train_judge(reviews["second"], judge := output / "ngram-imdb-judge")
        words = {word for x in reviews.values() for text in x["text"] for word in words_of(text)}
        (judge / "words.txt").write_text("\n".join(sorted(words)) + "\n", encoding="utf-8")
    if "classifier" in chosen.parts:
        reader = classifier_tokenizer(train_tokenizer(texts, VOCABULARY))
        train_classifier(reviews, reader, output / "distilbert-imdb-mini")
    if "policy" in chosen.parts:
        tokenizer = train_tokenizer(texts, VOCABULARY)
        train_policy(texts, reviews["held_out"]["text"][:], tokenizer, policy)


if __name__ == "__main__":
    main()
