"""Parse options and run training for the commands that use trl's trainers."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import trl
from transformers import TrainerCallback, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler

from rlhf_course.command_line import exits, options
from rlhf_course.command_line.output import open_output
from rlhf_course.course.presets import load_preset
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.policy.save_load import write_base
from rlhf_course.runtime.files import atomic_folder
from rlhf_course.runtime.tracking import prepare_wandb

# A resumed run must keep the values of these options and of the script's own options.
SAME = """max_length learning_rate lr_scheduler_type warmup_steps weight_decay optim max_grad_norm
max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps seed bf16 fp16
dtype use_peft lora_r lora_alpha lora_dropout lora_target_modules use_rslora use_dora
train_sampling_strategy center_rewards_coefficient loss_type label_smoothing_factor
neftune_noise_alpha adam_beta1 adam_beta2 adam_epsilon""".split()

DEFAULTS = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "seed": 0,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": torch.cuda.is_available(),
    "train_sampling_strategy": "group_by_length",
    "save_total_limit": 2,
    "logging_nan_inf_filter": False,  # it would hide NaN and Inf
    "ddp_find_unused_parameters": False,  # no parameter is unused
    "accelerator_config": {"use_configured_state": True},  # set by init_process()
}


def parse(about: str, experiment: str, kinds: tuple, names: dict, fixed: dict, arguments) -> tuple:
    """Return the script's arguments, trl's config, ModelConfig, and the settings.

    ``kinds`` are the classes of the first two results. ``names`` maps options to settings of the
    experiment, whose preset gives the defaults; ``fixed`` contains further defaults.
    """

    def choose(given: dict) -> tuple:
        settings = load_preset(experiment, given.setdefault("preset", "tiny"))
        found = {option: getattr(settings, name) for option, name in names.items()}
        if "dataset" in given:  # the preset's files belong to its dataset
            found |= dict.fromkeys(found.keys() & {"data_files", "data_dir"})
        found["per_device_eval_batch_size"] = found["per_device_train_batch_size"]
        is_bf16 = getattr(settings, "bf16", found.get("dtype") == "bfloat16")
        found["bf16"] = is_bf16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        found["fp16"] = found.get("dtype") == "float16"  # presets for older GPUs
        return (*kinds, trl.ModelConfig), DEFAULTS | found | fixed

    script, config, model_args = options.parse(about, ["preset", "dataset"], choose, arguments)
    if config.trust_remote_code or model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError(
            "Omit --trust_remote_code, --load_in_4bit and --load_in_8bit: unsupported here."
        )
    if not model_args.use_peft and model_args.dtype in ("bfloat16", "float16"):
        print(f"Warning: {model_args.dtype} weights round small updates away. Use --dtype float32.")
    if isinstance(model_args.lora_target_modules, str):  # trl reads a str as a pattern
        model_args.lora_target_modules = [model_args.lora_target_modules]
    if model_args.lora_target_modules == ["all-linear"]:
        model_args.lora_target_modules = "all-linear"
    every = vars(config) | vars(model_args) | vars(script)
    changes = {name: every[option] for option, name in names.items()}
    return script, config, model_args, load_preset(experiment, script.preset, changes)


def model_options(model_args) -> dict:
    """Return from_pretrained's keyword arguments for the base model."""
    names = {"revision": "model_revision"} | {n: n for n in ("dtype", "attn_implementation")}
    return {name: getattr(model_args, argument) for name, argument in names.items()}


def make_trainer(kind: type, model, tokenizer, config, model_args, train, held_out):
    """Return a trl trainer of class ``kind`` for tokenized data."""
    targets, names = model_args.lora_target_modules or [], [n for n, _ in model.named_modules()]
    for target in targets if model_args.use_peft and targets != "all-linear" else ():
        if not any(f".{name}".endswith(f".{target}") for name in names):
            cure = "A converted Baichuan has q_proj, k_proj, v_proj and o_proj."
            raise ValueError(f"--lora_target_modules: the base has no {target}. {cure}")
    parts = {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}
    return kind(model, config, peft_config=trl.get_peft_config(model_args), **parts)


def check_finite(what: str, number: float, most: float = math.inf) -> None:
    """Raise ``FloatingPointError`` unless a number is finite and below ``most``."""
    if not -math.inf < number < most:
        cure = "Lower --learning_rate, or check the base's weights and --dtype."
        raise FloatingPointError(f"Diverged: {what} is {number:g}. No model was saved. {cure}")


