"""PPO as a command: notebook 03's GPT-2 that learns to write positive reviews, or notebook 04's adapters.

    python scripts/train_ppo.py
    python scripts/train_ppo.py --preset scratch --dataset FOLDER --steps 60
    python scripts/train_ppo.py --config my.yaml --log_with tensorboard --output runs/a
    python scripts/train_ppo.py --output runs/a --resume
    python scripts/train_ppo.py --sft_adapter runs/sft/model --reward_adapter runs/reward/model --dataset PAIRS

With the adapters that train_sft.py and train_reward_model.py --use_peft leave, policy, reference and reward model share
one base, and the prompts are those of preference pairs. Every setting of the experiment in configs/ that a run uses is
an option (--experiment NAME --help lists them); --config FILE reads options from a YAML file, and the command line wins
over it. Ctrl-C stops after the current step and leaves a checkpoint that --resume goes on from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import yaml
from trl_cli import one_line

from rlhf_course.presets import PRESETS, Settings, load_preset, read_spec

IMDB, CHAT = "03_gpt2_imdb_ppo", "04_lora_rlhf_baichuan"
SHARED = ("learning_rate", "batch_size", "mini_batch_size", "ppo_epochs", "init_kl_coef", "log_with")
CHAT_SETTINGS = ("dataset", "train_subset", "max_length", "dtype", "sigmoid_score", "max_prompt", "max_new_tokens")
CHAT_SETTINGS += (*SHARED, "steps", "mixed_precision", "gradient_checkpointing")  # the others are of other stages
ADAPTERS = ("sft_adapter", "reward_adapter")
MAKE_THEM = """--sft_adapter and --reward_adapter are both needed; these two commands make them:
  python scripts/train_sft.py --model_name_or_path BASE --dataset ANSWERS --output_dir runs/sft
  python scripts/train_reward_model.py --model_name_or_path BASE --dataset PAIRS --use_peft --output_dir runs/reward
They leave runs/sft/model and runs/reward/model."""


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Settings]:
    """The run's options and settings. Raises ``SystemExit`` with a sentence for what is not valid."""
    early = argparse.ArgumentParser(add_help=False)  # what decides which settings there are
    early.add_argument("--config", type=Path, help="YAML file of options")
    early.add_argument("--experiment", choices=(IMDB, CHAT), help=f"default: {IMDB}; with adapters {CHAT}")
    early.add_argument("--sft_adapter", metavar="FOLDER", help="adapter that the policy and its reference start as")
    early.add_argument("--reward_adapter", metavar="FOLDER", help="adapter with a score head, on the same base")
    known, _ = early.parse_known_args(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[early]
    )
    try:
        content = read_options(known.config)
        experiment, spec = choose_experiment(content | {k: v for k, v in vars(known).items() if v is not None})
        parser.add_argument("--preset", choices=PRESETS, help="size of the run (default: tiny)")
        parser.add_argument("--output", type=Path, help="where all it writes goes (default: build/train_ppo)")
        parser.add_argument("--seed", type=int, help="seed (default: 0)")
        parser.add_argument("--save_every", type=int, help="steps between checkpoints (default: 50)")
        parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --output")
        settings_group = parser.add_argument_group(f"settings of {experiment} (tiny · scratch · full)")
        for key, entry in spec.items():
            values = " · ".join(str(entry[preset]) for preset in PRESETS)
            names = ("--log_with", "--report_to") if key == "log_with" else (f"--{key}",)
            settings_group.add_argument(*names, metavar="X", help=f"{entry['help']} ({values})".replace("%", "%%"))
        given = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value not in (None, False)}
        given = content | given | {"experiment": experiment}
        defaults = {"preset": "tiny", "config": None, "output": "build/train_ppo", "seed": 0, "save_every": 50}
        defaults |= dict.fromkeys(ADAPTERS) | {"experiment": None, "resume": False}
        options = argparse.Namespace(**{k: given.pop(k, v) for k, v in defaults.items()})
        options.output = Path(options.output)
        if unknown := set(given) - set(spec):
            raise ValueError(f"Unknown option {min(unknown)!r}; the settings of {experiment} are {', '.join(spec)}.")
        overrides = {k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in given.items()}
        settings = load_preset(experiment, options.preset, overrides)
        if experiment == CHAT:
            check_adapters(options)
            if settings.dataset is None:
                raise ValueError(f"--preset {options.preset} needs --dataset: a folder or hub id of preference pairs.")
        return options, settings
    except (ValueError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))


