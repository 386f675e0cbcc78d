"""What the commands over trl's trainers share: their options, and a run from its output folder."""

import argparse
import math
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from command_line import exits, options
from rlhf_course.course.presets import load_preset

# With these, and the script's own options, a resumed run must agree.
SAME = """max_length learning_rate lr_scheduler_type warmup_steps weight_decay optim max_grad_norm
max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps seed bf16 fp16
dtype use_peft lora_r lora_alpha lora_dropout lora_target_modules train_sampling_strategy""".split()


def common_defaults(bf16: bool, epochs: float, batch_size: int) -> dict:
    """Return defaults that both commands have and trl has not; bf16 needs a GPU that has it."""
    import torch

    gpu = torch.cuda.is_available()
    sizes = {f"per_device_{part}_batch_size": batch_size for part in ("train", "eval")}
    return sizes | {
        "bf16": bf16 and gpu and torch.cuda.is_bf16_supported(),
        "num_train_epochs": epochs,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "seed": 0,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": gpu,
        "train_sampling_strategy": "group_by_length",
        "save_total_limit": 2,
        "logging_nan_inf_filter": False,  # which hides what it should show
        "ddp_find_unused_parameters": False,  # there are none
        "accelerator_config": {"use_configured_state": True},  # as distributed.init() found it
    }


def parse(name, about, experiment, kinds, defaults, overrides, arguments) -> tuple:
    """Return the script's arguments, trl's config, ModelConfig and Settings.

    ``kinds`` are the name of trl's config class and the script's dataclass; ``defaults`` makes
    defaults of a preset's settings; ``overrides`` says what all of these change in the settings.
    """
    with options.read(name, ["preset"], arguments) as (given, read):
        settings = load_preset(experiment, given.setdefault("preset", "tiny"))
        import trl

        classes = (getattr(trl, kinds[0]), trl.ModelConfig, kinds[1])
        formats = (argparse.ArgumentDefaultsHelpFormatter,)
        config, model_args, script = read(classes, defaults(settings), about, formats)
        if config.trust_remote_code or model_args.load_in_4bit or model_args.load_in_8bit:
            raise ValueError("Remote code and quantized bases are not supported here.")
        if isinstance(model_args.lora_target_modules, str):  # trl takes one name for a pattern
            model_args.lora_target_modules = [model_args.lora_target_modules]
        changes = overrides(settings, script, config, model_args)
        return script, config, model_args, load_preset(experiment, script.preset, changes)


def model_options(model_args) -> dict:
    """Return how to load the base, as from_pretrained takes it."""
    names = {"revision": "model_revision"} | {n: n for n in ("dtype", "attn_implementation")}
    return {name: getattr(model_args, argument) for name, argument in names.items()}


def make_trainer(kind: str, model, tokenizer, config, model_args, train, held_out):
    """Return trl's trainer of that name on tokenized data."""
    import torch
    import trl
    from transformers import TrainerCallback
    from transformers.trainer_pt_utils import LengthGroupedSampler

    class Careful(TrainerCallback):
        """Make an epoch's order depend on seed and epoch only, and refuse gradients of NaN."""

        def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
            batches = train_dataloader.batch_sampler
            batches = getattr(batches, "batch_sampler", batches)  # if processes share the batches
            if isinstance(sampler := getattr(batches, "sampler", None), LengthGroupedSampler):
                sampler.generator = torch.Generator().manual_seed(args.seed + int(state.epoch))

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if not args.fp16:  # which leaves such steps out
                norm = torch.nn.utils.get_total_norm(grads).item()
                check_finite(f"the gradient's norm in step {state.global_step + 1}", norm)

    parts = {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}
    parts["peft_config"] = trl.get_peft_config(model_args)
    return getattr(trl, kind)(model, config, callbacks=[Careful()], **parts)


