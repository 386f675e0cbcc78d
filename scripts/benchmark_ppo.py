"""How long one PPO step takes here, phase by phase, and beside the classic stepwise PPO of TRL 0.11.4.

    python scripts/benchmark_ppo.py
    python scripts/benchmark_ppo.py --against PYTHON_OF_AN_ENVIRONMENT_WITH_TRL_0.11

Every variant does the same work on the same models and queries: 128 queries of 2-7 tokens, responses of 4-15 tokens,
scores from a sentiment classifier, 4 epochs over one mini-batch. The variants are

* ours: one batched ``generate`` with a length per row, ``SentimentReward``, ``step``;
* one-by-one: the loop of the classic tutorial, a ``generate`` per query and a sentiment pipeline in batches of 16;
* batched: the old version's own batched ``generate`` and the pipeline in batches of 128. It draws one length for the
  whole batch, so its work varies from round to round: compare it by time per response token.

Each variant is a process of its own that waits while another one has its turn, so drift of the machine hits all alike.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, EPOCHS, LENGTHS = 128, 4, (4, 16)
PHASES = ("generate", "score", "update", "total")
TITLES = {"ours": "ours", "one-by-one": "TRL 0.11, one by one", "batched": "TRL 0.11, batched"}
PINS = 'torch==2.13.0 trl==0.11.4 transformers==4.45.2 accelerate==0.34.2 datasets==2.21.0 peft==0.12.0 "numpy<2"'


# --- workers: this part runs under either environment ----------------------------------------------------------------


def versions() -> dict:
    """Versions of Python and of the libraries that matter here."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "accelerate", "trl", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def ours(plan: dict, tokenizer):
    """This course's trainer as (trainer, generate, score)."""
    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
    from rlhf_course.rewards import SentimentReward

    precision = {"mixed_precision": "bf16"} if plan["bf16"] else {}
    config = PPOConfig(
        batch_size=BATCH,
        mini_batch_size=BATCH,
        ppo_epochs=EPOCHS,
        learning_rate=plan["lr"],
        accelerator_kwargs=precision,
    )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(plan["model"])
    trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    lengths = LengthSampler(*LENGTHS)

    def generate(queries):
        return trainer.generate(
            queries, length_sampler=lengths, return_prompt=False, do_sample=True, top_k=0, top_p=1.0
        )

    return trainer, generate, SentimentReward(plan["reward_model"])


def old(plan: dict, tokenizer):
    """TRL 0.11's trainer as (trainer, generate, score), one by one or batched."""
    from transformers import pipeline
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
    from trl.core import LengthSampler

    config = PPOConfig(batch_size=BATCH, mini_batch_size=BATCH, ppo_epochs=EPOCHS, learning_rate=plan["lr"])
    model = AutoModelForCausalLMWithValueHead.from_pretrained(plan["old_model"])
    trainer = PPOTrainer(config, model, create_reference_model(model), tokenizer)
    lengths, batched = LengthSampler(*LENGTHS), plan["variant"] == "batched"
    sampling = dict(min_length=-1, top_k=0.0, top_p=1.0, do_sample=True, pad_token_id=tokenizer.eos_token_id)
    folder = plan["old_reward_model"]
    classify = pipeline("sentiment-analysis", model=folder, tokenizer=folder, device=trainer.accelerator.device)
    settings = {"top_k": None, "function_to_apply": "none", "batch_size": BATCH if batched else 16}

    def generate(queries):
        if batched:
            return trainer.generate(queries, batch_size=BATCH, length_sampler=lengths, return_prompt=False, **sampling)
        found = (trainer.generate(query, max_new_tokens=lengths(), **sampling).squeeze() for query in queries)
        return [tokens[len(query) :] for query, tokens in zip(queries, found, strict=True)]

    def score(texts):
        import torch

        found = [{entry["label"]: entry["score"] for entry in labels} for labels in classify(texts, **settings)]
        return torch.tensor([labels["POSITIVE"] for labels in found])

    return trainer, generate, score


def model_flop(model, query_tokens: int, response_tokens: int) -> float:
    """Floating-point operations that one update needs, without those for padding.

    A forward pass takes 2 per weight of the transformer blocks and token, and 2·H·V per response token for the
    vocabulary; a backward pass takes twice that. The policy goes forward and backward in every epoch (its first
    forward pass gives the old log-probabilities too), the reference forward once. The last token of a sample predicts
    nothing. Attention scores, norms and the value head are left out: under 4 % at these lengths.
    """
    blocks = sum(p.numel() for name, p in model.named_parameters() if ".h." in name and p.dim() == 2)
    head = model.config.hidden_size * model.config.vocab_size
    forward = 2 * blocks * (query_tokens + response_tokens - BATCH) + 2 * head * response_tokens
    return forward * (3 * EPOCHS + 1)


