"""Train the policies of the site's page `live`: adapters at several β, and their card.

    python scripts/make/train_live_policies.py   # continues where it stopped; half an hour

It runs the cells of notebook 04 at preset tiny, with an adapter in place of the full policy.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import nbformat
import torch
import yaml
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

from rlhf_course.course.presets import ROOT
from rlhf_course.evaluation import distinct_n, mean_ci, perplexity
from rlhf_course.runtime.files import atomic_folder

NOTEBOOK = "04_gpt2_imdb_ppo"
FOLDER = ROOT / "models" / "imdb-live-policies"
LAST = "live, probes = "  # how the cell with the training loop starts
MODULES = ["c_attn", "c_proj", "c_fc"]
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=MODULES, task_type="CAUSAL_LM")
LORA.fan_in_fan_out = True  # GPT-2's linear layers have weights (in, out)
COMMON = {"horizon": 1e12, "probe_every": 5}  # the controller leaves β as it is
RUNS = {  # folder → what differs from notebook 04's settings
    "beta-0": {"init_kl_coef": 0.0, "learning_rate": 4e-3, "steps": 40},
    "beta-0.16": {"learning_rate": 2e-3, "steps": 40},
    "beta-0.6": {"init_kl_coef": 0.6, "learning_rate": 2e-3, "steps": 25},
}


def train(overrides: dict) -> dict:
    """Run the notebook's cells up to the training loop; return their names."""
    names = {"preset": "tiny", "overrides": overrides, "output_dir": "build", "seed": 0}
    for cell in nbformat.read(ROOT / f"notebooks/{NOTEBOOK}.ipynb", as_version=4).cells:
        if cell.cell_type != "code" or "parameters" in cell.metadata.get("tags", []):
            continue
        exec(compile(cell.source, NOTEBOOK, "exec"), names)
        if "AutoModelForCausalLMWithValueHead" in cell.source and "policy" not in names:
            load = names["AutoModelForCausalLMWithValueHead"].from_pretrained
            kind = SimpleNamespace(from_pretrained=partial(load, peft_config=LORA))
            names["AutoModelForCausalLMWithValueHead"] = kind
            names["create_reference_model"] = lambda policy: None  # the base without the adapter
            names["LivePlot"] = Log
        if cell.source.startswith(LAST):
            return names
    raise ValueError(f"{NOTEBOOK} has no cell that starts with {LAST!r}; change LAST.")


class Log:
    """Print the score and KL of each step, in place of the notebook's LivePlot."""

    def __init__(self) -> None:
        self.steps = 0

    def update(self, stats: dict, last: bool = False) -> None:
        self.steps += 1
        score, kl = stats["ppo/mean_scores"], stats["objective/kl"]
        print(f"step {self.steps}: score {score:.2f}, KL {kl:.2f}", flush=True)


def row(names: dict, table) -> dict:
    """Return what is measured of responses: means over the queries, and the texts' variety."""
    texts = (table["query"] + table["response"]).tolist()
    found = {"kl": table["kl"], "score": table["score"], "second": names["second"](texts)}
    found |= {"length": table["length"]}
    found = {key: mean_ci(values) for key, values in found.items()}
    numbers = {key: mean for key, (mean, _) in found.items()}
    numbers |= {f"{key}_ci": half for key, (_, half) in found.items() if key != "length"}
    numbers |= {"perplexity": perplexity(table), "distinct_2": distinct_n(table["response"], 2)}
    return {key: float(f"{value:.5g}") for key, value in numbers.items()}


def record(name: str, target: Path) -> None:
    """Train one policy; write its adapter, settings and measurements."""
    overrides = COMMON | RUNS[name]
    names = train(overrides)
    model = names["policy"].pretrained_model
    with torch.no_grad():  # measure what is saved: bfloat16
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.copy_(weight.bfloat16())
    final = row(names, names["evaluate_policy"]())
    kept = {key: getattr(names["settings"], key) for key in KEPT}
    card = {"beta": kept["init_kl_coef"], "settings": kept | {"rank": LORA.r}}
    card |= {"before": row(names, names["before"]), "after": final}
    card["path"] = [*(row(names, table) for table in names["probes"]), final]
    with atomic_folder(target / name) as folder:
        weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        weights = {key: value.bfloat16().contiguous() for key, value in weights.items()}
        save_file(weights, folder / "adapter_model.safetensors")
        config = model.peft_config[model.active_adapter]
        config.base_model_name_or_path = "models/gpt2-imdb-mini"
        config.save_pretrained(folder)
        (folder / "run.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    print(name, final, flush=True)


KEPT = "init_kl_coef learning_rate steps batch_size mini_batch_size ppo_epochs".split()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("--output", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    for name in chosen.only:
        if not (chosen.output / name / "run.json").exists():
            record(name, chosen.output)


if __name__ == "__main__":
    sys.exit(main())