def read_options(file: Path | None) -> dict:
    """A YAML file's options under their names here. Raises ``ValueError`` when it is no list of options."""
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no list of options like steps: 60.")
    return {"log_with" if key == "report_to" else key: value for key, value in content.items()}


def choose_experiment(given: dict) -> tuple[str, dict[str, dict]]:
    """The experiment that the options mean, and those of its settings that PPO uses."""
    adapters = [name for name in ADAPTERS if given.get(name)]
    experiment = given.get("experiment") or (CHAT if adapters else IMDB)
    if experiment not in (IMDB, CHAT):
        raise ValueError(f"Unknown experiment {experiment!r}; choose one of {IMDB}, {CHAT}.")
    if adapters and experiment == IMDB:
        raise ValueError(f"--{adapters[0]} is for --experiment {CHAT} alone.")
    spec = read_spec(experiment)
    return experiment, {key: entry for key, entry in spec.items() if experiment == IMDB or key in CHAT_SETTINGS}


def check_adapters(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` unless both folders hold an adapter."""
    folders = [getattr(options, name) for name in ADAPTERS]
    if None in folders:
        raise ValueError(MAKE_THEM)
    for name, folder in zip(ADAPTERS, folders, strict=True):
        if not Path(folder, "adapter_config.json").exists():
            raise ValueError(f"--{name}: there is no adapter in {folder}, which has no adapter_config.json.")


class Experiment(NamedTuple):
    """What the training loop needs."""

    trainer: object  # a PPOTrainer, whose dataloader gives query (text) and input_ids
    score: Callable  # prompts and responses, as texts → (B,)
    generation: dict
    decode: Callable  # token ids of responses → texts


def make_config(options: argparse.Namespace, settings: Settings, **more):
    """What the experiments' PPOConfigs have in common, and ``more``."""
    from rlhf_course import PPOConfig

    more |= {name: getattr(settings, name) for name in SHARED}
    return PPOConfig(seed=options.seed, project_kwargs={"logging_dir": str(options.output / "tensorboard")}, **more)


def build_imdb(options: argparse.Namespace, settings: Settings) -> Experiment:
    """Notebook 03's: film reviews, and a sentiment classifier as the reward."""
    from transformers import AutoTokenizer

    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer
    from rlhf_course.data import build_queries, collate, load_reviews
    from rlhf_course.offline.world import prepare
    from rlhf_course.rewards import SentimentReward

    assets = prepare(settings)
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    tokenizer.pad_token = tokenizer.eos_token
    query_lengths = LengthSampler(settings.query_min, settings.query_max)
    reviews = load_reviews(assets.dataset, "train")
    config = make_config(
        options,
        settings,
        model_name=str(settings.model),
        target=settings.target,
        horizon=settings.horizon,
        accelerator_kwargs={"mixed_precision": settings.mixed_precision},
    )
    trainer = PPOTrainer(
        config,
        AutoModelForCausalLMWithValueHead.from_pretrained(assets.model),
        tokenizer=tokenizer,
        dataset=build_queries(reviews, tokenizer, query_lengths, settings.min_characters),
        data_collator=collate,
    )
    reward = SentimentReward(assets.reward_model)
    generation = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": tokenizer.eos_token_id}
    generation["length_sampler"] = LengthSampler(settings.response_min, settings.response_max)

    def score(queries, responses):
        return reward([query + response for query, response in zip(queries, responses, strict=True)])

    return Experiment(trainer, score, generation, tokenizer.batch_decode)


def build_chat(options: argparse.Namespace, settings: Settings) -> Experiment:
    """Notebook 04's: policy, reference and reward model as adapters on one base.

    Raises ``ValueError`` for adapters that do not fit together, and where texts do not fit into the base.
    """
    import torch
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import AutoTokenizer

    from rlhf_course import AutoModelForCausalLMWithValueHead, PPOTrainer
    from rlhf_course.data import collate, load_pairs
    from rlhf_course.lora import RewardAdapter
    from rlhf_course.offline.chat import build_preferences
    from rlhf_course.rewards import RewardModel

    sft, judge = options.sft_adapter, options.reward_adapter
    bases = [PeftConfig.from_pretrained(folder).base_model_name_or_path for folder in (sft, judge)]
    if len({Path(base).resolve() for base in bases}) > 1:
        raise ValueError(f"The adapters were trained on different bases, {bases[0]} and {bases[1]}; they must share one.")
    tokenizer = AutoTokenizer.from_pretrained(sft if Path(sft, "tokenizer_config.json").exists() else bases[0])
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(sft, dtype=settings.dtype)
    reward = RewardModel(RewardAdapter(policy, judge), tokenizer, batch_size=settings.batch_size)
    if reward.max_length < settings.max_length:
        raise ValueError(f"--max_length {settings.max_length} is more than the base's {reward.max_length} positions.")

    dataset = str(build_preferences()) if settings.dataset == "offline" else settings.dataset
    pairs, _ = load_pairs(dataset, f"train[:{settings.train_subset}]" if settings.train_subset else "train")
    longest = min(settings.max_prompt, settings.max_length - settings.max_new_tokens)
    prompts = list(dict.fromkeys(pairs["prompt"]))
    tokens = tokenizer(prompts)["input_ids"]
    rows = [{"query": p, "input_ids": ids} for p, ids in zip(prompts, tokens, strict=True) if len(ids) <= longest]
    print(f"Prompts: {len(rows)} to train on; dropped: {len(prompts) - len(rows)} of more than {longest} tokens.")
    if len(rows) < settings.batch_size:
        raise ValueError(f"{len(rows)} prompts are fewer than one batch of {settings.batch_size}.")

    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    config = make_config(
        options,
        settings,
        model_name=str(bases[0]),
        adap_kl_ctrl=False,
        begin_suppress_tokens=[tokenizer.eos_token_id],
        gradient_checkpointing=settings.gradient_checkpointing,
        accelerator_kwargs={"mixed_precision": settings.mixed_precision if bf16 else "no"},
    )
    queries = Dataset.from_list(rows).with_format("torch")
    trainer = PPOTrainer(config, policy, tokenizer=tokenizer, dataset=queries, data_collator=collate)
    generation = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": settings.max_new_tokens}

    def score(queries, answers):
        raw = reward(queries, answers)
        return raw.sigmoid() if settings.sigmoid_score else raw

    def decode(responses):
        return [text.strip() for text in tokenizer.batch_decode(responses, skip_special_tokens=True)]

    return Experiment(trainer, score, generation, decode)


def train(options: argparse.Namespace, settings: Settings) -> int:
    """Run PPO; returns the exit code: 0 when finished, 130 when stopped by Ctrl-C."""
    from accelerate.utils import set_seed
    from datasets.exceptions import DatasetsError
    from tqdm.auto import tqdm

    from rlhf_course.data import endless
    from rlhf_course.ppo.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, stop_between_steps
    from rlhf_course.run_card import quiet_libraries

    quiet_libraries()
    checkpoint = latest_checkpoint(options.output)
    if options.resume and checkpoint is None:
        raise SystemExit(f"--resume: there is no checkpoint in {options.output}; run without it to begin.")
    if checkpoint is not None and not options.resume:
        raise SystemExit(f"{options.output} holds {checkpoint.name}: go on with --resume, or choose another --output.")
    set_seed(options.seed)
    try:
        trainer, score, generation, decode = {IMDB: build_imdb, CHAT: build_chat}[options.experiment](options, settings)
        done = int(checkpoint.name.split("-")[1]) if checkpoint else 0
        if done >= settings.steps:
            raise SystemExit(f"{checkpoint} has {done} of {settings.steps} steps already; raise --steps to go on.")
        batches = islice(endless(trainer.dataloader), done, settings.steps)
        if checkpoint:
            load_checkpoint(trainer, checkpoint)
    except (ValueError, OSError, DatasetsError) as error:
        raise SystemExit(f"train_ppo.py: {one_line(error)}") from None
    with stop_between_steps() as interrupt, tqdm(total=settings.steps, initial=done, desc="PPO") as bar:
        for batch in batches:
            responses = trainer.generate(batch["input_ids"], return_prompt=False, **generation)
            batch["response"] = decode(responses)
            scores = score(batch["query"], batch["response"])
            stats = trainer.step(batch["input_ids"], responses, scores)
            trainer.log_stats(stats, batch, scores)
            bar.update()
            bar.set_postfix(score=f"{stats['ppo/mean_scores']:.2f}", KL=f"{stats['objective/kl']:.2f}")
            if interrupt.requested or trainer.current_step % options.save_every == 0:
                save_checkpoint(trainer, options.output)
            if interrupt.requested:
                print(f"Stopped after step {trainer.current_step}; --resume goes on from there.")
                return 130
    save_checkpoint(trainer, options.output)
    trainer.save_pretrained(options.output / "policy")
    trainer.accelerator.end_training()
    print(f"The policy is in {options.output / 'policy'}; last score {stats['ppo/mean_scores']:.3f}.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse and train; returns the exit code."""
    return train(*parse_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
