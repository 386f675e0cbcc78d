"""What the models in models/ can do, measured on reviews that none of them has seen; writes their
cards.

    python scripts/make/measure_imdb_models.py FOLDER

Takes the options of train_imdb_models.py, those that the models were trained with.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import yaml
from torch import Tensor
from train_imdb_models import (
    OPENING,
    TEMPERATURE,
    load_split,
    parse_arguments,
    policy_rows,
    sharpen,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course.course.presets import ROOT
from rlhf_course.evaluation import distinct_n, unknown_words
from rlhf_course.rewards import NgramSentiment, SentimentReward
from rlhf_course.runtime.files import atomic_file

FRAGMENT = 16  # tokens
ORDER, DISCOUNT = 5, 0.75  # of the n-gram model


@torch.no_grad()
def perplexity(model, rows: Sequence[list[int]], given: Sequence[int] | None = None) -> float:
    """Per token, of every token after the first ``given`` ones (default: 1) of each row."""
    total = count = 0
    for row, first in zip(rows, given or [1] * len(rows), strict=True):
        ids, labels = torch.tensor([row]), torch.tensor([[-100] * first + row[first:]])
        total += model(input_ids=ids, labels=labels).loss.item() * (len(row) - first)
        count += len(row) - first
    return math.exp(total / count)


def ngram_perplexity(
    train: Sequence[list[int]], rows: Sequence[list[int]], vocabulary: int
) -> float:
    """The same of an n-gram model of order 5 with absolute discounting, interpolated with all lower
    orders.

    Chen and Goodman 1999 (doi:10.1006/csla.1999.0128), section 2.5.
    """
    counts: dict[tuple, int] = defaultdict(int)
    for row in train:
        for end in range(1, len(row) + 1):
            for n in range(1, min(ORDER, end) + 1):
                counts[tuple(row[end - n : end])] += 1
    seen, kinds = (
        defaultdict(int),
        defaultdict(int),
    )  # of a history: tokens after it, different tokens after it
    for gram, count in counts.items():
        seen[gram[:-1]] += count
        kinds[gram[:-1]] += 1
    total = number = 0
    for row in rows:
        for place in range(1, len(row)):
            p = 1 / vocabulary
            for n in range(min(ORDER, place + 1)):
                history = tuple(row[place - n : place])
                if seen.get(history):
                    found = max(counts.get((*history, row[place]), 0) - DISCOUNT, 0)
                    p = (found + DISCOUNT * kinds[history] * p) / seen[history]
            total, number = total - math.log(p), number + 1
    return math.exp(total / number)


@torch.no_grad()
def sample(model, tokenizer, queries: Sequence[list[int]], length: int, seed: int) -> list[str]:
    """Each query with ``length`` tokens more, from the model's own distribution."""
    torch.manual_seed(seed)
    texts = []
    for query in queries:
        ids = model.generate(
            torch.tensor([query]),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            pad_token_id=0,
        )
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return texts


def samples(policy, tokenizer, openings: Sequence[list[int]], known: set[str]) -> dict:
    """What the card says of 256 openings of 2 to 8 tokens, continued by 16 tokens; three seeds."""
    rng = np.random.default_rng(0)
    lengths = [int(rng.integers(2, 9)) for _ in openings]
    pairs = [(row[: n + FRAGMENT], n) for row, n in zip(openings, lengths, strict=True)]
    pairs = [(row, n) for row, n in pairs if len(row) == n + FRAGMENT][:256]
    rows, lengths = [row for row, _ in pairs], [n for _, n in pairs]
    queries = [row[:n] for row, n in pairs]
    found = {"temperature": TEMPERATURE, "baked": perplexity(policy, rows, lengths)}
    written = [sample(policy, tokenizer, queries, FRAGMENT, seed) for seed in range(3)]
    found["unknown"] = max(unknown_words(texts, known) for texts in written)
    real = distinct_n(tokenizer.batch_decode([*rows]), 2)
    found["distinct"] = min(distinct_n(texts, 2) for texts in written) / real
    sharpen(policy, 1 / TEMPERATURE)  # as it was trained
    return found | {"trained_ppl": perplexity(policy, rows, lengths)}


