"""Fine-tune a base model on questions and answers (SFT).

    python scripts/train_sft.py
    python scripts/train_sft.py --model_name_or_path FOLDER --dataset FOLDER --lora_r 8
    python scripts/train_sft.py --config my.yaml --output_dir runs/a --resume_from_checkpoint true

The loss covers the answers and their EOS. Transformers must support the base (convert a Baichuan
with convert_baichuan.py). The data must have the columns of HC3 or of an instruction dataset.
Training uses LoRA; --use_peft false trains all weights. Writes model/ (adapter or model),
metrics.json and checkpoints/ to --output_dir. --help lists this script's options first, and
then trl's. --preset sets defaults, --config FILE reads options from a YAML file, and the
command line overrides both.
"""

import math
import sys
from dataclasses import dataclass

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from rlhf_course.command_line import trl_run
from rlhf_course.command_line.options import option
from rlhf_course.course.presets import PRESETS, Settings
from rlhf_course.data import describe, hold_out, load_answers, tokenize_answers
from rlhf_course.policy.save_load import load_model, load_tokenizer
from rlhf_course.runtime.hub import download
from rlhf_course.synthetic.build import build_answers, build_base

NAME = "train_sft.py"
SAME = "max_length dtype lora_r lora_alpha lora_target_modules".split()
NAMES = dict(zip(SAME, SAME, strict=True)) | {"dataset": "sft_dataset", "data_files": "sft_files"}
NAMES |= {"subset": "sft_subset", "per_device_train_batch_size": "sft_batch_size"}
NAMES |= {"num_train_epochs": "sft_epochs", "learning_rate": "sft_learning_rate"}
FIXED = {"output_dir": "build/train_sft", "completion_only_loss": True, "use_peft": True}
NOT_HERE = "packing padding_free assistant_only_loss chat_template_path eos_token dataset_kwargs"


@dataclass
class ScriptArguments:
    """Hold options that trl lacks."""

    _argument_group_name = "this script"
    preset: str = option("tiny", f"size of the run: {', '.join(PRESETS)}")
    dataset: str | None = option(None, "questions and answers: a folder or hub id")
    data_files: str | None = option(None, "files of the dataset")
    subset: int | None = option(None, "rows to use, from the start")
    eval_share: float = option(0.05, "held-out share of the questions")


def parse_arguments(arguments: list[str] | None = None) -> tuple:
    """Return ScriptArguments, SFTConfig, ModelConfig and Settings.

    Raises ``ValueError`` for unsupported options.
    """
    kinds, experiment = (ScriptArguments, SFTConfig), "05_lora_rlhf_baichuan"
    found = trl_run.parse(__doc__, experiment, kinds, NAMES, FIXED, arguments)
    script, config, _, _ = found
    if not 0 < script.eval_share < 1:
        raise ValueError(f"--eval_share is {script.eval_share}; use a number between 0 and 1.")
    wrong = [name for name in NOT_HERE.split() if getattr(config, name)]
    if wrong or not config.completion_only_loss:
        raise ValueError(
            f"Omit --{wrong[0] if wrong else 'completion_only_loss false'}: this script trains on"
            " answers only. A row is one question, one answer, and the base's EOS."
        )
    if script.dataset is None:
        needed = "needs --dataset. Pass a folder or hub id of HC3-like answers or of instructions"
        raise ValueError(f"--preset {script.preset} {needed}.")
    return found


def find_inputs(model_args, settings: Settings) -> tuple[str, str]:
    """Return base and dataset as folders or hub ids; build those that the preset generates."""
    base, dataset = model_args.model_name_or_path, settings.sft_dataset
    if base is None and settings.checkpoint == "scratch" and dataset != "offline":
        raise ValueError(
            "--model_name_or_path is missing. Pass a folder or hub id of a base that fits the data."
        )
    with PartialState().main_process_first():  # other processes reuse these files
        if base:
            download(base, model_args.model_revision)
        base = base or str(build_base(settings))
        return base, str(build_answers()) if dataset == "offline" else dataset


