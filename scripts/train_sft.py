"""Supervised fine-tuning as a command: a base model learns to answer questions, by LoRA or with all
its weights.

    python scripts/train_sft.py
    python scripts/train_sft.py --model_name_or_path FOLDER --dataset FOLDER --lora_r 8 --report_to
    tensorboard python scripts/train_sft.py --config my.yaml --output_dir runs/a
    --resume_from_checkpoint true

The loss is that of the answers and their EOS alone. The base is one that transformers knows
(convert_baichuan.py makes one of a Baichuan); the dataset holds questions and answers as HC3 does,
or instructions. --use_peft false trains all weights. Leaves model/ (adapter or model), metrics.json
and checkpoints/ in --output_dir. The options are trl's, and a few more at the end of --help;
--preset sets their defaults, --config FILE reads options from a YAML file, and the command line
wins.
"""

from rlhf_course.runtime import command

if __name__ == "__main__":
    command.loading()

import json
import math
import sys
from dataclasses import dataclass, field

import trl_cli

from rlhf_course.course.presets import PRESETS, Settings

NAME, EXPERIMENT = "train_sft.py", "05_lora_rlhf_baichuan"
NOT_HERE = (
    "packing",
    "padding_free",
    "assistant_only_loss",
    "chat_template_path",
    "eos_token",
    "dataset_kwargs",
)


@dataclass
class ScriptArguments:
    """What trl has no option for."""

    _argument_group_name = "this script"
    preset: str = field(default="tiny", metadata={"help": f"size of the run: {', '.join(PRESETS)}"})
    dataset: str | None = field(
        default=None, metadata={"help": "answers: a folder or hub id (None: the preset's)"}
    )
    data_files: str | None = field(
        default=None, metadata={"help": "files of the dataset (None: all, or the preset's)"}
    )
    subset: int | None = field(
        default=None, metadata={"help": "rows to use, from the start (none: all)"}
    )
    eval_share: float = field(
        default=0.05, metadata={"help": "share of the questions that is held out"}
    )


def preset_defaults(settings: Settings) -> dict:
    """The preset's settings under the names of the options."""
    bf16 = settings.dtype == "bfloat16"
    same = ("max_length", "dtype", "lora_r", "lora_alpha", "lora_target_modules")
    defaults = trl_cli.common_defaults(bf16, settings.sft_epochs, settings.sft_batch_size)
    return (
        defaults
        | {name: getattr(settings, name) for name in same}
        | {
            "subset": settings.sft_subset,
            "output_dir": "build/train_sft",
            "learning_rate": settings.sft_learning_rate,
            "completion_only_loss": True,
            "use_peft": True,
        }
    )


def overrides(settings: Settings, script: ScriptArguments, config, model_args) -> dict:
    """What the options change in the preset's settings. Raises ``ValueError`` for those that make
    no sense here.
    """
    trl_cli.check_whole([("subset", script.subset, 1), ("max_length", config.max_length or 0, 1)])
    if not 0 < script.eval_share < 1:
        raise ValueError(f"--eval_share takes a number between 0 and 1, got {script.eval_share}.")
    if wrong := [name for name in NOT_HERE if getattr(config, name)]:
        raise ValueError(
            f"--{wrong[0]} is not for this script: a row is one question, one answer and the base's"
            " EOS."
        )
    if not config.completion_only_loss:
        raise ValueError(
            "--completion_only_loss false is not for this script, which learns answers, not"
            " questions."
        )
    given = {
        "sft_dataset": script.dataset,
        "sft_files": script.data_files,
        "sft_subset": script.subset,
    }
    if script.dataset is None:  # the preset's files are those of its own dataset
        given = {name: value for name, value in given.items() if value is not None}
        if settings.sft_dataset is None:
            raise ValueError(
                f"--preset {script.preset} needs --dataset: a folder or hub id like HC3, or"
                " instructions."
            )
    return given | {"max_length": config.max_length}


def parse_arguments(arguments: list[str] | None = None) -> tuple:
    """ScriptArguments, SFTConfig, ModelConfig and Settings; ``SystemExit`` with a sentence for what
    is not valid.
    """
    kinds = ("SFTConfig", ScriptArguments)
    return trl_cli.parse(NAME, __doc__, EXPERIMENT, kinds, preset_defaults, overrides, arguments)


