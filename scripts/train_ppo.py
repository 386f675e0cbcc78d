"""Run PPO as in notebook 04 (GPT-2 writes positive reviews) or 05 (adapters answer questions).

    python scripts/train_ppo.py
    python scripts/train_ppo.py --preset scratch --dataset FOLDER --steps 60
    python scripts/train_ppo.py --config my.yaml --log_with tensorboard --output runs/a
    python scripts/train_ppo.py --config my.yaml --output runs/a --resume
    python scripts/train_ppo.py --sft_adapter runs/sft/model --reward_adapter runs/reward/model
    python scripts/train_ppo.py --preset small --reward_adapter runs/reward/model --dataset FOLDER

With adapters from train_sft.py and train_reward_model.py --use_peft, the policy, reference and
reward model share one base, and prompts come from preference pairs (--dataset). Without
--sft_adapter, the policy is a new adapter on the reward adapter's base, a chat model. Every
notebook setting that a run uses is an option; pass --help with the adapters to list notebook 05's.
--config FILE reads options from a YAML file, which the command line overrides. Ctrl-C stops after
the current step and saves a checkpoint, from which --resume continues. --output gets log.jsonl
(statistics), evaluations.jsonl (score and KL on held-out prompts) and texts.jsonl (answers).
"""

import random
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LoraConfig, PeftConfig
from tqdm.auto import tqdm

from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer
from rlhf_course.command_line import base_checks, exits, options, ppo_options, progress
from rlhf_course.command_line.output import Output, open_output
from rlhf_course.command_line.ppo_options import (
    ADAPTERS,
    LORA,
    Options,
    config_fields,
    experiment_of,
    used_settings,
)
from rlhf_course.command_line.records import Records
from rlhf_course.course.presets import Settings, prepare, shipped
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.data import (
    build_queries,
    collate,
    decode_answers,
    endless,
    load_pairs,
    load_reviews,
    prompt_ids,
)
from rlhf_course.data.rows import UnknownSplitError
from rlhf_course.evaluation import evaluate
from rlhf_course.policy.adapters import RewardAdapter, quantization
from rlhf_course.policy.save_load import load_tokenizer
from rlhf_course.ppo.checkpoint import (
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
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
    held_out: list  # queries for evaluations: texts, or token ids
    most_tokens: int  # of a response
    advice: str  # options that shorten the run


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
    policy = load_imdb_policy(assets.model, settings)
    base_checks.warn_about_step_size(policy, chosen.preset, settings.learning_rate)
    base_checks.warn_about_texts(tokenizer, reviews["text"][: base_checks.COMPARED])
    queries = build_queries(reviews, tokenizer, query_lengths, settings.min_characters)
    queries, held_out = hold_out_openings(
        chosen, settings, assets.dataset, tokenizer, queries, query_lengths
    )
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

    return Run(
        trainer,
        score,
        tokenizer.batch_decode,
        generation,
        held_out=held_out,
        most_tokens=settings.response_max - 1,
        advice="--response_max or --steps",
    )


def load_imdb_policy(source: str, settings: Settings):
    """Return notebook 04's policy, with a LoRA adapter if the preset has one."""
    lora = None
    rank = getattr(settings, "lora_rank", 0)
    if rank:
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
        )
    return AutoModelForCausalLMWithValueHead.from_pretrained(source, peft_config=lora)


def hold_out_openings(
    chosen: Options, settings: Settings, dataset: str, tokenizer, queries: Dataset, lengths
) -> tuple[Dataset, list]:
    """Return queries for training and for evaluations: of the test split, or the last of train.

    Random generators keep their state, so a run's samples do not depend on its evaluations.
    """
    count = chosen.eval_prompts
    if not count:
        return queries, []
    try:
        reviews = load_reviews(dataset, "test")
    except UnknownSplitError:
        kept = max(len(queries) - count, 1)
        rows = queries.select(range(kept, len(queries)))
        return queries.select(range(kept)), list(rows["input_ids"])
    with same_random_state(seed=0):
        rows = build_queries(reviews, tokenizer, lengths, settings.min_characters)
        rows = rows.shuffle(seed=0)  # reviews may be sorted by label
    return queries, list(rows["input_ids"][:count])


