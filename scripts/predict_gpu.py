"""What a PPO step asks of a GPU, counted on the pretend one of tests/, and the time that follows: a
prediction.

    python scripts/benchmark_ppo.py --predict

The counts are those of a model with GPT-2 small's depth (12 layers; widths change no count) and a
classifier with DistilBERT's (6 layers), 128 queries of 2-7 tokens, responses of 4-15, bf16
autocast, 4 epochs over one mini-batch. The floating-point operations are those of the real widths.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"  # where the pretend GPU is
LAUNCH, WAIT = (
    6e-6,
    20e-6,
)  # seconds of the host per operation that launches a kernel, and per wait for the device
REPLAYED = 2e-6  # seconds of the device per small kernel of a graph, whose launch is one
BF16, TF32, SHARE = (
    312e12,
    156e12,
    0.4,
)  # an A800's peaks in FLOP per second, and what of them is reached
EPOCHS, BATCH, STEPS = 4, 128, 194
HIDDEN, VOCABULARY, LAYERS, CLASSIFIER_LAYERS = 768, 50_257, 12, 6
PHASES = (
    "batch",
    "generate",
    "score",
    "forward_pass",
    "compute_rewards",
    "compute_advantages",
    "optimize_step",
    "calc_stats",
)


def count(folder: Path) -> dict:
    """Launches and waits per phase, and tokens, of the second step of a run; in a process with the
    pretend GPU.
    """
    import numpy as np
    import torch
    from datasets import Dataset
    from pretend_gpu.counts import COUNTS
    from transformers import (
        DistilBertConfig,
        DistilBertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
    )

    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
    from rlhf_course.data import collate
    from rlhf_course.ppo import trainer as trainer_module
    from rlhf_course.rewards import SentimentReward
    from rlhf_course.worlds.small_models import classifier_tokenizer, train_tokenizer

    class Counting(trainer_module.Clock):
        """A clock that names the phases of a step for the counts."""

        def __call__(self, phase: str):
            return COUNTS(phase)

    trainer_module.Clock = Counting
    torch.manual_seed(0)
    np.random.seed(0)
    tokenizer = train_tokenizer(["a film that one likes, or not"] * 10, 300)
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    network = GPT2LMHeadModel(
        GPT2Config(n_embd=24, n_layer=LAYERS, n_head=2, vocab_size=len(tokenizer), **rates | ids)
    )
    judge = classifier_tokenizer(tokenizer)
    labels = {
        "id2label": {0: "NEGATIVE", 1: "POSITIVE"},
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
    }
    sizes = {
        "dim": 24,
        "n_layers": CLASSIFIER_LAYERS,
        "n_heads": 2,
        "hidden_dim": 96,
        "vocab_size": len(judge),
    }
    DistilBertForSequenceClassification(DistilBertConfig(**sizes, **labels)).save_pretrained(folder)
    judge.save_pretrained(folder)
    config = PPOConfig(ppo_epochs=EPOCHS, accelerator_kwargs={"mixed_precision": "bf16"})
    draw = np.random.default_rng(0)
    rows = Dataset.from_dict(
        {"input_ids": [draw.integers(1, 250, n).tolist() for n in draw.integers(2, 8, BATCH)]}
    )
    policy = AutoModelForCausalLMWithValueHead(network)
    trainer = PPOTrainer(
        config, policy, None, tokenizer, rows.with_format("torch"), data_collator=collate
    )
    reward = SentimentReward(str(folder), batch_size=BATCH)
    for _ in range(2):
        COUNTS.clear()
        with COUNTS("batch"):
            queries = next(iter(trainer.dataloader))["input_ids"]
        with COUNTS("generate"):
            responses = trainer.generate(
                queries,
                LengthSampler(4, 16),
                return_prompt=False,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                eos_token_id=[],
            )
        texts = tokenizer.batch_decode(responses)
        with COUNTS("score"):
            scores = reward(texts)
        with COUNTS("other"):  # what a step does between its phases
            trainer.step(queries, responses, scores)
    kinds = COUNTS.launches, COUNTS.waits
    found = {
        p: [*(sum(c.get(p, {}).values()) for c in kinds), COUNTS.replayed.get(p, 0)]
        for p in (*PHASES, "other")
    }
    width = (
        max(len(q) + len(r) for q, r in zip(queries, responses, strict=True)) - 1
    )  # rows are padded on a GPU
    return {"counts": found, "tokens": BATCH * width, "response_tokens": sum(map(len, responses))}


def device_seconds(tokens: int, response_tokens: int) -> dict[str, float]:
    """Seconds of arithmetic per phase at GPT-2 small's widths: 2 per weight and token, in a
    backward pass 4.

    The policy's layers run in bf16 on ``tokens``, padding included; its vocabulary (response tokens
    alone) and the classifier run in TF32.
    """
    layers, head = 2 * 12 * HIDDEN**2 * LAYERS * tokens, 2 * HIDDEN * VOCABULARY * response_tokens
    once = layers / (SHARE * BF16) + head / (SHARE * TF32)
    classifier = 2 * 12 * HIDDEN**2 * CLASSIFIER_LAYERS * (tokens + 3 * BATCH)
    found = dict.fromkeys(PHASES, 0.0) | {"generate": once, "score": classifier / (SHARE * TF32)}
    return found | {
        "forward_pass": 2 * once,
        "optimize_step": (3 * EPOCHS - 1) * once,
        "other": 0.0,
    }


def predict() -> dict:
    """Counts and predicted seconds per phase, and of a run; raises ``RuntimeError`` where nothing
    can be counted.
    """
    sys.path.insert(0, str(TESTS))
    import pretend_gpu

    if not pretend_gpu.available():
        raise RuntimeError("--predict needs a C++ compiler, g++ or $CXX, for the pretend GPU.")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder]
        environment = pretend_gpu.environment(HF_HUB_OFFLINE="1")
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError("Counting on the pretend GPU failed:\n" + done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    device = device_seconds(found["tokens"], found["response_tokens"])
    rows = {}
    for phase, (launches, waits, replayed) in found["counts"].items():
        host, work = launches * LAUNCH + waits * WAIT, device[phase] + replayed * REPLAYED
        rows[phase] = {
            "launches": launches,
            "replayed": replayed,
            "waits": waits,
            "host s": host,
            "device s": work,
        }
        rows[phase]["predicted s"] = max(host, work)
    rows["step"] = {key: sum(row[key] for row in rows.values()) for key in rows["generate"]}
    return {"phases": rows, "steps": STEPS, "predicted_s": STEPS * rows["step"]["predicted s"]}


def table(found: dict):
    """The prediction as a table of words, a row per phase."""
    import pandas as pd

    rows = {
        phase.replace("_", " "): {
            "launches": f"{row['launches']:,}",
            "kernels in graphs": f"{row['replayed']:,}",
            "waits": str(row["waits"]),
            "host": f"{1000 * row['host s']:.1f} ms",
            "device": f"{1000 * row['device s']:.1f} ms",
            "predicted": f"{1000 * row['predicted s']:.1f} ms",
        }
        for phase, row in found["phases"].items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("one PPO step")


def sentence(found: dict) -> str:
    """What follows, and from what."""
    return (
        f"{found['steps']} steps of GPT-2 small with batches of {BATCH} are **predicted** to take"
        f" {found['predicted_s']:.0f} s on an A800; nothing of this is measured. A launch is taken"
        f" as {LAUNCH * 1e6:.0f} µs of the host and a wait as {WAIT * 1e6:.0f} µs; a kernel in a"
        f" graph as {REPLAYED * 1e6:.0f} µs of the device, and arithmetic as {SHARE:.0%} of its"
        " peak in bf16 (the layers) and TF32 (vocabulary, classifier). In each phase the larger of"
        " host and device counts."
    )


if __name__ == "__main__":
    print(json.dumps(count(Path(sys.argv[1]))))
