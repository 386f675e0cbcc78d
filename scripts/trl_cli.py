"""What the commands over trl's trainers share: their options, output folder, tracking, and how they
end.
"""

import argparse
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import command_line

from rlhf_course.course.presets import load_preset
from rlhf_course.runtime import command

CHECKPOINTS, KINDS = "checkpoints", ("train", "eval")

NO_REMOTE_CODE = (
    "Remote code is not run here: convert the model to one that transformers knows (Baichuan:"
    " convert_baichuan.py)."
)


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and every default."""


def common_defaults(bf16: bool, epochs: float, batch_size: int) -> dict:
    """Defaults that both commands have and trl has not. bf16 needs a GPU that can do it."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "bf16": bf16 and gpu and torch.cuda.is_bf16_supported(),
        "num_train_epochs": epochs,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "seed": 0,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": gpu,
        "train_sampling_strategy": "group_by_length",
        "save_total_limit": 2,
        "logging_nan_inf_filter": False,  # which hides what it should show
        "disable_tqdm": False,
        "ddp_find_unused_parameters": False,  # there are none
        "accelerator_config": {
            "use_configured_state": True
        },  # what distributed.init() found, CPUs over gloo too
    }


def parse(name, about, experiment, kinds, defaults, overrides, arguments) -> tuple:
    """The script's own arguments, trl's config, ModelConfig and Settings; ``SystemExit`` with a
    sentence for bad ones.

    The command line wins over the YAML file, and this over the preset.

    Args:
        name, about: the script's name, and what --help says of it.
        experiment: whose presets there are.
        kinds: the name of trl's config class, and the script's dataclass.
        defaults: settings of the preset → options.
        overrides: settings of the preset, script, config and model arguments → what these change in
            the settings; may raise ``ValueError``.
        arguments: the command line; None takes the process's.
    """
    with command_line.read(name, ["preset"], arguments) as (given, read):
        preset = given["preset"] = str(given.get("preset", "tiny"))
        settings = load_preset(experiment, preset)
        with warnings.catch_warnings(action="ignore"):
            import trl

            classes = (getattr(trl, kinds[0]), trl.ModelConfig, kinds[1])
            how = {"description": about, "formatter_class": HelpFormatter}
            config_args, model_args, script = read(classes, defaults(settings), **how)
        numbers = vars(config_args) | vars(model_args) | vars(script)
        if wrong := [
            name for name, x in numbers.items() if isinstance(x, float) and not math.isfinite(x)
        ]:
            raise ValueError(f"--{wrong[0]} takes a finite number, got {numbers[wrong[0]]}.")
        check_whole([("lora_r", model_args.lora_r, 1)])
        check_whole(
            [
                (f"per_device_{kind}_batch_size", numbers[f"per_device_{kind}_batch_size"], 1)
                for kind in KINDS
            ]
        )
        if config_args.trust_remote_code:
            raise ValueError(NO_REMOTE_CODE)
        if model_args.load_in_4bit or model_args.load_in_8bit:
            raise ValueError(
                "Quantized bases (--load_in_4bit, --load_in_8bit) are not supported here; try"
                " --use_peft."
            )
        settings = load_preset(
            experiment, preset, overrides(settings, script, config_args, model_args)
        )
    return script, config_args, model_args, settings


def check_whole(numbers: list[tuple]) -> None:
    """Raise ``ValueError`` unless in each (option, value, least) the value is None or a whole
    number from least on.
    """
    for name, value, least in numbers:
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"--{name} takes a whole number of at least {least}, got {value!r}.")


def begin(config) -> Path:
    """The output folder; libraries are quiet from here on, and wandb asks nothing.

    Raises ``ValueError`` under DeepSpeed's ZeRO-3.
    """
    if config.deepspeed_plugin and config.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "ZeRO-3 does not run here; scripts/accelerate/fsdp.yaml shards the weights as well."
        )
    output = Path(config.output_dir)
    config.output_dir = str(output / CHECKPOINTS)

    from rlhf_course.course.run_card import quiet_libraries
    from rlhf_course.runtime.files import check_folder
    from rlhf_course.runtime.tracking import prepare_wandb

    quiet_libraries()
    warnings.filterwarnings(
        "ignore", message="fan_in_fan_out"
    )  # peft on GPT-2's layers, about what it sets itself
    if "wandb" in config.report_to:
        prepare_wandb()
    if "tensorboard" in config.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(check_folder(output / "tensorboard")))
    return output


def open_output(name: str, folder: Path, script, config, model_args):
    """The output folder, held for this run: see :func:`outputs.open_output`."""
    import outputs
    from accelerate import PartialState

    settings = config.to_dict() | vars(model_args) | vars(script)
    settings |= {"processes": PartialState().num_processes, "command": name}
    wanted = str(config.resume_from_checkpoint or "false")
    resume = {"false": False, "no": False, "none": False, "true": True, "yes": True}.get(
        wanted.lower(), wanted
    )
    inputs, option = ("dataset", "model_name_or_path"), "--resume_from_checkpoint true"
    return outputs.open_output(folder, "model", settings, inputs, option, resume, CHECKPOINTS)


def load_base_tokenizer(path: str, model_args):
    """The base's tokenizer. Raises ``ValueError`` where it has no EOS token."""
    from rlhf_course.policy.save_load import load_tokenizer

    tokenizer = load_tokenizer(path, revision=model_args.model_revision)
    if tokenizer.eos_token is None:
        raise ValueError(f"The tokenizer of {path} has no EOS token, which ends every dialogue.")
    return tokenizer