def clock(cuda: bool) -> float:
    """Seconds on a clock, once the device has finished what it was given."""
    if cuda:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def matrix_rate(device) -> float:
    """Float32 operations per second of one matrix product, 1024 x 1024 (4096 on a GPU); the median of five."""
    import torch

    size, cuda = (4096, True) if device.type == "cuda" else (1024, False)
    a, seconds = torch.rand(size, size, device=device), []
    for _ in range(6):
        started = clock(cuda)
        torch.mm(a, a)
        seconds.append(clock(cuda) - started)
    return 2 * size**3 / statistics.median(seconds[1:])


def one_step(run, tokenizer, rows: list) -> dict:
    """One PPO step on these queries: seconds per phase, tokens, FLOP and memory."""
    import torch

    trainer, generate, score = run
    device = trainer.accelerator.device
    cuda = device.type == "cuda"
    queries = [torch.tensor(row["input_ids"], device=device) for row in rows]
    ticks = [clock(cuda)]
    responses = generate(queries)
    ticks.append(clock(cuda))
    # A vocabulary wider than the tokenizer's (random weights only) is folded onto it.
    replies = tokenizer.batch_decode([tokens % len(tokenizer) for tokens in responses])
    scores = list(score([row["query"] + reply for row, reply in zip(rows, replies, strict=True)]))
    ticks.append(clock(cuda))
    trainer.step(queries, responses, scores)
    ticks.append(clock(cuda))
    seconds = [after - before for before, after in zip(ticks[:-1], ticks[1:], strict=True)] + [ticks[-1] - ticks[0]]
    counts = sum(map(len, queries)), sum(map(len, responses))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        **dict(zip(PHASES, seconds, strict=True)),
        "response_tokens": counts[1],
        "update_flop": model_flop(trainer.model, *counts),
        "matrix_flop_per_second": matrix_rate(device),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else resident,
    }


def worker(plan: dict) -> None:
    """Do one step per line on stdin, and answer each with one line of JSON on what was stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    found = versions()
    if plan["variant"] != "ours" and not (found["trl"] or "").startswith("0.11."):
        state = f"has trl {found['trl']}" if found["trl"] else "has no trl"
        print(json.dumps({"error": f"The environment given with --against {state}; it must be 0.11.x."}), file=answers)
        return
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(plan["threads"])
    mine = plan["variant"] == "ours"
    tokenizer = AutoTokenizer.from_pretrained(plan["model" if mine else "old_model"])
    run = ours(plan, tokenizer) if mine else old(plan, tokenizer)
    device = run[0].accelerator.device
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"versions": found, "device": name}), file=answers, flush=True)
    for step, _ in enumerate(sys.stdin):
        first = step * BATCH % (len(plan["queries"]) - BATCH + 1)
        answer = one_step(run, tokenizer, plan["queries"][first : first + BATCH])
        print(json.dumps(answer), file=answers, flush=True)


# --- the parent ------------------------------------------------------------------------------------------------------


class Variant:
    """A worker process that takes one step at a time."""

    def __init__(self, name: str, python: str, folder: Path, threads: int) -> None:
        self.name, self.log, self.rounds = name, folder / f"{name}.log", []
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        command = [python, os.path.abspath(__file__), "--worker", name, "--plan", str(folder / "plan.json")]
        pipe = subprocess.PIPE
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    def answer(self) -> dict:
        """The worker's next line; ends the program with a sentence where there is none."""
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {}
        if "error" in answer:
            sys.exit(answer["error"])
        if not line:
            code, log = self.process.wait(), self.log.read_text(errors="replace").rstrip().splitlines()
            sys.exit("\n  ".join([f"The worker {self.name!r} ended with code {code}. Its last words:", *log[-15:]]))
        return answer

    def step(self) -> dict:
        """Have it do one step."""
        try:
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone: answer() says why
        return self.answer()


