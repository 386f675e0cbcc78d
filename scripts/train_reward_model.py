"""Notebook 01's experiment as a command: a reward model from preference pairs, and its audit.

    python scripts/train_reward_model.py
    python scripts/train_reward_model.py --preset scratch --dataset FOLDER --output_dir runs/a
    python scripts/train_reward_model.py --preset full --use_peft --lora_r 16 --report_to wandb
    python scripts/train_reward_model.py --config my.yaml --output_dir runs/a --resume_from_checkpoint true

Leaves model/, audit.json, audit.png and checkpoints/ in --output_dir. The options are trl's, and a few more at the end
of --help; --preset sets their defaults, --config FILE reads options from a YAML file, and the command line wins.
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlhf_course.presets import PRESETS, Settings, load_preset

EXPERIMENT = "01_reward_modeling"


@dataclass
class ScriptArguments:
    """What trl has no option for."""

    _argument_group_name = "this script"
    preset: str = field(default="tiny", metadata={"help": f"size of the run: {', '.join(PRESETS)}"})
    dataset: str | None = field(default=None, metadata={"help": "pairs: a folder or hub id (None: the preset's)"})
    data_dir: str | None = field(default=None, metadata={"help": "subfolder of the dataset"})
    train_subset: int | None = field(default=None, metadata={"help": "pairs to train on (none: all)"})
    eval_subset: int | None = field(default=None, metadata={"help": "pairs held out (none: all of the split test)"})
    audit_prompts: int = field(default=300, metadata={"help": "held-out prompts that the audit answers badly"})


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and every default."""


def preset_defaults(preset: str) -> dict:
    """The preset's settings under the names of the options. bf16 needs a GPU that can do it."""
    import torch

    settings, gpu = load_preset(EXPERIMENT, preset), torch.cuda.is_available()
    return {key: getattr(settings, key) for key in ("train_subset", "eval_subset", "audit_prompts", "max_length")} | {
        "output_dir": "build/train_reward_model",
        "learning_rate": settings.learning_rate,
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "bf16": settings.bf16 and gpu and torch.cuda.is_bf16_supported(),
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "seed": 0,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": gpu,
        "remove_unused_columns": False,  # length is for the sampler
        "train_sampling_strategy": "group_by_length",
        "save_total_limit": 2,
        "disable_tqdm": False,
        "lora_task_type": "SEQ_CLS",
        "lora_modules_to_save": ["score"],
    }


def parse_arguments(arguments: list[str] | None = None) -> tuple:
    """ScriptArguments, RewardConfig, ModelConfig and Settings; ``SystemExit`` with a sentence for what is not valid."""
    usage = "train_reward_model.py [--config FILE] [--preset PRESET] [options]"
    early = argparse.ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
    early.add_argument("--preset")
    early.add_argument("--config")
    known, rest = early.parse_known_args(arguments)
    try:
        content = yaml.safe_load(Path(known.config).read_text(encoding="utf-8")) if known.config else {}
        if not isinstance(content, dict):
            raise ValueError(f"{known.config} is no list of options like max_length: 224.")
        preset = str(known.preset or content.get("preset", "tiny"))
        load_preset(EXPERIMENT, preset)
        with warnings.catch_warnings(action="ignore"):
            from trl import ModelConfig, RewardConfig, TrlParser

            parser = TrlParser(
                (RewardConfig, ModelConfig, ScriptArguments),
                description=__doc__,
                usage=usage,
                formatter_class=HelpFormatter,
            )
            parser.set_defaults_with_config(**preset_defaults(preset))
            config = ["--config", known.config] if known.config else []
            config_args, model_args, script = parser.parse_args_and_config([*config, "--preset", preset, *rest])
        check(script, config_args, model_args)
        overrides = {
            "dataset": script.dataset,
            "model": model_args.model_name_or_path,
            "max_length": config_args.max_length,
        }
        overrides = {key: value for key, value in overrides.items() if value is not None}
        if script.dataset or script.data_dir:  # the preset's subfolder is one of its own dataset
            overrides["data_dir"] = script.data_dir
        settings = load_preset(EXPERIMENT, preset, overrides)
        if settings.dataset is None:
            raise ValueError(f"--preset {preset} needs --dataset: a folder or hub id with columns chosen and rejected.")
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        early.error(one_line(error))
    return script, config_args, model_args, settings


def check(script: ScriptArguments, config, model_args) -> None:
    """Raise ``ValueError`` for numbers that make no sense, and for what this script does not do."""
    for name, value, least in (
        ("train_subset", script.train_subset, 1),
        ("eval_subset", script.eval_subset, 2),
        ("audit_prompts", script.audit_prompts, 2),
        ("max_length", config.max_length or 0, 1),
    ):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"--{name} takes a whole number of at least {least}, got {value!r}.")
    if config.trust_remote_code:
        raise ValueError("Remote code is not run here: convert the model to one that transformers knows.")
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError("Quantized bases (--load_in_4bit, --load_in_8bit) are not supported here; try --use_peft.")


