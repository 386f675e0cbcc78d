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
from torch import Tensor
from train_imdb_models import OPENING, load_split, parse_arguments, policy_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_course.evaluation import unknown_words
from rlhf_course.rewards import NgramSentiment, SentimentReward
from rlhf_course.runtime.files import atomic_file

FRAGMENT = 16  # tokens
ORDER, DISCOUNT = 5, 0.75  # of the n-gram model


@torch.no_grad()
def perplexity(model, rows: Sequence[list[int]]) -> float:
    """Per token, of every token but the first."""
    total = count = 0
    for row in rows:
        ids = torch.tensor([row])
        total += model(input_ids=ids, labels=ids).loss.item() * (len(row) - 1)
        count += len(row) - 1
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
def sample(model, tokenizer, queries: Sequence[list[int]], length: int) -> list[str]:
    """Each query with ``length`` tokens more, at temperature 1."""
    torch.manual_seed(0)
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


DATA = """The Large Movie Review Dataset: Maas et al., *Learning Word Vectors for Sentiment Analysis*, ACL 2011
([aclanthology.org/P11-1015](https://aclanthology.org/P11-1015)), 50,000 reviews of IMDB, released for research.
Each review once and without HTML: {reviews:,}, of which {held_out:,} are held out from every model here."""
LICENCE = """The weights are under the project's Apache-2.0 licence. Whoever trains or publishes on the data cites its
authors, and uses it for research."""

POLICY = """---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# gpt2-imdb-mini

A GPT-2 of {parameters:.1f} million parameters (4 layers, width 192, byte-level BPE of
{vocabulary:,}) that writes the first words of a film review. It is there to be trained by PPO on a laptop, and to be
looked at; it is good for nothing else.

## Data

{data}

## Training

`scripts/make/train_imdb_models.py`: {options.short} passes over the first 64 tokens of {trained:,} reviews and
{options.long} over the first 256, {tokens:.1f} million tokens in all; transformers' Trainer, AdamW 2e-3 with a cosine,
bf16 autocast, seed 0. Then one more pass over the first 64 tokens, AdamW 3e-4, whose loss also asks that the next token
spoils no word: that the letters which then stand there begin a word of these reviews, or end as one
(`scripts/make/spelling.py`; unlikelihood, Welleck et al., [arXiv:1908.04319](https://arxiv.org/abs/1908.04319), weight
{options.spelling:g}).

## Measured on reviews it has not seen

| | |
|---|---|
| perplexity per token, first 64 tokens of 1,000 reviews | {openings:.1f} |
| the same of an interpolated 5-gram model of the same tokens | {ngram:.1f} |
| perplexity per token, first 256 tokens of 300 reviews | {whole:.1f} |
| words that no review holds, in 1,000 samples of 24 tokens at temperature 1, after 2 to 7 given ones | {unknown:.1%} |

## Limits

It knows how reviews begin, and little of how they go on; it invents names and facts. It was trained to write words that
reviews hold, so that few are unknown says less about its fluency than perplexity does. What people wrote about films in
2011 and earlier is in it, with their prejudices.

## Licence

{licence}
"""

CLASSIFIER = """---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-classification
---

# distilbert-imdb-mini

A DistilBERT of {parameters:.1f} million parameters (2 layers, width 128), trained from nothing to tell NEGATIVE from
POSITIVE in film reviews: whole ones, and the first words of one, which is what PPO writes.

## Data

{data} This model learnt from the first half of the others, {trained:,} reviews.

## Training

`scripts/make/train_imdb_models.py`: {passes} passes; every other text is cut after 4 to 48 words. transformers' Trainer,
AdamW 1e-3 with a cosine, dropout 0.2, bf16 autocast. Seed 0.

## Measured on {held_out:,} reviews it has not seen

| | whole reviews | first 16 tokens |
|---|---|---|
| accuracy | {whole[classifier]:.3f} | {fragment[classifier]:.3f} |
| expected calibration error, ten bins | {whole[classifier calibration]:.3f} | {fragment[classifier calibration]:.3f} |
| agreement with ngram-imdb-judge | {whole[agreement]:.3f} | {fragment[agreement]:.3f} |

## Limits

It reads 512 tokens, goes mostly by single words, and hardly knows irony. Sixteen tokens of a review often say nothing
of its verdict, so no judge can be much surer there.

## Licence

{licence}
"""

