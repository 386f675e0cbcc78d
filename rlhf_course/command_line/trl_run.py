"""Parse options and run training for the commands that use trl's trainers."""

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import torch
import trl
from transformers import TrainerCallback, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler

from rlhf_course.command_line import command_presets, exits, options
from rlhf_course.command_line.output import open_output
from rlhf_course.command_line.progress import Estimate
from rlhf_course.command_line.records import Records
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


def parse(
    about: str,
    experiment: str,
    classes: tuple[type, type],
    setting_names: dict[str, str],
    fixed: dict,
    arguments: list[str] | None,
) -> tuple:
    """Return the script's arguments, trl's config, ModelConfig, and the settings.

    ``classes`` are the classes of the first two results. ``setting_names`` maps options to settings
    of the experiment, whose preset gives the defaults; ``fixed`` contains further defaults.
    """

    def choose(early: dict) -> tuple:
        early.setdefault("preset", "tiny")  # options.parse makes these options defaults
        settings = command_presets.load_settings(experiment, early["preset"])
        defaults = {option: getattr(settings, name) for option, name in setting_names.items()}
        if "dataset" in early:  # the preset's files belong to its dataset
            for option in ("data_files", "data_dir"):
                if option in defaults:
                    defaults[option] = None
        defaults["per_device_eval_batch_size"] = defaults["per_device_train_batch_size"]
        is_bfloat16 = defaults.get("dtype") == "bfloat16"
        wants_bf16 = getattr(settings, "bf16", is_bfloat16)
        has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        defaults["bf16"] = wants_bf16 and has_bf16
        defaults["fp16"] = defaults.get("dtype") == "float16"  # presets for older GPUs
        defaults = DEFAULTS | defaults | fixed
        own_options = command_presets.load_options(experiment, early["preset"])
        own_options.pop("save_every", None)  # an option of train_ppo.py
        return (*classes, trl.ModelConfig), defaults | own_options

    script, config, model_args = options.parse(about, ["preset", "dataset"], choose, arguments)
    check_model_args(config, model_args)
    config.include_num_input_tokens_seen = "non_padding"  # for the estimate of the run's time
    values = vars(config) | vars(model_args) | vars(script)
    changes = {name: values[option] for option, name in setting_names.items()}
    settings = command_presets.load_settings(experiment, script.preset, changes)
    return script, config, model_args, settings


def check_model_args(config, model_args) -> None:
    """Raise ``ValueError`` for unsupported options; change LoRA's targets to the form trl reads."""
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


def model_options(model_args) -> dict:
    """Return from_pretrained's keyword arguments for the base model."""
    return {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }


def make_trainer(trainer_class: type, model, tokenizer, config, model_args, train, held_out):
    """Return a trl trainer for tokenized data."""
    if model_args.use_peft:
        check_targets(model, model_args.lora_target_modules)
    return trainer_class(
        model,
        config,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=trl.get_peft_config(model_args),
    )


def check_targets(model, targets: list[str] | str | None) -> None:
    """Raise ``ValueError`` if the base lacks a layer that LoRA targets."""
    if targets is None or targets == "all-linear":
        return
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in names):
            raise ValueError(
                f"--lora_target_modules: the base has no {target}. A converted Baichuan has q_proj,"
                " k_proj, v_proj and o_proj."
            )


def check_finite(what: str, number: float, limit: float = math.inf) -> None:
    """Raise ``FloatingPointError`` unless a number is finite and below ``limit``."""
    if not -math.inf < number < limit:
        raise FloatingPointError(
            f"Diverged: {what} is {number:g}. No model was saved. Lower --learning_rate, or check"
            " the base's weights and --dtype."
        )


class Steps(TrainerCallback):
    """Make epochs repeatable, stop between steps, and limit the number of checkpoints."""

    def __init__(self, trainer, output, stop_request) -> None:
        self.trainer = trainer
        self.stop_request = stop_request
        self.code = 0
        self.written: dict[Path, list[Path]] = {}  # checkpoint folder: its files
        if output.checkpoint:
            self.written[output.checkpoint] = list(output.checkpoint.iterdir())
        # trl would also remove the user's files.
        self.limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """Make the samples' order depend only on seed and epoch."""
        batches = train_dataloader.batch_sampler
        batches = getattr(batches, "batch_sampler", batches)  # if processes share the batches
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = torch.Generator().manual_seed(args.seed + int(state.epoch))

    def on_step_end(self, args, state, control, **kwargs):
        """Save a checkpoint and stop if any process was asked to stop."""
        self.code = exits.stop_code(self.stop_request, self.trainer.accelerator)
        if self.code:
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        """Remove this run's oldest checkpoints above the limit, but no other files."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.written[folder] = list(folder.iterdir())
        if not self.limit or not state.is_world_process_zero:
            return
        best = Path(state.best_model_checkpoint or "").name
        while len(self.written) > self.limit:
            removable = [old for old in self.written if old != folder and old.name != best]
            if not removable:
                break
            oldest = removable[0]
            for file in self.written.pop(oldest):
                file.unlink(missing_ok=True)
            with suppress(OSError):  # it has files of the user
                oldest.rmdir()


class Report(NamedTuple):
    """Tell what a run records besides trl's statistics, and how large its rows are."""

    measure_before: Callable[[], dict]  # held-out measurements before the first step
    read_texts: Callable[[], list[dict]]  # a row per fixed prompt, at each save
    row_tokens: float  # mean number of tokens of a training row
    advice: str  # options that shorten the run


