"""PPO as a command: notebook 04's GPT-2 learns positive reviews, or notebook 05's adapters answer.

    python scripts/train_ppo.py
    python scripts/train_ppo.py --preset scratch --dataset FOLDER --steps 60
    python scripts/train_ppo.py --config my.yaml --log_with tensorboard --output runs/a
    python scripts/train_ppo.py --config my.yaml --output runs/a --resume
    python scripts/train_ppo.py --sft_adapter runs/sft/model --reward_adapter runs/reward/model

With the adapters that train_sft.py and train_reward_model.py --use_peft leave, policy, reference
and reward model share one base, and the prompts are those of preference pairs (--dataset). Every
setting of the experiment that a run uses is an option (--experiment NAME --help lists them);
--config FILE reads options from a YAML file, and the command line wins over it. Ctrl-C stops after
the current step and leaves a checkpoint; the same command with --resume continues from it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import yaml
from command_line import exits, options

from rlhf_course.course.presets import PRESETS, Settings, load_preset, read_spec
from rlhf_course.ppo.config import PPOConfig

NAME = "train_ppo.py"
IMDB, CHAT = "04_gpt2_imdb_ppo", "05_lora_rlhf_baichuan"
SHARED = "learning_rate batch_size mini_batch_size ppo_epochs init_kl_coef log_with".split()
OF_PPO = "seed logprob_chunk_size gradient_accumulation_steps early_stopping".split()
# The settings of notebook 05 that this stage uses.
CHAT_SETTINGS = "dataset train_subset max_length max_prompt max_new_tokens dtype steps".split()
CHAT_SETTINGS += [*SHARED, "sigmoid_score", "mixed_precision"]
MAY_CHANGE = {"output", "resume", "save_every", "steps", "log_with", "gradient_checkpointing"}
SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0}
MAKE_THEM = """--sft_adapter and --reward_adapter are both needed; these two commands make them:
  python scripts/train_sft.py --model_name_or_path BASE --dataset ANSWERS --output_dir runs/sft
  python scripts/train_reward_model.py --model_name_or_path BASE --dataset PAIRS --use_peft \\
      --output_dir runs/reward
They leave runs/sft/model and runs/reward/model."""


def option(default, text: str, metavar: str = "X", **how):
    """Return a dataclass's field with its line of --help; ``how`` goes to argparse."""
    return field(default=default, metadata={"help": text, "metavar": metavar, **how})


@dataclass
class Options:
    """What a run needs in addition to its experiment's settings."""

    preset: str = option("tiny", f"size of the run: {', '.join(PRESETS)} (default: tiny)")
    experiment: str | None = option(
        None, f"{IMDB} (default), or {CHAT} (default with adapters)", "NAME"
    )
    sft_adapter: str | None = option(None, "adapter that policy and reference start as", "FOLDER")
    reward_adapter: str | None = option(
        None, "adapter with a score head, on the same base", "FOLDER"
    )
    output: str = option("build/train_ppo", "the run's folder (default: build/train_ppo)", "FOLDER")
    seed: int = option(0, "seed (default: 0)")
    save_every: int = option(50, "steps between checkpoints (default: 50)")
    resume: bool = option(False, "continue from the last whole checkpoint in --output")
    early_stopping: bool = option(
        False, "end a step's epochs when the policy has moved too far (default: false)"
    )
    gradient_accumulation_steps: int = option(1, "mini-batches per optimizer step (default: 1)")
    gradient_checkpointing: bool | None = option(
        None, "recompute activations, to save memory (default: the preset's)"
    )
    logprob_chunk_size: int | None = option(
        None, "response tokens whose logits are in memory at once (default: all)"
    )
    quantization: str | None = option(
        None, "the frozen base in 8bit or 4bit (default: as --dtype says)", "BITS"
    )