@contextmanager
def same_random_state(seed: int):
    """Seed the random generators for the with block, and then restore their states."""
    state = random_state()
    set_seed(seed)
    try:
        yield
    finally:
        set_random_state(state)


def shared_base(chosen: Options) -> str | None:
    """Return the adapters' base, or None without adapters; raise ``ValueError`` if bases differ."""
    if not chosen.reward_adapter:
        return None
    judge_base = PeftConfig.from_pretrained(chosen.reward_adapter).base_model_name_or_path
    if not chosen.sft_adapter:
        return judge_base
    base = PeftConfig.from_pretrained(chosen.sft_adapter).base_model_name_or_path
    if Path(base).resolve() != Path(judge_base).resolve():
        raise ValueError(f"The adapters' bases {base} and {judge_base} differ. Use one base.")
    return base


def load_prompts(tokenizer, chosen: Options, settings: Settings) -> tuple[Dataset, list[str]]:
    """Return preference pairs' prompts for training, and texts of held-out prompts.

    A prompt must leave enough tokens for a response. Prompts are held out as
    :func:`hold_out_prompts` says.
    """
    with PartialState().main_process_first():  # other processes reuse these files
        dataset = build_preferences() if settings.dataset == "offline" else settings.dataset
    count = settings.train_subset
    split = f"{chosen.split}[:{count}]" if count else chosen.split
    pairs, _ = load_pairs(dataset, split, chosen.data_dir, chosen.columns)
    prompts = list(dict.fromkeys(pairs["prompt"]))
    base_checks.warn_about_texts(tokenizer, prompts)
    longest = min(settings.max_prompt, settings.max_length - settings.max_new_tokens)
    rows = fitting_prompts(tokenizer, prompts, longest)
    dropped = len(prompts) - len(rows)
    rows, held_out = hold_out_prompts(rows, chosen, dataset, tokenizer, longest)
    print(
        f"Prompts for training: {len(rows)}, held out: {len(held_out)}; dropped: {dropped} longer"
        f" than {longest} tokens (the smaller of --max_prompt and --max_length minus"
        " --max_new_tokens)."
    )
    queries = [row["query"] for row in held_out]
    return Dataset.from_list(rows).with_format("torch"), queries


def fitting_prompts(tokenizer, prompts: list[str], longest: int) -> list[dict]:
    """Return rows of query and input_ids, of prompts of at most ``longest`` tokens."""
    rows = []
    all_ids = prompt_ids(tokenizer, prompts) if prompts else []
    for prompt, ids in zip(prompts, all_ids, strict=True):
        if len(ids) <= longest:
            rows.append({"query": prompt, "input_ids": ids})
    return rows


