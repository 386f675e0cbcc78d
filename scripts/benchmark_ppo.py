"""How long one PPO step takes, phase by phase, here and in the classic stepwise PPO of TRL 0.11.4.

Every variant works on the same models and queries: 128 queries of 2-7 tokens, responses of 4-15 tokens, scores from a
sentiment classifier, 4 epochs over one mini-batch. Each is a process of its own, and they take turns step by step.

ours        one batched generate with a length per row, SentimentReward, step
one-by-one  the classic tutorial's loop: a generate per query, a sentiment pipeline in batches of 16
batched     the old version's batched generate, the pipeline in batches of 128; each response is cut at a length of
            its own, so that all three update on equally many tokens
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
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

BATCH, EPOCHS, LENGTHS = 128, 4, (4, 16)
PHASES = ("generate", "score", "update", "total")
TITLES = {"ours": "ours", "one-by-one": "TRL 0.11, one by one", "batched": "TRL 0.11, batched"}
COLUMNS = {"ms_per_token": "ms/token", "response_tokens": "tokens", "peak_mb": "peak MB"}
COLUMNS = {phase: f"{phase} s" for phase in PHASES} | COLUMNS
PINS = "torch==2.13.0 trl==0.11.4 transformers==4.45.2 accelerate==0.34.2 datasets==2.21.0 peft==0.12.0 rich"
PINS += ' "numpy<2" "pyarrow<18" "pandas<3"'


def ours(plan: dict, tokenizer):
    """This course's (trainer, generate, score)."""
    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
    from rlhf_course.rewards import SentimentReward

    config = PPOConfig(accelerator_kwargs={"mixed_precision": "bf16"} if plan["bf16"] else {}, **plan["ppo"])
    model = AutoModelForCausalLMWithValueHead.from_pretrained(plan["model"])
    trainer, lengths = PPOTrainer(config, model, tokenizer=tokenizer), LengthSampler(*LENGTHS)
    sampling = {"length_sampler": lengths, "return_prompt": False, "do_sample": True, "top_k": 0, "top_p": 1.0}
    return trainer, lambda queries: trainer.generate(queries, **sampling), SentimentReward(plan["reward_model"])


def old(plan: dict, tokenizer):
    """TRL 0.11's (trainer, generate, score), one by one or batched."""
    import torch
    from transformers import pipeline
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
    from trl.core import LengthSampler

    model = AutoModelForCausalLMWithValueHead.from_pretrained(plan["old_model"])
    trainer = PPOTrainer(PPOConfig(**plan["ppo"]), model, create_reference_model(model), tokenizer)
    folder, device = plan["old_reward_model"], trainer.accelerator.device
    classify = pipeline("sentiment-analysis", model=folder, tokenizer=folder, device=device)
    lengths, batched = LengthSampler(*LENGTHS), plan["variant"] == "batched"
    sampling = dict(min_length=-1, top_k=0.0, top_p=1.0, do_sample=True, pad_token_id=tokenizer.eos_token_id)
    settings = {"top_k": None, "function_to_apply": "none", "batch_size": BATCH if batched else 16}

    def generate(queries):
        if batched:
            options = {"batch_size": BATCH, "return_prompt": False, "max_new_tokens": LENGTHS[1] - 1}
            return [tokens[: lengths()] for tokens in trainer.generate(queries, **options, **sampling)]
        found = [trainer.generate(query, max_new_tokens=lengths(), **sampling).squeeze() for query in queries]
        return [tokens[len(query) :] for query, tokens in zip(queries, found, strict=True)]

    def score(texts):
        found = [{entry["label"]: entry["score"] for entry in labels} for labels in classify(texts, **settings)]
        return torch.tensor([labels["POSITIVE"] for labels in found])

    return trainer, generate, score


def model_flop(model, query_tokens: int, response_tokens: int) -> float:
    """Floating-point operations that one update needs, padding not counted.

    Forward: 2 per block weight and token, 2·H·V per response token for the vocabulary; backward: twice that. The policy
    goes both ways in every epoch (the old log-probabilities come with the first), the reference forward once; a
    sample's last token predicts nothing. Attention scores (under 4 %) are left out.
    """
    blocks = sum(p.numel() for name, p in model.named_parameters() if ".h." in name and p.dim() == 2)
    head = model.config.hidden_size * model.config.vocab_size
    return (3 * EPOCHS + 1) * (2 * blocks * (query_tokens + response_tokens - BATCH) + 2 * head * response_tokens)