class Steps(TrainerCallback):
    """Make epochs repeatable, stop between steps, and limit the number of checkpoints."""

    def __init__(self, trainer, output, asked) -> None:
        self.trainer, self.asked, self.code, last = trainer, asked, 0, output.checkpoint
        self.written = [[last, *last.iterdir()]] if last else []  # lists of a folder and its files
        # trl would also remove the user's files.
        self.limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """Make the samples' order depend only on seed and epoch."""
        batches = train_dataloader.batch_sampler
        batches = getattr(batches, "batch_sampler", batches)  # if processes share the batches
        if isinstance(sampler := getattr(batches, "sampler", None), LengthGroupedSampler):
            sampler.generator = torch.Generator().manual_seed(args.seed + int(state.epoch))

    def on_step_end(self, args, state, control, **kwargs):
        """Save a checkpoint and stop if any process was asked to stop."""
        self.code = exits.stop_code(self.asked, self.trainer.accelerator)
        if self.code:
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        """Remove this run's oldest checkpoints above the limit, but no other files."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.written.append([folder, *folder.iterdir()])
        best = Path(state.best_model_checkpoint or "").name
        while self.limit and len(self.written) > self.limit and state.is_world_process_zero:
            old = [i for i, (place, *_) in enumerate(self.written[:-1]) if place.name != best]
            if not old:
                break
            oldest, *files = self.written.pop(old[0])
            for file in files:
                file.unlink(missing_ok=True)
            with suppress(OSError):
                oldest.rmdir()


def train(trainer, output, measure: Callable[[], tuple], most: float = math.inf) -> tuple:
    """Train, from the output's checkpoint if there is one, and save the model and its tokenizer.

    Returns 0 and ``measure``'s result, which begins with the held-out loss; or, if stopped between
    steps, the exit code and (). If this held-out loss is not finite or not below ``most``, the
    function raises ``FloatingPointError`` and saves no model.
    """
    output.begin()
    last = output.checkpoint
    state = TrainerState.load_from_json(last / "trainer_state.json") if last else trainer.state
    if 0 < state.max_steps <= state.global_step:  # trl would train one more step
        best = trainer.args.load_best_model_at_end and state.best_model_checkpoint
        trainer._load_from_checkpoint(str(last.with_name(Path(best).name) if best else last))
        trainer.state = state
        print(f"The run is finished at {last}. Saving its model again.")
    else:
        with exits.watch_for_stop() as asked:
            trainer.add_callback(steps := Steps(trainer, output, asked))
            trainer.train(resume_from_checkpoint=last and str(last))
        if steps.code:
            print(f"Stopped after step {trainer.state.global_step}; a resumed run continues there.")
            return steps.code, ()
    measured = measure()
    check_finite("the loss on held-out data", measured[0], most)
    is_first = trainer.accelerator.is_main_process  # other processes write nothing
    with atomic_folder(output.result) if is_first else nullcontext(output.result) as aside:
        trainer.save_model(aside)
        if is_first and hasattr(
            network := trainer.accelerator.unwrap_model(trainer.model), "peft_config"
        ):
            write_base(aside, network)
    trainer.accelerator.wait_for_everyone()
    return 0, measured


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Call ``run`` with the parsed options and the output folder; return its exit code."""

    def run_there(script, config, model_args, settings) -> int:
        folder = Path(config.output_dir).expanduser()
        config.output_dir = str(folder / "checkpoints")
        quiet_libraries()
        if "wandb" in config.report_to:
            prepare_wandb()
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        every = vars(config) | vars(model_args) | vars(script)
        every |= {"command": name, "processes": config.world_size}
        own = {*vars(script)} - {"dataset", "preset", "audit_prompts"}
        same = {key: every.get(key) for key in [*SAME, *own, "command", "processes"]}
        inputs = {key: every[key] for key in ("dataset", "model_name_or_path")}
        resume = str(config.resume_from_checkpoint or "false").lower()
        if resume not in ("true", "false"):
            raise ValueError(f"--resume_from_checkpoint must be true or false; got {resume}.")
        with open_output(folder, "model", same, inputs, resume == "true", "checkpoints") as output:
            return run(script, config, model_args, settings, output)

    return options.main(name, parse_arguments, run_there, arguments)