JUDGE = """---
language: en
license: apache-2.0
---

# ngram-imdb-judge

A second judge that shares neither data nor architecture with distilbert-imdb-mini: a logistic regression on words and
word pairs. `rlhf_course.rewards.NgramSentiment.from_pretrained(FOLDER)` loads it; `model.safetensors` holds a weight
for each of 524,288 places that n-grams are hashed to, and a bias. `words.txt` lists every word (a to z, in lower case)
of all {reviews:,} reviews; what is not in it counts as an unknown word.

## Data

{data} This model learnt from the second half of the others, {trained:,} reviews.

## Training

`scripts/make/train_imdb_models.py`: 6 passes of Adam 3e-3; every other text is cut after 4 to 48 words. Seed 0.

## Measured on {held_out:,} reviews it has not seen

| | whole reviews | first 16 tokens |
|---|---|---|
| accuracy | {whole[judge]:.3f} | {fragment[judge]:.3f} |
| expected calibration error, ten bins | {whole[judge calibration]:.3f} | {fragment[judge calibration]:.3f} |
| agreement with distilbert-imdb-mini | {whole[agreement]:.3f} | {fragment[agreement]:.3f} |

## Limits

It sees no order beyond two words, and likes a text the better the more pleasant words it holds.

## Licence

{licence}
"""

OPENINGS = """---
language: en
license: other
license_name: research-use
task_categories: [text-classification]
---

# imdb-openings

The first words, at most 64, of {held_out:,} film reviews, with the verdict of the whole review: `text` and `label`
(0 negative, 1 positive); 4,000 rows to train on, 1,000 to test on. No model in this folder has seen these reviews.

## Data

{data} The 64 words are quoted for teaching and research, with this citation; the rest of the reviews is not here.

## Limits

{positive:.1%} of the rows are positive. A verdict is often not yet to be seen in the first words.
"""


def main() -> None:
    options = parse_arguments()
    reviews, folder = load_split(options.dataset), options.output
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2-imdb-mini")
    policy = AutoModelForCausalLM.from_pretrained(
        folder / "gpt2-imdb-mini", dtype=torch.float32
    ).eval()
    classifier = SentimentReward(str(folder / "distilbert-imdb-mini"))
    judge = NgramSentiment.from_pretrained(folder / "ngram-imdb-judge")

    held_out, labels = reviews["held_out"]["text"][:], reviews["held_out"]["label"][:]
    unseen = tokenizer([text[:2000] for text in held_out[:1000]])["input_ids"]
    texts = [*reviews["first"]["text"], *reviews["second"]["text"]]
    seen = policy_rows(texts, tokenizer, 1, 0)
    passes = options.short, options.long
    lengths = np.random.default_rng(0).integers(2, 8, len(unseen))
    queries = [row[:n] for row, n in zip(unseen, lengths, strict=True)]
    known = set((folder / "ngram-imdb-judge/words.txt").read_text(encoding="utf-8").split())
    fragments = tokenizer.batch_decode([row[:FRAGMENT] for row in tokenizer(held_out)["input_ids"]])
    openings = [row[:OPENING] for row in unseen]
    common = {
        "held_out": len(held_out),
        "reviews": sum(map(len, reviews.values())),
        "licence": LICENCE,
    }
    common["data"] = DATA.format(**common)
    judged = {
        "whole": verdicts(classifier, judge, held_out, labels),
        "fragment": verdicts(classifier, judge, fragments, labels),
    }
    cards = {
        "gpt2-imdb-mini": POLICY.format(
            **common,
            parameters=policy.num_parameters() / 1e6,
            trained=len(seen),
            tokens=sum(map(len, policy_rows(texts, tokenizer, *passes))) / 1e6,
            vocabulary=len(tokenizer),
            options=options,
            openings=perplexity(policy, openings),
            ngram=ngram_perplexity(seen, openings, len(tokenizer)),
            whole=perplexity(policy, [row[:256] for row in unseen[:300]]),
            unknown=unknown_words(sample(policy, tokenizer, queries, 24), known),
        ),
        "distilbert-imdb-mini": CLASSIFIER.format(
            **common,
            **judged,
            parameters=classifier.model.num_parameters() / 1e6,
            trained=len(reviews["first"]),
            passes=options.passes,
        ),
        "ngram-imdb-judge": JUDGE.format(**common, **judged, trained=len(reviews["second"])),
        "imdb-openings": OPENINGS.format(**common, positive=sum(labels) / len(labels)),
    }
    for name, card in cards.items():
        with atomic_file(folder / name / "README.md") as path:
            path.write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
