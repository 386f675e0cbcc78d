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
from rlhf_course.course import losses
from rlhf_course.course.presets import ROOT, shipped
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.policy.network import without_dropout
from rlhf_course.policy.save_load import load_model, load_tokenizer
from rlhf_course.ppo import algorithm as ppo
from rlhf_course.ppo import update
from rlhf_course.ppo.checkpoint import load_checkpoint
from rlhf_course.ppo.rollout import Samples, forward
from rlhf_course.rewards import find_form, load_reward_model
from rlhf_course.runtime.files import atomic_folder, read_json
from scripts import train_ppo

HERE = Path(command_line.__file__).parent / "engines"
VERSIONS = {"verl": "0.9.1", "trl": "1.16.0"}
OVERLAY = ROOT / "build/engines" / f"verl-{VERSIONS['verl']}"
SAMPLES = 16  # recorded samples
GROUP = 4  # responses per prompt for trl
NOISE = {"verl": 1.0, "trl": 0.3}  # nats per token from old to new policy; activates clipping
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def rebuild(folder: Path, inputs: list[str]):
    """Return a run's options, settings, and last state; raise ``ValueError`` if inputs changed.

    ``inputs`` are options that name the run's models and datasets.
    """
    if not (folder / "run.json").exists():
        raise ValueError(f"{folder} has no run.json. Choose an output folder of train_ppo.py.")
    recorded = read_json(folder / "run.json")
    if recorded["settings"].get("command") != train_ppo.NAME:
        raise ValueError(f"{folder} is not a run of {train_ppo.NAME}. Hand over one of its runs.")
    for argument in inputs:
        name = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and name.replace("-", "_") not in recorded["inputs"]:
            raise ValueError(f"--{name} cannot change: a hand-over has the run's own settings.")
    options, settings = train_ppo.parse_arguments([*run_options(recorded), *inputs])
    if options.quantization:
        raise ValueError("Adapters cannot be merged into a quantized base. Use an unquantized run.")
    places = vars(settings) | vars(options) | {"base": train_ppo.shared_base(options)}
    for name, before in recorded["inputs"].items():
        place = places[name]
        is_same = before == place
        if not is_same and place is not None:
            is_same = before == fingerprint(shipped(place))
        if not is_same:
            raise ValueError(f"--{name} {place} differs from {folder}'s. Pass the run's input.")
    build = train_ppo.build_chat if options.sft_adapter else train_ppo.build_imdb
    run = build(options, settings)
    check_form(run, options)
    load_checkpoint(run.trainer, find_checkpoint(folder))
    return options, settings, run


def check_form(run, options) -> None:
    """Raise ``ValueError`` if the reward adapter reads texts in a form that is not handed over."""
    if not options.reward_adapter:
        return
    form = find_form(run.trainer.policy, run.trainer.tokenizer, options.reward_adapter)
    if form not in ("transcript", "chat"):
        raise ValueError(
            f"The reward adapter {options.reward_adapter} reads texts in the form {form!r}, which"
            " a hand-over does not write. Use an adapter trained by train_reward_model.py."
        )


def run_options(recorded: dict) -> list[str]:
    """Return a recorded run's settings as options of train_ppo.py."""
    options = []
    for name, value in recorded["settings"].items():
        if name == "command" or value is None:
            continue
        if isinstance(value, list):
            options += [f"--{name}", *map(str, value)]
        else:
            options.append(f"--{name}={value}")
    return options


def save_models(folder: Path, options, settings, run) -> int | None:
    """Write the three models; return the reward label's index, or None for a single label."""

    def save(name: str, network, tokenizer, adapter: str = "default") -> None:
        network = copy.deepcopy(network)
        if isinstance(network, PeftModel):
            network = network.merge_and_unload(adapter_names=[adapter])
        network.float().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    policy = run.trainer.policy
    reference = run.trainer.ref_model or policy  # without a model, the policy's adapter "ref"
    tokenizer = copy.deepcopy(run.trainer.tokenizer)
    is_chat = tokenizer.chat_template is not None
    tokenizer.chat_template = CHAT_TEMPLATE  # prompts are plain texts, or already formatted
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    if adds_bos and not is_chat:
        tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
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
    indices = {label.upper(): index for label, index in judge.config.label2id.items()}
    return indices[settings.reward_label.upper()]


def prompt_texts(tokenizer, texts: list[str], queries: list[torch.Tensor]) -> list[str]:
    """Return the prompts as an engine gets them: a chat model's after its template."""
    if tokenizer.chat_template is None:
        return texts
    return tokenizer.batch_decode(queries)