def one_line(error: Exception) -> str:
    """The message of an exception as one line."""
    return " ".join(str(error).split())


def find_checkpoint(config) -> str | None:
    """The checkpoint to go on from; None begins anew. Raises ``ValueError`` where that would mix two runs."""
    from transformers.trainer_utils import get_last_checkpoint

    wanted, folder = str(config.resume_from_checkpoint or "false"), config.output_dir
    latest = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if wanted.lower() in ("false", "no", "none"):
        if latest:
            raise ValueError(f"{latest} is there already: --resume_from_checkpoint true, or another --output_dir.")
        return None
    found = latest if wanted.lower() in ("true", "yes") else wanted
    if found is None or not Path(found, "trainer_state.json").exists():
        raise ValueError(f"--resume_from_checkpoint: there is no checkpoint in {folder if found is None else found}.")
    return found


def load_data(dataset: str, script: ScriptArguments, settings: Settings, seed: int) -> tuple:
    """Pairs to train on, pairs held out, and what was dropped from each. Without a split test, some are set aside."""
    from rlhf_course.data import describe, load_pairs

    def load(split: str, count: int | None):
        pairs, report = load_pairs(dataset, f"{split}[:{count}]" if count else split, settings.data_dir)
        print(f"{split}: {len(pairs)} pairs; dropped: {describe(report)}.")
        return pairs, report

    train, dropped = load("train", script.train_subset)
    try:
        held_out, dropped_test = load("test", script.eval_subset)
    except ValueError as error:
        if not str(error).startswith("No split"):
            raise
        count = min(script.eval_subset or len(train), max(2, len(train) // 10))
        if len(train) <= count:
            raise ValueError(
                f"{dataset} has no split test, and {len(train)} pairs are too few to hold some out."
            ) from None
        parts = train.train_test_split(test_size=count, seed=seed)
        train, held_out, dropped_test = parts["train"], parts["test"], {}
        print(f"There is no split test in {dataset}: {count} of the pairs of train are held out instead.")
    return train, held_out, {"train": dropped, "test": dropped_test}


def load_base(path: str, config, model_args):
    """The base as a reward model on its device, and its tokenizer, agreeing on the token that pads."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, revision=model_args.model_revision)
    if tokenizer.eos_token is None:
        raise ValueError(f"The tokenizer of {path} has no EOS token, which ends every dialogue.")
    names = {"dtype": "dtype", "attn_implementation": "attn_implementation", "revision": "model_revision"}
    options = {name: getattr(model_args, argument) for name, argument in names.items()}
    return load_scorer(path, tokenizer, config, **options), tokenizer


def load_scorer(path: str | Path, tokenizer, config, **options):
    """A RewardModel on the run's device. Raises ``ValueError`` where it has no positions for max_length tokens."""
    from rlhf_course.rewards import RewardModel, load_reward_model

    scorer = RewardModel(load_reward_model(path, **options).to(config.device), tokenizer)
    if scorer.max_length < config.max_length:
        raise ValueError(f"--max_length {config.max_length} is more than the {scorer.max_length} positions of {path}.")
    return scorer


def make_trainer(model, tokenizer, config, model_args, train, held_out):
    """trl's RewardTrainer on tokenized pairs, with the latest numbers beside its progress bar."""
    from transformers import PrinterCallback, ProgressCallback
    from trl import RewardTrainer, get_peft_config

    class Bar(ProgressCallback):
        """The progress bar, without a dictionary scrolling by at every log."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            if self.training_bar is not None and logs:
                shown = {key: f"{logs[key]:.3f}" for key in ("loss", "accuracy", "eval_accuracy") if key in logs}
                self.training_bar.set_postfix(shown, refresh=False)

    if str(model_args.lora_target_modules).isidentifier():  # trl makes of one name a pattern for whole paths
        model_args.lora_target_modules = model_args.lora_target_modules and [model_args.lora_target_modules]
    columns = ["chosen_ids", "rejected_ids", "length"]
    trainer = RewardTrainer(
        model,
        config,
        train_dataset=train.select_columns(columns),
        eval_dataset=held_out.select_columns(columns),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.remove_callback(PrinterCallback if config.disable_tqdm else ProgressCallback)
    if not config.disable_tqdm:
        trainer.add_callback(Bar)
    return trainer


def accuracy(scorer, pairs) -> float:
    """The share of pairs whose chosen answer scores higher."""
    chosen, rejected = (scorer(pairs["prompt"][:], pairs[side][:]) for side in ("chosen", "rejected"))
    return (chosen > rejected).double().mean().item()


def baselines(pairs) -> dict[str, float]:
    """What length alone gets right (ties count a half), and the best accuracy there is, where gold is known."""
    import numpy as np

    gap = np.array([len(c) - len(r) for c, r in zip(pairs["chosen"], pairs["rejected"], strict=True)])
    found = {"length_baseline": float((np.sign(gap) / 2 + 0.5).mean())}
    if {"gold_chosen", "gold_rejected"} <= set(pairs.column_names):
        gold = np.array(pairs["gold_chosen"][:]) - np.array(pairs["gold_rejected"][:])
        found["ceiling"] = float((1 / (1 + np.exp(-np.abs(gold)))).mean())
    return found


def run_audit(scorer, pairs):
    """The audit's table over the chosen answers; an answer that is too long ends early, as a generated one would."""
    from rlhf_course.audit import audit

    tokenizer, room = scorer.tokenizer, scorer.max_length - 8  # EOS, and what cutting inside a word may add

    def score(prompts, answers):
        tokens = tokenizer([f" {answer}" for answer in answers])["input_ids"]
        cut = [
            tokenizer.decode(ids[:room], skip_special_tokens=True).strip() if len(ids) > room else answer
            for ids, answer in zip(tokens, answers, strict=True)
        ]
        return scorer(prompts, cut)

    return audit(score, pairs["prompt"][:], pairs["chosen"][:])


def write_results(output: Path, results: dict, table) -> None:
    """audit.json and audit.png, each whole or not at all."""
    from rlhf_course.audit import PASS
    from rlhf_course.files import atomic_file
    from rlhf_course.plots import audit_bars

    with atomic_file(output / "audit.json") as path:
        path.write_text(json.dumps(results | {"probes": table.to_dict("index")}, indent=1) + "\n", encoding="utf-8")
    with atomic_file(output / "audit.png") as path:
        audit_bars({"this reward model": table}, PASS).savefig(path, format="png", dpi=150)


def run(script: ScriptArguments, config, model_args, settings: Settings) -> None:
    """Train, save and audit. Raises ``ValueError`` or ``OSError`` for inputs that are of no use."""
    output = Path(config.output_dir)
    config.output_dir = str(output / "checkpoints")
    checkpoint = find_checkpoint(config)

    from accelerate.utils import set_seed

    from rlhf_course.data import tokenize_pairs
    from rlhf_course.files import atomic_folder
    from rlhf_course.offline.world import prepare_reward_model
    from rlhf_course.run_card import quiet_libraries
    from rlhf_course.tracking import _has_wandb_key

    quiet_libraries()
    warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft on GPT-2's layers, about what it sets itself
    if "wandb" in config.report_to and not _has_wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")
    if "tensorboard" in config.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(output / "tensorboard"))
    assets = prepare_reward_model(settings)
    train, held_out, dropped = load_data(assets.dataset, script, settings, config.seed)
    set_seed(config.seed)  # before the head is drawn
    before, tokenizer = load_base(assets.model, config, model_args)
    train, dropped["train"]["too long"] = tokenize_pairs(train, tokenizer, config.max_length)
    held_out, dropped["test"]["too long"] = tokenize_pairs(held_out, tokenizer, config.max_length)
    too_long = dropped["train"]["too long"] + dropped["test"]["too long"]
    print(f"Dropped, as longer than {config.max_length} tokens: {too_long}. Left: {len(train)} and {len(held_out)}.")
    if len(held_out) < 2:
        raise ValueError("An audit needs at least two held-out pairs; raise --max_length or --eval_subset.")

    results = {"dataset": assets.dataset, "base": assets.model, "accuracy_before": accuracy(before, held_out)}
    trainer = make_trainer(before.model, tokenizer, config, model_args, train, held_out)
    trainer.train(resume_from_checkpoint=checkpoint)
    with atomic_folder(output / "model") as folder:
        trainer.save_model(folder)
    trainer.end()

    scorer = load_scorer(output / "model", tokenizer, config)  # what was saved is what is audited
    share, pairs = accuracy(scorer, held_out), len(held_out)
    results |= {"accuracy": share, "accuracy_ci": 1.96 * (share * (1 - share) / pairs) ** 0.5} | baselines(held_out)
    results |= {"train_pairs": len(train), "held_out_pairs": pairs, "dropped": dropped}
    table = run_audit(scorer, held_out.select(range(min(script.audit_prompts, pairs))))
    write_results(output, results, table)
    known = "".join(f", {key.replace('_', ' ')} {results[key]:.3f}" for key in baselines(held_out))
    print(f"\n{table[['share', 'ci', 'margin', 'passed']].to_string(float_format='%.2f')}\n")
    print(f"Accuracy on {pairs} held-out pairs: {results['accuracy_before']:.3f} before, {share:.3f} after", end="")
    print(f" (± {results['accuracy_ci']:.3f}){known}.")
    print(f"The reward model is in {output / 'model'}; the audit in {output / 'audit.json'} and audit.png.")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 when finished, 1 with a sentence for unusable inputs, 130 when stopped by Ctrl-C."""
    options = parse_arguments(arguments)
    from datasets.exceptions import DatasetsError

    try:
        run(*options)
    except (ValueError, OSError, DatasetsError) as error:
        print(f"train_reward_model.py: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\nStopped; where a checkpoint was saved, --resume_from_checkpoint true goes on from it.", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
