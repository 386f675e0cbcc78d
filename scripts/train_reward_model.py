"""Notebook 01's experiment as a command: a reward model from preference pairs, and its audit.

    python scripts/train_reward_model.py
    python scripts/train_reward_model.py --preset scratch --dataset FOLDER --output_dir runs/a
    python scripts/train_reward_model.py --preset full --use_peft --lora_r 16 --report_to wandb
    python scripts/train_reward_model.py --output_dir runs/a --resume_from_checkpoint true

Leaves model/, audit.json, audit.png and checkpoints/ in --output_dir. The options are trl's, and a
few more at the end of --help; --preset sets their defaults, --config FILE reads options from a YAML
file, and the command line wins.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from command_line import trl_run

from rlhf_course.course.presets import PRESETS, Settings

NAME, EXPERIMENT = "train_reward_model.py", "01_reward_modeling"


@dataclass
class ScriptArguments:
    """What trl has no option for."""

    _argument_group_name = "this script"
    preset: str = field(default="tiny", metadata={"help": f"size of the run: {', '.join(PRESETS)}"})
    dataset: str | None = field(default=None, metadata={"help": "pairs: a folder or hub id"})
    data_dir: str | None = field(default=None, metadata={"help": "subfolder of the dataset"})
    train_subset: int | None = field(default=None, metadata={"help": "pairs to train on"})
    eval_subset: int | None = field(default=None, metadata={"help": "pairs held out"})
    audit_prompts: int = field(
        default=300, metadata={"help": "held-out prompts that the audit answers badly"}
    )


def preset_defaults(settings: Settings) -> dict:
    """The preset's settings under the names of the options."""
    return trl_run.common_defaults(settings.bf16, settings.epochs, settings.batch_size) | {
        "train_subset": settings.train_subset,
        "eval_subset": settings.eval_subset,
        "audit_prompts": settings.audit_prompts,
        "max_length": settings.max_length,
        "output_dir": "build/train_reward_model",
        "learning_rate": settings.learning_rate,
        "remove_unused_columns": False,  # length is for the sampler
        "lora_task_type": "SEQ_CLS",
        "lora_modules_to_save": ["score"],
    }


def overrides(settings: Settings, script: ScriptArguments, config, model_args) -> dict:
    """Return what the options change in the preset's settings."""
    given = {name: getattr(script, name) for name in ("train_subset", "eval_subset", "dataset")}
    given["model"] = model_args.model_name_or_path
    given = {key: value for key, value in given.items() if value is not None}
    given |= {"audit_prompts": script.audit_prompts, "max_length": config.max_length}
    if script.dataset or script.data_dir:  # the preset's subfolder is one of its own dataset
        given["data_dir"] = script.data_dir
    if script.dataset is None and settings.dataset is None:
        needed = "--dataset: a folder or hub id with columns chosen and rejected"
        raise ValueError(f"--preset {script.preset} needs {needed}.")
    return given


def parse_arguments(arguments: list[str] | None = None) -> tuple:
    """Return ScriptArguments, RewardConfig, ModelConfig and Settings."""
    kinds = ("RewardConfig", ScriptArguments)
    return trl_run.parse(NAME, __doc__, EXPERIMENT, kinds, preset_defaults, overrides, arguments)


def load_data(dataset: str, script: ScriptArguments, settings: Settings, seed: int) -> tuple:
    """Return pairs to train on, pairs held out, and how many were dropped from each and why.

    Without a split test, a tenth of the prompts is held out with all their pairs.
    """
    from rlhf_course.data import describe, hold_out, load_pairs

    def load(split: str, count: int | None):
        where = f"{split}[:{count}]" if count else split
        pairs, report = load_pairs(dataset, where, settings.data_dir)
        print(f"{split}: {len(pairs)} pairs; dropped: {describe(report)}.")
        return pairs, report

    train, dropped = load("train", script.train_subset)
    try:
        held_out, dropped_test = load("test", script.eval_subset)
    except ValueError as error:
        if not str(error).startswith("No split"):
            raise
        (train, held_out), dropped_test = hold_out(train, 0.1, seed), {}
        held_out = held_out.select(range(min(len(held_out), script.eval_subset or len(held_out))))
        print(
            f"{dataset} has no split test: {len(held_out)} pairs of train are held out, by prompt."
        )
    return train, held_out, {"train": dropped, "test": dropped_test}


def load_scorer(path: str | Path, tokenizer, config, **options):
    """Return a RewardModel on the run's device; ``ValueError`` if it has too few positions."""
    from rlhf_course.rewards import RewardModel, load_reward_model

    scorer = RewardModel(load_reward_model(path, **options).to(config.device), tokenizer)
    if scorer.max_length < config.max_length:
        raise ValueError(
            f"--max_length {config.max_length} is more than the {scorer.max_length} positions of"
            f" {path}."
        )
    return scorer


def accuracy(scorer, pairs) -> float:
    """Return the share of pairs whose chosen answer scores higher."""
    from rlhf_course.rewards import finite

    prompts = pairs["prompt"][:]
    chosen, rejected = (
        finite(scorer(prompts, pairs[side][:]), pairs[side]) for side in ("chosen", "rejected")
    )
    return (chosen > rejected).double().mean().item()


