"""Run PPO as in notebook 04 (GPT-2 writes positive reviews) or 05 (adapters answer questions).

    python scripts/train_ppo.py
    python scripts/train_ppo.py --preset scratch --dataset FOLDER --steps 60
    python scripts/train_ppo.py --config my.yaml --log_with tensorboard --output runs/a
    python scripts/train_ppo.py --config my.yaml --output runs/a --resume
    python scripts/train_ppo.py --sft_adapter runs/sft/model --reward_adapter runs/reward/model

With adapters from train_sft.py and train_reward_model.py --use_peft, the policy, reference and
reward model share one base, and prompts come from preference pairs (--dataset). Every notebook
setting that a run uses is an option; pass --help with both adapters to list notebook 05's.
--config FILE reads options from a YAML file, which the command line overrides. Ctrl-C stops after
the current step and saves a checkpoint, from which --resume continues.
"""

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from datasets import Dataset
from peft import PeftConfig
from tqdm.auto import tqdm

from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer
from rlhf_course.command_line import exits, options, ppo_options
from rlhf_course.command_line.output import Output, open_output
from rlhf_course.command_line.ppo_options import (
    ADAPTERS,
    Options,
    config_fields,
    experiment_of,
    used_settings,
)
from rlhf_course.course.presets import Settings, prepare, shipped
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.data import build_queries, collate, endless, load_pairs, load_reviews, prompt_ids
from rlhf_course.policy.adapters import RewardAdapter, quantization
from rlhf_course.policy.save_load import load_tokenizer
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint
from rlhf_course.ppo.config import PPOConfig
from rlhf_course.ppo.sampling import SAMPLING
from rlhf_course.rewards import RewardModel, SentimentReward, find_form
from rlhf_course.runtime import tracking
from rlhf_course.runtime.hub import download
from rlhf_course.synthetic.build import build_preferences

NAME = "train_ppo.py"
# A resumed run may change these options.
MAY_CHANGE = "output resume save_every save_at steps log_with gradient_checkpointing".split()


def parse_arguments(arguments: list[str] | None = None) -> tuple[Options, Settings]:
    """Return the options and settings; raise ``ValueError`` if one is invalid."""
    return ppo_options.parse(__doc__, arguments)


class Run(NamedTuple):
    """Hold the inputs of the training loop."""

    trainer: PPOTrainer  # its batches contain query (texts) and input_ids
    score: Callable  # texts of queries and responses → (B,)
    decode: Callable  # token ids of responses → texts
    generation: dict


def make_trainer(
    chosen: Options, settings: Settings, policy, tokenizer, queries, **config_options
) -> PPOTrainer:
    """Return a PPOTrainer; its config has the shared options and ``config_options``."""
    config = PPOConfig(
        **config_fields(chosen, settings),
        **config_options,
        accelerator_kwargs={"mixed_precision": settings.mixed_precision},
        project_kwargs={"logging_dir": str(chosen.output / "tensorboard")},
    )
    return PPOTrainer(config, policy, tokenizer=tokenizer, dataset=queries, data_collator=collate)


def build_imdb(chosen: Options, settings: Settings) -> Run:
    """Return notebook 04's run: film reviews, with a sentiment classifier as the reward."""
    with PartialState().main_process_first():  # other processes reuse these files
        assets = prepare(settings)
    tokenizer = load_tokenizer(assets.model)
    tokenizer.pad_token = tokenizer.eos_token
    query_lengths = LengthSampler(settings.query_min, settings.query_max)
    reviews = load_reviews(assets.dataset, "train")
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(assets.model)
    queries = build_queries(reviews, tokenizer, query_lengths, settings.min_characters)
    trainer = make_trainer(
        chosen, settings, policy, tokenizer, queries, model_name=str(settings.model)
    )
    reward = SentimentReward(assets.reward_model, settings.reward_label)
    generation = SAMPLING | {
        "pad_token_id": tokenizer.eos_token_id,
        "length_sampler": LengthSampler(settings.response_min, settings.response_max),
    }

    def score(queries, responses):
        pairs = zip(queries, responses, strict=True)
        return reward([query + response for query, response in pairs])

    return Run(trainer, score, tokenizer.batch_decode, generation)


def shared_base(chosen: Options) -> str | None:
    """Return the adapters' base, or None without adapters; raise ``ValueError`` if bases differ."""
    if not chosen.sft_adapter:
        return None
    base = PeftConfig.from_pretrained(chosen.sft_adapter).base_model_name_or_path
    judge_base = PeftConfig.from_pretrained(chosen.reward_adapter).base_model_name_or_path
    if Path(base).resolve() != Path(judge_base).resolve():
        raise ValueError(f"The adapters' bases {base} and {judge_base} differ. Use one base.")
    return base


def load_prompts(tokenizer, settings: Settings) -> Dataset:
    """Return preference pairs' distinct prompts that leave enough tokens for a response."""
    with PartialState().main_process_first():  # other processes reuse these files
        dataset = build_preferences() if settings.dataset == "offline" else settings.dataset
    count = settings.train_subset
    pairs, _ = load_pairs(dataset, f"train[:{count}]" if count else "train")
    longest = min(settings.max_prompt, settings.max_length - settings.max_new_tokens)
    prompts = list(dict.fromkeys(pairs["prompt"]))
    rows = []
    for prompt, ids in zip(prompts, prompt_ids(tokenizer, prompts), strict=True):
        if len(ids) <= longest:
            rows.append({"query": prompt, "input_ids": ids})
    print(
        f"Prompts for training: {len(rows)}; dropped: {len(prompts) - len(rows)} longer than"
        f" {longest} tokens."
    )
    return Dataset.from_list(rows).with_format("torch")