def find_inputs(model_args, settings: Settings) -> tuple[str, str]:
    """The base and the dataset, as folders or hub ids; what the preset makes itself is made."""
    from accelerate import PartialState

    from rlhf_course.runtime.hub import download
    from rlhf_course.worlds.build import build_answers, build_base

    base, dataset = model_args.model_name_or_path, settings.sft_dataset
    if base is None and settings.checkpoint == "scratch" and dataset != "offline":
        raise ValueError(
            "--model_name_or_path is needed: a base for these answers, as a folder or hub id."
        )
    with (
        PartialState().main_process_first()
    ):  # it builds or downloads what is missing, the others find it there
        if base:
            download(base, model_args.model_revision)
        return base or str(build_base(settings)), (
            str(build_answers()) if dataset == "offline" else dataset
        )


def load_base(base: str, config, model_args):
    """The base model. Raises ``ValueError`` for an adapter, and where there are no positions for
    max_length tokens.
    """
    from transformers import AutoModelForCausalLM

    from rlhf_course.policy.save_load import load_model

    model = load_model(AutoModelForCausalLM, base, **trl_cli.model_options(model_args))
    if getattr(model, "peft_config", None):
        raise ValueError(
            f"{base} is an adapter: merge it into its base first, or start from that base."
        )
    positions = getattr(
        model.config.get_text_config(), "max_position_embeddings", config.max_length
    )
    if positions < config.max_length:
        raise ValueError(
            f"--max_length {config.max_length} is more than the {positions} positions of {base}."
        )
    return model


def answer_loss(trainer) -> tuple[float, int]:
    """Mean −log p of the tokens of held-out answers with their EOS, and how many these are; no
    token counts more.
    """
    import torch

    rows, model = [], trainer.model.eval()
    for batch in trainer.get_eval_dataloader():
        labels = batch.pop("labels")[:, 1:]
        with torch.no_grad(), trainer.accelerator.autocast():
            logits = model(**batch, use_cache=False).logits[:, :-1]
        learnt = labels != -100
        losses = torch.zeros(labels.shape, device=labels.device)
        losses[learnt] = torch.nn.functional.cross_entropy(
            logits[learnt].float(), labels[learnt], reduction="none"
        )
        rows.append(
            trainer.accelerator.gather_for_metrics(torch.stack([losses.sum(1), learnt.sum(1)], 1))
        )
    total, count = torch.cat(rows).cpu().double().sum(0).tolist()
    return total / count, int(count)


def run(script: ScriptArguments, config, model_args, settings: Settings, output) -> int:
    """Train, save and measure; returns the exit code. Raises ``ValueError`` or ``OSError`` for
    useless inputs.
    """
    from transformers import TrainerCallback

    from rlhf_course.data import describe, hold_out, load_answers, tokenize_answers
    from rlhf_course.runtime.files import atomic_file

    base, dataset = find_inputs(model_args, settings)
    split = f"train[:{script.subset}]" if script.subset else "train"
    answers, dropped = load_answers(dataset, split, settings.sft_files)
    tokenizer = trl_cli.load_base_tokenizer(base, model_args)
    parts = hold_out(answers, script.eval_share, config.seed)
    parts = [tokenize_answers(part, tokenizer, config.max_length) for part in parts]
    (train, held_out), too_long = zip(*parts, strict=True)
    dropped["too long"] = sum(too_long)
    print(
        f"Answers: {len(train)} to train on, {len(held_out)} held out; dropped:"
        f" {describe(dropped)}."
    )

    model = load_base(base, config, model_args)
    trainer = trl_cli.make_trainer(
        "SFTTrainer", model, tokenizer, config, model_args, train, held_out
    )

    class Before(TrainerCallback):
        """The loss before the first step, when weights are where, or sharded as, they will be in
        training.
        """

        def on_train_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:
                before = answer_loss(trainer)[0]
                trl_cli.check_finite(
                    "The base is of no use: the loss of held-out data", before, "before training"
                )
                trainer.log({"loss_before": before})

    trainer.add_callback(Before)
    code, measured = trl_cli.train(trainer, output, lambda: answer_loss(trainer), most=100)
    if code:
        return code
    after, tokens = measured
    before = next(
        entry["loss_before"] for entry in trainer.state.log_history if "loss_before" in entry
    )
    results = {"dataset": dataset, "base": base, "loss_before": before, "loss": after}
    results |= {
        "perplexity_before": math.exp(before),
        "perplexity": math.exp(after),
        "train_rows": len(train),
    }
    results |= {"held_out_rows": len(held_out), "held_out_tokens": tokens, "dropped": dropped}
    if trainer.accelerator.is_main_process:
        with atomic_file(output.folder / "metrics.json") as path:
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(
        f"Loss per token of held-out answers: {before:.3f} before, {after:.3f} after; more in"
        " metrics.json."
    )
    print(f"The {'adapter' if model_args.use_peft else 'model'} is in {output.result}.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 when finished, 1 with a sentence for unusable inputs, 130 when
    stopped by Ctrl-C.
    """
    return trl_cli.main(NAME, parse_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
