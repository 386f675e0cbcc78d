"""Notebook 01's experiment as a command: a reward model from preference pairs, and its audit.

    python scripts/train_reward_model.py
    python scripts/train_reward_model.py --preset scratch --dataset FOLDER --output_dir runs/a
    python scripts/train_reward_model.py --preset full --use_peft --lora_r 16 --report_to wandb
    python scripts/train_reward_model.py --config my.yaml --output_dir runs/a
    --resume_from_checkpoint true

Leaves model/, audit.json, audit.png and checkpoints/ in --output_dir. The options are trl's, and a
few more at the end of --help; --preset sets their defaults, --config FILE reads options from a YAML
file, and the command line wins.
"""

from rlhf_course.runtime import command

if __name__ == "__main__":
    command.loading()

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import trl_cli

from rlhf_course.course.presets import PRESETS, Settings

NAME, EXPERIMENT = "train_reward_model.py", "01_reward_modeling"
SIDES = ("chosen", "rejected")


@dataclass
class ScriptArguments:
    """What trl has no option for."""

    _argument_group_name = "this script"
    preset: str = field(default="tiny", metadata={"help": f"size of the run: {', '.join(PRESETS)}"})
    dataset: str | None = field(
        default=None, metadata={"help": "pairs: a folder or hub id (None: the preset's)"}
    )
    data_dir: str | None = field(default=None, metadata={"help": "subfolder of the dataset"})
    train_subset: int | None = field(
        default=None, metadata={"help": "pairs to train on (none: all)"}
    )
    eval_subset: int | None = field(
        default=None, metadata={"help": "pairs held out (none: all of the split test)"}
    )
    audit_prompts: int = field(
        default=300, metadata={"help": "held-out prompts that the audit answers badly"}
    )


