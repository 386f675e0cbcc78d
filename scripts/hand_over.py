"""Hand a PPO run over to a larger engine, with proof that the arithmetic is the same.

    python scripts/hand_over.py RUN --to verl
    python scripts/hand_over.py RUN --to trl --method grpo
    python scripts/hand_over.py RUN --to verl --check

RUN is the folder that train_ppo.py left. Options of train_ppo.py may follow: name models and
datasets of your own again. Writes models, prompts, reward, settings, a launch command and a
recorded batch to RUN-to-ENGINE. --check replays the batch in the engine's own code; the exit code
is 2 where a number or a setting differs.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import torch
import train_ppo
import yaml
from command_line import exits
from command_line.output import find_checkpoint, fingerprint
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from rlhf_course import AutoModelForCausalLMWithValueHead
from rlhf_course.course.presets import ROOT
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.course.shipped import shipped
from rlhf_course.policy.network import without_dropout
from rlhf_course.policy.save_load import load_model, load_tokenizer
from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo import update
from rlhf_course.ppo.checkpoint import load_checkpoint
from rlhf_course.ppo.rollout import Rollout, forward
from rlhf_course.rewards import load_reward_model
from rlhf_course.runtime.files import atomic_folder, read_json

HERE, VERSIONS = Path(__file__).resolve().parent / "engines", {"verl": "0.9.1", "trl": "1.16.0"}
OVERLAY = ROOT / "build/engines" / f"verl-{VERSIONS['verl']}"
SAMPLES, GROUP = 16, 4  # in the recorded batch; responses per prompt for trl
NOISE = {"verl": 1.0, "trl": 0.3}  # nats per token between old and new policy, so that clips act
NEVER = 1e9  # a bound that no ratio and no gradient reaches
CELLS = "clipped leave_one_out rloo_loss group_advantages grpo_loss".split()  # of notebook 07
TALK = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def rebuild(folder: Path, more: list[str]):
    """Return options, settings and parts of a run in the state of its last checkpoint."""
    if not (folder / "run.json").exists():
        raise ValueError(f"{folder} holds no run.json. Name a folder that train_ppo.py left.")
    before = read_json(folder / "run.json")
    given = {k: v for k, v in before["settings"].items() if v is not None}
    if given.pop("command", None) != train_ppo.NAME:
        raise ValueError(f"{folder} is not a run of {train_ppo.NAME}. Hand over one of its runs.")
    given = [f"--{name}={value}" for name, value in given.items()]
    chosen, settings = train_ppo.parse_arguments([*given, *more])
    if chosen.quantization:
        raise ValueError("Adapters cannot be merged into a quantized base. Use an unquantized run.")
    places = vars(settings) | vars(chosen) | {"base": train_ppo.shared_base(chosen)}
    for name, old in before["inputs"].items():
        place = places[name]
        if old not in (place, place and fingerprint(shipped(place))):
            raise ValueError(f"--{name} {place} is not what {folder} was made with. Name that one.")
    run = (train_ppo.build_chat if chosen.sft_adapter else train_ppo.build_imdb)(chosen, settings)
    load_checkpoint(run.trainer, find_checkpoint(folder))
    return chosen, settings, run


def save_models(folder: Path, chosen, settings, run) -> int | None:
    """Write the three models; return which label is the score, None for the only one."""

    def save(network, name: str, tokenizer, adapter: str = "default") -> None:
        if isinstance(network, PeftModel):
            network = copy.deepcopy(network).merge_and_unload(adapter_names=[adapter])
        network.float().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    policy, reference = run.trainer.policy, run.trainer.ref_model or run.trainer.policy
    tokenizer = copy.deepcopy(run.trainer.tokenizer)
    has_start = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    tokenizer.chat_template = "{{ bos_token }}" * has_start + TALK  # prompts are plain texts
    save(policy.pretrained_model, "policy", tokenizer, "policy")
    save(reference.pretrained_model, "reference", tokenizer, "ref")
    if chosen.reward_adapter:
        judge = load_reward_model(chosen.reward_adapter)
        judge.config.pad_token_id = run.trainer.tokenizer.pad_token_id
        save(judge, "reward_model", load_tokenizer(train_ppo.shared_base(chosen)))
        return None
    source = shipped(settings.reward_model)
    judge = load_model(AutoModelForSequenceClassification, source, dtype=torch.float32)
    save(judge, "reward_model", load_tokenizer(source))
    return {k.upper(): v for k, v in judge.config.label2id.items()}[settings.reward_label.upper()]


def save_prompts(folder: Path, engine: str, run) -> list[int]:
    """Write the prompts whose text gives their tokens; return their rows."""
    ids, texts = (run.trainer.dataset[name][:] for name in ("input_ids", "query"))
    again = run.trainer.tokenizer(texts)["input_ids"]
    kept = [row for row, query in enumerate(ids) if query.tolist() == again[row]]
    if len(kept) < SAMPLES:
        raise ValueError(f"Only {len(kept)} prompts give their own tokens; {SAMPLES} are needed.")
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


def record(run, rows: list[int]) -> tuple[Rollout, dict]:
    """Sample responses to prompts; return the batch, and its texts and tokens of queries."""
    trainer, tokenizer = run.trainer, run.trainer.tokenizer
    trainer.config.begin_suppress_tokens = []  # which engines do not have
    queries = [trainer.dataset[row]["input_ids"] for row in rows]
    prompts = [trainer.dataset[row]["query"] for row in rows]
    responses = trainer.generate(queries, return_prompt=False, **run.generation)
    scores = torch.as_tensor(run.score(prompts, run.decode(responses))).float()
    given = queries, responses, scores.to(trainer.accelerator.device), tokenizer.pad_token_id
    rollout = Rollout.from_lists(*given)
    with torch.no_grad(), without_dropout(trainer.model):
        update.add_logprobs(rollout, trainer.model, trainer.reference, trainer.config, 0)
    answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
    texts = {"prompts": prompts, "answers": answers, "queries": [q.tolist() for q in queries]}
    return Rollout(**{k: v.cpu() for k, v in vars(rollout).items() if v is not None}), texts


def compute(policy, rollout: Rollout, noise, config, kl_coef: float, method: str) -> dict:
    """Fill in advantages; return losses and the gradient's norm by this course's functions.

    The samples count as those of an older policy, whose log-probabilities differ by ``noise``.
    """
    new, mask, found = forward(policy, rollout)[0], rollout.mask, {}
    old, scores = rollout.logprobs - noise, rollout.scores
    if method == "ppo":
        update.add_rewards(rollout, config, kl_coef)
        update.add_advantages(rollout, config)
        per_token = ppo.policy_loss(new, old, rollout.advantages, config.cliprange)[0]
        loss, before = ppo.masked_mean(per_token, mask), rollout.values
        how = before + noise, before, rollout.returns, config.cliprange_value
        found["value loss"] = ppo.masked_mean(ppo.value_loss(*how)[0], mask).item()
    else:
        names = {"settings": SimpleNamespace(cliprange=config.cliprange), "torch": torch}
        for cell in nbformat.read(ROOT / "notebooks/07_after_ppo.ipynb", as_version=4).cells:
            if cell.source.startswith(tuple(f"def {name}(" for name in CELLS)):
                exec(compile(cell.source, "notebook 07", "exec"), names)
        if method == "rloo":
            scores = scores - kl_coef * (rollout.kl * mask).sum(1)
        baseline = names["leave_one_out" if method == "rloo" else "group_advantages"]
        rollout.advantages = baseline(scores.view(-1, GROUP)).flatten()
        how = (new, old, mask) if method == "rloo" else (new, old, rollout.ref_logprobs, mask)
        more = () if method == "rloo" else (kl_coef,)
        loss = names[f"{method}_loss"](*how, rollout.advantages, *more)
    loss.backward()
    norms = [p.grad.norm() for p in policy.pretrained_model.parameters() if p.grad is not None]
    return found | {"policy loss": loss.item(), "gradient norm": torch.stack(norms).norm().item()}


def write(chosen: argparse.Namespace, more: list[str]) -> None:
    """Write the hand-over; nothing is left of one that fails."""
    options, settings, run = rebuild(chosen.run, more)
    engine, config, kl_coef = chosen.to, run.trainer.config, run.trainer.kl_ctl.value
    method, repeats = (chosen.method, GROUP) if engine == "trl" else ("ppo", 1)
    with atomic_folder(chosen.output) as folder:
        index = save_models(folder, options, settings, run)
        rows = save_prompts(folder, engine, run)
        rollout, texts = record(
            run, [row for row in rows[: SAMPLES // repeats] for _ in range(repeats)]
        )
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(folder / "policy")
        dice = torch.Generator().manual_seed(0)
        noise = NOISE[engine] * torch.randn(rollout.mask.shape, generator=dice)
        found = compute(policy, rollout, noise, config, kl_coef, method)
        batch = {k: v for k, v in vars(rollout).items() if v is not None} | {"noise": noise}
        save_file({k: v.contiguous() for k, v in batch.items()}, folder / "batch.safetensors")
        limits = yaml.safe_load((HERE / "limits.yaml").read_text("utf-8"))
        longest = getattr(settings, "max_new_tokens", None) or settings.response_max - 1
        content = {
            "engine": engine,
            "version": VERSIONS[engine],
            "name": method.upper(),
            "run": chosen.run.name,
            "step": run.trainer.current_step,
            "config": config,
            "kl_coef": kl_coef,
            "never": NEVER,
            "update": config.mini_batch_size * config.gradient_accumulation_steps,
            "index": index,
            "steps": settings.steps,
            "longest_response": longest,
            "group": GROUP,
            "samples": SAMPLES,
            "longest_prompt": max(map(len, run.trainer.dataset["input_ids"][:])),
            "prompts": len(rows),
            "lost": len(run.trainer.dataset) - len(rows),
            "sigmoid": getattr(settings, "sigmoid_score", False),
            "bf16": settings.mixed_precision == "bf16",
            "limits": [x for key in ("both", engine, method) for x in limits.get(key, [])],
        }
        templates = Environment(
            loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True
        )
        sources = {"settings.txt": f"{engine}.txt.j2"}
        for name in (
            "settings.txt",
            "launch.sh",
            "reward.py",
            "README.md",
            *["train.py"] * (engine == "trl"),
        ):
            text = templates.get_template(sources.get(name, f"{name}.j2")).render(content)
            (folder / name).write_text(text, encoding="utf-8")
        lines = (folder / "settings.txt").read_text("utf-8").split("# Files")[0].split("# Your")[0]
        expected = {
            "settings": [x for x in lines.splitlines() if x[0] != "#"],
            "numbers": found,
        } | texts
        (folder / "expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")
    print("Cannot be carried over:", *content["limits"], sep="\n* ")
    print(f"Open next: {chosen.output / 'README.md'}")


def check(chosen: argparse.Namespace) -> int:
    """Replay the recorded batch in a process of its own; return its exit code."""
    if not (chosen.output / "expected.json").exists():
        raise ValueError(f"{chosen.output} holds no hand-over. Write one first, without --check.")
    where = dict(os.environ)
    if chosen.to == "verl":
        if not OVERLAY.exists():
            raise ValueError(f"{OVERLAY} is missing: `make engines` puts verl's code there.")
        where["PYTHONPATH"] = str(OVERLAY)
    command = [sys.executable, HERE / "replay.py", chosen.to, chosen.output]
    return subprocess.run(command, env=where).returncode


def main(arguments: list[str]) -> int:
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser("hand_over.py", description=__doc__, **how)
    parser.add_argument("run", type=Path, help="folder that train_ppo.py left")
    parser.add_argument("--to", required=True, choices=[*VERSIONS], help="the engine")
    parser.add_argument("--method", default="rloo", choices=["rloo", "grpo"], help="for trl")
    parser.add_argument("--check", action="store_true", help="replay what was written")
    parser.add_argument("--output", type=Path, help="folder (default: RUN-to-ENGINE)")
    chosen, more = parser.parse_known_args(arguments)
    chosen.output = chosen.output or Path(f"{chosen.run.resolve()}-to-{chosen.to}")
    quiet_libraries()
    if chosen.check:
        return check(chosen)
    write(chosen, more)
    return 0


if __name__ == "__main__":
    sys.exit(exits.run("hand_over.py", main))
