"""The small models of real film reviews that models/ holds, trained from the reviews themselves.

    python scripts/make/train_imdb_models.py FOLDER
    python scripts/make/train_imdb_models.py FOLDER --parts openings judge

FOLDER holds IMDB in the hub's layout. The parts are openings, judge, classifier and policy, made in
that order; policy and classifier go on where they were stopped.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
from spelling import SpellingLoss
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from rlhf_course.course.presets import ROOT
from rlhf_course.data import load_reviews
from rlhf_course.evaluation import words_of
from rlhf_course.rewards import NgramSentiment
from rlhf_course.worlds.small_models import classifier_tokenizer, train_tokenizer

SEED = 0
HELD_OUT = 5000  # reviews that no model sees
# Words of a held-out review that are shipped; tokens of a review that the policy mostly learns from
OPENING = 64
# More words that are one token leave fewer to misspell.
VOCABULARY = {"policy": 24_000, "classifier": 16_000}
TEMPERATURE = 0.81  # of the policy that is shipped; measure_imdb_models.py measures what it does
LABELS = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}


def load_split(folder: Path) -> datasets.DatasetDict:
    """Every review once, without HTML: held_out, and the rest as first half and second half."""
    rows = datasets.concatenate_datasets(
        [load_reviews(folder, split) for split in ("train", "test")]
    )
    rows = rows.map(lambda row: {"text": re.sub(r"\s*(<br\s*/?>\s*)+", " ", row["text"]).strip()})
    first = {text: place for place, text in reversed([*enumerate(rows["text"])])}
    rows = rows.select(sorted(first.values())).shuffle(seed=SEED)
    half = (HELD_OUT + len(rows)) // 2
    ends = {"held_out": (0, HELD_OUT), "first": (HELD_OUT, half), "second": (half, len(rows))}
    return datasets.DatasetDict({name: rows.select(range(*end)) for name, end in ends.items()})


def cut(text: str, rng: np.random.Generator) -> str:
    """Return a text as a judge learns from it: every other time 4 to 48 words, as PPO's have."""
    return text if rng.random() < 0.5 else " ".join(text.split()[: rng.integers(4, 49)])


def train_judge(reviews: datasets.Dataset, folder: Path, passes: int = 6) -> None:
    """Logistic regression on the words and word pairs of reviews."""
    torch.manual_seed(SEED)
    judge, rng = NgramSentiment(torch.zeros(2**19, 1), torch.zeros(1)), np.random.default_rng(SEED)
    weights = [judge.weight.requires_grad_(), judge.bias.requires_grad_()]
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    texts, labels = reviews["text"][:], torch.tensor(reviews["label"][:]).float()
    for _ in range(passes):
        for rows in torch.randperm(len(texts)).split(128):
            logits = judge([cut(texts[row], rng) for row in rows.tolist()])
            binary_cross_entropy_with_logits(logits, labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    judge.save_pretrained(folder)


def train_classifier(
    reviews: datasets.Dataset,
    held_out: datasets.Dataset,
    tokenizer,
    folder: Path,
    work: Path,
    options,
) -> None:
    """A small DistilBERT on beginnings of reviews: whole ones, as far as its 512 positions go, and
    short ones.
    """
    rng, rows = np.random.default_rng(SEED), []
    for _ in range(options.passes):
        ids = tokenizer(
            [cut(text, rng) for text in reviews["text"]], truncation=True, max_length=512
        )["input_ids"]
        rows += [
            {"input_ids": row, "labels": label}
            for row, label in zip(ids, reviews["label"], strict=True)
        ]
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        n_layers=2,
        n_heads=2,
        dim=128,
        hidden_dim=512,
        dropout=0.2,
        attention_dropout=0.0,
        seq_classif_dropout=0.2,
        **LABELS,
    )
    transformers.set_seed(SEED)
    held_out = held_out.select(range(1000))
    ids = tokenizer(held_out["text"][:], truncation=True, max_length=512)["input_ids"]
    held_out = [
        {"input_ids": row, "labels": label}
        for row, label in zip(ids, held_out["label"], strict=True)
    ]
    model = fit(
        DistilBertForSequenceClassification(config),
        datasets.Dataset.from_list(rows),
        datasets.Dataset.from_list(held_out),
        DataCollatorWithPadding(tokenizer),
        work / "classifier",
        learning_rate=options.classifier_lr,
        compute_metrics=lambda found: {
            "accuracy": (found.predictions.argmax(1) == found.label_ids).mean()
        },
    )
    for part in (model.to(torch.bfloat16), tokenizer):
        part.save_pretrained(folder)


def policy_rows(texts: Sequence[str], tokenizer, short: int, long: int) -> list[list[int]]:
    """The beginnings of reviews in tokens: each ``short`` times the first 64, and ``long`` times
    the first 256.
    """
    ids = tokenizer([text[:2000] for text in texts])["input_ids"]
    ids = [
        row if len(text) > 2000 else [*row, tokenizer.eos_token_id]
        for row, text in zip(ids, texts, strict=True)
    ]
    return [row[:OPENING] for row in ids] * short + [row[:256] for row in ids] * long