def preset_defaults(settings: Settings) -> dict:
    """The preset's settings under the names of the options."""
    return trl_cli.common_defaults(settings.bf16, settings.epochs, settings.batch_size) | {
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
    """What the options change in the preset's settings. Raises ``ValueError`` for numbers that make
    no sense.
    """
    numbers = [("train_subset", script.train_subset, 1), ("eval_subset", script.eval_subset, 2)]
    numbers += [
        ("audit_prompts", script.audit_prompts, 2),
        ("max_length", config.max_length or 0, 1),
    ]
    trl_cli.check_whole(numbers)
    given = {
        "dataset": script.dataset,
        "model": model_args.model_name_or_path,
        "max_length": config.max_length,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if script.dataset or script.data_dir:  # the preset's subfolder is one of its own dataset
        given["data_dir"] = script.data_dir
    if script.dataset is None and settings.dataset is None:
        needed = "--dataset: a folder or hub id with columns chosen and rejected"
        raise ValueError(f"--preset {script.preset} needs {needed}.")
    return given


def parse_arguments(arguments: list[str] | None = None) -> tuple:
    """ScriptArguments, RewardConfig, ModelConfig and Settings; ``SystemExit`` with a sentence for
    what is not valid.
    """
    kinds = ("RewardConfig", ScriptArguments)
    return trl_cli.parse(NAME, __doc__, EXPERIMENT, kinds, preset_defaults, overrides, arguments)


def load_data(dataset: str, script: ScriptArguments, settings: Settings, seed: int) -> tuple:
    """Pairs to train on, pairs held out, and what was dropped from each. Without a split test, some
    are set aside.
    """
    from rlhf_course.data import describe, load_pairs

    def load(split: str, count: int | None):
        pairs, report = load_pairs(
            dataset, f"{split}[:{count}]" if count else split, settings.data_dir
        )
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
        print(
            f"There is no split test in {dataset}: {count} of the pairs of train are held out"
            " instead."
        )
    return train, held_out, {"train": dropped, "test": dropped_test}


def load_scorer(path: str | Path, tokenizer, config, **options):
    """A RewardModel on the run's device. Raises ``ValueError`` where it has no positions for
    max_length tokens.
    """
    from rlhf_course.rewards import RewardModel, load_reward_model

    scorer = RewardModel(load_reward_model(path, **options).to(config.device), tokenizer)
    if scorer.max_length < config.max_length:
        raise ValueError(
            f"--max_length {config.max_length} is more than the {scorer.max_length} positions of"
            f" {path}."
        )
    return scorer


def make_trainer(model, tokenizer, config, model_args, train, held_out):
    """trl's RewardTrainer on tokenized pairs."""
    parts = [
        part.select_columns(["chosen_ids", "rejected_ids", "length"]) for part in (train, held_out)
    ]
    return trl_cli.make_trainer("RewardTrainer", model, tokenizer, config, model_args, *parts)


def accuracy(scorer, pairs) -> float:
    """The share of pairs whose chosen answer scores higher."""
    from rlhf_course.rewards import finite

    chosen, rejected = (
        finite(scorer(pairs["prompt"][:], pairs[side][:]), pairs[side]) for side in SIDES
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
    """The audit's table over the chosen answers; an answer that is too long ends early, as a
    generated one would.
    """
    from rlhf_course.audit import audit

    tokenizer, room = (
        scorer.tokenizer,
        scorer.max_length - 8,
    )  # EOS, and what cutting inside a word may add

    def score(prompts, answers):
        tokens = tokenizer([f" {answer}" for answer in answers])["input_ids"]
        cut = [
            (
                tokenizer.decode(ids[:room], skip_special_tokens=True).strip()
                if len(ids) > room
                else answer
            )
            for ids, answer in zip(tokens, answers, strict=True)
        ]
        return scorer(prompts, cut)

    return audit(score, pairs["prompt"][:], pairs["chosen"][:])


def write_results(output: Path, results: dict, table) -> None:
    """audit.json and audit.png, each whole or not at all."""
    from rlhf_course.audit import PASS
    from rlhf_course.course.plots import audit_bars
    from rlhf_course.runtime.files import atomic_file

    with atomic_file(output / "audit.json") as path:
        path.write_text(
            json.dumps(results | {"probes": table.to_dict("index")}, indent=1) + "\n",
            encoding="utf-8",
        )
    with atomic_file(output / "audit.png") as path:
        audit_bars({"this reward model": table}, PASS).savefig(path, format="png", dpi=150)


def run(script: ScriptArguments, config, model_args, settings: Settings, output) -> int:
    """Train, save and audit; returns the exit code. Raises ``ValueError`` or ``OSError`` for
    useless inputs.
    """
    from accelerate import PartialState
    from accelerate.utils import set_seed

    from rlhf_course.data import tokenize_pairs
    from rlhf_course.worlds.build import prepare_reward_model

    with PartialState().main_process_first():  # it builds what is missing, the others find it there
        assets = prepare_reward_model(settings, model_args.model_revision)
    train, held_out, dropped = load_data(assets.dataset, script, settings, config.seed)
    tokenizer = trl_cli.load_base_tokenizer(assets.model, model_args)
    set_seed(config.seed)  # before the head is drawn
    before = load_scorer(
        assets.model, tokenizer, config, new_head=True, **trl_cli.model_options(model_args)
    )
    train, dropped["train"]["too long"] = tokenize_pairs(train, tokenizer, config.max_length)
    held_out, dropped["test"]["too long"] = tokenize_pairs(held_out, tokenizer, config.max_length)
    too_long = dropped["train"]["too long"] + dropped["test"]["too long"]
    print(
        f"Dropped, as longer than {config.max_length} tokens: {too_long}. Left: {len(train)} and"
        f" {len(held_out)}."
    )
    if len(held_out) < 2:
        raise ValueError(
            "An audit needs at least two held-out pairs; raise --max_length or --eval_subset."
        )

    results = {
        "dataset": assets.dataset,
        "base": assets.model,
        "accuracy_before": accuracy(before, held_out),
    }
    trainer = make_trainer(before.model, tokenizer, config, model_args, train, held_out)
    code, _ = trl_cli.train(trainer, output, lambda: [trainer.evaluate()["eval_loss"]])
    if code:
        return code

    scorer = load_scorer(output.result, tokenizer, config)  # what was saved is what is audited
    share, pairs = accuracy(scorer, held_out), len(held_out)
    results |= {
        "accuracy": share,
        "accuracy_ci": 1.96 * (share * (1 - share) / pairs) ** 0.5,
    } | baselines(held_out)
    results |= {"train_pairs": len(train), "held_out_pairs": pairs, "dropped": dropped}
    table = run_audit(scorer, held_out.select(range(min(script.audit_prompts, pairs))))
    if PartialState().is_main_process:
        write_results(output.folder, results, table)
    known = "".join(f", {key.replace('_', ' ')} {results[key]:.3f}" for key in baselines(held_out))
    print(f"\n{table[['share', 'ci', 'margin', 'passed']].to_string(float_format='%.2f')}\n")
    print(
        f"Accuracy on {pairs} held-out pairs: {results['accuracy_before']:.3f} before, {share:.3f}"
        " after",
        end="",
    )
    print(f" (± {results['accuracy_ci']:.3f}){known}.")
    print(
        f"The reward model is in {output.result}; the audit in {output.folder / 'audit.json'} and"
        " audit.png."
    )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 when finished, 1 with a sentence for unusable inputs, 130 when
    stopped by Ctrl-C.
    """
    return trl_cli.main(NAME, parse_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
