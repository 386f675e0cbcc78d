"""Notebook 03's experiment as a command: GPT-2 learns to write positive film reviews.

    python scripts/train_ppo.py
    python scripts/train_ppo.py --preset scratch --dataset FOLDER --steps 60
    python scripts/train_ppo.py --config my.yaml --log_with tensorboard --output runs/a
    python scripts/train_ppo.py --output runs/a --resume

Every setting of configs/03_gpt2_imdb_ppo.yaml is an option; --config FILE reads options from a YAML file, and the
command line wins over it. Ctrl-C stops after the current step and leaves a checkpoint that --resume goes on from.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

import yaml

from rlhf_course.presets import PRESETS, Settings, load_preset, read_spec

EXPERIMENT = "03_gpt2_imdb_ppo"


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Settings]:
    """The run's options and settings. Raises ``SystemExit`` with a sentence for what is not valid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="size of the run (default: tiny)")
    parser.add_argument("--config", type=Path, help="YAML file of options")
    parser.add_argument("--output", type=Path, help="where checkpoints and the policy go (default: build/train_ppo)")
    parser.add_argument("--seed", type=int, help="seed (default: 0)")
    parser.add_argument("--save_every", type=int, help="steps between checkpoints (default: 50)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --output")
    settings_group = parser.add_argument_group("settings (tiny · scratch · full)")
    for key, entry in read_spec(EXPERIMENT).items():
        values = " · ".join(str(entry[preset]) for preset in PRESETS)
        settings_group.add_argument(f"--{key}", metavar="X", help=f"{entry['help']} ({values})".replace("%", "%%"))
    given = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value not in (None, False)}
    try:
        if "config" in given:
            given = yaml.safe_load(given["config"].read_text(encoding="utf-8")) | given
        defaults = {"preset": "tiny", "config": None, "output": "build/train_ppo", "seed": 0, "save_every": 50}
        options = argparse.Namespace(**{k: given.pop(k, v) for k, v in (defaults | {"resume": False}).items()})
        options.output = Path(options.output)
        overrides = {k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in given.items()}
        return options, load_preset(EXPERIMENT, options.preset, overrides)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def build_trainer(settings: Settings, seed: int):
    """Trainer, tokenizer, reward, generation settings and response-length sampler of the experiment."""
    from accelerate.utils import set_seed
    from transformers import AutoTokenizer

    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
    from rlhf_course.data import build_queries, collate, load_reviews
    from rlhf_course.offline.world import prepare
    from rlhf_course.rewards import SentimentReward

    set_seed(seed)
    assets = prepare(settings)
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    tokenizer.pad_token = tokenizer.eos_token
    query_lengths = LengthSampler(settings.query_min, settings.query_max)
    reviews = load_reviews(assets.dataset, "train")
    config = PPOConfig(
        model_name=str(settings.model),
        seed=seed,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        mini_batch_size=settings.mini_batch_size,
        ppo_epochs=settings.ppo_epochs,
        init_kl_coef=settings.init_kl_coef,
        target=settings.target,
        horizon=settings.horizon,
        log_with=settings.log_with,
        accelerator_kwargs={"mixed_precision": settings.mixed_precision},
    )
    trainer = PPOTrainer(
        config,
        AutoModelForCausalLMWithValueHead.from_pretrained(assets.model),
        tokenizer=tokenizer,
        dataset=build_queries(reviews, tokenizer, query_lengths, settings.min_characters),
        data_collator=collate,
    )
    generation = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": tokenizer.eos_token_id}
    lengths = LengthSampler(settings.response_min, settings.response_max)
    return trainer, tokenizer, SentimentReward(assets.reward_model), generation, lengths


def train(options: argparse.Namespace, settings: Settings) -> int:
    """Run PPO; returns the exit code: 0 when finished, 130 when stopped by Ctrl-C."""
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
    trainer, tokenizer, reward, generation, lengths = build_trainer(settings, options.seed)
    done = int(checkpoint.name.split("-")[1]) if checkpoint else 0
    if done >= settings.steps:
        raise SystemExit(f"{checkpoint} has {done} of {settings.steps} steps already; raise --steps to go on.")
    batches = islice(endless(trainer.dataloader), done, settings.steps)
    if checkpoint:
        load_checkpoint(trainer, checkpoint)
    with stop_between_steps() as interrupt, tqdm(total=settings.steps, initial=done, desc="PPO") as bar:
        for batch in batches:
            responses = trainer.generate(batch["input_ids"], lengths, return_prompt=False, **generation)
            batch["response"] = tokenizer.batch_decode(responses)
            scores = reward([query + text for query, text in zip(batch["query"], batch["response"], strict=True)])
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


if __name__ == "__main__":
    sys.exit(train(*parse_arguments()))
