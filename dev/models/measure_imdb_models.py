"""Measure the models in models/ on reviews not used in training, and write their cards.

    python dev/models/measure_imdb_models.py FOLDER

FOLDER is the folder passed to train_imdb_models.py.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from dev.models import train_imdb_models as made
from rlhf_course.course.presets import ROOT
from rlhf_course.evaluation import distinct_n, unknown_words
from rlhf_course.rewards import NgramSentiment, SentimentReward
from rlhf_course.runtime.files import atomic_file

FRAGMENT = 16  # tokens
STUDENT = ("long", "short", "spelling")  # the parts of the shipped policy's training
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}


@torch.no_grad()
def perplexity(model, rows: Sequence[list[int]], skipped: Sequence[int] | None = None) -> float:
    """Return the perplexity per token after each row's first ``skipped`` tokens (default: 1)."""
    total = count = 0
    for row, first in zip(rows, skipped or [1] * len(rows), strict=True):
        ids = torch.tensor([row])
        labels = torch.tensor([[-100] * first + row[first:]])
        total += model(input_ids=ids, labels=labels).loss.item() * (len(row) - first)
        count += len(row) - first
    return math.exp(total / count)


def sample(model, tokenizer, queries: Sequence[list[int]], seed: int) -> list[str]:
    """Return the queries' texts, each continued by 16 tokens sampled at temperature 1."""
    torch.manual_seed(seed)
    queries = (torch.tensor([query]) for query in queries)
    rows = [model.generate(query, max_new_tokens=FRAGMENT, **SAMPLING)[0] for query in queries]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def samples(policy, tokenizer, openings: Sequence[list[int]], known: set[str]) -> dict:
    """Return the model card's numbers about texts.

    The policy continues 256 openings of 2 to 8 tokens by 16 tokens each, at three seeds.
    """
    lengths = np.random.default_rng(0).integers(2, 9, len(openings)).tolist()
    pairs = zip(openings, lengths, strict=True)
    pairs = [(row[: n + FRAGMENT], n) for row, n in pairs if len(row) >= n + FRAGMENT][:256]
    rows = [row for row, _ in pairs]
    lengths = [n for _, n in pairs]
    numbers = {"temperature": made.TEMPERATURE, "baked": perplexity(policy, rows, lengths)}
    queries = [row[:n] for row, n in pairs]
    written = [sample(policy, tokenizer, queries, seed) for seed in range(3)]
    numbers["unknown"] = max(unknown_words(texts, known) for texts in written)
    real = distinct_n(tokenizer.batch_decode(rows), 2)
    numbers["distinct"] = min(distinct_n(texts, 2) for texts in written) / real
    made.sharpen(policy, 1 / made.TEMPERATURE)  # undo the temperature
    return numbers | {"trained_ppl": perplexity(policy, rows, lengths)}


def verdicts(classifier: SentimentReward, judge: NgramSentiment, texts, labels) -> dict:
    """Return the accuracies of the classifier and the judge, and how often the two agree."""
    first = classifier.logits(texts).argmax(1) == classifier.index
    second = judge(texts) > 0
    pairs = {"classifier": (first, labels), "judge": (second, labels), "agreement": (first, second)}
    return {name: (a == b).float().mean().item() for name, (a, b) in pairs.items()}


def training(policy, texts: Sequence[str], tokenizer) -> dict:
    """Return the model card's numbers about the policy's size and training."""
    numbers = {
        "parameters": policy.num_parameters() / 1e6,
        "vocabulary": len(tokenizer),
        "layers": policy.config.n_layer,
        "width": policy.config.n_embd,
        "teacher_layers": made.TEACHER["n_layer"],
        "teacher_width": made.TEACHER["n_embd"],
    }
    passes = {part: made.PASSES[part] for part in made.LONG}
    lengths = {part: made.policy_rows(texts, tokenizer, made.LONG[part]) for part in STUDENT}
    tokens = sum(passes[part] * sum(map(len, lengths[part]["input_ids"])) for part in STUDENT)
    return numbers | passes | {"trained": len(texts), "tokens": tokens / 1e6}


def measure(reviews, folder: Path) -> dict[str, dict]:
    """Return a dict from each model to the numbers for its card."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2-imdb-mini")
    policy = AutoModelForCausalLM.from_pretrained(folder / "gpt2-imdb-mini", dtype=torch.float32)
    classifier = SentimentReward(str(folder / "distilbert-imdb-mini"))
    judge = NgramSentiment.from_pretrained(folder / "ngram-imdb-judge")
    held_out = reviews["held_out"]["text"][:]
    labels = torch.tensor(reviews["held_out"]["label"][:])
    unseen = tokenizer([text[:2000] for text in held_out[:1000]])["input_ids"]
    known = set((folder / "ngram-imdb-judge/words.txt").read_text(encoding="utf-8").split())
    fragments = tokenizer.batch_decode([row[:FRAGMENT] for row in tokenizer(held_out)["input_ids"]])
    openings = [row[: made.OPENING] for row in unseen]
    kinds = {"whole": held_out, "fragment": fragments}
    judged = {}
    for kind, texts in kinds.items():
        judged[kind] = verdicts(classifier, judge, texts, labels == 1)
    texts = [*reviews["first"]["text"], *reviews["second"]["text"]]
    numbers = training(policy, texts, tokenizer)
    numbers |= samples(policy.eval(), tokenizer, openings, known)  # also undoes TEMPERATURE
    numbers |= {"openings": perplexity(policy, openings), "spelling": made.SPELLING}
    numbers["whole"] = perplexity(policy, [row[:256] for row in unseen[:300]])
    size = {"parameters": classifier.model.num_parameters() / 1e6}
    size["passes"] = made.PASSES["classifier"]
    return {
        "gpt2-imdb-mini": numbers,
        "distilbert-imdb-mini": judged | size | {"trained": len(reviews["first"])},
        "ngram-imdb-judge": judged | {"trained": len(reviews["second"])},
        "imdb-openings": {"positive": labels.float().mean().item()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", type=Path, help="folder of IMDB in the hub's layout")
    parser.add_argument("--output", type=Path, default=ROOT / "models")
    chosen = parser.parse_args()
    reviews = made.load_split(chosen.dataset)
    cards = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))
    common = {"held_out": len(reviews["held_out"]), "reviews": sum(map(len, reviews.values()))}
    common |= {"data": cards["data"].format(**common), "license": cards["license"]}
    for name, numbers in measure(reviews, chosen.output).items():
        with atomic_file(chosen.output / name / "README.md") as path:
            path.write_text(cards[name].format(**common, **numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
