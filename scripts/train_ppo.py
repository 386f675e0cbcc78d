"""PPO as a command: notebook 04's GPT-2 that learns to write positive reviews, or notebook 05's
adapters.

    python scripts/train_ppo.py
    python scripts/train_ppo.py --preset scratch --dataset FOLDER --steps 60
    python scripts/train_ppo.py --config my.yaml --log_with tensorboard --output runs/a
    python scripts/train_ppo.py --config my.yaml --output runs/a --resume
    python scripts/train_ppo.py --sft_adapter runs/sft/model --reward_adapter runs/reward/model
    --dataset PAIRS

With the adapters that train_sft.py and train_reward_model.py --use_peft leave, policy, reference
and reward model share one base, and the prompts are those of preference pairs. Every setting of the
experiment that a run uses is an option (--experiment NAME --help lists them); --config FILE reads
options from a YAML file, and the command line wins over it. Ctrl-C stops after the current step and
leaves a checkpoint that the same command with --resume goes on from.
"""

from rlhf_course.runtime import command

if __name__ == "__main__":
    command.loading()

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import command_line
import yaml

from rlhf_course.course.presets import PRESETS, Settings, like, load_preset, read_spec
from rlhf_course.ppo.config import PPOConfig

NAME = "train_ppo.py"
IMDB, CHAT = "04_gpt2_imdb_ppo", "05_lora_rlhf_baichuan"
EXAMPLES = {
    "experiment": IMDB,
    "quantization": "8bit",
    "logprob_chunk_size": 512,
    "gradient_checkpointing": True,
}
EXAMPLES |= {
    "sft_adapter": "runs/sft/model",
    "reward_adapter": "runs/reward/model",
}  # of options without a default
SHARED = (
    "learning_rate",
    "batch_size",
    "mini_batch_size",
    "ppo_epochs",
    "init_kl_coef",
    "log_with",
)
OF_PPO = (
    "seed",
    "logprob_chunk_size",
    "gradient_accumulation_steps",
    "early_stopping",
)  # options, not settings
CHAT_SETTINGS = (
    "dataset",
    "train_subset",
    "max_length",
    "max_prompt",
    "max_new_tokens",
    "dtype",
    "steps",
    *SHARED,
)
CHAT_SETTINGS += (
    "sigmoid_score",
    "mixed_precision",
)  # the others are of other stages, or an option below
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0}
MAKE_THEM = """--sft_adapter and --reward_adapter are both needed; these two commands make them:
  python scripts/train_sft.py --model_name_or_path BASE --dataset ANSWERS --output_dir runs/sft
  python scripts/train_reward_model.py --model_name_or_path BASE --dataset PAIRS --use_peft --output_dir runs/reward
They leave runs/sft/model and runs/reward/model."""


def option(default, text: str, metavar: str = "X", **how):
    """A dataclass's field with what --help says of it; ``how`` goes to argparse."""
    return field(default=default, metadata={"help": text, "metavar": metavar, **how})


@dataclass
class Options:
    """What a run needs beside its experiment's settings. Raises ``ValueError`` where one is not
    like its default.
    """

    preset: str = option("tiny", f"size of the run: {', '.join(PRESETS)} (default: tiny)")
    experiment: str | None = option(
        None, f"{IMDB} (default), or {CHAT} (default with adapters)", "NAME"
    )
    sft_adapter: str | None = option(
        None, "adapter that the policy and its reference start as", "FOLDER"
    )
    reward_adapter: str | None = option(
        None, "adapter with a score head, on the same base", "FOLDER"
    )
    output: str = option(
        "build/train_ppo", "where all it writes goes (default: build/train_ppo)", "FOLDER"
    )
    seed: str = option(0, "seed (default: 0)")
    save_every: str = option(50, "steps between checkpoints (default: 50)")
    resume: bool = option(False, "go on from the latest checkpoint in --output")
    early_stopping: bool = option(
        False, "end a step's epochs once the policy has moved too far (default: false)"
    )
    gradient_accumulation_steps: str = option(1, "mini-batches per optimizer step (default: 1)")
    gradient_checkpointing: bool | None = option(
        None, "recompute activations, to save memory (default: the preset's)"
    )
    logprob_chunk_size: str | None = option(
        None, "response tokens whose logits are in memory at once (default: all)"
    )
    quantization: str | None = option(
        None, "the frozen base in 8bit or 4bit (default: as --dtype says)", "BITS"
    )

    def __post_init__(self) -> None:
        for name, default in [(entry.name, entry.default) for entry in fields(self)]:
            if not (getattr(self, name) is default is None):
                example, least = EXAMPLES.get(name, default), 0 if name == "seed" else 1
                setattr(self, name, like(name, getattr(self, name), example, least))
        self.output = Path(self.output).expanduser()