def hold_out_prompts(
    rows: list[dict], chosen: Options, dataset, tokenizer, longest: int
) -> tuple[list[dict], list[dict]]:
    """Return (training prompts, held-out prompts), at most ``--eval_prompts`` of them.

    Held-out prompts are those of ``--eval_split`` that are not in ``rows``. If the split has fewer
    than four of them, a tenth of ``rows`` is held out instead.
    """
    count = chosen.eval_prompts
    if not count:
        return rows, []
    known = {row["query"] for row in rows}
    try:
        test, _ = load_pairs(dataset, chosen.eval_split, chosen.data_dir, chosen.columns)
        unseen = [prompt for prompt in dict.fromkeys(test["prompt"]) if prompt not in known]
    except UnknownSplitError:
        if chosen.eval_split != "test":  # the reader named it
            raise
        unseen = []
    held_out = fitting_prompts(tokenizer, unseen, longest)
    draw = random.Random(0)
    if len(held_out) >= 4:
        return rows, draw.sample(held_out, min(count, len(held_out)))
    drawn = set(draw.sample(range(len(rows)), min(count, len(rows) // 10)))
    training = [row for number, row in enumerate(rows) if number not in drawn]
    return training, [rows[number] for number in sorted(drawn)]


def load_policy(chosen: Options, settings: Settings, base: str):
    """Return the SFT adapter as the policy; without one, a new adapter on the base."""
    load_options = {"dtype": settings.dtype}
    if chosen.quantization:
        load_options["quantization_config"] = quantization(chosen.quantization)
    source = chosen.sft_adapter
    if source is None:
        source = base
        load_options["peft_config"] = LoraConfig(
            r=settings.lora_r,
            lora_alpha=settings.lora_alpha,
            target_modules=settings.lora_target_modules,
            task_type="CAUSAL_LM",
        )
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(source, **load_options)
    base_checks.warn_about_step_size(policy, chosen.preset, settings.learning_rate)
    return policy


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
    adapter = chosen.sft_adapter
    has_tokenizer = adapter and Path(adapter, "tokenizer_config.json").exists()
    tokenizer = load_tokenizer(adapter if has_tokenizer else base)
    policy = load_policy(chosen, settings, base)
    judge = RewardAdapter(policy, chosen.reward_adapter)
    score_batch_size = chosen.sample_batch_size or settings.batch_size
    form = find_form(judge, tokenizer, chosen.reward_adapter)
    reward = RewardModel(judge, tokenizer, batch_size=score_batch_size, form=form)
    if reward.max_length < settings.max_length:
        raise ValueError(
            f"--max_length {settings.max_length} exceeds the base's {reward.max_length} positions."
            " Lower it."
        )
    queries, held_out = load_prompts(tokenizer, chosen, settings)
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
        return decode_answers(tokenizer, responses)

    generation = SAMPLING | {
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return Run(
        trainer,
        score,
        decode,
        generation,
        held_out=held_out,
        most_tokens=settings.max_new_tokens,
        advice="--max_new_tokens or --steps",
    )


def describe_run(chosen: Options, settings: Settings) -> tuple[dict, dict]:
    """Return the settings and the inputs (models and datasets) that a resumed run must keep."""
    values = dict(vars(chosen))
    for name in used_settings(experiment_of(chosen)):
        if name not in LORA or not chosen.sft_adapter:
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
        build = build_chat if chosen.reward_adapter else build_imdb
        run = build(chosen, settings)
        if output.checkpoint:
            load_checkpoint(run.trainer, output.checkpoint)
        done = run.trainer.current_step
        if done > settings.steps:
            raise ValueError(
                f"{output.checkpoint} has {done} of {settings.steps} steps already; raise --steps."
            )
        output.begin()
        records = Records(output.folder, done)
        run.generation["batch_size"] = chosen.sample_batch_size
        code = loop(run, settings, chosen.save_every, output, records)
        if code == 0:
            run.trainer.save_pretrained(output.result)
        tracking.finish(run.trainer.accelerator)
    if code == 0:
        print_change(records)
        print(f"The policy is in {output.result}.")
    else:
        print(f"Stopped after step {run.trainer.current_step}; --resume continues from there.")
    return code


def loop(run: Run, settings: Settings, save_every: int, output: Output, records: Records) -> int:
    """Take the remaining steps and save checkpoints; return 0, or a stop signal's exit code."""
    trainer = run.trainer
    steps = settings.steps
    done = trainer.current_step
    save_at = getattr(settings, "save_at", ())
    is_main = trainer.accelerator.is_main_process
    evaluation_seconds = 0.0
    if done % save_every == 0:  # a run that was stopped between two evaluations adds none
        evaluation_seconds = measure(run, records)
    estimate = progress.Estimate(run.advice, is_main)
    tokens = 0
    bar = tqdm(total=steps, initial=done, desc="PPO", disable=not is_main)
    with exits.watch_for_stop() as stop_request, bar:
        for batch in islice(endless(trainer.dataloader), done, steps):
            stats = take_step(run, batch)
            step = trainer.current_step
            records.add_log(step, stats)
            evaluations_left = steps // save_every - step // save_every
            if steps % save_every:
                evaluations_left += 1
            tokens += stats["tokens/responses_len_mean"] * trainer.config.batch_size
            estimate.update(
                tokens=tokens,
                done=step - done,
                left=steps - step,
                steps_left=steps - step,
                more_seconds=evaluation_seconds * evaluations_left,
            )
            code = exits.stop_code(stop_request, trainer.accelerator)
            if code or step % save_every == 0 or step == steps:
                save_checkpoint(trainer, output.folder)
            if not code and (step % save_every == 0 or step == steps):
                measure(run, records)
            if step in save_at and step < steps:
                trainer.save_pretrained(output.result.with_name(f"policy-{step}"))
            if code:
                return code
            bar.update()  # after the checkpoint: a pipe's reader, such as tee, may be gone
            score = f"{stats['ppo/mean_scores']:.2f}"
            bar.set_postfix(score=score, KL=f"{stats['objective/kl']:.2f}")
    return 0


def take_step(run: Run, batch: dict) -> dict:
    """Sample, score, and take one PPO step; return its statistics."""
    trainer = run.trainer
    config = trainer.config
    is_main = trainer.accelerator.is_main_process
    queries = batch["input_ids"]
    calls = -(-len(queries) // (run.generation["batch_size"] or len(queries)))
    with progress.sampling_bar(
        trainer.policy.pretrained_model, most=run.most_tokens * calls, is_main=is_main
    ):
        responses = trainer.generate(queries, return_prompt=False, **run.generation)
    batch["response"] = run.decode(responses)
    scores = run.score(batch["query"], batch["response"])
    per_update = config.mini_batch_size * config.gradient_accumulation_steps
    updates = config.ppo_epochs * config.batch_size // per_update
    with progress.optimization_bar(trainer.optimizer.optimizer, most=updates, is_main=is_main):
        stats = trainer.step(queries, responses, scores)
    trainer.log_stats(stats, batch, scores)
    return stats


def measure(run: Run, records: Records) -> float:
    """Answer the held-out prompts and record score, KL and four answers; return the seconds.

    The same seed is used at each step, so that answers differ only because the policy does.
    """
    step = run.trainer.current_step
    if not run.held_out or records.evaluations.has(step):
        return 0.0
    started = time.perf_counter()
    generation = {
        name: value
        for name, value in run.generation.items()
        if name not in ("length_sampler", "batch_size")
    }
    generation["max_new_tokens"] = run.most_tokens
    size = run.generation["batch_size"] or len(run.held_out)
    table = evaluate(run.trainer, run.score, run.held_out, batch_size=size, **generation)
    means = table[["score", "kl", "length", "finished"]].mean()
    records.add_evaluation(step, {"prompts": len(table)} | means.to_dict())
    answers = table[["query", "response", "score", "kl"]].rename(
        columns={"query": "prompt", "response": "answer"}
    )
    records.add_texts(step, answers.to_dict("records"))
    return time.perf_counter() - started


def print_change(records: Records) -> None:
    """Print the first and the last evaluation on held-out prompts."""
    rows = records.evaluations.rows
    if len(rows) < 2:
        return
    before = rows[0]
    after = rows[-1]
    print(
        f"{after['prompts']} held-out prompts: score {before['score']:.2f} before,"
        f" {after['score']:.2f} after; KL {after['kl']:.2f} nats. Answers: {records.texts.file}."
    )


def main(arguments: list[str] | None = None) -> int:
    """Return :func:`train`'s exit code, or 1 after an error."""
    return options.main(NAME, parse_arguments, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
