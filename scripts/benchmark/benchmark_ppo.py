"""How long one PPO step takes, phase by phase, here and in the classic stepwise PPO of TRL 0.11.4;
and how cost grows.

Every variant works on the same models and queries: 128 queries of 2-7 tokens, responses of 4-15
tokens, scores from a sentiment classifier, 4 epochs over one mini-batch. Each is a process of its
own, and they take turns step by step.

ours        one batched generate with a length per row, SentimentReward, step
one-by-one  the classic tutorial's loop: a generate per query, a sentiment pipeline in batches of 16
batched     the old version's batched generate, the pipeline in batches of 128; each response is cut
            at a length of its own, so that all three update on equally many tokens

--shape lora measures ours alone: adapters policy, ref and reward on one Llama with random weights
and Baichuan2-7B's shape, 8 samples of 128 query and 256 response tokens. --costs measures ours
alone over batch size and response length.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TITLES = {"ours": "ours", "one-by-one": "TRL 0.11, one by one", "batched": "TRL 0.11, batched"}
COLUMNS = {phase: f"{phase} s" for phase in ("generate", "score", "forward", "update", "total")}
COLUMNS |= {"ms_per_token": "ms/token", "response_tokens": "tokens", "peak_mb": "peak MB"}
PINS = (
    "torch==2.13.0 trl==0.11.4 transformers==4.45.2 accelerate==0.34.2 datasets==2.21.0"
    " peft==0.12.0 rich"
)
PINS += ' "numpy<2" "pyarrow<18" "pandas<3"'
WORKER = Path(__file__).with_name("benchmark_worker.py")

# Baichuan2-7B, after conversion.
LLAMA_7B = {"vocab_size": 125_696, "hidden_size": 4096, "intermediate_size": 11_008}
LLAMA_7B |= {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096}
LLAMA_TOY = LLAMA_7B | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 172}
LLAMA_TOY |= {"num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"batch": 128, "query": None, "lengths": (4, 16)}
LORA = {"batch": 8, "query": 128, "lengths": (256, 257), "llama": LLAMA_7B, "dtype": "bfloat16"}
TOY = {"query": 16, "lengths": (32, 33), "llama": LLAMA_TOY, "dtype": "float32"}
# Samples per step, query tokens, response tokens (the last number is not reached). gpt2-32 is what
# site/running.md tells those without a GPU.
SHAPES = {"tiny": GPT2, "gpt2": GPT2, "gpt2-32": GPT2 | {"batch": 32}}
SHAPES |= {"lora": LORA, "lora-toy": LORA | TOY}
BATCHES, RESPONSES = (16, 32, 64, 128, 256, 512, 1024), (16, 32, 64, 128, 256, 512)
COST_RESPONSE, COST_BATCH = 16, 64  # the response length of the one sweep, the batch of the other


class Variant:
    """A worker process that takes one step at a time."""

    def __init__(self, name: str, python: str, folder: Path, threads: int) -> None:
        self.name, self.log, self.rounds, pipe = name, folder / f"{name}.log", [], subprocess.PIPE
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        command = [python, str(WORKER), name, str(folder / "plan.json")]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
            )

    def ask(self, question: dict | None = None) -> dict:
        """The worker's answer; without one, the program ends with a sentence."""
        with suppress(BrokenPipeError):  # it is gone; below is why
            self.process.stdin.write(json.dumps(question) + "\n" if question else "")
            self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or "null")
        if answer is None:
            title = f"The worker {self.name} ended with code {self.process.wait()}; its last words:"
            last = self.log.read_text(errors="replace").rstrip().splitlines()[-15:]
            sys.exit("\n  ".join([title, *last]))
        return sys.exit(f"{answer['error']}: pip install {PINS}") if "error" in answer else answer

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.wait()


def build_random(folder: Path, world, small: bool) -> None:
    """Random weights with room for long responses, and the given models' tokenizers.

    small: of the tiny preset's size; else shaped like GPT-2 small (dropout off) and DistilBERT
    base.
    """
    import transformers as hf

    names = ("model", "reward_model")
    tokenizers = {name: hf.AutoTokenizer.from_pretrained(getattr(world, name)) for name in names}
    zero = ("bos_token_id", "eos_token_id", "pad_token_id", "attn_pdrop", "embd_pdrop")
    settings, labels = dict.fromkeys((*zero, "resid_pdrop"), 0), {0: "NEGATIVE", 1: "POSITIVE"}
    reward_settings = {"id2label": labels, "label2id": {name: i for i, name in labels.items()}}
    if small:
        settings |= {"n_embd": 128, "n_layer": 4, "n_head": 4}
        settings["vocab_size"] = len(tokenizers["model"])
        reward_settings |= {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 512}
        reward_settings["vocab_size"] = len(tokenizers["reward_model"])
    hf.set_seed(0)
    judge = hf.DistilBertConfig(**reward_settings)
    models = {"model": hf.GPT2LMHeadModel(hf.GPT2Config(**settings))}
    models["reward_model"] = hf.DistilBertForSequenceClassification(judge)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizers[name].save_pretrained(folder / name)
        setattr(world, name, str(folder / name))