def save_prompts(folder: Path, engine: str, trainer) -> list[int]:
    """Write the prompts whose texts tokenize back to the same ids; return their row numbers."""
    queries = trainer.dataset["input_ids"][:]
    texts = prompt_texts(trainer.tokenizer, trainer.dataset["query"][:], queries)
    again = trainer.tokenizer(texts)["input_ids"]
    kept = [row for row, query in enumerate(queries) if query.tolist() == again[row]]
    if len(kept) < SAMPLES:
        raise ValueError(
            f"Only {len(kept)} prompts have texts that tokenize to the prompts' ids. Use at least"
            f" {SAMPLES} such prompts."
        )
    prompts = [texts[row] for row in kept]
    if engine == "trl":
        table = pd.DataFrame({"prompt": prompts})
        table.to_json(folder / "prompts.jsonl", orient="records", lines=True, force_ascii=False)
        return kept
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "data_source": "rlhf_course",
            "ability": "text",
            "reward_model": {"style": "model", "ground_truth": ""},
            "extra_info": {"index": index, "prompt": prompt},
        }
        for index, prompt in enumerate(prompts)
    ]
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    return kept


def record(run, rows: list[int]) -> tuple[Samples, update.Experience, dict]:
    """Sample a response to each prompt; return the batch, its experience, and its texts."""
    trainer = run.trainer
    trainer.config.begin_suppress_tokens = []  # engines lack this option
    queries = [trainer.dataset[row]["input_ids"] for row in rows]
    prompts = [trainer.dataset[row]["query"] for row in rows]
    responses = trainer.generate(queries, return_prompt=False, **run.generation)
    answers = trainer.tokenizer.batch_decode(responses, skip_special_tokens=True)  # as engines do
    texts = [text.replace(trainer.tokenizer.eos_token, "") for text in run.decode(responses)]
    scores = torch.as_tensor(run.score(prompts, texts)).float().to(trainer.accelerator.device)
    samples = Samples.from_lists(queries, responses, scores, trainer.tokenizer.pad_token_id)
    with torch.no_grad(), without_dropout(trainer.model):
        experience, _ = update.make_experience(
            samples, trainer.model, trainer.reference, trainer.config, trainer.kl_ctl.value
        )
    recorded = {
        "prompts": prompt_texts(trainer.tokenizer, prompts, queries),
        "answers": answers,
        "queries": [query.tolist() for query in queries],
    }
    return on_cpu(samples), on_cpu(experience), recorded


def on_cpu(batch: Samples | update.Experience):
    """Return a copy with all tensors on the CPU."""
    return type(batch)(**{name: tensor.cpu() for name, tensor in vars(batch).items()})


