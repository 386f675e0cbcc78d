"""Hand a PPO run over to a larger engine, and check that the engine computes the same numbers.

    python scripts/hand_over.py RUN --to verl
    python scripts/hand_over.py RUN --to trl --method grpo
    python scripts/hand_over.py RUN --to verl --check

RUN is an output folder of train_ppo.py. Options of train_ppo.py may follow: repeat those that name
your own models and datasets. Writes models, prompts, reward, settings, a launch command and a
recorded batch to RUN-to-ENGINE. --check replays the batch in the engine's own code, and exits with
2 if a number or a setting differs from the run's.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import torch
import yaml
from jinja2 import Template
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_course import AutoModelForCausalLMWithValueHead, command_line
from rlhf_course.command_line import exits
from rlhf_course.command_line.output import find_checkpoint, fingerprint
from rlhf_course.course.presets import ROOT
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.course.shipped import shipped
from rlhf_course.policy.network import without_dropout
from rlhf_course.policy.save_load import load_model, load_tokenizer
from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo import update
from rlhf_course.ppo.checkpoint import load_checkpoint
from rlhf_course.ppo.rollout import Samples, forward
from rlhf_course.rewards import load_reward_model
from rlhf_course.runtime.files import atomic_folder, read_json
from scripts import train_ppo

HERE = Path(command_line.__file__).parent / "engines"
VERSIONS = {"verl": "0.9.1", "trl": "1.16.0"}
OVERLAY = ROOT / "build/engines" / f"verl-{VERSIONS['verl']}"
SAMPLES, GROUP = 16, 4  # samples recorded; responses per prompt for trl
NOISE = {"verl": 1.0, "trl": 0.3}  # nats per token from old to new policy; activates clipping
TALK = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def rebuild(folder: Path, more: list[str]):
    """Return a run's options, settings, and last state; raise ``ValueError`` if inputs changed."""
    if not (folder / "run.json").exists():
        raise ValueError(f"{folder} has no run.json. Choose an output folder of train_ppo.py.")
    before = read_json(folder / "run.json")
    given = {k: v for k, v in before["settings"].items() if v is not None}
    if given.pop("command", None) != train_ppo.NAME:
        raise ValueError(f"{folder} is not a run of {train_ppo.NAME}. Hand over one of its runs.")
    for name in (x[2:].partition("=")[0] for x in more if x.startswith("--")):
        if name.replace("-", "_") not in before["inputs"]:
            raise ValueError(f"--{name} cannot change: a hand-over has the run's own settings.")
    given = [f"--{name}={value}" for name, value in given.items()]
    options, settings = train_ppo.parse_arguments([*given, *more])
    if options.quantization:
        raise ValueError("Adapters cannot be merged into a quantized base. Use an unquantized run.")
    places = vars(settings) | vars(options) | {"base": train_ppo.shared_base(options)}
    for name, old in before["inputs"].items():
        place = places[name]
        if old not in (place, place and fingerprint(shipped(place))):
            raise ValueError(f"--{name} {place} differs from {folder}'s. Pass the run's input.")
    run = (train_ppo.build_chat if options.sft_adapter else train_ppo.build_imdb)(options, settings)
    load_checkpoint(run.trainer, find_checkpoint(folder))
    return options, settings, run


def save_models(folder: Path, options, settings, run) -> int | None:
    """Write the three models; return the reward label's index, or None for a single label."""

    def save(name: str, network, tokenizer, adapter: str = "default") -> None:
        if isinstance(network, PeftModel):
            network = copy.deepcopy(network).merge_and_unload(adapter_names=[adapter])
        network.float().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    policy, reference = run.trainer.policy, run.trainer.ref_model or run.trainer.policy
    tokenizer = copy.deepcopy(run.trainer.tokenizer)
    has_start = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    tokenizer.chat_template = "{{ bos_token }}" * has_start + TALK  # prompts are plain texts
    save("policy", policy.pretrained_model, tokenizer, "policy")
    save("reference", reference.pretrained_model, tokenizer, "ref")
    if options.reward_adapter:
        judge = load_reward_model(options.reward_adapter)
        judge.config.pad_token_id = tokenizer.pad_token_id
        save("reward_model", judge, load_tokenizer(train_ppo.shared_base(options)))
        return None
    source = shipped(settings.reward_model)
    judge = load_model(AutoModelForSequenceClassification, source, dtype=torch.float32)
    save("reward_model", judge, load_tokenizer(source))
    return {k.upper(): v for k, v in judge.config.label2id.items()}[settings.reward_label.upper()]