def build_gpt2_shape(folder: Path, world) -> None:
    """Random weights in the shapes of GPT-2 small and DistilBERT base, with the tiny world's tokenizers."""
    from transformers import (
        AutoTokenizer,
        DistilBertConfig,
        DistilBertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        set_seed,
    )

    set_seed(0)
    dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # off, so that all variants do the same
    policy = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, pad_token_id=0, **dropouts))
    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    shape = DistilBertConfig(id2label=labels, label2id={name: i for i, name in labels.items()})
    for name, model in (("model", policy), ("reward_model", DistilBertForSequenceClassification(shape))):
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(getattr(world, name)).save_pretrained(folder / name)
        setattr(world, name, str(folder / name))


def copy_for_old(source: str, target: Path) -> str:
    """A copy of a model folder with the names that transformers 4.45 knows."""
    shutil.copytree(source, target)
    for name, key, value in (
        ("tokenizer_config", "tokenizer_class", "PreTrainedTokenizerFast"),
        ("config", None, None),
    ):
        path = target / f"{name}.json"
        settings = json.loads(path.read_text())
        if key:
            settings[key] = value
            settings.pop("backend", None)
        elif "dtype" in settings:
            settings["torch_dtype"] = settings.pop("dtype")
        path.write_text(json.dumps(settings))
    return str(target)


def make_plan(options, folder: Path) -> dict:
    """What the workers need: folders of models and the queries, written to plan.json too."""
    from transformers import AutoTokenizer

    from rlhf_course import LengthSampler
    from rlhf_course.data import build_queries, load_reviews
    from rlhf_course.offline.world import prepare
    from rlhf_course.presets import load_preset

    given = {key: value for key in ("model", "reward_model", "dataset") if (value := getattr(options, key))}
    for key, value in given.items():
        if not Path(value).is_dir():
            sys.exit(f"--{key} {value} is not a folder; give one that holds a saved {key.replace('_', ' ')}.")
    world = prepare(load_preset("03_gpt2_imdb_ppo", "tiny", given))
    if options.shape == "gpt2":
        build_gpt2_shape(folder, world)
    plan = {"model": world.model, "reward_model": world.reward_model}
    if options.against:
        plan |= {f"old_{key}": copy_for_old(value, folder / f"old_{key}") for key, value in plan.items()}
    reviews = load_reviews(world.dataset, "train").shuffle(seed=0).select(range(50 * BATCH))
    queries = build_queries(reviews, AutoTokenizer.from_pretrained(world.model), LengthSampler(2, 8))
    plan |= {"queries": queries.with_format(None).to_list()}
    plan |= {"lr": options.lr, "threads": options.threads, "bf16": options.bf16}
    (folder / "plan.json").write_text(json.dumps(plan))
    return plan