def check_finite(what: str, number: float, most: float = math.inf) -> None:
    """Raise ``FloatingPointError`` unless a number is finite and below ``most``."""
    if not -math.inf < number < most:
        cure = "Lower --learning_rate, or look at the base's weights and --dtype."
        raise FloatingPointError(f"Diverged: {what} is {number:g}. No model was saved. {cure}")


def restore_finished(trainer, checkpoint: Path | None) -> bool:
    """Load the checkpoint of a finished run, if it is one: trl would train one more step."""
    from transformers import TrainerState

    state = checkpoint and TrainerState.load_from_json(checkpoint / "trainer_state.json")
    if not state or state.global_step < state.max_steps:
        return False
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    print(f"The run is finished: {checkpoint} is of its last step. Its model is saved again.")
    return True


def train(trainer, output, measure: Callable[[], tuple], most: float = math.inf) -> tuple:
    """Train, from the output's checkpoint if there is one, and save the model and its tokenizer.

    Returns 0 and what ``measure`` found, the loss of held-out data first; or, for a run that was
    stopped between steps, its exit code and (). Saves no model if that loss is not below ``most``.
    """
    import torch
    from transformers import TrainerCallback

    from rlhf_course.runtime.files import atomic_folder

    stopped, resumed = [], output.checkpoint
    written = [[resumed, *resumed.iterdir()]] if resumed else []  # folders, each with its files
    limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None

    class Stop(TrainerCallback):
        """End the run after a step, with a checkpoint; keep only the last of its checkpoints."""

        def on_step_end(self, args, state, control, **kwargs):
            code = torch.tensor(float(asked.code), device=args.device)
            if trainer.accelerator.reduce(code).item() > 0:  # all processes stop at one step
                stopped.append(asked.code or 130)
                control.should_save = control.should_training_stop = True

        def on_save(self, args, state, control, **kwargs):
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            written.append([folder, *folder.iterdir()])
            while limit and len(written) > limit:
                oldest, *files = written.pop(0)  # trl would also remove what others put there
                if state.is_world_process_zero and output.folder in oldest.parents:
                    for file in files:
                        file.unlink(missing_ok=True)
                    with suppress(OSError):  # it holds files of somebody else
                        oldest.rmdir()

    output.begin()
    trainer.add_callback(Stop)
    if not restore_finished(trainer, output.checkpoint):
        with exits.stop_between_steps() as asked:
            trainer.train(resume_from_checkpoint=output.checkpoint and str(output.checkpoint))
    if stopped:
        print(f"Stopped after step {trainer.state.global_step}; resuming goes on from there.")
        return stopped[0], ()
    measured = measure()
    check_finite("the loss of held-out data", measured[0], most)
    is_first = trainer.accelerator.is_main_process  # the others write nothing
    with atomic_folder(output.result) if is_first else nullcontext(output.result) as aside:
        trainer.save_model(aside)
    trainer.accelerator.wait_for_everyone()
    return 0, measured


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Return the exit code of ``run``, which gets the run's output after what was parsed."""

    def run_there(script, config, model_args, settings) -> int:
        from command_line.output import open_output
        from rlhf_course.course.run_card import quiet_libraries
        from rlhf_course.runtime.tracking import prepare_wandb

        folder = Path(config.output_dir).expanduser()
        config.output_dir = str(folder / "checkpoints")
        quiet_libraries()
        if "wandb" in config.report_to:
            prepare_wandb()
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        every = vars(config) | vars(model_args) | vars(script) | {"command": name}
        every["processes"] = config.world_size
        own = {*vars(script)} - {"dataset", "preset", "audit_prompts"}
        same = {key: every[key] for key in [*SAME, *own, "command", "processes"]}
        inputs = {key: every[key] for key in ("dataset", "model_name_or_path")}
        resume = config.resume_from_checkpoint or False
        resume = {"true": True, "false": False}.get(str(resume).lower(), resume)
        with open_output(folder, "model", same, inputs, resume, "checkpoints") as output:
            return run(script, config, model_args, settings, output)

    return options.main(name, parse_arguments, run_there, arguments)