def save_prompts(folder: Path, engine: str, trainer) -> list[int]:
    """Write the prompts whose texts tokenize back to the same ids; return their row numbers."""
    ids, texts = (trainer.dataset[name][:] for name in ("input_ids", "query"))
    pairs = zip(ids, trainer.tokenizer(texts)["input_ids"], strict=True)
    kept = [row for row, (query, again) in enumerate(pairs) if query.tolist() == again]
    if len(kept) < SAMPLES:
        raise ValueError(
            f"Only {len(kept)} prompts have texts that tokenize to the prompts' ids. Use at least"
            f" {SAMPLES} such prompts."
        )
    table = pd.DataFrame({"prompt": [texts[row] for row in kept]})
    if engine == "trl":
        table.to_json(folder / "prompts.jsonl", orient="records", lines=True, force_ascii=False)
        return kept
    table["data_source"], table["ability"] = "rlhf_course", "text"
    table["reward_model"] = [{"style": "model", "ground_truth": ""}] * len(table)
    table["extra_info"] = [{"index": i, "prompt": text} for i, text in enumerate(table["prompt"])]
    table["prompt"] = [[{"role": "user", "content": text}] for text in table["prompt"]]
    table.to_parquet(folder / "prompts.parquet")
    return kept


def record(run, rows: list[int]) -> tuple[Samples, update.Experience, dict]:
    """Sample a response to each prompt; return the batch, its experience, and its texts."""
    trainer = run.trainer
    trainer.config.begin_suppress_tokens = []  # engines lack this option
    queries, prompts = ([trainer.dataset[row][k] for row in rows] for k in ("input_ids", "query"))
    responses = trainer.generate(queries, return_prompt=False, **run.generation)
    answers = trainer.tokenizer.batch_decode(responses, skip_special_tokens=True)  # as engines do
    seen = [x.replace(trainer.tokenizer.eos_token, "") for x in run.decode(responses)]
    scores = torch.as_tensor(run.score(prompts, seen)).float()
    given = queries, responses, scores.to(trainer.accelerator.device)
    samples = Samples.from_lists(*given, trainer.tokenizer.pad_token_id)
    with torch.no_grad(), without_dropout(trainer.model):
        experience, _ = update.make_experience(
            samples, trainer.model, trainer.reference, trainer.config, trainer.kl_ctl.value
        )
    texts = {"prompts": prompts, "answers": answers, "queries": [q.tolist() for q in queries]}
    return on_cpu(samples), on_cpu(experience), texts


def on_cpu(batch):
    """Return a copy of samples or of an experience with all tensors on the CPU."""
    return type(batch)(**{name: tensor.cpu() for name, tensor in vars(batch).items()})


def ppo_loss(new, old, noise, experience: update.Experience, config) -> tuple:
    """Return the policy and value losses (scalars)."""
    values = ppo.value_loss(
        experience.values + noise, experience.values, experience.returns, config.cliprange_value
    )[0]
    policy = ppo.policy_loss(new, old, experience.advantages, config.cliprange)[0]
    return tuple(ppo.masked_mean(loss, experience.mask) for loss in (policy, values))


