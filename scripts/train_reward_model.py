"""Train a reward model on preference pairs and audit it, as notebook 01 does.

    python scripts/train_reward_model.py
    python scripts/train_reward_model.py --preset scratch --dataset FOLDER --output_dir runs/a
    python scripts/train_reward_model.py --preset small --dataset FOLDER
    python scripts/train_reward_model.py --preset full --use_peft --lora_r 16 --report_to wandb
    python scripts/train_reward_model.py --output_dir runs/a --resume_from_checkpoint true

Writes model/, audit.json, audit.png, checkpoints/, log.jsonl (statistics), evaluations.jsonl
(held-out accuracy) and texts.jsonl (scored pairs) to --output_dir. --help lists this script's
options first, and then trl's. --preset sets defaults, --config FILE reads options
from a YAML file, and the command line overrides both.
"""

import sys
from dataclasses import dataclass

import numpy as np
from accelerate import PartialState
from accelerate.utils import set_seed
from trl import RewardConfig, RewardTrainer

from rlhf_course.audit import PASS, audit
from rlhf_course.command_line import base_checks, command_presets, trl_run
from rlhf_course.command_line.options import option
from rlhf_course.command_line.records import SHOWN
from rlhf_course.course.plots import audit_bars
from rlhf_course.course.presets import Settings
from rlhf_course.data import describe, hold_out, load_pairs, tokenize_pairs
from rlhf_course.data.encoding import write_form
from rlhf_course.data.rows import UnknownSplitError
from rlhf_course.policy.save_load import load_tokenizer
from rlhf_course.rewards import RewardModel, load_reward_model, require_finite
from rlhf_course.runtime.files import atomic_file
from rlhf_course.synthetic.build import prepare_reward_model

NAME = "train_reward_model.py"
# Options → notebook 01's settings.
SETTING_NAMES = {
    "dataset": "dataset",
    "data_dir": "data_dir",
    "train_subset": "train_subset",
    "eval_subset": "eval_subset",
    "audit_prompts": "audit_prompts",
    "model_name_or_path": "model",
    "max_length": "max_length",
    "per_device_train_batch_size": "batch_size",
    "num_train_epochs": "epochs",
    "learning_rate": "learning_rate",
}
FIXED = {
    "output_dir": "build/train_reward_model",
    "lora_task_type": "SEQ_CLS",
    "lora_modules_to_save": ["score"],
    "remove_unused_columns": False,  # the sampler needs column "length"
}


@dataclass
class ScriptArguments:
    """Hold options that trl lacks."""

    _argument_group_name = "this script"
    preset: str = option("tiny", command_presets.HELP)
    dataset: str | None = option(None, "preference pairs: a folder or hub id")
    data_dir: str | None = option(None, "subfolder of the dataset")
    columns: str | None = option(
        None, "its columns, such as prompt=question,chosen=response_j,rejected=response_k"
    )
    split: str = option("train", "split to train on")
    eval_split: str = option(
        "test", "split that is held out; without a split test, a tenth of --split"
    )
    train_subset: int | None = option(None, "pairs to train on")
    eval_subset: int | None = option(None, "pairs held out")
    audit_prompts: int = option(300, "held-out prompts in the audit")


def parse_arguments(arguments: list[str] | None = None) -> tuple:
    """Return ScriptArguments, RewardConfig, ModelConfig and Settings."""
    return trl_run.parse(
        __doc__,
        "01_reward_modeling",
        classes=(ScriptArguments, RewardConfig),
        setting_names=SETTING_NAMES,
        fixed=FIXED,
        arguments=arguments,
    )


def load_data(dataset: str, script: ScriptArguments, seed: int) -> tuple:
    """Return training pairs, held-out pairs, and numbers of dropped pairs by split and reason.

    If there is no split test, a tenth of the prompts, with all their pairs, are held out.
    """

    def load(split: str, count: int | None):
        rows = f"{split}[:{count}]" if count else split
        pairs, report = load_pairs(dataset, rows, script.data_dir, script.columns)
        print(f"{split}: {len(pairs)} pairs; dropped: {describe(report)}.")
        return pairs, report

    train, dropped = load(script.split, script.train_subset)
    try:
        held_out, dropped_test = load(script.eval_split, script.eval_subset)
    except UnknownSplitError:
        if script.eval_split != "test":  # the reader named it
            raise
        train, held_out = hold_out(train, 0.1, seed)
        dropped_test = {}
        if script.eval_subset:
            held_out = held_out.select(range(min(len(held_out), script.eval_subset)))
        print(
            f"{dataset} has no test split: {len(held_out)} pairs of the {script.split} split are"
            " held out, by prompt."
        )
    shared = len(distinct(train) & distinct(held_out))
    if shared:
        print(
            f"Warning: {shared} held-out pairs are also training pairs. Remove them from one split."
        )
    return train, held_out, {"train": dropped, "test": dropped_test}