def ppo_loss(
    new_logprobs, old_logprobs, noise, experience: update.Experience, config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the policy and value losses (scalars); ``noise`` (B, R) also moves the new values."""
    value_losses, _ = ppo.value_loss(
        experience.values + noise, experience.values, experience.returns, config.cliprange_value
    )
    policy_losses, _, _ = ppo.policy_loss(
        new_logprobs, old_logprobs, experience.advantages, config.cliprange
    )
    policy_loss = ppo.masked_mean(policy_losses, experience.mask)
    value_loss = ppo.masked_mean(value_losses, experience.mask)
    return policy_loss, value_loss


def group_loss(
    new_logprobs,
    old_logprobs,
    scores: torch.Tensor,
    experience: update.Experience,
    config,
    kl_coef: float,
    method: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RLOO's or GRPO's loss as in notebook 07, and its advantages (B,)."""
    mask = experience.mask
    if method == "rloo":
        kl = (experience.kl * mask).sum(1)
        grouped = (scores - kl_coef * kl).view(-1, GROUP)
        advantages = losses.leave_one_out(grouped).flatten()
        loss = losses.rloo_loss(new_logprobs, old_logprobs, mask, advantages, config.cliprange)
        return loss, advantages
    advantages = losses.group_advantages(scores.view(-1, GROUP)).flatten()
    loss = losses.grpo_loss(
        new_logprobs,
        old_logprobs,
        experience.ref_logprobs,
        mask,
        advantages,
        kl_coef,
        cliprange=config.cliprange,
    )
    return loss, advantages


def compute_numbers(
    policy, samples: Samples, experience: update.Experience, noise: torch.Tensor, trainer, method
) -> tuple[dict[str, float], torch.Tensor]:
    """Return the losses and gradient norm that the engine must compute, and the advantages."""
    config = trainer.config
    advantages = experience.advantages
    new_logprobs = forward(policy, samples).logprobs
    old_logprobs = experience.logprobs - noise
    numbers = {}
    if method == "ppo":
        loss, value_loss = ppo_loss(new_logprobs, old_logprobs, noise, experience, config)
        numbers["value loss"] = value_loss.item()
    else:
        loss, advantages = group_loss(
            new_logprobs,
            old_logprobs,
            samples.scores,
            experience,
            config,
            trainer.kl_ctl.value,
            method,
        )
    loss.backward()
    weights = policy.pretrained_model.parameters()
    norms = torch.stack([weight.grad.norm() for weight in weights if weight.grad is not None])
    numbers["policy loss"] = loss.item()
    numbers["gradient norm"] = norms.norm().item()
    return numbers, advantages


def write(engine: str, method: str, target: Path, options, settings, run) -> None:
    """Write the hand-over to ``target``.

    The old log-probabilities are the recorded ones with noise added. Without noise, every ratio
    would be 1, and a comparison would pass for an engine that never clips.

    Raises ``ValueError`` if the folder has files, because the user may have edited them.
    """
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} already has files. Remove it, or move it away.")
    repeats = GROUP if engine == "trl" else 1
    with atomic_folder(target) as folder:
        label_index = save_models(folder, options, settings, run)
        rows = save_prompts(folder, engine, run.trainer)
        sampled_rows = [row for row in rows[: SAMPLES // repeats] for _ in range(repeats)]
        samples, experience, texts = record(run, sampled_rows)
        network = load_model(AutoModelForCausalLM, folder / "policy", dtype=torch.float32)
        policy = AutoModelForCausalLMWithValueHead(network)
        generator = torch.Generator().manual_seed(0)
        noise = NOISE[engine] * torch.randn(samples.mask.shape, generator=generator)
        numbers, advantages = compute_numbers(
            policy, samples, experience, noise, run.trainer, method
        )
        batch = vars(samples) | vars(experience) | {"advantages": advantages, "noise": noise}
        contiguous = {name: tensor.contiguous() for name, tensor in batch.items()}
        save_file(contiguous, folder / "batch.safetensors")
        values = {
            "config": run.trainer.config,
            "engine": engine,
            "gap": "" if run.trainer.tokenizer.chat_template else " ",
            "group": GROUP,
            "index": label_index,
            "kl_coef": run.trainer.kl_ctl.value,
            "limits": yaml.safe_load((HERE / "limits.yaml").read_text("utf-8")) | {"ppo": []},
            "method": method,
            "samples": samples,
            "rows": rows,
            "run": run,
            "settings": settings,
            "target": target,
            "version": VERSIONS[engine],
        }
        for source in (*HERE.glob("both/*.j2"), *HERE.glob(f"{engine}/*.j2")):
            template = Template(source.read_text("utf-8"), keep_trailing_newline=True)
            (folder / source.stem).write_text(template.render(values), encoding="utf-8")
        shutil.copy(HERE / "replay.py", folder)
        compared, _, _ = (folder / "settings.txt").read_text("utf-8").partition("# Free")
        lines = [line for line in compared.splitlines() if not line.startswith("#")]
        expected = {"settings": lines, "numbers": numbers} | texts
        (folder / "expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")
    print("Differences from the run are listed in", target / "README.md")


def check(engine: str, folder: Path) -> int:
    """Replay the recorded batch in a separate process; return its exit code."""
    if not (folder / "expected.json").exists():
        raise ValueError(f"{folder} has no hand-over. First run the command without --check.")
    environment = dict(os.environ)
    if engine == "verl":
        if not OVERLAY.exists():
            raise ValueError(f"{OVERLAY} is missing. Run `make engines` to install verl's code.")
        environment["PYTHONPATH"] = str(OVERLAY)
    command = [sys.executable, folder / "replay.py", engine, folder]
    return subprocess.run(command, env=environment).returncode


def main(arguments: list[str]) -> int:
    """Write a hand-over, or check one; return 2 if a check fails, else 0."""
    parser = argparse.ArgumentParser(
        "hand_over.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="output folder of train_ppo.py")
    parser.add_argument("--to", required=True, choices=[*VERSIONS], help="target engine")
    parser.add_argument("--method", choices=["rloo", "grpo"], help="method in trl (default: rloo)")
    parser.add_argument("--check", action="store_true", help="replay the recorded batch")
    chosen, inputs = parser.parse_known_args(arguments)
    if chosen.method and chosen.to != "trl":
        parser.error(f"--method is for trl; {chosen.to} gets the run's own method, PPO")
    target = Path(f"{chosen.run.resolve()}-to-{chosen.to}")
    quiet_libraries()
    if chosen.check:
        return check(chosen.to, target)
    method = chosen.method or ("rloo" if chosen.to == "trl" else "ppo")
    options, settings, run = rebuild(chosen.run, inputs)
    write(chosen.to, method, target, options, settings, run)
    return 0


if __name__ == "__main__":
    sys.exit(exits.run("hand_over.py", main))