def one_step(trainer, generate, score, tokenizer, rows: list) -> dict:
    """One PPO step on these queries: seconds per phase, tokens, FLOP, memory, and the rate of a matrix product."""
    import torch
    from torch.utils.benchmark import Timer, timer  # they wait for the GPU

    device = trainer.accelerator.device
    queries, ticks = [torch.tensor(row["input_ids"], device=device) for row in rows], [timer()]
    responses = generate(queries)
    ticks.append(timer())
    # Random weights may have more tokens than the tokenizer: those are folded onto its own.
    replies = tokenizer.batch_decode([tokens % len(tokenizer) for tokens in responses])
    scores = list(score([row["query"] + reply for row, reply in zip(rows, replies, strict=True)]))
    ticks.append(timer())
    trainer.step(queries, responses, scores)
    ticks.append(timer())
    seconds = [ticks[i + 1] - ticks[i] for i in range(3)] + [ticks[3] - ticks[0]]
    counts = sum(map(len, queries)), sum(map(len, responses))
    a = torch.rand((4096 if device.type == "cuda" else 1024,) * 2, device=device)
    product = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return dict(zip(PHASES, seconds, strict=True)) | {
        "response_tokens": counts[1],
        "update_flop": model_flop(trainer.model, *counts),
        "matrix_flop_per_second": 2 * len(a) ** 3 / product.blocked_autorange(min_run_time=0.1).median,
        "ms_per_token": 1000 * seconds[3] / counts[1],
        "peak_mb": (torch.cuda.max_memory_allocated() if device.type == "cuda" else memory) / 1e6,
    }


def worker(plan: dict) -> None:
    """Take one step per line on stdin; answer each with a line of JSON on what was stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    wanted = ("torch", "transformers", "accelerate", "trl", "numpy")
    versions = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"] in wanted}
    mine, trl = plan["variant"] == "ours", versions.get("trl", "missing")
    if not mine and not trl.startswith("0.11."):
        error = f"In the environment of --against trl is {trl}; it must be 0.11.x: pip install {PINS}"
        return print(json.dumps({"error": error}), file=answers)
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(plan["threads"])
    tokenizer = AutoTokenizer.from_pretrained(plan["model" if mine else "old_model"])
    run = ours(plan, tokenizer) if mine else old(plan, tokenizer)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"versions": versions | {"python": sys.version.split()[0]}, "device": device}), file=answers)
    for step, _ in enumerate(sys.stdin):
        first = step * BATCH % (len(plan["queries"]) - BATCH + 1)
        print(json.dumps(one_step(*run, tokenizer, plan["queries"][first : first + BATCH])), file=answers)


class Variant:
    """A worker process that takes one step at a time."""

    def __init__(self, name: str, python: str, folder: Path, threads: int) -> None:
        self.name, self.log, self.rounds, pipe = name, folder / f"{name}.log", [], subprocess.PIPE
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        command = [python, os.path.abspath(__file__), "--worker", name, str(folder / "plan.json")]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    def ask(self, line: str = "") -> dict:
        """The worker's answer to this line; without one, the program ends with a sentence."""
        with suppress(BrokenPipeError):  # it is gone; below is why
            print(line, end="", file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline() or "null")
        if answer is None:
            title = f"The worker {self.name} ended with code {self.process.wait()}; its last words:"
            sys.exit("\n  ".join([title, *self.log.read_text(errors="replace").rstrip().splitlines()[-15:]]))
        return sys.exit(answer["error"]) if "error" in answer else answer