def distinct(pairs) -> set[tuple[str, str, str]]:
    """Return the distinct (prompt, chosen, rejected)."""
    return set(zip(pairs["prompt"], pairs["chosen"], pairs["rejected"], strict=True))


def load_scorer(path: str, tokenizer, config, form: str | None = None, **options) -> RewardModel:
    """Return a RewardModel on the run's device; raise ``ValueError`` for too few positions."""
    model = load_reward_model(path, **options).to(config.device)
    scorer = RewardModel(model, tokenizer, form=form)
    if scorer.max_length < config.max_length:
        raise ValueError(
            f"--max_length {config.max_length} exceeds the {scorer.max_length} positions of {path}."
            " Lower it."
        )
    return scorer


def accuracy(scorer, pairs) -> float:
    """Return the share of pairs whose chosen answer outscores the rejected one."""
    prompts = pairs["prompt"][:]
    chosen_answers = pairs["chosen"][:]
    rejected_answers = pairs["rejected"][:]
    chosen = require_finite(scorer(prompts, chosen_answers), chosen_answers)
    rejected = require_finite(scorer(prompts, rejected_answers), rejected_answers)
    return (chosen > rejected).double().mean().item()


def baselines(pairs) -> dict[str, float]:
    """Return the accuracy of preferring longer answers, and the best possible accuracy.

    Ties in length count as 0.5. The best possible accuracy needs pairs with gold scores.
    """
    both = zip(pairs["chosen"], pairs["rejected"], strict=True)
    longer = np.sign([len(chosen) - len(rejected) for chosen, rejected in both])
    accuracies = {"length_baseline": float((longer / 2 + 0.5).mean())}
    if {"gold_chosen", "gold_rejected"} <= set(pairs.column_names):
        margin = np.array(pairs["gold_chosen"][:]) - np.array(pairs["gold_rejected"][:])
        accuracies["ceiling"] = float((1 / (1 + np.exp(-np.abs(margin)))).mean())
    return accuracies


SPARE_TOKENS = 8  # EOS, and tokens added by cutting inside a word


def run_audit(scorer, pairs):
    """Return the audit's table for the chosen answers; truncate overlong answers."""
    tokenizer = scorer.tokenizer
    max_tokens = scorer.max_length - SPARE_TOKENS

    def cut(answer: str) -> str:
        ids = tokenizer(f" {answer}")["input_ids"]
        if len(ids) <= max_tokens:
            return answer
        return tokenizer.decode(ids[:max_tokens], skip_special_tokens=True).strip()

    def score(prompts, answers):
        return scorer(prompts, [cut(answer) for answer in answers])

    return audit(score, pairs["prompt"][:], pairs["chosen"][:])


def write_results(output, results: dict, table) -> None:
    """Write audit.json and audit.png, and print their numbers."""
    output.write("audit.json", results | {"probes": table.to_dict("index")})
    if PartialState().is_main_process:
        with atomic_file(output.folder / "audit.png") as path:
            audit_bars({"this reward model": table}, PASS).savefig(path, format="png", dpi=150)
    print(f"\n{table[['share', 'ci', 'margin', 'passed']].to_string(float_format='%.2f')}\n")
    print(
        f"Accuracy on {results['held_out_pairs']} held-out pairs: {results['accuracy_before']:.3f}"
        f" before, {results['accuracy']:.3f} ± {results['accuracy_ci']:.3f} after; choosing"
        f" the longer answer gives {results['length_baseline']:.3f}."
    )


def tokenize(pairs, report: dict, tokenizer, max_length: int, form: str):
    """Return pairs, tokenized in a form of data/encoding.py; count overlong pairs in ``report``."""
    rows, report["too long"] = tokenize_pairs(pairs, tokenizer, max_length, form)
    print(
        f"{len(rows)} pairs remain; dropped as too long: {report['too long']} (more than"
        f" {max_length} tokens; raise --max_length)."
    )
    return rows