def copy_for_old(source: str, target: Path) -> str:
    """A copy of a model folder in the words of transformers 4.45."""
    shutil.copytree(source, target)
    tokenizer = {"model_input_names": ["input_ids", "attention_mask"]}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    new = {"config.json": {"torch_dtype": "float32"}, "tokenizer_config.json": tokenizer}
    for name, changes in new.items():
        settings = json.loads((target / name).read_text()) | changes
        settings.pop("dtype", None)
        (target / name).write_text(json.dumps(settings))
    return str(target)


def write_plan(options, folder: Path) -> None:
    """What the workers need: settings, model folders, queries."""
    shape = SHAPES[options.shape]
    plan = {"bf16": options.bf16, "threads": options.threads}
    plan["ppo"] = {"batch_size": shape["batch"], "mini_batch_size": shape["batch"], "ppo_epochs": 4}
    names = {"lr": "learning_rate", "gradient_checkpointing": "gradient_checkpointing"}
    plan["ppo"] |= {name: getattr(options, option) for option, name in names.items()}
    if "llama" in shape:
        import random

        draw, words = random.Random(0), range(1, shape["llama"]["vocab_size"])
        plan |= {"llama": shape["llama"], "dtype": shape["dtype"]}
        plan["queries"] = [{"input_ids": draw.choices(words, k=shape["query"])} for _ in range(64)]
    else:
        plan |= plan_of_gpt2(options, folder)
    (folder / "plan.json").write_text(json.dumps(plan))


