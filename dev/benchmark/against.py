"""Race this checkout's PPO step against another commit's: the same inputs, turn by turn.

    python dev/benchmark/against.py HEAD~1
    python dev/benchmark/against.py 9962060 --pairs 9 --shapes short lora

The other commit is checked out in a temporary folder. Each of the two runs in a process of its own,
and they take steps in turn, so that other programs on the machine slow both down alike. A ratio is
this checkout's seconds divided by the other commit's: below 1, this checkout is faster. On a busy
machine, the ratio of CPU time, which all threads spend together, is steadier. Weights, tokens and
scores are random; a commit needs only the classic API (``PPOTrainer.step``).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
WARMUP = 1  # pairs that are not measured
TURN = "turn: "  # begins a line with a turn's times


@dataclass(frozen=True)
class Shape:
    """Define what a step computes; the upper ends of the token ranges are exclusive."""

    network: dict  # a transformers configuration with its model_type
    batch: int
    mini_batch: int
    epochs: int
    queries: tuple[int, int]  # tokens
    responses: tuple[int, int]  # tokens
    lora: dict = field(default_factory=dict)  # peft's LoraConfig; empty: train all weights


SHAPES = {
    # 1.9 million weights, short samples of uneven lengths, one mini-batch.
    "short": Shape(
        network={
            "model_type": "gpt2",
            "vocab_size": 8192,
            "n_positions": 256,
            "n_embd": 128,
            "n_layer": 4,
            "n_head": 4,
        },
        batch=128,
        mini_batch=128,
        epochs=4,
        queries=(2, 8),
        responses=(4, 16),
    ),
    # The size of models/gpt2-imdb-mini.
    "imdb": Shape(
        network={
            "model_type": "gpt2",
            "vocab_size": 16_000,
            "n_positions": 256,
            "n_embd": 288,
            "n_layer": 6,
            "n_head": 6,
        },
        batch=64,
        mini_batch=64,
        epochs=2,
        queries=(2, 8),
        responses=(4, 16),
    ),
    # Notebook 05 with the tiny preset.
    "lora": Shape(
        network={
            "model_type": "llama",
            "vocab_size": 1200,
            "hidden_size": 128,
            "intermediate_size": 336,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
        batch=64,
        mini_batch=32,
        epochs=2,
        queries=(10, 40),
        responses=(8, 49),
        lora={
            "task_type": "CAUSAL_LM",
            "r": 16,
            "lora_alpha": 32,
            "target_modules": "all-linear",
        },
    ),
}


class Tokenizer:
    """Provide what a trainer reads from a tokenizer."""

    pad_token_id = 0
    eos_token_id = 0


def make_trainer(shape: Shape):
    """Return a trainer of the package that this process imports, with random weights."""
    import peft
    import torch
    import transformers

    from rlhf_course import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

    torch.manual_seed(0)
    network = dict(shape.network)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(network.pop("model_type"), **network, **special)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(
        transformers.AutoModelForCausalLM.from_config(config),
        peft_config=peft.LoraConfig(**shape.lora) if shape.lora else None,
    )
    sizes = PPOConfig(
        batch_size=shape.batch, mini_batch_size=shape.mini_batch, ppo_epochs=shape.epochs
    )
    return PPOTrainer(sizes, policy, tokenizer=Tokenizer())


def make_samples(shape: Shape, seed: int) -> tuple[list, list, list]:
    """Return random queries and responses (token tensors) and scores, equal for equal seeds."""
    import torch

    generator = np.random.default_rng(seed)

    def texts(lengths: tuple[int, int]) -> list:
        return [
            torch.from_numpy(generator.integers(1, shape.network["vocab_size"], length))
            for length in generator.integers(*lengths, shape.batch)
        ]

    queries = texts(shape.queries)
    responses = texts(shape.responses)
    scores = torch.from_numpy(generator.normal(size=shape.batch)).float()
    return queries, responses, list(scores)


def work(threads: int, steps: int) -> None:
    """Take turns in this process: for each line of stdin (shape, seed), print a turn's times."""
    import torch

    torch.set_num_threads(threads)
    trainers = {}
    for line in sys.stdin:
        name, seed = line.split()
        shape = SHAPES[name]
        if name not in trainers:
            trainers[name] = make_trainer(shape)
        batches = [make_samples(shape, int(seed) + step) for step in range(steps)]
        with report_turn(steps):
            for queries, responses, scores in batches:
                trainers[name].step(queries, responses, scores)