def train_policy(
    texts: Sequence[str], held_out: Sequence[str], tokenizer, folder: Path, work: Path, options
) -> None:
    """GPT-2 on the beginnings of reviews; at last once over the openings with a loss against
    misspelling.
    """
    rows = policy_rows(texts, tokenizer, options.short, options.long)
    held_out = [row[:OPENING] for row in tokenizer(held_out)["input_ids"]]
    eos = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_layer=4,
        n_embd=192,
        n_head=3,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **eos,
    )
    transformers.set_seed(SEED)
    rows, held_out = (
        datasets.Dataset.from_dict({"input_ids": part, "labels": part, "length": [*map(len, part)]})
        for part in (rows, held_out[:1000])
    )
    collate = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    model = fit(
        GPT2LMHeadModel(config), rows, held_out, collate, work / "policy", learning_rate=2e-3
    )
    loss, openings = (
        SpellingLoss(texts, tokenizer, options.spelling),
        rows.select(range(len(texts))),
    )
    model = fit(
        model,
        openings,
        held_out,
        collate,
        work / "spelling",
        compute_loss_func=loss,
        learning_rate=3e-4,
    )
    sharpen(model, TEMPERATURE)
    for part in (model.to(torch.bfloat16), tokenizer):
        part.save_pretrained(folder)


@torch.no_grad()
def sharpen(model: GPT2LMHeadModel, temperature: float) -> None:
    """Divide all logits by a temperature, so that the model's own distribution becomes sharper.

    The head is linear and without bias: dividing the final layer norm divides the logits. PPO then
    samples from, and scores, one distribution.
    """
    for parameter in model.transformer.ln_f.parameters():
        parameter /= temperature


def fit(
    model,
    train,
    held_out,
    collate,
    work: Path,
    compute_metrics=None,
    compute_loss_func=None,
    **options,
):
    """The model, trained for one pass by transformers' Trainer, from its last checkpoint on."""
    arguments = TrainingArguments(
        str(work),
        num_train_epochs=1,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=300,
        weight_decay=0.05,
        adam_beta2=0.95,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        train_sampling_strategy="group_by_length",
        eval_strategy="steps",
        eval_steps=500,
        save_steps=500,
        save_total_limit=1,
        logging_steps=50,
        report_to="none",
        seed=SEED,
        **options,
    )
    more = {"compute_metrics": compute_metrics, "compute_loss_func": compute_loss_func}
    trainer = Trainer(model, arguments, collate, train, held_out, **more)
    trainer.train(resume_from_checkpoint=any(work.glob("checkpoint-*")))
    (work / "log.json").write_text(json.dumps(trainer.state.log_history))
    return model


def save_openings(reviews: datasets.Dataset, folder: Path) -> None:
    """The first 64 words of every held-out review, with its label: 4,000 to train on, 1,000 to test
    on.
    """
    rows = reviews.map(lambda row: {"text": " ".join(row["text"].split()[:OPENING])})
    for split, part in {
        "train": rows.select(range(4000)),
        "test": rows.select(range(4000, len(rows))),
    }.items():
        part.to_parquet(folder / f"{split}-00000-of-00001.parquet")


PARTS = ("openings", "judge", "classifier", "policy")


def parse_arguments() -> argparse.Namespace:
    """Return the command line, which measure_imdb_models.py shares, to measure what was trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, help="folder of IMDB in the hub's layout")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--output", type=Path, default=ROOT / "models")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/imdb_models", help="checkpoints, for going on"
    )
    parser.add_argument(
        "--short", type=int, default=5, help="the policy's passes over 64 tokens of each review"
    )
    parser.add_argument("--long", type=int, default=1, help="and over 256")
    parser.add_argument(
        "--spelling", type=float, default=10.0, help="weight of the loss against misspelling"
    )
    parser.add_argument("--passes", type=int, default=8, help="of the classifier")
    parser.add_argument("--classifier_lr", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    datasets.disable_progress_bars()
    reviews = load_split(options.dataset)
    texts = [*reviews["first"]["text"], *reviews["second"]["text"]]
    policy, output = options.output / "gpt2-imdb-mini", options.output
    if not (policy / "tokenizer.json").exists():
        train_tokenizer(texts, VOCABULARY["policy"]).save_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    if "openings" in options.parts:
        save_openings(reviews["held_out"], output / "imdb-openings")
    if "judge" in options.parts:
        train_judge(reviews["second"], judge := output / "ngram-imdb-judge")
        words = {
            word for part in reviews.values() for text in part["text"] for word in words_of(text)
        }
        (judge / "words.txt").write_text("\n".join(sorted(words)) + "\n", encoding="utf-8")
    if "classifier" in options.parts:
        reader = classifier_tokenizer(train_tokenizer(texts, VOCABULARY["classifier"]))
        where = output / "distilbert-imdb-mini", options.work
        train_classifier(reviews["first"], reviews["held_out"], reader, *where, options)
    if "policy" in options.parts:
        train_policy(
            texts, reviews["held_out"]["text"][:], tokenizer, policy, options.work, options
        )


if __name__ == "__main__":
    main()