def load_base(base: str, config, model_args):
    """Return the base model.

    Raises ``ValueError`` if it is an adapter or has too few positions.
    """
    model = load_model(AutoModelForCausalLM, base, **trl_run.model_options(model_args))
    if getattr(model, "peft_config", None):
        raise ValueError(f"{base} is an adapter. Merge it into its base, or start from that base.")
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", config.max_length)
    if positions < config.max_length:
        has = f"the {positions} positions of {base}"
        raise ValueError(f"--max_length {config.max_length} exceeds {has}. Lower it.")
    return model


@torch.no_grad()
def answer_loss(trainer) -> tuple[float, int]:
    """Return the mean −log p per token of held-out answers and EOS, and the number of tokens.

    All tokens have equal weight, whatever their batch.
    """
    rows, model = [], trainer.model.eval()
    for batch in trainer.get_eval_dataloader():
        labels = batch.pop("labels")[:, 1:]
        with trainer.accelerator.autocast():
            logits = model(**batch, use_cache=False).logits[:, :-1]
        learned = labels != -100
        losses = torch.zeros(labels.shape, device=labels.device)
        losses[learned] = torch.nn.functional.cross_entropy(
            logits[learned].float(), labels[learned], reduction="none"
        )
        both = torch.stack([losses.sum(1), learned.sum(1)], 1)
        rows.append(trainer.accelerator.gather_for_metrics(both))
    total, count = torch.cat(rows).cpu().double().sum(0).tolist()
    return total / count, int(count)


def load_rows(script: ScriptArguments, dataset: str, tokenizer, config) -> tuple:
    """Return tokenized training and held-out answers, and numbers of dropped answers by reason."""
    split = f"train[:{script.subset}]" if script.subset else "train"
    answers, dropped = load_answers(dataset, split, script.data_files)
    parts = hold_out(answers, script.eval_share, config.seed)
    parts = [tokenize_answers(part, tokenizer, config.max_length) for part in parts]
    (train, held_out), too_long = zip(*parts, strict=True)
    dropped["too long"] = sum(too_long)
    what = f"{len(train)} for training, {len(held_out)} held out; dropped: {describe(dropped)}"
    print(f"Answers: {what}.")
    return train, held_out, dropped


class Before(TrainerCallback):
    """Log the loss before the first step, so that a resumed run can read it."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            before = answer_loss(self.trainer)[0]
            trl_run.check_finite("the base's loss on held-out data", before)
            self.trainer.log({"loss_before": before})


def run(script: ScriptArguments, config, model_args, settings: Settings, output) -> int:
    """Train, measure, save, and write metrics.json; return the exit code."""
    base, dataset = find_inputs(model_args, settings)
    tokenizer = load_tokenizer(base, revision=model_args.model_revision)
    train, held_out, dropped = load_rows(script, dataset, tokenizer, config)
    model, parts = load_base(base, config, model_args), (train, held_out)
    trainer = trl_run.make_trainer(SFTTrainer, model, tokenizer, config, model_args, *parts)
    trainer.add_callback(Before(trainer))
    code, measured = trl_run.train(trainer, output, lambda: answer_loss(trainer), most=100)
    if code:
        return code
    after, tokens = measured
    logged = trainer.state.log_history
    before = next(entry["loss_before"] for entry in logged if "loss_before" in entry)
    results = {"dataset": dataset, "base": base, "loss_before": before, "loss": after}
    results |= {"perplexity_before": math.exp(before), "perplexity": math.exp(after)}
    results |= {"train_rows": len(train), "held_out_rows": len(held_out)}
    output.write("metrics.json", results | {"held_out_tokens": tokens, "dropped": dropped})
    print(f"Loss per token of held-out answers: {before:.3f} before, {after:.3f} after.")
    print(f"The {'adapter' if model_args.use_peft else 'model'} is in {output.result}.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when finished, 1 after an error, and 130 after Ctrl-C."""
    return trl_run.main(NAME, parse_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
