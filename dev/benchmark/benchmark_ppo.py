"""Measure the time and memory of a PPO step's phases, in this course or in TRL 0.11.4.

    python dev/benchmark/benchmark_ppo.py --shape gpt2-32 --bf16
    python dev/benchmark/benchmark_ppo.py --costs   # varies batch size and response length
    OLD_PYTHON dev/benchmark/benchmark_ppo.py       # the classic tutorial's loop

With trl 0.11 (tests/fixtures/make_fixtures.py lists that environment's packages), the script
measures TRL's trainer. TRL's loop generates single responses and scores 16 texts at a time;
--batched generates all responses in one batch, and scores all texts in one batch. Results are
merged into --output. Weights and queries are random; time and memory do not depend on their
values. Queries have 2-7 tokens, and responses have 4-15. A sentiment classifier scores the texts.
A step runs 4 epochs on one mini-batch.
"""

import argparse
import json
import os
import random
import resource
import tempfile
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
import transformers as hf
from torch.utils.benchmark import timer  # synchronizes with the GPU

MODELS = Path(__file__).resolve().parents[2] / "models"  # the shipped tokenizers
TITLES = {"ours": "ours", "one-by-one": "TRL 0.11, one by one", "batched": "TRL 0.11, batched"}
COLUMNS = "generate score forward update total generate_mb score_mb step_mb tokens".split()
BATCH = {"tiny": 128, "gpt2": 128, "gpt2-32": 32}
LENGTHS = (4, 16)  # response tokens; the upper end is exclusive
TINY_POLICY = {"n_embd": 192, "n_layer": 4, "n_head": 3, "vocab_size": 24_002}
TINY_CLASSIFIER = {"dim": 128, "n_layers": 2, "n_heads": 2, "hidden_dim": 512, "vocab_size": 16_002}
LABELS = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0, "return_prompt": False}
WARMUP = 2
IS_OLD = version("trl").startswith("0.11.")
SWEPT = (16, 32, 64, 128, 256, 512, 1024)  # batch sizes; response lengths up to 512


def models(shape: str) -> tuple:
    """Return a policy and a classifier with random weights, and their tokenizers."""
    hf.set_seed(0)
    files = [MODELS / f"{name}-imdb-mini" / "tokenizer.json" for name in ("gpt2", "distilbert")]
    tokenizer, reader = (hf.PreTrainedTokenizerFast(tokenizer_file=str(file)) for file in files)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.decode([0])
    reader.pad_token = reader.decode([0])
    reader.model_input_names = ["input_ids", "attention_mask"]
    sizes = (TINY_POLICY, TINY_CLASSIFIER) if shape == "tiny" else ({}, {})
    zero = dict.fromkeys(("bos_token_id", "eos_token_id", "attn_pdrop", "embd_pdrop"), 0)
    policy = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes[0], **zero, resid_pdrop=0))
    # The trainer refuses a tokenizer far smaller than the policy's vocabulary.
    tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), policy.config.vocab_size)])
    classifier = hf.DistilBertConfig(**sizes[1], **LABELS)
    return policy, hf.DistilBertForSequenceClassification(classifier).eval(), tokenizer, reader


