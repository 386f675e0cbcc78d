"""Train one adapter per β for the site's page *Live*, and write the adapters' card.

    python dev/models/train_live_policies.py   # half an hour; skips finished policies

The script runs notebook 04's cells with the tiny preset, and an adapter replaces the full policy.
"""

import json
from functools import partial
from types import SimpleNamespace

import nbformat
import yaml
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

from rlhf_course.course.presets import ROOT
from rlhf_course.evaluation import distinct_n, mean_ci, perplexity
from rlhf_course.rewards import NgramSentiment
from rlhf_course.runtime.files import atomic_file, atomic_folder

NOTEBOOK = "04_gpt2_imdb_ppo"
LOOP = "live, probes = "  # how the training cell starts
FOLDER = ROOT / "models" / "imdb-live-policies"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["c_attn", "c_proj", "c_fc"]}
LORA |= {"task_type": "CAUSAL_LM", "fan_in_fan_out": True}  # weights (inputs, outputs)
# The controller keeps β constant.
COMMON = {"horizon": 1e12, "probe_every": 5, "learning_rate": 2e-3, "steps": 40}
# folder → changes to notebook 04's settings
RUNS = {f"beta-{beta:g}": {"init_kl_coef": beta} for beta in (0.0, 0.16, 0.6)}
LINE = "| {beta} | {learning_rate} | {steps} | {score:.2f} ± {score_ci:.2f} "
LINE += "| {kl:.2f} ± {kl_ci:.2f} | {second:.2f} ± {second_ci:.2f} "
LINE += "| {perplexity:.1f} | {distinct_2:.2f} |"


class Log:
    """Print each step's score and KL, in place of the notebook's LivePlot."""

    def update(self, stats: dict, last: bool = False) -> None:
        print(f"score {stats['ppo/mean_scores']:.2f}, KL {stats['objective/kl']:.2f}", flush=True)


def train(overrides: dict) -> dict:
    """Run the notebook's cells up to the end of the training loop; return their global names."""
    names = {"preset": "tiny", "overrides": overrides, "output_dir": "build", "seed": 0}
    for cell in nbformat.read(ROOT / f"notebooks/{NOTEBOOK}.ipynb", as_version=4).cells:
        if cell.cell_type != "code" or "parameters" in cell.metadata.get("tags", []):
            continue
        exec(compile(cell.source, NOTEBOOK, "exec"), names)
        if names.get("LivePlot", Log) is not Log:  # the cell that imports it has run
            load = names["AutoModelForCausalLMWithValueHead"].from_pretrained
            load = partial(load, peft_config=LoraConfig(**LORA))
            names["AutoModelForCausalLMWithValueHead"] = SimpleNamespace(from_pretrained=load)
            names["create_reference_model"] = lambda policy: None  # the base is the reference
            names["LivePlot"] = Log
        if cell.source.startswith(LOOP):
            return names
    raise ValueError(f"{NOTEBOOK} has no cell that starts with {LOOP!r}; change LOOP.")


def row(names: dict, table) -> dict:
    """Return responses' perplexity and distinct-2, and mean KL and scores, with intervals."""
    judge = NgramSentiment.from_pretrained(names["assets"].judge)
    second = judge((table["query"] + table["response"]).tolist())
    numbers = {"perplexity": perplexity(table), "distinct_2": distinct_n(table["response"], 2)}
    for key, values in (("kl", table["kl"]), ("score", table["score"]), ("second", second)):
        numbers[key], numbers[f"{key}_ci"] = mean_ci(values)
    return {key: float(f"{value:.5g}") for key, value in numbers.items()}


def record(name: str) -> None:
    """Train one policy; write its adapter, settings and measurements."""
    names = train(COMMON | RUNS[name])
    model = names["policy"].pretrained_model
    for key, weight in model.named_parameters():
        if "lora_" in key:
            weight.data = weight.data.bfloat16().float()  # measure what is saved
    before = row(names, names["before"])
    after = row(names, names["evaluate_policy"]())
    settings = names["settings"]
    path = [*(row(names, table) for table in names["probes"]), after]
    run = {"beta": settings.init_kl_coef, "before": before, "after": after}
    run |= {key: getattr(settings, key) for key in ("learning_rate", "steps")} | {"path": path}
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    config = model.peft_config[model.active_adapter]
    config.base_model_name_or_path = "models/gpt2-imdb-mini"
    with atomic_folder(FOLDER / name) as folder:
        weights = {key: value.bfloat16().contiguous() for key, value in weights.items()}
        save_file(weights, folder / "adapter_model.safetensors")
        config.save_pretrained(folder)
        (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def write_card() -> None:
    """Write README.md from the runs, with the template in models/cards.yaml."""
    runs = [json.loads((FOLDER / name / "run.json").read_text()) for name in RUNS]
    base = {"beta": "none: the base", "learning_rate": "", "steps": 0, "after": runs[0]["before"]}
    lines = [LINE.format(**run, **run["after"]).replace("| -", "| −") for run in (base, *runs)]
    cards = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))
    numbers = {"measured": "\n".join(lines), "rank": LORA["r"]}
    with atomic_file(FOLDER / "README.md") as path:
        path.write_text(cards["imdb-live-policies"].format(**numbers), encoding="utf-8")


if __name__ == "__main__":
    for name in RUNS:
        if not (FOLDER / name / "run.json").exists():
            record(name)
    write_card()