def measure(options) -> dict:
    """Take turns over all rounds; everything found, as the JSON file holds it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_plan(options, folder)
        pythons = {"ours": sys.executable}
        if options.against:
            pythons |= dict.fromkeys(("one-by-one", "batched"), shutil.which(options.against))
        variants = [Variant(name, python, folder, options.threads) for name, python in pythons.items()]
        try:
            ready = {variant.name: variant.answer() for variant in variants}
            for turn in range(options.warmup + options.rounds):
                for variant in variants[turn % len(variants) :] + variants[: turn % len(variants)]:
                    variant.rounds.append(variant.step())
                seconds = ", ".join(f"{v.name} {v.rounds[-1]['total']:.2f} s" for v in variants)
                print(f"round {turn + 1 - options.warmup}: {seconds}", file=sys.stderr, flush=True)
        finally:
            for variant in variants:
                variant.process.kill()
                variant.process.wait()
    settings = {key: getattr(options, key) for key in ("shape", "threads", "bf16", "lr", "warmup", "rounds")}
    found = {v.name: summary(v.rounds[options.warmup :]) | ready[v.name] for v in variants}
    mine = found["ours"]["rounds"]
    for entry in found.values():
        entry["ratio"] = {p: entry["median"][p] / found["ours"]["median"][p] for p in PHASES}
        paired = [theirs["total"] / own["total"] for theirs, own in zip(entry["rounds"], mine, strict=True)]
        entry["ratio_total_range"] = [min(paired), max(paired)]
    return {**settings, "batch": BATCH, "epochs": EPOCHS, "variants": found}


def summary(rounds: list[dict]) -> dict:
    """Medians over rounds of one variant, and what follows from them."""
    median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    per_token = statistics.median(row["total"] / row["response_tokens"] for row in rounds)
    rate = statistics.median(row["update_flop"] / row["update"] for row in rounds)
    return {
        "median": median,
        "seconds_per_response_token": per_token,
        "update_flop_per_second": rate,
        "fraction_of_matrix_rate": rate / median["matrix_flop_per_second"],
        "rounds": rounds,
    }


def report(result: dict) -> str:
    """The result as a table and sentences."""
    found, mine = result["variants"], result["variants"]["ours"]
    header = ("", *(f"{phase} s" for phase in PHASES), "tokens", "ms/token", "peak MB")
    rows = []
    for name, entry in found.items():
        median = entry["median"]
        token = 1000 * entry["seconds_per_response_token"]
        cells = [f"{median[p]:.3f}" for p in PHASES]
        rows.append((TITLES[name], *cells, f"{median['response_tokens']:.0f}", f"{token:.2f}", f"{median['peak_bytes'] / 1e6:.0f}"))
    for name, entry in list(found.items())[1:]:
        token = entry["seconds_per_response_token"] / mine["seconds_per_response_token"]
        rows.append((f"{TITLES[name]} / ours", *(f"{entry['ratio'][p]:.1f}x" for p in PHASES), "", f"{token:.1f}x", ""))
    lines = ["".join(cell.ljust(28) if i == 0 else cell.rjust(11) for i, cell in enumerate(row)) for row in (header, *rows)]
    for name, entry in list(found.items())[1:]:
        low, high = entry["ratio_total_range"]
        lines.append(f"Round by round, {TITLES[name]} took {low:.1f} to {high:.1f} times as long as ours.")
    rate, product = mine["update_flop_per_second"], mine["median"]["matrix_flop_per_second"]
    lines.append(
        f"Our update needs {mine['median']['update_flop'] / 1e9:.1f} GFLOP and does {rate / 1e9:.1f} GFLOP/s: "
        f"{100 * mine['fraction_of_matrix_rate']:.0f} % of a float32 matrix product here ({product / 1e9:.1f} GFLOP/s)."
    )
    if len(found) == 1:
        lines.append(f"To compare with TRL 0.11, pip install {PINS} into another environment and give its Python with --against.")
    return "\n".join(lines)


def draw(result: dict, path: Path) -> None:
    """Stacked bars of the phases, one bar per variant."""
    import matplotlib

    matplotlib.use("Agg")
    from rlhf_course.plots import COLOURS, plt

    found = result["variants"]
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.6 * len(found)))
    names, left = [TITLES[name] for name in found], [0.0] * len(found)
    for phase, colour in zip(PHASES[:3], ("policy", "reward", "value"), strict=True):
        widths = [entry["median"][phase] for entry in found.values()]
        axis.barh(names, widths, left=left, color=COLOURS[colour], label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, (total, entry) in enumerate(zip(left, found.values(), strict=True)):
        axis.annotate(f" {total:.2f} s ({entry['ratio']['total']:.1f}x)", (total, row), va="center")
    axis.set(xlim=(0, 1.2 * max(left)), xlabel=f"seconds per PPO step of {BATCH} samples, medians")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=150)


def main() -> None:
    """Measure, print, and write the JSON file and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="PYTHON", help="interpreter of an environment with trl 0.11.4")
    parser.add_argument("--shape", choices=("tiny", "gpt2"), default="tiny", help="gpt2: GPT-2 small, random weights")
    for name in ("model", "reward_model", "dataset"):
        parser.add_argument(f"--{name}", metavar="FOLDER", help="instead of the tiny preset's")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all cores)")
    parser.add_argument("--lr", type=float, default=1.41e-5, help="small, so that the work stays the same")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast for ours")
    parser.add_argument("--output", type=Path, default=Path("build/benchmark/ppo.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(json.loads(options.plan.read_text()) | {"variant": options.worker})
    if options.rounds < 1 or options.warmup < 0:
        sys.exit("--rounds must be at least 1, and --warmup at least 0.")
    if options.against and shutil.which(options.against) is None:
        sys.exit(f"There is no interpreter at {options.against}; --against takes the path of a Python.")
    from rlhf_course.files import atomic_file

    result = measure(options)
    with atomic_file(options.output) as path:
        path.write_text(json.dumps(result, indent=1))
    with atomic_file(options.output.with_suffix(".png")) as path:
        draw(result, path)
    print(report(result), f"Everything is in {options.output} and {options.output.with_suffix('.png')}.", sep="\n")


if __name__ == "__main__":
    main()