def parse_arguments(arguments: list[str] | None = None) -> tuple[Options, Settings]:
    """Return the run's options and settings; ``SystemExit`` with a sentence for an invalid one."""
    first = ["experiment", "sft_adapter", "reward_adapter"]
    with options.read(NAME, first, arguments) as (given, parse):
        if "report_to" in given:  # its name in the commands over trl's trainers
            given["log_with"] = given.pop("report_to")
        default = CHAT if given.get("sft_adapter") or given.get("reward_adapter") else IMDB
        experiment = given.setdefault("experiment", default)
        if experiment not in BUILD:
            known = ", ".join(BUILD)
            raise ValueError(f"Unknown experiment {experiment!r}; choose one of {known}.")
        kinds = [Options, settings_class(experiment, used_settings(experiment))]
        chosen, texts = parse(kinds, {}, __doc__)
        found = {k: v for k, v in vars(texts).items() if v is not None or k in given}
        overrides = {k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in found.items()}
        check_options(chosen)
        chosen.output = Path(chosen.output).expanduser()
        settings = load_preset(experiment, chosen.preset, overrides)
        if chosen.gradient_checkpointing is None:
            chosen.gradient_checkpointing = getattr(settings, "gradient_checkpointing", False)
        PPOConfig(**ppo_options(chosen, settings))  # says what does not fit before anything runs
        return chosen, settings


def used_settings(experiment: str) -> dict[str, dict]:
    """Return an experiment's settings that PPO uses: see presets.read_spec."""
    spec = read_spec(experiment)
    return {key: spec[key] for key in (CHAT_SETTINGS if experiment == CHAT else spec)}


def settings_class(experiment: str, used: dict[str, dict]) -> type:
    """Return a dataclass of these settings as texts, None where none is given."""
    entries = []
    for key, entry in used.items():
        values = " · ".join(str(entry[preset]) for preset in PRESETS)
        aliases = ["--report_to"] if key == "log_with" else []
        text = f"{entry['help']} ({values})".replace("%", "%%")
        entries.append((key, str | None, option(None, text, aliases=aliases)))
    title = f"settings of {experiment} (tiny · scratch · full)"
    return make_dataclass("GivenSettings", entries, namespace={"_argument_group_name": title})


def ppo_options(chosen: Options, settings: Settings) -> dict:
    """Return what both experiments' PPOConfig gets from options and settings."""
    names = [name for name in (*SHARED, "target", "horizon") if hasattr(settings, name)]
    found = {name: getattr(settings, name) for name in names}
    return found | {name: getattr(chosen, name) for name in (*OF_PPO, "gradient_checkpointing")}


def check_options(chosen: Options) -> None:
    """Raise ``ValueError`` for options that do not fit the experiment, or each other."""
    folders = {"--sft_adapter": chosen.sft_adapter, "--reward_adapter": chosen.reward_adapter}
    if chosen.save_every < 1:
        raise ValueError(f"--save_every takes a number of at least 1, got {chosen.save_every}.")
    if chosen.experiment == IMDB and (any(folders.values()) or chosen.quantization):
        raise ValueError(f"Adapters and --quantization are only for --experiment {CHAT}.")
    if chosen.experiment == CHAT and not all(folders.values()):
        raise ValueError(MAKE_THEM)
    for name, folder in folders.items():
        if folder and not Path(folder, "adapter_config.json").exists():
            raise ValueError(f"{name}: there is no adapter_config.json in {folder}.")


class Run(NamedTuple):
    """What the training loop needs."""

    trainer: object  # a PPOTrainer; its batches have query (texts) and input_ids
    score: Callable  # queries and responses, as texts → (B,)
    decode: Callable  # token ids of responses → texts
    generation: dict


def make_trainer(chosen: Options, settings: Settings, policy, tokenizer, queries, **more):
    """Return a PPOTrainer with what the experiments' configs have in common, and ``more``."""
    from rlhf_course import PPOTrainer
    from rlhf_course.data import collate

    more["accelerator_kwargs"] = {"mixed_precision": settings.mixed_precision}
    more["project_kwargs"] = {"logging_dir": str(chosen.output / "tensorboard")}
    config = PPOConfig(**ppo_options(chosen, settings), **more)
    parts = {"tokenizer": tokenizer, "dataset": queries, "data_collator": collate}
    return PPOTrainer(config, policy, **parts)