def build_chat(chosen: Options, settings: Settings) -> Run:
    """Return notebook 05's run: adapters on one base, and prompts from preference pairs.

    Raises ``ValueError`` if the adapters' bases differ or have too few positions.
    """
    if settings.dataset is None:
        raise ValueError(
            f"--preset {chosen.preset} needs --dataset. Pass a folder or hub id of preference"
            " pairs."
        )
    base = shared_base(chosen)
    download(base)
    has_tokenizer = Path(chosen.sft_adapter, "tokenizer_config.json").exists()
    tokenizer = load_tokenizer(chosen.sft_adapter if has_tokenizer else base)
    load_options = {"dtype": settings.dtype}
    if chosen.quantization:
        load_options["quantization_config"] = quantization(chosen.quantization)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(chosen.sft_adapter, **load_options)
    judge = RewardAdapter(policy, chosen.reward_adapter)
    score_batch_size = chosen.sample_batch_size or settings.batch_size
    form = find_form(judge, tokenizer, chosen.reward_adapter)
    reward = RewardModel(judge, tokenizer, batch_size=score_batch_size, form=form)
    if reward.max_length < settings.max_length:
        raise ValueError(
            f"--max_length {settings.max_length} exceeds the base's {reward.max_length} positions."
            " Lower it."
        )
    queries = load_prompts(tokenizer, settings)
    if not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()):
        settings.mixed_precision = "no"
    trainer = make_trainer(
        chosen,
        settings,
        policy,
        tokenizer,
        queries,
        model_name=base,
        adap_kl_ctrl=False,
        begin_suppress_tokens=[tokenizer.eos_token_id],
    )

    def score(queries, answers):
        raw = reward(queries, answers)
        return raw.sigmoid() if settings.sigmoid_score else raw

    def decode(responses):
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [text.strip() for text in texts]

    generation = SAMPLING | {
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return Run(trainer, score, decode, generation)


def describe_run(chosen: Options, settings: Settings) -> tuple[dict, dict]:
    """Return the settings and the inputs (models and datasets) that a resumed run must keep."""
    values = dict(vars(chosen))
    for name in used_settings(experiment_of(chosen)):
        values[name] = getattr(settings, name)
    names = ("dataset", *ADAPTERS, "model", "reward_model")
    places = {name: values.pop(name) for name in names if name in values}
    places["base"] = shared_base(chosen)
    inputs = {name: shipped(place) if place else place for name, place in places.items()}
    same = {name: value for name, value in values.items() if name not in MAY_CHANGE}
    same["command"] = NAME
    return same, inputs


def train(chosen: Options, settings: Settings) -> int:
    """Run PPO; return the exit code: 0 if finished, 130 or 143 if stopped by a signal."""
    quiet_libraries()
    same, inputs = describe_run(chosen, settings)
    with open_output(chosen.output, "policy", same, inputs, chosen.resume) as output:
        set_seed(chosen.seed)
        build = build_chat if chosen.sft_adapter else build_imdb
        run = build(chosen, settings)
        if output.checkpoint:
            load_checkpoint(run.trainer, output.checkpoint)
        done = run.trainer.current_step
        if done > settings.steps:
            raise ValueError(
                f"{output.checkpoint} has {done} of {settings.steps} steps already; raise --steps."
            )
        output.begin()
        run.generation["batch_size"] = chosen.sample_batch_size
        code = loop(run, settings, chosen.save_every, output)
        if code == 0:
            run.trainer.save_pretrained(output.result)
        tracking.finish(run.trainer.accelerator)
    if code == 0:
        print(f"The policy is in {output.result}.")
    else:
        print(f"Stopped after step {run.trainer.current_step}; --resume continues from there.")
    return code


def loop(run: Run, settings: Settings, save_every: int, output: Output) -> int:
    """Take the remaining steps and save checkpoints; return 0, or a stop signal's exit code."""
    trainer = run.trainer
    steps = settings.steps
    done = trainer.current_step
    save_at = getattr(settings, "save_at", ())
    is_main = trainer.accelerator.is_main_process
    bar = tqdm(total=steps, initial=done, desc="PPO", disable=not is_main)
    with exits.watch_for_stop() as stop_request, bar:
        for batch in islice(endless(trainer.dataloader), done, steps):
            queries = batch["input_ids"]
            responses = trainer.generate(queries, return_prompt=False, **run.generation)
            batch["response"] = run.decode(responses)
            scores = run.score(batch["query"], batch["response"])
            stats = trainer.step(queries, responses, scores)
            trainer.log_stats(stats, batch, scores)
            step = trainer.current_step
            code = exits.stop_code(stop_request, trainer.accelerator)
            if code or step % save_every == 0 or step == steps:
                save_checkpoint(trainer, output.folder)
            if step in save_at and step < steps:
                trainer.save_pretrained(output.result.with_name(f"policy-{step}"))
            if code:
                return code
            bar.update()  # after the checkpoint: a pipe's reader, such as tee, may be gone
            score = f"{stats['ppo/mean_scores']:.2f}"
            bar.set_postfix(score=score, KL=f"{stats['objective/kl']:.2f}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Return :func:`train`'s exit code, or 1 after an error."""
    return options.main(NAME, parse_arguments, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
