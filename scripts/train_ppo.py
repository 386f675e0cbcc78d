"""PPO as a command: notebook 04's GPT-2 that learns to write positive reviews, or notebook 05's adapters.

    python scripts/train_ppo.py
    python scripts/train_ppo.py --preset scratch --dataset FOLDER --steps 60
    python scripts/train_ppo.py --config my.yaml --log_with tensorboard --output runs/a
    python scripts/train_ppo.py --config my.yaml --output runs/a --resume
    python scripts/train_ppo.py --sft_adapter runs/sft/model --reward_adapter runs/reward/model --dataset PAIRS

With the adapters that train_sft.py and train_reward_model.py --use_peft leave, policy, reference and reward model share
one base, and the prompts are those of preference pairs. Every setting of the experiment that a run uses is an option
(--experiment NAME --help lists them); --config FILE reads options from a YAML file, and the command line wins over it.
Ctrl-C stops after the current step and leaves a checkpoint that the same command with --resume goes on from.
"""

from __future__ import annotations

from rlhf_course.runtime import command

if __name__ == "__main__":
    command.loading()

import argparse
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import yaml
from option_file import read_options

from rlhf_course.course.presets import PRESETS, Settings, like, load_preset, read_spec
from rlhf_course.ppo.config import PPOConfig

NAME = "train_ppo.py"
IMDB, CHAT = "04_gpt2_imdb_ppo", "05_lora_rlhf_baichuan"
OPTIONS = {"config": None, "experiment": None, "sft_adapter": None, "reward_adapter": None, "preset": "tiny"}
OPTIONS |= {"output": "build/train_ppo", "seed": 0, "save_every": 50, "resume": False}
OPTIONS |= {"quantization": None, "logprob_chunk_size": None}
EXAMPLES = {"config": "my.yaml", "experiment": IMDB, "quantization": "8bit", "logprob_chunk_size": 512}
EXAMPLES |= {"sft_adapter": "runs/sft/model", "reward_adapter": "runs/reward/model"}  # of options without a default
SHARED = ("learning_rate", "batch_size", "mini_batch_size", "ppo_epochs", "init_kl_coef", "log_with")
CHAT_SETTINGS = ("dataset", "train_subset", "max_length", "max_prompt", "max_new_tokens", "dtype", "steps", *SHARED)
CHAT_SETTINGS += ("sigmoid_score", "mixed_precision", "gradient_checkpointing")  # the others are of other stages
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0}
MAKE_THEM = """--sft_adapter and --reward_adapter are both needed; these two commands make them:
  python scripts/train_sft.py --model_name_or_path BASE --dataset ANSWERS --output_dir runs/sft
  python scripts/train_reward_model.py --model_name_or_path BASE --dataset PAIRS --use_peft --output_dir runs/reward
They leave runs/sft/model and runs/reward/model."""


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Settings]:
    """The run's options and settings. Raises ``SystemExit`` with a sentence for what is not valid."""
    how = {"argument_default": argparse.SUPPRESS, "formatter_class": argparse.RawDescriptionHelpFormatter}
    how["usage"] = "train_ppo.py [--config FILE] [--experiment NAME] [options]"
    how["prog"] = "train_ppo.py"
    parser = early = argparse.ArgumentParser(**how, add_help=False)  # what decides which settings there are
    early.add_argument("--config", help="YAML file of options")
    early.add_argument("--experiment", metavar="NAME", help=f"{IMDB} (default), or {CHAT} (default with adapters)")
    early.add_argument("--sft_adapter", metavar="FOLDER", help="adapter that the policy and its reference start as")
    early.add_argument("--reward_adapter", metavar="FOLDER", help="adapter with a score head, on the same base")
    early.set_defaults(**OPTIONS)
    try:
        early.set_defaults(**read_file(early.parse_known_args(arguments)[0].config))
        known, _ = early.parse_known_args(arguments)
        experiment = known.experiment or (CHAT if known.sft_adapter or known.reward_adapter else IMDB)
        if experiment not in BUILD:
            raise ValueError(f"Unknown experiment {experiment!r}; choose one of {', '.join(BUILD)}.")
        spec = read_spec(experiment)
        used = {key: spec[key] for key in (CHAT_SETTINGS if experiment == CHAT else spec)}
        parser = argparse.ArgumentParser(description=__doc__, parents=[early], **how)
        parser.add_argument("--preset", choices=PRESETS, help="size of the run (default: tiny)")
        parser.add_argument("--output", help="where all it writes goes (default: build/train_ppo)")
        parser.add_argument("--seed", help="seed (default: 0)")
        parser.add_argument("--save_every", help="steps between checkpoints (default: 50)")
        parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --output")
        text = "numbers of the vocabulary in memory for so many response tokens at once (default: all)"
        parser.add_argument("--logprob_chunk_size", metavar="TOKENS", help=text)
        text = "the frozen base in 8 or 4 bits, through bitsandbytes (default: as --dtype says); needs adapters"
        parser.add_argument("--quantization", choices=("8bit", "4bit"), help=text)
        settings_group = parser.add_argument_group(f"settings of {experiment} (tiny · scratch · full)")
        for key, entry in used.items():
            values = " · ".join(str(entry[preset]) for preset in PRESETS)
            names = ["--log_with", "--report_to"] if key == "log_with" else [f"--{key}"]
            settings_group.add_argument(*names, metavar="X", help=f"{entry['help']} ({values})".replace("%", "%%"))
        given = vars(parser.parse_args(arguments))
        options = argparse.Namespace(**{key: read_option(key, given.pop(key)) for key in OPTIONS})
        options.experiment, options.output = experiment, Path(options.output).expanduser()
        if unknown := given.keys() - used.keys():
            raise ValueError(f"Unknown setting {min(unknown)!r} for {experiment}; it has {', '.join(used)}.")
        overrides = {k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in given.items()}
        check_adapters(options)
        settings = load_preset(experiment, options.preset, overrides)
        ppo = {name: getattr(settings, name) for name in (*SHARED, "target", "horizon") if name in used}
        PPOConfig(seed=options.seed, logprob_chunk_size=options.logprob_chunk_size, **ppo)  # what does not fit, now
        return options, settings
    except (ValueError, OSError, yaml.YAMLError) as error:
        parser.error(command.sentence(error) if isinstance(error, OSError) else str(error))