def build_imdb(chosen: Options, settings: Settings) -> Run:
    """Return notebook 04's run: film reviews, and a sentiment classifier as the reward."""
    from accelerate import PartialState

    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler
    from rlhf_course.course.shipped import prepare
    from rlhf_course.data import build_queries, load_reviews
    from rlhf_course.policy.save_load import load_tokenizer
    from rlhf_course.rewards import SentimentReward

    with PartialState().main_process_first():  # the others find what it builds
        assets = prepare(settings)
    tokenizer = load_tokenizer(assets.model)
    tokenizer.pad_token = tokenizer.eos_token
    query_lengths = LengthSampler(settings.query_min, settings.query_max)
    reviews = load_reviews(assets.dataset, "train")
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(assets.model)
    queries = build_queries(reviews, tokenizer, query_lengths, settings.min_characters)
    named = {"model_name": str(settings.model)}
    trainer = make_trainer(chosen, settings, policy, tokenizer, queries, **named)
    reward = SentimentReward(assets.reward_model, settings.reward_label)
    lengths = LengthSampler(settings.response_min, settings.response_max)
    generation = SAMPLING | {"pad_token_id": tokenizer.eos_token_id, "length_sampler": lengths}

    def score(queries, responses):
        return reward([q + r for q, r in zip(queries, responses, strict=True)])

    return Run(trainer, score, tokenizer.batch_decode, generation)


def shared_base(chosen: Options) -> str | None:
    """Return the base of both adapters, None without adapters.

    Raises ``ValueError`` if they have different ones.
    """
    from peft import PeftConfig

    adapters = chosen.sft_adapter, chosen.reward_adapter
    if not all(adapters):
        return None
    bases = [PeftConfig.from_pretrained(folder).base_model_name_or_path for folder in adapters]
    if Path(bases[0]).resolve() != Path(bases[1]).resolve():
        raise ValueError(f"The adapters must share one base; theirs are {bases[0]} and {bases[1]}.")
    return bases[0]


def load_prompts(tokenizer, settings: Settings):
    """Return the prompts of preference pairs that leave room for an answer, each once."""
    from accelerate import PartialState
    from datasets import Dataset

    from rlhf_course.data import load_pairs
    from rlhf_course.worlds.build import build_preferences

    with PartialState().main_process_first():
        dataset = build_preferences() if settings.dataset == "offline" else settings.dataset
    count = settings.train_subset
    pairs, _ = load_pairs(dataset, f"train[:{count}]" if count else "train")
    longest = min(settings.max_prompt, settings.max_length - settings.max_new_tokens)
    prompts = list(dict.fromkeys(pairs["prompt"]))
    tokens = zip(prompts, tokenizer(prompts)["input_ids"], strict=True)
    rows = [{"query": p, "input_ids": ids} for p, ids in tokens if len(ids) <= longest]
    dropped = f"{len(prompts) - len(rows)} of more than {longest} tokens"
    print(f"Prompts: {len(rows)} to train on; dropped: {dropped}.")
    return Dataset.from_list(rows).with_format("torch")


def build_chat(chosen: Options, settings: Settings) -> Run:
    """Return notebook 05's run: adapters on one base, and prompts from preference pairs.

    Raises ``ValueError`` if the adapters, or texts and base, do not fit together.
    """
    import torch

    from rlhf_course import AutoModelForCausalLMWithValueHead
    from rlhf_course.policy.adapters import RewardAdapter, quantization
    from rlhf_course.policy.save_load import load_tokenizer
    from rlhf_course.rewards import RewardModel
    from rlhf_course.runtime.hub import download

    if settings.dataset is None:
        needed = "--dataset: a folder or hub id of preference pairs"
        raise ValueError(f"--preset {chosen.preset} needs {needed}.")
    base, sft = shared_base(chosen), chosen.sft_adapter
    download(base)
    tokenizer = load_tokenizer(sft if Path(sft, "tokenizer_config.json").exists() else base)
    kind = chosen.quantization
    smaller = {"quantization_config": quantization(kind)} if kind else {}
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(sft, dtype=settings.dtype, **smaller)
    judge = RewardAdapter(policy, chosen.reward_adapter)
    reward = RewardModel(judge, tokenizer, batch_size=settings.batch_size)
    if reward.max_length < settings.max_length:
        has = f"the base's {reward.max_length} positions"
        raise ValueError(f"--max_length {settings.max_length} is more than {has}.")
    queries = load_prompts(tokenizer, settings)
    if not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()):
        settings.mixed_precision = "no"
    more = {"model_name": base, "adap_kl_ctrl": False}
    more["begin_suppress_tokens"] = [tokenizer.eos_token_id]
    trainer = make_trainer(chosen, settings, policy, tokenizer, queries, **more)

    def score(queries, answers):
        raw = reward(queries, answers)
        return raw.sigmoid() if settings.sigmoid_score else raw

    def decode(responses):
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [text.strip() for text in texts]

    return Run(trainer, score, decode, SAMPLING | {"max_new_tokens": settings.max_new_tokens})


