"""Fine-tune a base model on questions and answers (SFT).

    python scripts/train_sft.py
    python scripts/train_sft.py --model_name_or_path FOLDER --dataset FOLDER --lora_r 8
    python scripts/train_sft.py --config my.yaml --output_dir runs/a --resume_from_checkpoint true

The loss covers the answers and their EOS. Transformers must support the base (convert a Baichuan
with convert_baichuan.py). The data must have questions and answers, messages, or HC3's columns.
Training uses LoRA; --use_peft false trains all weights. Writes model/ (adapter or model),
metrics.json, checkpoints/, log.jsonl (statistics), evaluations.jsonl (held-out loss) and
texts.jsonl (sampled answers) to --output_dir. --help lists this script's options first, and
then trl's. --preset sets defaults, --config FILE reads options from a YAML file, and the
command line overrides both.
"""

import math
import sys
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from rlhf_course.command_line import base_checks, command_presets, trl_run
from rlhf_course.command_line.options import option
from rlhf_course.command_line.records import SHOWN
from rlhf_course.course.presets import Settings
from rlhf_course.data import (
    decode_answers,
    describe,
    hold_out,
    load_answers,
    prompt_ids,
    tokenize_answers,
)
from rlhf_course.policy.network import without_dropout
from rlhf_course.policy.save_load import load_model, load_tokenizer
from rlhf_course.ppo.sampling import SAMPLING, refuse_nan
from rlhf_course.runtime.hub import download
from rlhf_course.synthetic.build import build_answers, build_base

NAME = "train_sft.py"
# Options → notebook 05's settings.
SETTING_NAMES = {
    "dataset": "sft_dataset",
    "data_files": "sft_files",
    "subset": "sft_subset",
    "max_length": "max_length",
    "per_device_train_batch_size": "sft_batch_size",
    "num_train_epochs": "sft_epochs",
    "learning_rate": "sft_learning_rate",
    "dtype": "dtype",
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_target_modules": "lora_target_modules",
}
FIXED = {"output_dir": "build/train_sft", "completion_only_loss": True, "use_peft": True}
UNSUPPORTED = (
    "packing",
    "padding_free",
    "assistant_only_loss",
    "chat_template_path",
    "eos_token",
    "dataset_kwargs",
)


@dataclass
class ScriptArguments:
    """Hold options that trl lacks."""

    _argument_group_name = "this script"
    preset: str = option("tiny", command_presets.HELP)
    dataset: str | None = option(None, "questions and answers: a folder or hub id")
    data_dir: str | None = option(None, "subfolder of a dataset folder")
    data_files: str | None = option(None, "files of the dataset")
    columns: str | None = option(None, "its columns, such as prompt=question,answer=response")
    split: str = option("train", "split to use")
    subset: int | None = option(None, "rows to use, from the start")
    eval_share: float = option(0.05, "held-out share of the questions")
    max_new_tokens: int = option(48, "longest sampled answer in texts.jsonl, tokens")


def parse_arguments(arguments: list[str] | None = None) -> tuple:
    """Return ScriptArguments, SFTConfig, ModelConfig and Settings.

    Raises ``ValueError`` for unsupported options.
    """
    script, config, model_args, settings = trl_run.parse(
        __doc__,
        "05_lora_rlhf_baichuan",
        classes=(ScriptArguments, SFTConfig),
        setting_names=SETTING_NAMES,
        fixed=FIXED,
        arguments=arguments,
    )
    if script.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens must be at least 1; got {script.max_new_tokens}.")
    if not 0 < script.eval_share < 1:
        raise ValueError(f"--eval_share is {script.eval_share}; use a number between 0 and 1.")
    unsupported = [name for name in UNSUPPORTED if getattr(config, name)]
    if not config.completion_only_loss:
        unsupported.append("completion_only_loss false")
    if unsupported:
        raise ValueError(
            f"Omit --{unsupported[0]}: this script trains on answers only. A row is one question,"
            " one answer, and the base's EOS."
        )
    if script.dataset is None:
        raise ValueError(
            f"--preset {script.preset} needs --dataset. Pass a folder or hub id of HC3-like answers"
            " or of instructions."
        )
    return script, config, model_args, settings