class Recorder(TrainerCallback):
    """Write the run's records, and print once how long the run will take."""

    def __init__(self, trainer, records: Records, report: Report) -> None:
        self.trainer = trainer
        self.records = records
        self.report = report
        self.first_step = 0
        self.first_tokens = 0
        self.evaluation_seconds = 0.0
        self.estimate = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            started = time.perf_counter()
            self.records.add_evaluation(0, self.report.measure_before())
            record_texts(0, self.records, self.report)
            self.evaluation_seconds = time.perf_counter() - started
        self.first_step = state.global_step
        self.first_tokens = state.num_input_tokens_seen
        self.estimate = Estimate(self.report.advice, state.is_world_process_zero)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.records.add_log(state.global_step, logs)

    def on_step_end(self, args, state, control, **kwargs):
        steps_left = state.max_steps - state.global_step
        rows_per_step = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        tokens = state.num_input_tokens_seen - self.first_tokens
        self.estimate.update(
            tokens=tokens,
            done=tokens,
            left=steps_left * rows_per_step * self.report.row_tokens,
            steps_left=steps_left,
            more_seconds=self.evaluation_seconds,
        )

    def on_save(self, args, state, control, **kwargs):
        record_texts(state.global_step, self.records, self.report)


def record_texts(step: int, records: Records, report: Report) -> None:
    """Record texts; a model that cannot sample, because it diverged, has none."""
    with suppress(FloatingPointError):  # the loss on held-out data shows it
        records.add_texts(step, report.read_texts())


def open_records(output) -> Records:
    """Return the records of a run, up to the checkpoint from which it continues."""
    if not output.checkpoint:
        return Records(output.folder)
    state = TrainerState.load_from_json(output.checkpoint / "trainer_state.json")
    return Records(output.folder, state.global_step)


def train(
    trainer,
    output,
    records: Records,
    report: Report,
    measure: Callable[[], tuple],
    limit: float = math.inf,
) -> tuple[int, tuple]:
    """Train, from the output's checkpoint if there is one, and save the model and its tokenizer.

    Returns 0 and ``measure``'s result, which begins with the held-out loss; or, if stopped between
    steps, the exit code and (). If this held-out loss is not finite or not below ``limit``, the
    function raises ``FloatingPointError`` and saves no model.
    """
    output.begin()
    trainer.add_callback(Recorder(trainer, records, report))
    last = output.checkpoint
    state = TrainerState.load_from_json(last / "trainer_state.json") if last else trainer.state
    if 0 < state.max_steps <= state.global_step:  # trl would train one more step
        load_finished(trainer, state, last)
    else:
        with exits.watch_for_stop() as stop_request:
            steps = Steps(trainer, output, stop_request)
            trainer.add_callback(steps)
            trainer.train(resume_from_checkpoint=str(last) if last else None)
        if steps.code:
            print(f"Stopped after step {trainer.state.global_step}; a resumed run continues there.")
            return steps.code, ()
    measured = measure()
    check_finite("the loss on held-out data", measured[0], limit)
    record_texts(trainer.state.global_step, records, report)
    save(trainer, output.result)
    return 0, measured


def load_finished(trainer, state: TrainerState, checkpoint: Path) -> None:
    """Load a finished run's model: the best one if the run keeps it, else the last."""
    source = checkpoint
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
        source = checkpoint.with_name(Path(state.best_model_checkpoint).name)
    trainer._load_from_checkpoint(str(source))
    trainer.state = state
    print(f"The run is finished at {checkpoint}. Saving its model again.")


def save(trainer, folder: Path) -> None:
    """Save the model and its tokenizer; an adapter's folder also records its base."""
    is_main = trainer.accelerator.is_main_process
    with atomic_folder(folder) if is_main else nullcontext(folder) as unfinished:
        trainer.save_model(unfinished)  # every process takes part
        network = trainer.accelerator.unwrap_model(trainer.model)
        if is_main and hasattr(network, "peft_config"):
            write_base(unfinished, network)
    trainer.accelerator.wait_for_everyone()


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Call ``run`` with the parsed options and the output folder; return its exit code."""

    def run_in_output(script, config, model_args, settings) -> int:
        folder = Path(config.output_dir).expanduser()
        config.output_dir = str(folder / "checkpoints")
        quiet_libraries()
        if "wandb" in config.report_to:
            prepare_wandb()
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        values = vars(config) | vars(model_args) | vars(script)
        values["command"] = name
        values["processes"] = config.world_size
        script_options = set(vars(script)) - {
            "dataset",
            "preset",
            "audit_prompts",
            "max_new_tokens",
        }
        same = {key: values.get(key) for key in [*SAME, *script_options, "command", "processes"]}
        inputs = {key: values[key] for key in ("dataset", "model_name_or_path")}
        resume = str(config.resume_from_checkpoint or "false").lower()
        if resume not in ("true", "false"):
            raise ValueError(f"--resume_from_checkpoint must be true or false; got {resume}.")
        with open_output(folder, "model", same, inputs, resume == "true", "checkpoints") as output:
            return run(script, config, model_args, settings, output)

    return options.main(name, parse_arguments, run_in_output, arguments)