BUILD = {IMDB: build_imdb, CHAT: build_chat}


def train(chosen: Options, settings: Settings) -> int:
    """Run PPO; return the exit code: 0 when finished, 130 or 143 when stopped by a signal."""
    from accelerate.utils import set_seed
    from command_line.output import open_output

    from rlhf_course.course.run_card import quiet_libraries
    from rlhf_course.ppo.checkpoint import load_checkpoint
    from rlhf_course.runtime import tracking

    quiet_libraries()
    used = used_settings(chosen.experiment)
    every = vars(chosen) | {name: getattr(settings, name) for name in used}
    names = ("dataset", "model", "reward_model", "sft_adapter", "reward_adapter")
    inputs = {name: every.pop(name) for name in names if name in every}
    inputs["base"] = shared_base(chosen)
    same = {name: value for name, value in every.items() if name not in MAY_CHANGE}
    same["command"] = NAME
    with open_output(chosen.output, "policy", same, inputs, chosen.resume) as output:
        set_seed(chosen.seed)
        run = BUILD[chosen.experiment](chosen, settings)
        if output.checkpoint:
            load_checkpoint(run.trainer, output.checkpoint)
        done = run.trainer.current_step
        if done > settings.steps:
            raise ValueError(
                f"{output.checkpoint} has {done} of {settings.steps} steps already; raise --steps."
            )
        output.begin()
        code = loop(run, settings.steps, chosen.save_every, output.folder)
        if code == 0:
            run.trainer.save_pretrained(output.result)
        tracking.finish(run.trainer.accelerator)
    print(
        f"Stopped after step {run.trainer.current_step}; --resume continues from there."
        if code
        else f"The policy is in {output.result}."
    )
    return code


def loop(run: Run, steps: int, save_every: int, folder: Path) -> int:
    """Take the steps that are left, with checkpoints; return the exit code of a stop, or 0."""
    import torch
    from tqdm.auto import tqdm

    from rlhf_course.data import endless
    from rlhf_course.ppo.checkpoint import save_checkpoint

    trainer, done = run.trainer, run.trainer.current_step
    is_main = trainer.accelerator.is_main_process
    bar = tqdm(total=steps, initial=done, desc="PPO", disable=not is_main)
    with exits.stop_between_steps() as asked, bar:
        for batch in islice(endless(trainer.dataloader), done, steps):
            queries = batch["input_ids"]
            responses = trainer.generate(queries, return_prompt=False, **run.generation)
            batch["response"] = run.decode(responses)
            scores = run.score(batch["query"], batch["response"])
            stats = trainer.step(queries, responses, scores)
            trainer.log_stats(stats, batch, scores)
            bar.update()
            shown = {"score": stats["ppo/mean_scores"], "KL": stats["objective/kl"]}
            bar.set_postfix({name: f"{value:.2f}" for name, value in shown.items()})
            code = torch.tensor(float(asked.code), device=trainer.accelerator.device)
            stop = trainer.accelerator.reduce(code).item() > 0  # all processes stop at one step
            if stop or trainer.current_step % save_every == 0 or trainer.current_step == steps:
                save_checkpoint(trainer, folder)
            if stop:
                return asked.code or 130
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: see :func:`train`, and 1 after an error."""
    return options.main(NAME, parse_arguments, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