def find_inputs(model_args, settings: Settings) -> tuple[str, str]:
    """Return base and dataset as folders or hub ids; build those that the preset generates."""
    base = model_args.model_name_or_path
    dataset = settings.sft_dataset
    if base is None and settings.checkpoint == command_presets.REAL_MODEL:
        base = command_presets.find_real_model(settings.checkpoint)
    if base is None and settings.checkpoint == "scratch" and dataset != "offline":
        raise ValueError(
            "--model_name_or_path is missing. Pass a folder or hub id of a base that fits the data."
        )
    with PartialState().main_process_first():  # other processes reuse these files
        if base:
            download(base, model_args.model_revision)
        else:
            base = str(build_base(settings))
        if dataset == "offline":
            dataset = str(build_answers())
    return base, dataset


def load_base(base: str, config, model_args):
    """Return the base model.

    Raises ``ValueError`` if it is an adapter or has too few positions.
    """
    model = load_model(AutoModelForCausalLM, base, **trl_run.model_options(model_args))
    if getattr(model, "peft_config", None):
        raise ValueError(f"{base} is an adapter. Merge it into its base, or start from that base.")
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", config.max_length)
    if positions < config.max_length:
        raise ValueError(
            f"--max_length {config.max_length} exceeds the {positions} positions of {base}."
            " Lower it."
        )
    return model


@torch.no_grad()
def answer_loss(trainer) -> tuple[float, int]:
    """Return the mean −log p per token of held-out answers and EOS, and the number of tokens.

    All tokens have equal weight, whatever their batch.
    """
    model = trainer.model.eval()
    sums = []  # a batch's tensor (B, 2): each row's loss and number of tokens
    for batch in trainer.get_eval_dataloader():
        labels = batch.pop("labels")[:, 1:]
        with trainer.accelerator.autocast():
            logits = model(**batch, use_cache=False).logits[:, :-1]
        learned = labels != -100
        losses = torch.zeros(labels.shape, device=labels.device)
        losses[learned] = torch.nn.functional.cross_entropy(
            logits[learned].float(), labels[learned], reduction="none"
        )
        row_sums = torch.stack([losses.sum(1), learned.sum(1)], 1)
        sums.append(trainer.accelerator.gather_for_metrics(row_sums))
    total, count = torch.cat(sums).cpu().double().sum(0).tolist()
    return total / count, int(count)


def place_data(script: ScriptArguments, dataset: str) -> tuple[str, str | None]:
    """Return the folder or hub id, and the file names, with ``--data_dir`` applied.

    Raises ``ValueError`` for a subfolder of a hub dataset without file names.
    """
    if not script.data_dir:
        return dataset, script.data_files
    if Path(dataset).is_dir():
        return str(Path(dataset, script.data_dir)), script.data_files
    if not script.data_files:
        raise ValueError(f"--data_dir of {dataset} needs --data_files: a file in that subfolder.")
    return dataset, f"{script.data_dir}/{script.data_files}"


def load_rows(script: ScriptArguments, dataset: str, tokenizer, config) -> tuple:
    """Return tokenized training and held-out answers, numbers of dropped answers, and prompts.

    The numbers are by reason. The prompts are a few held-out ones, as texts.
    """
    split = f"{script.split}[:{script.subset}]" if script.subset else script.split
    place, data_files = place_data(script, dataset)
    answers, dropped = load_answers(place, split, data_files, script.columns)
    base_checks.warn_about_texts(tokenizer, answers["prompt"][: base_checks.COMPARED])
    train, held_out = hold_out(answers, script.eval_share, config.seed)
    prompts = list(dict.fromkeys(held_out["prompt"]))
    train, train_too_long = tokenize_answers(train, tokenizer, config.max_length)
    held_out, held_out_too_long = tokenize_answers(held_out, tokenizer, config.max_length)
    dropped["too long"] = train_too_long + held_out_too_long
    limit = ""
    if dropped["too long"]:
        limit = f" (more than {config.max_length} tokens; raise --max_length)"
    print(
        f"Answers: {len(train)} for training, {len(held_out)} held out; dropped:"
        f" {describe(dropped)}{limit}."
    )
    show_example(train[0], tokenizer)
    lengths = [len(ids) for ids in prompt_ids(tokenizer, prompts)]
    short = [
        prompt
        for prompt, length in zip(prompts, lengths, strict=True)
        if length < config.max_length
    ]
    return train, held_out, dropped, short[:SHOWN]