def plan_of_gpt2(options, folder: Path) -> dict:
    """Folders of policy and classifier, for the old version too, and queries of film reviews."""
    from transformers import AutoTokenizer

    from rlhf_course import LengthSampler
    from rlhf_course.course.presets import load_preset
    from rlhf_course.course.shipped import prepare
    from rlhf_course.data import build_queries, load_reviews

    world = prepare(load_preset("04_gpt2_imdb_ppo", "tiny"))
    if options.shape.startswith("gpt2") or options.costs:
        build_random(folder, world, small=options.shape == "tiny")
    plan = {"model": world.model, "reward_model": world.reward_model}
    if options.against:
        old = {f"old_{key}": value for key, value in plan.items()}
        plan |= {key: copy_for_old(value, folder / key) for key, value in old.items()}
    reviews = load_reviews(world.dataset, "train").shuffle(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    queries = build_queries(reviews, tokenizer, LengthSampler(2, 8))
    return plan | {"queries": queries.with_format(None).to_list()}


def measure(options, folder: Path) -> dict:
    """All rounds of all variants, taking turns: variant → versions, device, rounds."""
    shape, variants = SHAPES[options.shape], []
    step = {"batch": shape["batch"], "lengths": shape["lengths"]}
    try:
        for name in TITLES if options.against else ("ours",):
            python = sys.executable if name == "ours" else shutil.which(options.against)
            variants.append(Variant(name, python, folder, options.threads))
        about = {v.name: v.ask() for v in variants}
        for turn in range(options.warmup + options.rounds):
            first = turn % len(variants)
            for v in variants[first:] + variants[:first]:
                v.rounds.append(v.ask(step))
            seconds = (f"{v.name} {v.rounds[-1]['total']:.2f} s" for v in variants)
            print(f"round {turn + 1 - options.warmup}:", *seconds, file=sys.stderr, flush=True)
    finally:
        for v in variants:
            v.end()
    return {v.name: about[v.name] | {"rounds": v.rounds[options.warmup :]} for v in variants}


def measure_costs(options, folder: Path) -> dict:
    """Versions, device, and medians of ours over batch sizes, and over response lengths: a row per
    point.
    """
    points = [("batch", n, COST_RESPONSE) for n in BATCHES] + [
        ("response", COST_BATCH, n) for n in RESPONSES
    ]
    ours, rows = Variant("ours", sys.executable, folder, options.threads), []
    try:
        about = ours.ask()
        for sweep, batch, response in points:
            step = {"batch": batch, "lengths": (response, response + 1)}
            rounds = [ours.ask(step) for _ in range(1 + options.rounds)][1:]
            row = {"sweep": sweep, "batch": batch, "response": response}
            medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
            rows.append(row | medians)
            said = f"batch {batch}, {response} tokens: {medians['total']:.2f} s"
            print(said, file=sys.stderr, flush=True)
    finally:
        ours.end()
    return about | {"costs": rows}


def summarise(found: dict) -> None:
    """Add medians, and ratios to ours, to every variant."""
    for name, entry in found.items():
        rounds, entry["title"] = entry["rounds"], TITLES[name]
        median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        entry["median"] = median
        mine = found["ours"]["median"]
        ratio = entry["ratio_to_ours"] = {key: median[key] / mine[key] for key in COLUMNS}
        pairs = zip(rounds, found["ours"]["rounds"], strict=True)
        paired = sorted(theirs["total"] / mine["total"] for theirs, mine in pairs)
        ratio["total_range"] = [paired[0], paired[-1]]


def report(found: dict) -> str:
    """The measurements as a table, and what follows from them."""
    import pandas as pd

    rows, rivals = {}, {}
    for name, entry in found.items():
        rows[entry["title"]] = {c: f"{entry['median'][c]:.3f}" for c in COLUMNS}
        if name != "ours":
            rivals[entry["title"]] = entry["ratio_to_ours"]
    for title, ratio in rivals.items():
        rows[f"{title} / ours"] = {c: f"{ratio[c]:.1f}x" for c in COLUMNS}
    lines = [pd.DataFrame.from_dict(rows, orient="index").rename(columns=COLUMNS).to_string()]
    for title, ratio in rivals.items():
        low, high = ratio["total_range"]
        lines.append(f"Round by round, {title} took {low:.1f} to {high:.1f} times as long as ours.")
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; ``SystemExit`` with a sentence for an invalid one."""
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("benchmark_ppo.py", **how)
    add = parser.add_argument
    add("--against", metavar="PYTHON", help="interpreter of an environment with trl 0.11.4")
    text = "tiny preset's models (default); GPT-2 small, 128 or 32 samples; a 7B with adapters; toy"
    add("--shape", choices=SHAPES, default="tiny", help=text)
    add("--costs", action="store_true", help="over batch size and response length")
    for name, value in (("rounds", 10), ("warmup", 2), ("threads", os.cpu_count())):
        add(f"--{name}", type=int, default=value, help=f"default: {value}")
    add("--lr", type=float, default=1.41e-5, help="small, so that the work stays the same")
    add("--bf16", action="store_true", help="bf16 autocast for ours")
    add("--gradient_checkpointing", action="store_true", help="for ours")
    add("--output", type=Path, default=Path("build/benchmark/ppo.json"), help="a JSON file")
    options = parser.parse_args(arguments)
    if "llama" in SHAPES[options.shape] and (options.against or options.costs):
        parser.error("--against and --costs are for the shapes tiny and gpt2.")
    if options.against and shutil.which(options.against) is None:
        parser.error(f"There is no interpreter at {options.against}.")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the JSON file and the figure."""
    import matplotlib

    matplotlib.use("Agg")
    options = parse_arguments(arguments)
    from rlhf_course.runtime.files import atomic_file, check_folder

    check_folder(options.output.parent)
    import pandas as pd

    sys.path.append(str(Path(__file__).resolve().parents[2] / "figs"))
    import benchmark_plots

    names = ("shape", "threads", "bf16", "gradient_checkpointing", "lr", "rounds", "warmup")
    results = {key: getattr(options, key) for key in names} | {"epochs": 4} | SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        write_plan(options, Path(folder))
        if options.costs:
            results |= measure_costs(options, Path(folder))
        else:
            results["variants"] = measure(options, Path(folder))
    if not options.costs:
        summarise(results["variants"])
        print(report(results["variants"]))
        if not options.against and "llama" not in results:
            print(
                f"To compare, pip install {PINS} into another environment; give its Python with"
                " --against."
            )
    with atomic_file(options.output) as path:
        path.write_text(json.dumps(results, indent=1))
    if options.costs:
        figure = benchmark_plots.step_costs(pd.DataFrame(results["costs"]))
    else:
        seconds = {entry["title"]: entry["median"] for entry in results["variants"].values()}
        figure = benchmark_plots.step_phases(seconds)
    with atomic_file(options.output.with_suffix(".png")) as path:
        figure.savefig(path, format="png", dpi=150)
    print(f"Everything is in {options.output} and {options.output.with_suffix('.png')}.")


if __name__ == "__main__":
    main()