def baselines(pairs) -> dict[str, float]:
    """What length alone gets right (ties count a half), and the best accuracy there is, where gold
    is known.
    """
    import numpy as np

    gap = np.array(
        [len(c) - len(r) for c, r in zip(pairs["chosen"], pairs["rejected"], strict=True)]
    )
    found = {"length_baseline": float((np.sign(gap) / 2 + 0.5).mean())}
    if {"gold_chosen", "gold_rejected"} <= set(pairs.column_names):
        gold = np.array(pairs["gold_chosen"][:]) - np.array(pairs["gold_rejected"][:])
        found["ceiling"] = float((1 / (1 + np.exp(-np.abs(gold)))).mean())
    return found


def run_audit(scorer, pairs):
    """Return the audit's table over the chosen answers; one that is too long is cut first."""
    from rlhf_course.audit import audit

    tokenizer = scorer.tokenizer
    max_tokens = scorer.max_length - 8  # EOS, and what cutting inside a word may add

    def cut(answer: str, ids: list[int]) -> str:
        if len(ids) <= max_tokens:
            return answer
        return tokenizer.decode(ids[:max_tokens], skip_special_tokens=True).strip()

    def score(prompts, answers):
        tokens = tokenizer([f" {answer}" for answer in answers])["input_ids"]
        return scorer(prompts, [cut(*both) for both in zip(answers, tokens, strict=True)])

    return audit(score, pairs["prompt"][:], pairs["chosen"][:])


def write_results(output: Path, results: dict, table) -> None:
    """Write audit.json and audit.png, and print the same."""
    from rlhf_course.audit import PASS
    from rlhf_course.course.plots import audit_bars
    from rlhf_course.runtime.files import atomic_file

    with atomic_file(output / "audit.json") as path:
        found = results | {"probes": table.to_dict("index")}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    with atomic_file(output / "audit.png") as path:
        audit_bars({"this reward model": table}, PASS).savefig(path, format="png", dpi=150)
    print(f"\n{table[['share', 'ci', 'margin', 'passed']].to_string(float_format='%.2f')}\n")
    print(
        f"Accuracy on {results['held_out_pairs']} held-out pairs: {results['accuracy_before']:.3f}"
        f" before, {results['accuracy']:.3f} ± {results['accuracy_ci']:.3f} after; the longer"
        f" answer alone gives {results['length_baseline']:.3f}."
    )


def tokenize(
    train, held_out, dropped: dict, tokenizer, max_length: int, audit_prompts: int
) -> tuple:
    """Return both parts with tokens; add to ``dropped`` how many pairs were too long."""
    from rlhf_course.data import tokenize_pairs

    train, dropped["train"]["too long"] = tokenize_pairs(train, tokenizer, max_length)
    held_out, dropped["test"]["too long"] = tokenize_pairs(held_out, tokenizer, max_length)
    too_long = dropped["train"]["too long"] + dropped["test"]["too long"]
    left = f"Left: {len(train)} and {len(held_out)}"
    print(f"Dropped, as longer than {max_length} tokens: {too_long}. {left}.")
    if min(len(held_out), audit_prompts) < 2:
        raise ValueError(
            "An audit needs at least two held-out pairs: raise --max_length, --eval_subset or"
            " --audit_prompts."
        )
    return train, held_out


def run(script: ScriptArguments, config, model_args, settings: Settings, output) -> int:
    """Train, save and audit; return the exit code."""
    from accelerate import PartialState
    from accelerate.utils import set_seed

    from rlhf_course.policy.save_load import load_tokenizer
    from rlhf_course.worlds.build import prepare_reward_model

    with PartialState().main_process_first():  # the others find what it builds
        assets = prepare_reward_model(settings, model_args.model_revision)
    train, held_out, dropped = load_data(assets.dataset, script, settings, config.seed)
    tokenizer = load_tokenizer(assets.model, revision=model_args.model_revision)
    set_seed(config.seed)  # before the head is drawn
    options = trl_run.model_options(model_args)
    before = load_scorer(assets.model, tokenizer, config, new_head=True, **options)
    limits = config.max_length, script.audit_prompts
    train, held_out = tokenize(train, held_out, dropped, tokenizer, *limits)

    results = {"dataset": assets.dataset, "base": assets.model}
    results["accuracy_before"] = accuracy(before, held_out)
    columns = ["chosen_ids", "rejected_ids", "length"]
    parts = [part.select_columns(columns) for part in (train, held_out)]
    kind = "RewardTrainer"
    trainer = trl_run.make_trainer(kind, before.model, tokenizer, config, model_args, *parts)
    code, _ = trl_run.train(trainer, output, lambda: [trainer.evaluate()["eval_loss"]])
    if code:
        return code

    scorer = load_scorer(output.result, tokenizer, config)  # what was saved is what is audited
    share, pairs = accuracy(scorer, held_out), len(held_out)
    ci = 1.96 * (share * (1 - share) / pairs) ** 0.5
    results |= {"accuracy": share, "accuracy_ci": ci} | baselines(held_out)
    results |= {"train_pairs": len(train), "held_out_pairs": pairs, "dropped": dropped}
    table = run_audit(scorer, held_out.select(range(min(script.audit_prompts, pairs))))
    if PartialState().is_main_process:
        write_results(output.folder, results, table)
    print(f"The reward model is in {output.result}, the audit in {output.folder}.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 when finished, 1 after an error, 130 when stopped by Ctrl-C."""
    return trl_run.main(NAME, parse_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