def parse_arguments(arguments: list[str] | None = None) -> tuple[Options, Settings]:
    """The run's options and settings. Raises ``SystemExit`` with a sentence for what is not valid."""
    with command_line.read(NAME, ["experiment", "sft_adapter", "reward_adapter"], arguments) as (
        given,
        parse,
    ):
        if "report_to" in given:  # its name in the commands over trl's trainers
            given["log_with"] = given.pop("report_to")
        early = Options(
            **{entry.name: given[entry.name] for entry in fields(Options) if entry.name in given}
        )
        experiment = early.experiment or (
            CHAT if early.sft_adapter or early.reward_adapter else IMDB
        )
        if experiment not in BUILD:
            raise ValueError(
                f"Unknown experiment {experiment!r}; choose one of {', '.join(BUILD)}."
            )
        used = used_settings(experiment)
        how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
        options, found = parse([Options, settings_class(experiment, used)], {}, **how)
        options.experiment = experiment
        overrides = {
            name: text for name, text in vars(found).items() if text is not None or name in given
        }
        overrides = {
            k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in overrides.items()
        }
        check_adapters(options)
        settings = load_preset(experiment, options.preset, overrides)
        if options.gradient_checkpointing is None:
            options.gradient_checkpointing = getattr(settings, "gradient_checkpointing", False)
        PPOConfig(**ppo_options(options, settings))  # what does not fit, now
        return options, settings


def used_settings(experiment: str) -> dict[str, dict]:
    """An experiment's settings that PPO uses: see :func:`~rlhf_course.course.presets.read_spec`."""
    spec = read_spec(experiment)
    return {key: spec[key] for key in (CHAT_SETTINGS if experiment == CHAT else spec)}


def settings_class(experiment: str, used: dict[str, dict]) -> type:
    """A dataclass of these settings, as texts; None where none is given."""
    entries = []
    for key, entry in used.items():
        values = " · ".join(str(entry[preset]) for preset in PRESETS)
        aliases = ["--report_to"] if key == "log_with" else []
        text = f"{entry['help']} ({values})".replace("%", "%%")
        entries.append((key, str | None, option(None, text, aliases=aliases)))
    title = f"settings of {experiment} (tiny · scratch · full)"
    return make_dataclass("GivenSettings", entries, namespace={"_argument_group_name": title})


def ppo_options(options: Options, settings: Settings) -> dict:
    """What both experiments' PPOConfig gets from options and settings."""
    names = [name for name in (*SHARED, "target", "horizon") if hasattr(settings, name)]
    found = {name: getattr(settings, name) for name in names} | {
        name: getattr(options, name) for name in OF_PPO
    }
    return found | {"gradient_checkpointing": options.gradient_checkpointing}


def check_adapters(options: Options) -> None:
    """Raise ``ValueError`` unless there are two adapters, or none where the experiment has none."""
    folders = {"--sft_adapter": options.sft_adapter, "--reward_adapter": options.reward_adapter}
    if options.experiment == IMDB and any(folders.values()):
        raise ValueError(f"--sft_adapter and --reward_adapter are for --experiment {CHAT} alone.")
    if options.experiment == IMDB and options.quantization:
        raise ValueError(
            "--quantization is for a frozen base with adapters; this experiment trains all weights."
        )
    if options.experiment == CHAT and not all(folders.values()):
        raise ValueError(MAKE_THEM)
    for name, folder in folders.items():
        if folder and not Path(folder, "adapter_config.json").exists():
            raise ValueError(
                f"{name}: there is no adapter in {folder}, which has no adapter_config.json."
            )