def show_example(row: dict, tokenizer) -> None:
    """Print an encoded row; the tokens that count in the loss are in ⟦ ⟧."""
    parts = []
    tokens = zip(row["input_ids"], row["completion_mask"], strict=True)
    for counts, group in groupby(tokens, key=itemgetter(1)):
        text = tokenizer.decode([token for token, _ in group])
        parts.append(f"⟦{text}⟧" if counts else text)
    print(
        f"A training row has {len(row['input_ids'])} tokens, of which {sum(row['completion_mask'])}"
        f" count in the loss, here in ⟦ ⟧:\n{''.join(parts)}\n"
    )


@torch.no_grad()
def sample_answers(trainer, tokenizer, prompts: list[str], most: int) -> list[dict]:
    """Return rows of prompt and answer, of at most ``most`` tokens, sampled with a fixed seed.

    The random generators' states are restored. Raises ``FloatingPointError`` for NaN.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    rows = {"input_ids": prompt_ids(tokenizer, prompts)}
    batch = tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(model.device)
    width = batch["input_ids"].shape[1]
    room = trainer.args.max_length - width
    with without_dropout(model), torch.random.fork_rng(), trainer.accelerator.autocast():
        torch.manual_seed(0)
        ids = model.generate(
            **batch,
            **SAMPLING,
            max_new_tokens=min(most, room),
            logits_processor=[refuse_nan],
            pad_token_id=tokenizer.pad_token_id,
            use_cache=True,
        )
    answers = decode_answers(tokenizer, ids[:, width:])
    return [
        {"prompt": prompt, "answer": answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def make_report(trainer, script: ScriptArguments, tokenizer, train, prompts) -> trl_run.Report:
    """Return what the run records: held-out loss, and answers to ``prompts``."""

    def measure_before() -> dict:
        before, _ = answer_loss(trainer)
        trl_run.check_finite("the base's loss on held-out data", before)
        trainer.log({"loss_before": before})  # a resumed run reads it
        return {"loss": before}

    return trl_run.Report(
        measure_before=measure_before,
        read_texts=lambda: sample_answers(trainer, tokenizer, prompts, script.max_new_tokens),
        row_tokens=sum(map(len, train["input_ids"])) / len(train),
        advice="--subset or --max_steps",
    )


def run(script: ScriptArguments, config, model_args, settings: Settings, output) -> int:
    """Train, measure, save, and write metrics.json; return the exit code."""
    base, dataset = find_inputs(model_args, settings)
    tokenizer = load_tokenizer(base, revision=model_args.model_revision)
    train, held_out, dropped, prompts = load_rows(script, dataset, tokenizer, config)
    model = load_base(base, config, model_args)
    base_checks.warn_about_step_size(model, script.preset, config.learning_rate)
    trainer = trl_run.make_trainer(
        SFTTrainer, model, tokenizer, config, model_args, train, held_out
    )
    report = make_report(trainer, script, tokenizer, train, prompts)
    records = trl_run.open_records(output)
    code, measured = trl_run.train(
        trainer, output, records, report, lambda: answer_loss(trainer), limit=100
    )
    if code:
        return code
    after, tokens = measured
    records.add_evaluation(trainer.state.global_step, {"loss": after})
    logged = trainer.state.log_history
    before = next(entry["loss_before"] for entry in logged if "loss_before" in entry)
    metrics = {
        "dataset": dataset,
        "base": base,
        "loss_before": before,
        "loss": after,
        "perplexity_before": math.exp(before),
        "perplexity": math.exp(after),
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "held_out_tokens": tokens,
        "dropped": dropped,
    }
    output.write("metrics.json", metrics)
    print(
        f"Loss per token of held-out answers: {before:.3f} before, {after:.3f} after. Sampled"
        f" answers: {records.texts.file}."
    )
    print(f"The {'adapter' if model_args.use_peft else 'model'} is in {output.result}.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when finished, 1 after an error, and 130 after Ctrl-C."""
    return trl_run.main(NAME, parse_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