def model_options(model_args) -> dict:
    """How to load the base, as from_pretrained takes it."""
    names = {
        "dtype": "dtype",
        "attn_implementation": "attn_implementation",
        "revision": "model_revision",
    }
    return {name: getattr(model_args, argument) for name, argument in names.items()}


def make_trainer(kind: str, model, tokenizer, config, model_args, train, held_out):
    """trl's trainer of that name on tokenized data, with the latest numbers beside its progress
    bar.
    """
    import torch
    import trl
    from torch.distributed.tensor import DTensor
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback
    from transformers.trainer_pt_utils import LengthGroupedSampler

    class SameOrder(TrainerCallback):
        """An epoch's order depends on seed and epoch alone, so a resumed run goes on with the rows
        still to come.
        """

        def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
            batches = train_dataloader.batch_sampler
            batches = getattr(
                batches, "batch_sampler", batches
            )  # under it, where processes share the batches
            sampler = getattr(batches, "sampler", None)
            if isinstance(sampler, LengthGroupedSampler):
                sampler.generator = torch.Generator().manual_seed(args.seed + int(state.epoch))

    class Finite(TrainerCallback):
        """Ends training at a gradient of NaN or Inf, before it moves a weight; with float16, steps
        are left out.
        """

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            if not args.fp16:
                step = state.global_step + 1
                check_finite(
                    "Training diverged: the norm of the gradient", norm.item(), f"in step {step}"
                )

    class Bar(ProgressCallback):
        """The progress bar, without a dictionary scrolling by at every log."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            if self.training_bar is not None and logs:
                names = ("loss", "accuracy", "mean_token_accuracy", "eval_accuracy")
                self.training_bar.set_postfix(
                    {key: f"{logs[key]:.3f}" for key in names if key in logs}, refresh=False
                )

    if str(
        model_args.lora_target_modules
    ).isidentifier():  # trl makes of one name a pattern for whole paths
        model_args.lora_target_modules = model_args.lora_target_modules and [
            model_args.lora_target_modules
        ]
    trainer = getattr(trl, kind)(
        model,
        config,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=trl.get_peft_config(model_args),
    )
    trainer.add_callback(SameOrder)
    trainer.add_callback(Finite)
    trainer.remove_callback(PrinterCallback if config.disable_tqdm else ProgressCallback)
    if not config.disable_tqdm:
        trainer.add_callback(Bar)
    return trainer


def check_finite(what: str, number: float, when: str, most: float = math.inf) -> None:
    """Raise ``FloatingPointError`` unless a number that training depends on is finite, and below
    ``most``.
    """
    if not -math.inf < number < most:
        cure = "Lower --learning_rate, or look at the base's weights and --dtype."
        raise FloatingPointError(f"{what} is {number:g} {when}, so no model was saved. {cure}")


def train(
    trainer, output, measure: Callable[[], tuple], most: float = math.inf
) -> tuple[int, tuple]:
    """Train, from the output's checkpoint on where there is one, and save model or adapter, and
    tokenizer.

    Returns 0 and what ``measure`` found after training, the loss of held-out data first; or the
    exit code of a run that was stopped between steps, which leaves a checkpoint and no model, and
    (). Raises ``FloatingPointError``, with no model saved, where a gradient or that loss is NaN or
    Inf, or the loss not below ``most``.
    """
    from contextlib import nullcontext

    import torch
    from peft import PeftModel
    from transformers import TrainerCallback

    from rlhf_course.policy.save_load import model_folder
    from rlhf_course.runtime.files import obey_umask, say_when_full

    stopped = []

    class Stop(TrainerCallback):
        """Ctrl-C and SIGTERM end the run after a step with a checkpoint, which whom the umask lets
        can read.
        """

        def on_step_end(self, args, state, control, **kwargs):
            code = torch.tensor(float(asked.code), device=args.device)
            if (
                trainer.accelerator.reduce(code).item() > 0
            ):  # all processes stop after the same step
                stopped.append(asked.code or 130)
                control.should_save = control.should_training_stop = True

        def on_save(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                obey_umask(Path(args.output_dir))

    output.begin(trainer.model)
    trainer.add_callback(Stop)
    with command.stop_between_steps() as asked, say_when_full(Path(trainer.args.output_dir)):
        trainer.train(resume_from_checkpoint=output.checkpoint and str(output.checkpoint))
    if stopped:
        print(
            f"Stopped after step {trainer.state.global_step}; --resume_from_checkpoint true goes on"
            " from there."
        )
        return stopped[0], ()
    measured = measure()
    check_finite("Training diverged: the loss of held-out data", measured[0], "after it", most)
    first = (
        trainer.accelerator.is_main_process
    )  # the others take part in gathering the weights, and write nothing
    adapter = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
    with model_folder(output.result, adapter) if first else nullcontext(output.result) as aside:
        trainer.save_model(aside)
    trainer.accelerator.wait_for_everyone()
    return 0, measured


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Returns the exit code of ``run``, which gets the run's output beside what was parsed: see
    command_line.main.
    """

    def parse_there(arguments: list[str]) -> tuple:
        from rlhf_course.runtime.distributed import init_quietly

        init_quietly()  # before trl's config asks which process this is
        return parse_arguments(arguments)

    def run_there(script, config, model_args, settings) -> int:
        with open_output(name, begin(config), script, config, model_args) as output:
            return run(script, config, model_args, settings, output)

    return command_line.main(name, parse_there, run_there, arguments)