class Run(NamedTuple):
    """What the training loop needs."""

    trainer: object  # a PPOTrainer; its batches have query (texts) and input_ids
    score: Callable  # queries and responses, as texts → (B,)
    decode: Callable  # token ids of responses → texts
    generation: dict


def make_trainer(options: Options, settings: Settings, policy, tokenizer, queries, **more):
    """A PPOTrainer with what the experiments' configs have in common, and ``more``."""
    from rlhf_course import PPOTrainer
    from rlhf_course.data import collate

    more["accelerator_kwargs"] = {"mixed_precision": settings.mixed_precision}
    more["project_kwargs"] = {"logging_dir": str(options.output / "tensorboard")}
    return PPOTrainer(
        PPOConfig(**ppo_options(options, settings), **more),
        policy,
        tokenizer=tokenizer,
        dataset=queries,
        data_collator=collate,
    )


def build_imdb(options: Options, settings: Settings) -> Run:
    """Notebook 04's: film reviews, and a sentiment classifier as the reward."""
    from accelerate import PartialState

    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler
    from rlhf_course.course.shipped import prepare
    from rlhf_course.data import build_queries, load_reviews
    from rlhf_course.policy.save_load import load_tokenizer
    from rlhf_course.rewards import SentimentReward

    with PartialState().main_process_first():  # it builds what is missing, the others find it there
        assets = prepare(settings)
    tokenizer = load_tokenizer(assets.model)
    tokenizer.pad_token = tokenizer.eos_token
    query_lengths = LengthSampler(settings.query_min, settings.query_max)
    reviews = load_reviews(assets.dataset, "train")
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(assets.model)
    queries = build_queries(reviews, tokenizer, query_lengths, settings.min_characters)
    trainer = make_trainer(
        options, settings, policy, tokenizer, queries, model_name=str(settings.model)
    )
    reward = SentimentReward(assets.reward_model, settings.reward_label)
    lengths = LengthSampler(settings.response_min, settings.response_max)
    generation = SAMPLING | {"pad_token_id": tokenizer.eos_token_id, "length_sampler": lengths}

    def score(queries, responses):
        return reward(
            [query + response for query, response in zip(queries, responses, strict=True)]
        )

    return Run(trainer, score, tokenizer.batch_decode, generation)


def build_chat(options: Options, settings: Settings) -> Run:
    """Notebook 05's: policy, reference and reward model as adapters on one base, prompts from
    preference pairs.

    Raises ``ValueError`` where the adapters, or texts and base, do not fit together.
    """
    import torch
    from accelerate import PartialState
    from datasets import Dataset
    from peft import PeftConfig

    from rlhf_course import AutoModelForCausalLMWithValueHead
    from rlhf_course.data import load_pairs
    from rlhf_course.policy.adapters import RewardAdapter, quantization
    from rlhf_course.policy.save_load import load_tokenizer
    from rlhf_course.rewards import RewardModel
    from rlhf_course.runtime.hub import download
    from rlhf_course.worlds.build import build_preferences

    if settings.dataset is None:
        raise ValueError(
            f"--preset {options.preset} needs --dataset: a folder or hub id of preference pairs."
        )
    sft, judge = options.sft_adapter, options.reward_adapter
    bases = [PeftConfig.from_pretrained(folder).base_model_name_or_path for folder in (sft, judge)]
    if Path(bases[0]).resolve() != Path(bases[1]).resolve():
        raise ValueError(f"The adapters must share one base; theirs are {bases[0]} and {bases[1]}.")
    download(bases[0])
    tokenizer = load_tokenizer(sft if Path(sft, "tokenizer_config.json").exists() else bases[0])
    smaller = (
        {"quantization_config": quantization(options.quantization)} if options.quantization else {}
    )
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(sft, dtype=settings.dtype, **smaller)
    reward = RewardModel(RewardAdapter(policy, judge), tokenizer, batch_size=settings.batch_size)
    if reward.max_length < settings.max_length:
        raise ValueError(
            f"--max_length {settings.max_length} is more than the base's {reward.max_length}"
            " positions."
        )

    with PartialState().main_process_first():
        dataset = build_preferences() if settings.dataset == "offline" else settings.dataset
    pairs, _ = load_pairs(
        dataset, f"train[:{settings.train_subset}]" if settings.train_subset else "train"
    )
    longest = min(settings.max_prompt, settings.max_length - settings.max_new_tokens)
    prompts = list(dict.fromkeys(pairs["prompt"]))
    tokens = tokenizer(prompts)["input_ids"]
    rows = [
        {"query": p, "input_ids": ids}
        for p, ids in zip(prompts, tokens, strict=True)
        if len(ids) <= longest
    ]
    print(
        f"Prompts: {len(rows)} to train on; dropped: {len(prompts) - len(rows)} of more than"
        f" {longest} tokens."
    )
    queries = Dataset.from_list(rows).with_format("torch")
    if not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()):
        settings.mixed_precision = "no"
    more = {
        "model_name": bases[0],
        "adap_kl_ctrl": False,
        "begin_suppress_tokens": [tokenizer.eos_token_id],
    }
    trainer = make_trainer(options, settings, policy, tokenizer, queries, **more)

    def score(queries, answers):
        raw = reward(queries, answers)
        return raw.sigmoid() if settings.sigmoid_score else raw

    def decode(responses):
        return [
            text.strip() for text in tokenizer.batch_decode(responses, skip_special_tokens=True)
        ]

    return Run(trainer, score, decode, SAMPLING | {"max_new_tokens": settings.max_new_tokens})