@contextmanager
def report_turn(steps: int) -> Iterator[None]:
    """Print how many seconds, on the clock and on all CPUs, each of ``steps`` steps took."""
    started = time.perf_counter()
    started_cpu = time.process_time()
    yield
    seconds = (time.perf_counter() - started) / steps
    cpu_seconds = (time.process_time() - started_cpu) / steps
    print(f"{TURN}{seconds} {cpu_seconds}", flush=True)


class Runner:
    """Take steps in a process that stays alive between turns: ``command``, with ``tree``'s package.

    The command answers each line of its stdin (a name, a seed) with a line of :func:`report_turn`.
    """

    def __init__(self, command: list[str], tree: Path = ROOT) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "TRANSFORMERS_VERBOSITY": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, shape_name: str, seed: int) -> np.ndarray:
        """Return a step's seconds on the clock and on all CPUs, (2,); the seed selects samples."""
        self.process.stdin.write(f"{shape_name} {seed}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(TURN):  # other lines are the package's own messages
                return np.array(line.removeprefix(TURN).split(), dtype=float)
        raise SystemExit("A step failed; its error is printed above.")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a temporary folder with a commit's files."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def race(shape_name: str, ours: Runner, other: Runner, pairs: int, steps: int = 1) -> None:
    """Print the ratios of each pair of turns, and their medians."""
    ratios = []
    for pair in range(-WARMUP, pairs):
        seed = 1000 + pair * steps
        if pair % 2:  # who begins alternates
            theirs = other.turn(shape_name, seed)
            seconds = ours.turn(shape_name, seed)
        else:
            seconds = ours.turn(shape_name, seed)
            theirs = other.turn(shape_name, seed)
        if pair < 0:
            continue
        ratios.append(seconds / theirs)
        print(
            f"{shape_name}, pair {pair + 1}: {seconds[0]:.3f} s against {theirs[0]:.3f} s,"
            f" ratio {ratios[-1][0]:.2f}; CPU {seconds[1]:.3f} s against {theirs[1]:.3f} s,"
            f" ratio {ratios[-1][1]:.2f}",
            flush=True,
        )
    clock, cpu = np.median(ratios, axis=0)
    print(f"{shape_name}: median ratio {clock:.2f}, of CPU time {cpu:.2f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Race this checkout against a commit, shape by shape."""
    parser = argparse.ArgumentParser(
        "against.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("revision", nargs="?", help="the other commit")
    add("--pairs", type=int, default=5, help="pairs of turns to measure for each shape")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="what to race")
    add("--steps", type=int, default=1, help="PPO steps in a turn")
    add("--threads", type=int, default=2, help="PyTorch threads")
    add("--work", action="store_true", help=argparse.SUPPRESS)  # this process takes the steps
    chosen = parser.parse_args(arguments)
    if chosen.work:
        work(chosen.threads, chosen.steps)
        return
    if chosen.revision is None:
        parser.error("name the other commit, for example HEAD~1.")
    with checked_out(chosen.revision) as tree, ExitStack() as stack:
        command = [sys.executable, "-W", "ignore", __file__, "--work"]
        command += ["--threads", str(chosen.threads), "--steps", str(chosen.steps)]
        runners = []
        for folder in (ROOT, tree):
            runner = Runner(command, folder)
            stack.callback(runner.close)
            runners.append(runner)
        for shape_name in chosen.shapes:
            race(shape_name, *runners, chosen.pairs, chosen.steps)


if __name__ == "__main__":
    main()