def ours(chosen: argparse.Namespace, sizes: dict) -> tuple:
    """Return this course's trainer, and functions that generate and score."""
    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
    from rlhf_course.rewards import SentimentReward

    policy, classifier, tokenizer, reader = models(chosen.shape)
    precision = {"mixed_precision": "bf16" if chosen.bf16 else "no"}
    config = PPOConfig(**sizes, accelerator_kwargs=precision)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(policy)
    trainer = PPOTrainer(config, policy, tokenizer=tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        classifier.save_pretrained(folder)
        reader.save_pretrained(folder)
        reward = SentimentReward(folder)

    def generate(queries, lengths):
        sampler = LengthSampler(lengths[0], lengths[1])
        return trainer.generate(queries, length_sampler=sampler, **SAMPLING)

    return trainer, generate, reward


def old(chosen: argparse.Namespace, sizes: dict) -> tuple:
    """Return TRL 0.11's trainer, and functions that generate (singly or batched) and score."""
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model

    policy, classifier, tokenizer, reader = models(chosen.shape)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(policy)
    trainer = PPOTrainer(PPOConfig(**sizes), policy, create_reference_model(policy), tokenizer)
    classify = hf.pipeline(
        "sentiment-analysis",
        model=classifier,
        tokenizer=reader,
        device=trainer.accelerator.device,
    )
    sampling = SAMPLING | {"min_length": -1, "pad_token_id": tokenizer.eos_token_id}
    size = sizes["batch_size"] if chosen.batched else 16

    def generate(queries, lengths):
        counts = [random.randrange(lengths[0], lengths[1]) for _ in queries]
        if chosen.batched:
            rows = trainer.generate(
                queries, batch_size=len(queries), max_new_tokens=lengths[1] - 1, **sampling
            )
        else:
            pairs = zip(queries, counts, strict=True)
            rows = [trainer.generate(q, max_new_tokens=n, **sampling)[0] for q, n in pairs]
        return [row[:n] for row, n in zip(rows, counts, strict=True)]

    def score(texts):
        rows = classify(texts, top_k=None, function_to_apply="none", batch_size=size)
        return torch.tensor([x["score"] for row in rows for x in row if x["label"] == "POSITIVE"])

    return trainer, generate, score


def one_step(trainer, generate, score, batch: int, lengths: tuple[int, int]) -> dict:
    """Take one PPO step; return COLUMNS as a dict: seconds, peak MB, response tokens."""
    trainer.config.batch_size = trainer.config.mini_batch_size = batch
    tokenizer = trainer.tokenizer
    device = trainer.accelerator.device
    sizes = (random.randint(2, 7) for _ in range(batch))
    queries = [torch.randint(1, tokenizer.vocab_size, (n,), device=device) for n in sizes]
    ticks = [timer()]
    peaks = []

    def tick() -> None:
        ticks.append(timer())
        peaks.append(peak_mb())

    responses = generate(queries, lengths)
    tick()
    # The policy's vocabulary may be larger than the tokenizer's.
    pairs = zip(queries, responses, strict=True)
    whole = [torch.cat(pair) % tokenizer.vocab_size for pair in pairs]
    scores = list(score(tokenizer.batch_decode(whole)))
    tick()
    stats = trainer.step(queries, responses, scores)
    tick()
    a, b, c, d = ticks
    forward = float(stats["time/ppo/forward_pass"])
    row = [b - a, c - b, forward, d - c - forward, d - a, *peaks, sum(map(len, responses))]
    return dict(zip(COLUMNS, row, strict=True))


def peak_mb() -> float:
    """Return the GPU's peak MB since the last call or, without a GPU, the process's peak so far."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    peak = torch.cuda.max_memory_allocated() / 1e6
    torch.cuda.reset_peak_memory_stats()
    return peak


def measure(run: tuple, points: list[tuple], rounds: int) -> pd.DataFrame:
    """Return a table with a row per point: medians of ``rounds`` steps.

    ``run`` is a trainer, and its functions that generate and score.
    """
    trainer, generate, score = run
    rows = []
    for sweep, batch, lengths in points:
        steps = []
        for _ in range(WARMUP + rounds):
            steps.append(one_step(trainer, generate, score, batch, lengths))
        point = {"sweep": sweep, "batch": batch, "response": lengths[1] - 1}
        rows.append(point | pd.DataFrame(steps[WARMUP:]).median().to_dict())
    return pd.DataFrame(rows)


def make_loop(chosen: argparse.Namespace) -> tuple:
    """Return the installed library's trainer, and functions that generate and score."""
    batch = BATCH[chosen.shape]
    sizes = {"batch_size": batch, "mini_batch_size": batch, "learning_rate": 1.41e-5}
    return old(chosen, sizes) if IS_OLD else ours(chosen, sizes)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        "benchmark_ppo.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--shape",
        choices=BATCH,
        default="tiny",
        help="tiny: a GPT-2 with 6 million weights; gpt2: GPT-2 small; gpt2-32: the same, batch 32",
    )
    add("--costs", action="store_true", help="vary batch size and response length")
    add("--batched", action="store_true", help="with trl 0.11: generate and score in one batch")
    add("--bf16", action="store_true", help="use autocast; not with trl 0.11")
    add("--rounds", type=int, default=10, help="steps to measure after two warm-up steps")
    add("--threads", type=int, default=os.cpu_count(), help="PyTorch threads")
    add("--output", type=Path, default=Path("build/benchmark/ppo.json"), help="JSON file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print medians, and write the JSON file."""
    chosen = parse_options(arguments)
    torch.set_num_threads(chosen.threads)
    batch = BATCH[chosen.shape]
    run = make_loop(chosen)
    results = {key: getattr(chosen, key) for key in ("shape", "threads", "bf16", "rounds")}
    results |= {"batch": batch, "lengths": LENGTHS}
    results["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if chosen.costs:
        points = [("batch", n, (16, 17)) for n in SWEPT]
        points += [("response", 64, (n, n + 1)) for n in SWEPT[:-1]]
        table = measure(run, points, chosen.rounds)
        results["costs"] = table.to_dict("records")
    else:
        table = measure(run, [("", batch, LENGTHS)], chosen.rounds)
        name = ("batched" if chosen.batched else "one-by-one") if IS_OLD else "ours"
        before = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
        others = before.get("variants", {}) if before.get("shape") == chosen.shape else {}
        entry = {"title": TITLES[name], "median": table.iloc[0].to_dict()}
        entry["versions"] = {name: version(name) for name in ("torch", "transformers", "trl")}
        results["variants"] = others | {name: entry}
    print(table.round(3).to_string(index=False))
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(results, indent=1))
    print(f"Results are in {chosen.output}.")


if __name__ == "__main__":
    main()
