"""Train a small GPT-2 by PPO to praise films, within a minute, and show texts before and after.

The reward is the score of a sentiment classifier. Policy, classifier and reviews come with the
course, so the command needs no network. It also writes what it shows to a page, build/hello.html.
"""

import argparse
import io
import random
import sys
import time
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from rlhf_course import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
)
from rlhf_course.command_line import exits
from rlhf_course.course.plots import panels
from rlhf_course.course.presets import shipped
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.data import build_queries, load_reviews
from rlhf_course.evaluation import mean_ci
from rlhf_course.rewards import SentimentReward
from rlhf_course.runtime.files import atomic_file

MODEL = shipped("models/gpt2-imdb-mini")
CLASSIFIER = shipped("models/distilbert-imdb-mini")
REVIEWS = shipped("models/imdb-openings")
BATCH_SIZE = 64
MEASURED = 256  # held-out queries
SHOWN = 16
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": 14}
BAR_PER_LOGIT = 15  # characters
STYLE = """<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; }
tr { border-bottom: 1px solid #ccc; }
svg { max-width: 100%; height: auto; }
</style>"""


def main(arguments: list[str]) -> int:
    """Train, show the texts and write the page; return 0."""
    parser = argparse.ArgumentParser("hello.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="PPO steps (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/hello.html"), help="page to write"
    )
    chosen = parser.parse_args(arguments)
    if chosen.steps < 1:
        raise ValueError(f"--steps is {chosen.steps}; it must be at least 1.")
    quiet_libraries()
    started = time.perf_counter()
    console = Console()
    console.print("A small GPT-2 continues film reviews. PPO trains it to write praise.\n")
    random.seed(chosen.seed)
    trainer = make_trainer(chosen.seed)
    classifier = SentimentReward(CLASSIFIER)
    training = read_queries("train", trainer.tokenizer, chosen.seed)
    held_out = read_queries("test", trainer.tokenizer, chosen.seed)[:MEASURED]

    _, texts_before, scores_before = sample(trainer, classifier, held_out)
    curve = train(trainer, classifier, training, chosen.steps, console)
    _, texts_after, scores_after = sample(trainer, classifier, held_out)

    texts = pd.DataFrame(
        {
            "opening": trainer.tokenizer.batch_decode(held_out),
            "before": texts_before,
            "after": texts_after,
        }
    )
    result = describe(scores_before, scores_after, time.perf_counter() - started)
    show(texts.head(SHOWN), result, console)
    write_page(chosen.output, texts.head(SHOWN), result, curve)
    console.print(f"Open {chosen.output}. Next: make course, or notebooks/00_hello_rlhf.ipynb.")
    return 0


def make_trainer(seed: int) -> PPOTrainer:
    """Return a trainer with the policy and its frozen reference."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(MODEL)
    config = PPOConfig(
        seed=seed,
        learning_rate=5e-4,
        batch_size=BATCH_SIZE,
        mini_batch_size=32,
        ppo_epochs=2,
        init_kl_coef=0.16,
        adap_kl_ctrl=False,
    )
    return PPOTrainer(config, policy, create_reference_model(policy), tokenizer)


def read_queries(split: str, tokenizer, seed: int) -> list[torch.Tensor]:
    """Return the first tokens of a split's reviews, in random order."""
    reviews = load_reviews(REVIEWS, split).shuffle(seed=seed)
    reviews = reviews.select(range(min(2000, len(reviews))))
    return list(build_queries(reviews, tokenizer, LengthSampler(4, 8))["input_ids"])


def sample(
    trainer: PPOTrainer, classifier: SentimentReward, queries: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[str], torch.Tensor]:
    """Return responses as token ids and as texts, and the scores of the whole texts (B,)."""
    responses = trainer.generate(queries, return_prompt=False, **SAMPLING)
    decode = trainer.tokenizer.batch_decode
    whole = [
        torch.cat([query.cpu(), response.cpu()])
        for query, response in zip(queries, responses, strict=True)
    ]
    return responses, decode(responses), classifier(decode(whole))


def train(
    trainer: PPOTrainer,
    classifier: SentimentReward,
    queries: list[torch.Tensor],
    steps: int,
    console: Console,
) -> pd.DataFrame:
    """Take PPO steps and print a line for each; return their mean scores and KL (nats)."""
    rows = []
    for step in range(1, steps + 1):
        batch = random.sample(queries, BATCH_SIZE)
        responses, _, scores = sample(trainer, classifier, batch)
        stats = trainer.step(batch, responses, list(scores))
        score = stats["ppo/mean_scores"]
        kl = stats["objective/kl"]
        rows.append({"score": score, "KL": kl})
        bar = "█" * max(0, round(BAR_PER_LOGIT * score))
        console.print(f"step {step:2} of {steps}   score {score:5.2f}   KL {kl:5.2f}   {bar}")
    return pd.DataFrame(rows, index=pd.RangeIndex(1, steps + 1, name="PPO step"))


def describe(before: torch.Tensor, after: torch.Tensor, seconds: float) -> str:
    """Return a sentence with the mean scores, their 95 % intervals, and the time."""
    first, first_half = mean_ci(before.numpy())
    last, last_half = mean_ci(after.numpy())
    return (
        f"Mean score of {len(before)} held-out texts: {first:.2f} ± {first_half:.2f} before,"
        f" {last:.2f} ± {last_half:.2f} after {seconds:.0f} seconds."
    )


def show(texts: pd.DataFrame, result: str, console: Console) -> None:
    """Print the texts before and after, and the result."""
    table = Table(*texts.columns, show_lines=True)
    for row in texts.itertuples(index=False):
        table.add_row(*(value.replace("[", "\\[") for value in row))
    console.print()
    console.print(table)
    console.print(result)


def write_page(file: Path, texts: pd.DataFrame, result: str, curve: pd.DataFrame) -> None:
    """Write the curves and the texts as one HTML page without other files."""
    figure, (left, right) = panels(columns=2, figsize=(9.5, 3))
    curve["score"].plot(ax=left, title="mean score of a batch, logits")
    curve["KL"].plot(ax=right, title="KL to the reference, nats")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", bbox_inches="tight")
    drawing = picture.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>A policy learns</title>{STYLE}
<h1>A small GPT-2 learns to praise films</h1>
<p>{result}</p>
{drawing}
{texts.to_html(index=False, border=0, justify="left")}
</html>
"""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as aside:
        aside.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(exits.run("hello.py", main))