def read_file(file: str | None) -> dict:
    """A YAML file's options under their names here: see :func:`option_file.read_options`."""
    content = {"log_with" if key == "report_to" else str(key): value for key, value in read_options(file).items()}
    return {key: read_option(key, value) if key in OPTIONS else value for key, value in content.items()}


def read_option(name: str, value):
    """An option's value in its type, None for one that may be left out. Raises ``ValueError`` for other types."""
    if value is None and OPTIONS[name] is None:
        return None
    return like(name, value, EXAMPLES.get(name, OPTIONS[name]), least=0 if name == "seed" else 1)


def check_adapters(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` unless there are two adapters, or none where the experiment has none."""
    folders = {"--sft_adapter": options.sft_adapter, "--reward_adapter": options.reward_adapter}
    if options.experiment == IMDB and any(folders.values()):
        raise ValueError(f"--sft_adapter and --reward_adapter are for --experiment {CHAT} alone.")
    if options.experiment == IMDB and options.quantization:
        raise ValueError("--quantization is for a frozen base with adapters; this experiment trains all weights.")
    if options.experiment == CHAT and not all(folders.values()):
        raise ValueError(MAKE_THEM)
    for name, folder in folders.items():
        if folder and not Path(folder, "adapter_config.json").exists():
            raise ValueError(f"{name}: there is no adapter in {folder}, which has no adapter_config.json.")


class Run(NamedTuple):
    """What the training loop needs."""

    trainer: object  # a PPOTrainer; its batches have query (texts) and input_ids
    score: Callable  # queries and responses, as texts → (B,)
    decode: Callable  # token ids of responses → texts
    generation: dict


def make_trainer(options: argparse.Namespace, settings: Settings, policy, tokenizer, queries, **more):
    """A PPOTrainer with what the experiments' configs have in common, and ``more``."""
    from rlhf_course import PPOTrainer
    from rlhf_course.data import collate

    more |= {name: getattr(settings, name) for name in SHARED}
    more["logprob_chunk_size"] = options.logprob_chunk_size
    more["accelerator_kwargs"] = {"mixed_precision": settings.mixed_precision}
    more["project_kwargs"] = {"logging_dir": str(options.output / "tensorboard")}
    return PPOTrainer(
        PPOConfig(seed=options.seed, **more), policy, tokenizer=tokenizer, dataset=queries, data_collator=collate
    )


def build_imdb(options: argparse.Namespace, settings: Settings) -> Run:
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
    more = {"model_name": str(settings.model), "target": settings.target, "horizon": settings.horizon}
    trainer = make_trainer(options, settings, policy, tokenizer, queries, **more)
    reward = SentimentReward(assets.reward_model, settings.reward_label)
    lengths = LengthSampler(settings.response_min, settings.response_max)
    generation = SAMPLING | {"pad_token_id": tokenizer.eos_token_id, "length_sampler": lengths}

    def score(queries, responses):
        return reward([query + response for query, response in zip(queries, responses, strict=True)])

    return Run(trainer, score, tokenizer.batch_decode, generation)


def build_chat(options: argparse.Namespace, settings: Settings) -> Run:
    """Notebook 05's: policy, reference and reward model as adapters on one base, prompts from preference pairs.

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
        raise ValueError(f"--preset {options.preset} needs --dataset: a folder or hub id of preference pairs.")
    sft, judge = options.sft_adapter, options.reward_adapter
    bases = [PeftConfig.from_pretrained(folder).base_model_name_or_path for folder in (sft, judge)]
    if Path(bases[0]).resolve() != Path(bases[1]).resolve():
        raise ValueError(f"The adapters must share one base; theirs are {bases[0]} and {bases[1]}.")
    download(bases[0])
    tokenizer = load_tokenizer(sft if Path(sft, "tokenizer_config.json").exists() else bases[0])
    smaller = {"quantization_config": quantization(options.quantization)} if options.quantization else {}
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(sft, dtype=settings.dtype, **smaller)
    reward = RewardModel(RewardAdapter(policy, judge), tokenizer, batch_size=settings.batch_size)
    if reward.max_length < settings.max_length:
        raise ValueError(f"--max_length {settings.max_length} is more than the base's {reward.max_length} positions.")

    with PartialState().main_process_first():
        dataset = build_preferences() if settings.dataset == "offline" else settings.dataset
    pairs, _ = load_pairs(dataset, f"train[:{settings.train_subset}]" if settings.train_subset else "train")
    longest = min(settings.max_prompt, settings.max_length - settings.max_new_tokens)
    prompts = list(dict.fromkeys(pairs["prompt"]))
    tokens = tokenizer(prompts)["input_ids"]
    rows = [{"query": p, "input_ids": ids} for p, ids in zip(prompts, tokens, strict=True) if len(ids) <= longest]
    print(f"Prompts: {len(rows)} to train on; dropped: {len(prompts) - len(rows)} of more than {longest} tokens.")
    queries = Dataset.from_list(rows).with_format("torch")
    if not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()):
        settings.mixed_precision = "no"
    more = {"model_name": bases[0], "adap_kl_ctrl": False, "begin_suppress_tokens": [tokenizer.eos_token_id]}
    more["gradient_checkpointing"] = settings.gradient_checkpointing
    trainer = make_trainer(options, settings, policy, tokenizer, queries, **more)

    def score(queries, answers):
        raw = reward(queries, answers)
        return raw.sigmoid() if settings.sigmoid_score else raw

    def decode(responses):
        return [text.strip() for text in tokenizer.batch_decode(responses, skip_special_tokens=True)]

    return Run(trainer, score, decode, SAMPLING | {"max_new_tokens": settings.max_new_tokens})


BUILD = {IMDB: build_imdb, CHAT: build_chat}


def train(options: argparse.Namespace, settings: Settings) -> int:
    """Run PPO; returns the exit code: 0 when finished, 130 when stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP."""
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
    used = CHAT_SETTINGS if options.experiment == CHAT else read_spec(options.experiment)
    every = vars(options) | {name: getattr(settings, name) for name in used} | {"command": NAME}
    inputs = [name for name in ("dataset", "model", "reward_model", "sft_adapter", "reward_adapter") if name in every]
    with open_output(options.output, "policy", every, inputs, "--resume", options.resume) as output:
        set_seed(options.seed)
        trainer, score, decode, generation = BUILD[options.experiment](options, settings)
        if output.checkpoint:
            load_checkpoint(trainer, output.checkpoint)
        done = trainer.current_step
        if done > settings.steps:
            raise ValueError(f"{output.checkpoint} has {done} of {settings.steps} steps already; raise --steps.")
        output.begin(trainer.model)
        batches = islice(endless(trainer.dataloader), done, settings.steps)
        bar = tqdm(total=settings.steps, initial=done, desc="PPO", disable=not state.is_main_process)
        with command.stop_between_steps() as asked, bar:
            for batch in batches:
                responses = trainer.generate(batch["input_ids"], return_prompt=False, **generation)
                batch["response"] = decode(responses)
                scores = score(batch["query"], batch["response"])
                stats = trainer.step(batch["input_ids"], responses, scores)
                trainer.log_stats(stats, batch, scores)
                bar.update()
                bar.set_postfix(score=f"{stats['ppo/mean_scores']:.2f}", KL=f"{stats['objective/kl']:.2f}")
                code = torch.tensor(float(asked.code), device=trainer.accelerator.device)
                stop = trainer.accelerator.reduce(code).item() > 0  # all processes stop after the same step
                if stop or trainer.current_step % options.save_every == 0 or trainer.current_step == settings.steps:
                    save_checkpoint(trainer, output.folder)
                if stop:
                    tracking.finish(trainer.accelerator)
                    print(f"Stopped after step {trainer.current_step}; --resume goes on from there.")
                    return asked.code or 130
        trainer.save_pretrained(output.result)
        tracking.finish(trainer.accelerator)
    print(f"The policy is in {output.result}.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: see :func:`train`, and 1 with a sentence for what is not valid."""

    def parse_and_train(arguments: list[str]) -> int:
        options = parse_arguments(arguments)
        from rlhf_course.runtime.distributed import shutdown

        code = train(*options)
        shutdown()
        return code

    return command.run(NAME, parse_and_train, arguments)


if __name__ == "__main__":
    sys.exit(main())