BUILD = {IMDB: build_imdb, CHAT: build_chat}


def train(options: Options, settings: Settings) -> int:
    """Run PPO; returns the exit code: 0 when finished, 130 when stopped by Ctrl-C, 143 by SIGTERM,
    129 by SIGHUP.
    """
    import torch
    from accelerate.utils import set_seed
    from outputs import open_output
    from tqdm.auto import tqdm

    from rlhf_course.course.run_card import quiet_libraries
    from rlhf_course.data import endless
    from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint
    from rlhf_course.runtime import tracking
    from rlhf_course.runtime.distributed import init_quietly

    state = init_quietly()
    quiet_libraries()
    used = {name: getattr(settings, name) for name in used_settings(options.experiment)}
    every = vars(options) | used | {"command": NAME}
    inputs = [
        name
        for name in ("dataset", "model", "reward_model", "sft_adapter", "reward_adapter")
        if name in every
    ]
    with open_output(options.output, "policy", every, inputs, "--resume", options.resume) as output:
        set_seed(options.seed)
        trainer, score, decode, generation = BUILD[options.experiment](options, settings)
        if output.checkpoint:
            load_checkpoint(trainer, output.checkpoint)
        done = trainer.current_step
        if done > settings.steps:
            raise ValueError(
                f"{output.checkpoint} has {done} of {settings.steps} steps already; raise --steps."
            )
        output.begin(trainer.model)
        batches = islice(endless(trainer.dataloader), done, settings.steps)
        bar = tqdm(
            total=settings.steps, initial=done, desc="PPO", disable=not state.is_main_process
        )
        with command.stop_between_steps() as asked, bar:
            for batch in batches:
                responses = trainer.generate(batch["input_ids"], return_prompt=False, **generation)
                batch["response"] = decode(responses)
                scores = score(batch["query"], batch["response"])
                stats = trainer.step(batch["input_ids"], responses, scores)
                trainer.log_stats(stats, batch, scores)
                bar.update()
                bar.set_postfix(
                    score=f"{stats['ppo/mean_scores']:.2f}", KL=f"{stats['objective/kl']:.2f}"
                )
                code = torch.tensor(float(asked.code), device=trainer.accelerator.device)
                stop = (
                    trainer.accelerator.reduce(code).item() > 0
                )  # all processes stop after the same step
                if (
                    stop
                    or trainer.current_step % options.save_every == 0
                    or trainer.current_step == settings.steps
                ):
                    save_checkpoint(trainer, output.folder)
                if stop:
                    tracking.finish(trainer.accelerator)
                    print(
                        f"Stopped after step {trainer.current_step}; --resume goes on from there."
                    )
                    return asked.code or 130
        trainer.save_pretrained(output.result)
        tracking.finish(trainer.accelerator)
    print(f"The policy is in {output.result}.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: see :func:`train`, and 1 with a sentence for what is not valid."""
    return command_line.main(NAME, parse_arguments, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