def calibration(p: Tensor, truth: Tensor) -> float:
    """Expected calibration error over ten bins (Guo et al. 2017, arXiv:1706.04599, eq. 3)."""
    bins = (p * 10).long().clamp(max=9)
    gaps = [
        (bins == b).float().mean() * (p[bins == b].mean() - truth[bins == b].mean()).abs()
        for b in bins.unique()
    ]
    return float(sum(gaps))


def verdicts(
    classifier: SentimentReward, judge: NgramSentiment, texts: list[str], labels: list[int]
) -> dict:
    """Accuracy and calibration of both, and how often they agree."""
    truth = torch.tensor(labels).float()
    first, second = classifier.logits(texts).softmax(1)[:, classifier.index], judge(texts).sigmoid()
    found = {"agreement": float(((first > 0.5) == (second > 0.5)).float().mean())}
    for name, p in {"classifier": first, "judge": second}.items():
        found[name] = float(((p > 0.5) == (truth == 1)).float().mean())
        found[f"{name} calibration"] = calibration(p, truth)
    return found


def measure(reviews, folder, options) -> dict[str, dict]:
    """Return what the models' cards say of each model."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2-imdb-mini")
    model = AutoModelForCausalLM.from_pretrained(folder / "gpt2-imdb-mini", dtype=torch.float32)
    policy, classifier = model.eval(), SentimentReward(str(folder / "distilbert-imdb-mini"))
    judge = NgramSentiment.from_pretrained(folder / "ngram-imdb-judge")
    held_out, labels = reviews["held_out"]["text"][:], reviews["held_out"]["label"][:]
    unseen = tokenizer([text[:2000] for text in held_out[:1000]])["input_ids"]
    texts = [*reviews["first"]["text"], *reviews["second"]["text"]]
    seen = policy_rows(texts, tokenizer, 1, 0)
    learned = policy_rows(texts, tokenizer, options.short, options.long)
    known = set((folder / "ngram-imdb-judge/words.txt").read_text(encoding="utf-8").split())
    fragments = tokenizer.batch_decode([row[:FRAGMENT] for row in tokenizer(held_out)["input_ids"]])
    openings = [row[:OPENING] for row in unseen]
    judged = {
        "whole": verdicts(classifier, judge, held_out, labels),
        "fragment": verdicts(classifier, judge, fragments, labels),
    }
    return {
        "gpt2-imdb-mini": {
            "parameters": policy.num_parameters() / 1e6,
            "trained": len(seen),
            "tokens": sum(map(len, learned)) / 1e6,
            "vocabulary": len(tokenizer),
            "options": options,
            **samples(policy, tokenizer, openings, known),  # after it, as it was trained
            "openings": perplexity(policy, openings),
            "ngram": ngram_perplexity(seen, openings, len(tokenizer)),
            "whole": perplexity(policy, [row[:256] for row in unseen[:300]]),
        },
        "distilbert-imdb-mini": judged
        | {"parameters": classifier.model.num_parameters() / 1e6, "passes": options.passes}
        | {"trained": len(reviews["first"])},
        "ngram-imdb-judge": judged | {"trained": len(reviews["second"])},
        "imdb-openings": {"positive": sum(labels) / len(labels)},
    }


def main() -> None:
    options = parse_arguments()
    reviews, folder = load_split(options.dataset), options.output
    cards = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))
    common = {"held_out": len(reviews["held_out"]), "reviews": sum(map(len, reviews.values()))}
    common |= {"data": cards["data"].format(**common), "licence": cards["licence"]}
    for name, found in measure(reviews, folder, options).items():
        with atomic_file(folder / name / "README.md") as path:
            path.write_text(cards[name].format(**common, **found), encoding="utf-8")


if __name__ == "__main__":
    main()