def group_loss(
    new, old, scores: torch.Tensor, experience: update.Experience, config, kl_coef: float, method
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RLOO's or GRPO's loss from notebook 07's code, and its advantages (B,)."""
    names = {"settings": SimpleNamespace(cliprange=config.cliprange), "torch": torch}
    wanted = ("clipped", "leave_one_out", "rloo_loss", "group_advantages", "grpo_loss")
    for cell in nbformat.read(ROOT / "notebooks/07_after_ppo.ipynb", as_version=4).cells:
        if cell.source.startswith(tuple(f"def {name}(" for name in wanted)):
            exec(compile(cell.source, "notebook 07", "exec"), names)
    mask = experience.mask
    if method == "rloo":
        grouped = (scores - kl_coef * (experience.kl * mask).sum(1)).view(-1, GROUP)
        advantages = names["leave_one_out"](grouped).flatten()
        return names["rloo_loss"](new, old, mask, advantages), advantages
    advantages = names["group_advantages"](scores.view(-1, GROUP)).flatten()
    loss = names["grpo_loss"](new, old, experience.ref_logprobs, mask, advantages, kl_coef)
    return loss, advantages


def write(engine: str, method: str, target: Path, options, settings, run) -> None:
    """Write the hand-over to ``target``, with noise in the old log-probabilities.

    Raises ``ValueError`` if the folder has files, because the user may have edited them.
    """
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} already has files. Remove it, or move it away.")
    config, kl_coef = run.trainer.config, run.trainer.kl_ctl.value
    repeats = GROUP if engine == "trl" else 1
    limits = yaml.safe_load((HERE / "limits.yaml").read_text("utf-8")) | {"ppo": []}
    with atomic_folder(target) as folder:
        index = save_models(folder, options, settings, run)
        rows = save_prompts(folder, engine, run.trainer)
        samples, experience, texts = record(
            run, [x for x in rows[: SAMPLES // repeats] for _ in range(repeats)]
        )
        network = load_model(AutoModelForCausalLM, folder / "policy", dtype=torch.float32)
        policy = AutoModelForCausalLMWithValueHead(network)
        generator = torch.Generator().manual_seed(0)
        noise = NOISE[engine] * torch.randn(samples.mask.shape, generator=generator)
        new, old = forward(policy, samples).logprobs, experience.logprobs - noise
        batch = vars(samples) | vars(experience) | {"noise": noise}
        if engine == "verl":
            loss, value_loss = ppo_loss(new, old, noise, experience, config)
            found = {"value loss": value_loss.item()}
        else:
            loss, batch["advantages"] = group_loss(
                new, old, samples.scores, experience, config, kl_coef, method
            )
            found = {}
        loss.backward()
        grads = [x.grad.norm() for x in network.parameters() if x.grad is not None]
        found |= {"policy loss": loss.item(), "gradient norm": torch.stack(grads).norm().item()}
        save_file({k: v.contiguous() for k, v in batch.items()}, folder / "batch.safetensors")
        for source in (*HERE.glob("both/*.j2"), *HERE.glob(f"{engine}/*.j2")):
            template = Template(source.read_text("utf-8"), keep_trailing_newline=True)
            text = template.render(locals() | {"version": VERSIONS[engine], "group": GROUP})
            (folder / source.stem).write_text(text, encoding="utf-8")
        shutil.copy(HERE / "replay.py", folder)
        lines = (folder / "settings.txt").read_text("utf-8").partition("# Free")[0].splitlines()
        expected = {"settings": [x for x in lines if x[0] != "#"], "numbers": found} | texts
        (folder / "expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")
    print("Differences from the run are listed in", target / "README.md")


def check(engine: str, folder: Path) -> int:
    """Replay the recorded batch in a separate process; return its exit code."""
    if not (folder / "expected.json").exists():
        raise ValueError(f"{folder} has no hand-over. First run the command without --check.")
    where = dict(os.environ)
    if engine == "verl":
        if not OVERLAY.exists():
            raise ValueError(f"{OVERLAY} is missing. Run `make engines` to install verl's code.")
        where["PYTHONPATH"] = str(OVERLAY)
    command = [sys.executable, folder / "replay.py", engine, folder]
    return subprocess.run(command, env=where).returncode


def main(arguments: list[str]) -> int:
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser("hand_over.py", description=__doc__, **how)
    parser.add_argument("run", type=Path, help="output folder of train_ppo.py")
    parser.add_argument("--to", required=True, choices=[*VERSIONS], help="target engine")
    parser.add_argument("--method", choices=["rloo", "grpo"], help="method in trl (default: rloo)")
    parser.add_argument("--check", action="store_true", help="replay the recorded batch")
    chosen, more = parser.parse_known_args(arguments)
    if chosen.method and chosen.to != "trl":
        parser.error(f"--method is for trl; {chosen.to} gets the run's own method, PPO")
    target = Path(f"{chosen.run.resolve()}-to-{chosen.to}")
    quiet_libraries()
    if chosen.check:
        return check(chosen.to, target)
    method = chosen.method or ("rloo" if chosen.to == "trl" else "ppo")
    write(chosen.to, method, target, *rebuild(chosen.run, more))
    return 0


if __name__ == "__main__":
    sys.exit(exits.run("hand_over.py", main))