def make_report(trainer, accuracy_before: float, train, held_out, form: str) -> trl_run.Report:
    """Return what the run records: held-out accuracy, and the scores of the first held-out pairs.

    ``train`` and ``held_out`` are tokenized in ``form``.
    """
    shown = held_out.select(range(min(SHOWN, len(held_out))))

    def score_pairs() -> list[dict]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        scorer = RewardModel(model, trainer.processing_class, form=form)
        rows = [{"prompt": row["prompt"]} for row in shown]
        for side in ("chosen", "rejected"):
            scores = scorer(shown["prompt"][:], shown[side][:]).tolist()
            for row, answer, score in zip(rows, shown[side], scores, strict=True):
                row |= {side: answer, f"{side}_score": round(score, 4)}
        return rows

    tokens = sum(map(len, train["chosen_ids"])) + sum(map(len, train["rejected_ids"]))
    return trl_run.Report(
        measure_before=lambda: {"accuracy": accuracy_before},
        read_texts=score_pairs,
        row_tokens=tokens / len(train),
        advice="--train_subset or --max_steps",
    )


def prepare_data(script: ScriptArguments, config, model_args, settings: Settings) -> tuple:
    """Return the dataset's and base's places, both splits, counts of dropped pairs, tokenizer."""
    settings.model = command_presets.find_real_model(settings.model)
    with PartialState().main_process_first():  # other processes reuse these files
        reading = {"split": script.split, "columns": script.columns}
        assets = prepare_reward_model(settings, model_args.model_revision, reading)
    train, held_out, dropped = load_data(assets.dataset, script, config.seed)
    tokenizer = load_tokenizer(assets.model, revision=model_args.model_revision)
    base_checks.warn_about_texts(tokenizer, train["chosen"][: base_checks.COMPARED])
    return assets, train, held_out, dropped, tokenizer


def run(script: ScriptArguments, config, model_args, settings: Settings, output) -> int:
    """Train, save and audit a model; return the exit code."""
    assets, train, held_out, dropped, tokenizer = prepare_data(script, config, model_args, settings)
    set_seed(config.seed)  # before the head is initialized
    options = trl_run.model_options(model_args)
    before = load_scorer(assets.model, tokenizer, config, new_head=True, **options)
    base_checks.warn_about_step_size(before.model, script.preset, config.learning_rate)
    form = before.form
    train = tokenize(train, dropped["train"], tokenizer, config.max_length, form)
    held_out = tokenize(held_out, dropped["test"], tokenizer, config.max_length, form)
    audited = min(script.audit_prompts, len(held_out))
    if audited < 2:
        raise ValueError(
            "An audit needs at least two held-out pairs; raise --max_length, --eval_subset or"
            " --audit_prompts."
        )

    accuracy_before = accuracy(before, held_out)
    columns = ["chosen_ids", "rejected_ids", "length"]
    trainer = trl_run.make_trainer(
        RewardTrainer,
        before.model,
        tokenizer,
        config,
        model_args,
        train.select_columns(columns),
        held_out.select_columns(columns),
    )

    def held_out_loss() -> tuple[float]:
        return (trainer.evaluate()["eval_loss"],)

    records = trl_run.open_records(output)
    report = make_report(trainer, accuracy_before, train, held_out, form)
    code, _ = trl_run.train(trainer, output, records, report, held_out_loss)
    if code:
        return code
    write_record_of_form(output, form)
    scorer = load_scorer(output.result, tokenizer, config, form)  # measure the saved model
    results = {"dataset": assets.dataset, "base": assets.model, "accuracy_before": accuracy_before}
    results |= measure(scorer, held_out)
    records.add_evaluation(trainer.state.global_step, {"accuracy": results["accuracy"]})
    results |= {"train_pairs": len(train), "dropped": dropped}
    table = run_audit(scorer, held_out.select(range(audited)))
    write_results(output, results, table)
    print(f"The reward model is in {output.result}, and the audit is in {output.folder}.")
    return 0


def write_record_of_form(output, form: str) -> None:
    """Write beside the model how texts become token ids, in the first process."""
    if PartialState().is_main_process:
        write_form(output.result, form)
    PartialState().wait_for_everyone()


def measure(scorer: RewardModel, held_out) -> dict[str, float]:
    """Return the accuracy on held-out pairs, with a 95 % half-width, beside simple rules."""
    share = accuracy(scorer, held_out)
    error = (share * (1 - share) / len(held_out)) ** 0.5
    return {
        "accuracy": share,
        "accuracy_ci": 1.96 * error,
        **baselines(held_out),
        "held_out_pairs": len(held_out),
    }


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when finished, 1 after an error, and 130 after Ctrl-C."""
    return trl_run.main(NAME, parse_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