def build_gpt2_shape(folder: Path, world) -> None:
    """Random weights shaped like GPT-2 small (dropout off) and DistilBERT base, with the given models' tokenizers."""
    import transformers as hf

    hf.set_seed(0)
    policy = hf.GPT2Config(bos_token_id=0, eos_token_id=0, pad_token_id=0, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    reward = hf.DistilBertConfig(id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})
    models = {"model": hf.GPT2LMHeadModel(policy), "reward_model": hf.DistilBertForSequenceClassification(reward)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        hf.AutoTokenizer.from_pretrained(getattr(world, name)).save_pretrained(folder / name)
        setattr(world, name, str(folder / name))


def copy_for_old(source: str, target: Path) -> str:
    """A copy of a model folder in the words of transformers 4.45."""
    shutil.copytree(source, target)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    for name, changes in (("config.json", {"torch_dtype": "float32"}), ("tokenizer_config.json", tokenizer)):
        settings = json.loads((target / name).read_text()) | changes
        settings.pop("dtype", None)
        (target / name).write_text(json.dumps(settings))
    return str(target)


def write_plan(options, folder: Path) -> None:
    """What the workers need: settings, model folders, queries."""
    from transformers import AutoTokenizer

    from rlhf_course import LengthSampler
    from rlhf_course.data import build_queries, load_reviews
    from rlhf_course.offline.world import prepare
    from rlhf_course.presets import load_preset

    given = {key: value for key in ("model", "reward_model", "dataset") if (value := getattr(options, key))}
    if missing := [value for value in given.values() if not Path(value).is_dir()]:
        sys.exit(f"There is no folder {missing[0]}.")
    world = prepare(load_preset("03_gpt2_imdb_ppo", "tiny", given))
    if options.shape == "gpt2":
        build_gpt2_shape(folder, world)
    plan = {"model": world.model, "reward_model": world.reward_model}
    if options.against:
        plan |= {f"old_{key}": copy_for_old(value, folder / f"old_{key}") for key, value in plan.items()}
    reviews = load_reviews(world.dataset, "train").shuffle(seed=0)
    queries = build_queries(reviews, AutoTokenizer.from_pretrained(world.model), LengthSampler(2, 8))
    plan |= {"queries": queries.with_format(None).to_list(), "bf16": options.bf16, "threads": options.threads}
    plan["ppo"] = {"batch_size": BATCH, "mini_batch_size": BATCH, "ppo_epochs": EPOCHS, "learning_rate": options.lr}
    (folder / "plan.json").write_text(json.dumps(plan))


def measure(options, folder: Path) -> dict:
    """All rounds of all variants, taking turns: variant → versions, device, rounds."""
    variants = []
    try:
        for name in TITLES if options.against else ("ours",):
            python = sys.executable if name == "ours" else shutil.which(options.against)
            variants.append(Variant(name, python, folder, options.threads))
        about = {v.name: v.ask() for v in variants}
        for turn in range(options.warmup + options.rounds):
            first = turn % len(variants)
            for v in variants[first:] + variants[:first]:
                v.rounds.append(v.ask("step\n"))
            seconds = (f"{v.name} {v.rounds[-1]['total']:.2f} s" for v in variants)
            print(f"round {turn + 1 - options.warmup}:", *seconds, file=sys.stderr, flush=True)
    finally:
        for v in variants:
            v.process.kill()
            v.process.wait()
    return {v.name: about[v.name] | {"rounds": v.rounds[options.warmup :]} for v in variants}


def summarise(found: dict) -> None:
    """Add medians, and ratios to ours, to every variant."""
    for entry in found.values():
        rounds = entry["rounds"]
        median = entry["median"] = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        rate = median["update_flop_per_second"] = median["update_flop"] / median["update"]
        median["fraction_of_matrix_rate"] = rate / median["matrix_flop_per_second"]
        ratio = entry["ratio_to_ours"] = {key: median[key] / found["ours"]["median"][key] for key in COLUMNS}
        pairs = zip(rounds, found["ours"]["rounds"], strict=True)
        paired = sorted(theirs["total"] / mine["total"] for theirs, mine in pairs)
        ratio["total_range"] = [paired[0], paired[-1]]


def report(found: dict) -> str:
    """The measurements as a table, and what follows from them."""
    import pandas as pd

    rows = {TITLES[name]: {c: f"{entry['median'][c]:.3f}" for c in COLUMNS} for name, entry in found.items()}
    rivals = {TITLES[name]: entry["ratio_to_ours"] for name, entry in found.items() if name != "ours"}
    rows |= {f"{title} / ours": {c: f"{ratio[c]:.1f}x" for c in COLUMNS} for title, ratio in rivals.items()}
    lines = [pd.DataFrame.from_dict(rows, orient="index").rename(columns=COLUMNS).to_string()]
    for title, ratio in rivals.items():
        low, high = ratio["total_range"]
        lines.append(f"Round by round, {title} took {low:.1f} to {high:.1f} times as long as ours.")
    mine = found["ours"]["median"]
    gflop, rate, product = (mine[k] / 1e9 for k in ("update_flop", "update_flop_per_second", "matrix_flop_per_second"))
    lines.append(f"Our update needs {gflop:.1f} GFLOP and does {rate:.1f} GFLOP/s, {100 * rate / product:.0f} % of ")
    lines[-1] += f"a float32 matrix product's {product:.1f} GFLOP/s."
    if not rivals:
        lines.append(f"To compare, pip install {PINS} into another environment; give its Python with --against.")
    return "\n".join(lines)


def draw(found: dict, path: Path) -> None:
    """Stacked bars of the phases, one bar per variant."""
    import matplotlib
    import pandas as pd

    matplotlib.use("Agg")
    from rlhf_course.plots import COLOURS

    table = pd.DataFrame.from_dict({TITLES[name]: entry["median"] for name, entry in found.items()}, orient="index")
    style = {"color": [COLOURS[name] for name in ("policy", "reward", "value")], "figsize": (8, 1.2 + 0.6 * len(found))}
    axis = table[list(PHASES[:3])].plot.barh(stacked=True, legend=False, **style)
    for row, seconds in enumerate(table["total"]):
        end = table.iloc[row][list(PHASES[:3])].sum()
        axis.annotate(f" {seconds:.2f} s ({seconds / table['total'].iloc[0]:.1f}x)", (end, row), va="center")
    axis.set(xlim=(0, 1.25 * axis.get_xlim()[1]), xlabel=f"seconds per PPO step of {BATCH} samples, medians")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.figure.legend(loc="outside upper center", ncols=3)
    axis.figure.savefig(path, format="png", dpi=150)


def main() -> None:
    """Measure, print, and write the JSON file and the figure."""
    if sys.argv[1:2] == ["--worker"]:
        return worker(json.loads(Path(sys.argv[3]).read_text()) | {"variant": sys.argv[2]})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="PYTHON", help="interpreter of an environment with trl 0.11.4")
    parser.add_argument("--shape", choices=("tiny", "gpt2"), default="tiny", help="gpt2: GPT-2 small, random weights")
    for name in ("model", "reward_model", "dataset"):
        parser.add_argument(f"--{name}", metavar="FOLDER", help="instead of the tiny preset's")
    for name, value, text in (("rounds", 10, ""), ("warmup", 2, "uncounted rounds; "), ("threads", os.cpu_count(), "")):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text}default: {value}")
    parser.add_argument("--lr", type=float, default=1.41e-5, help="small, so that the work stays the same")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast for ours")
    parser.add_argument("--output", type=Path, default=Path("build/benchmark/ppo.json"))
    options = parser.parse_args()
    if options.rounds < 1 or options.warmup < 0 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1, --warmup at least 0.")
    if options.against and shutil.which(options.against) is None:
        sys.exit(f"There is no interpreter at {options.against}; --against takes the path of a Python.")
    from rlhf_course.files import atomic_file

    with tempfile.TemporaryDirectory() as folder:
        write_plan(options, Path(folder))
        found = measure(options, Path(folder))
    summarise(found)
    settings = {key: getattr(options, key) for key in ("shape", "threads", "bf16", "lr", "warmup")}
    with atomic_file(options.output) as path:
        path.write_text(json.dumps({**settings, "batch": BATCH, "epochs": EPOCHS, "variants": found}, indent=1))
    with atomic_file(options.output.with_suffix(".png")) as path:
        draw(found, path)
    print(report(found), f"Everything is in {options.output} and {options.output.with_suffix('.png')}.", sep="\n")


if __name__ == "__main__":
    main()
