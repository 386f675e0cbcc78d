"""Replay a recorded batch in an engine's own code.

    python replay.py verl|trl FOLDER …

hand_over.py --check runs this file in an engine's environment, without the course. Exits with 2 if
a setting differs from the run's, or a number differs from the run's by more than 1e-5 (1e-4 for
log-probabilities and the gradient norm).
"""

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-5
NETWORK = 1e-4  # float32 logits near 100 may differ between versions of transformers


def verl(folder: Path, batch: dict, lines: dict[str, list[str]], _) -> tuple[dict, list[dict]]:
    """Return verl's numbers, and three sets of settings: defaults, the run's, settings.txt's."""
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    configs = [compose_verl(tuple(lines[name])) for name in ("default", "run", "now")]
    config = configs[2]
    validate_config(config, use_reference_policy=True, use_critic=True)
    keys = [line.partition("=")[0] for line in lines["run"]]
    settings = [{key: OmegaConf.select(each, key) for key in keys} for each in configs]
    return verl_numbers(folder, batch, config), settings


def verl_numbers(folder: Path, batch: dict, config) -> dict[str, torch.Tensor]:
    """Return verl's log-probabilities, advantages, returns, losses, and norm of the gradient."""
    from verl.trainer.ppo import core_algos
    from verl.utils.config import omega_conf_to_dataclass

    actor = config.actor_rollout_ref.actor
    critic = config.critic
    algorithm = config.algorithm
    mask = batch["mask"]
    values = batch["values"]
    noise = batch["noise"]
    rewards = verl_rewards(batch, algorithm, core_algos)
    estimate = core_algos.get_adv_estimator_fn(algorithm.adv_estimator)
    advantages, returns = estimate(rewards, values, mask, algorithm.gamma, algorithm.lam)
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    new_logprobs = verl_logprobs(model, batch)
    # The recorded values with the network's gradient.
    logprobs = batch["logprobs"] + new_logprobs - new_logprobs.detach()
    old_logprobs = batch["logprobs"] - noise
    policy_loss = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)
    actor_config = omega_conf_to_dataclass(actor)
    loss, _ = policy_loss(
        old_logprobs, logprobs, advantages, mask, actor.loss_agg_mode, actor_config
    )
    loss.backward()
    value_loss, _ = core_algos.compute_value_loss(
        values + noise, returns, values, mask, critic.cliprange_value, critic.loss_agg_mode
    )
    return {
        "logprobs": new_logprobs.detach(),
        "advantages": advantages * mask,
        "returns": returns * mask,
        "policy loss": loss,
        "gradient norm": gradient_norm(model),
        "value loss": value_loss,
    }


def verl_rewards(batch: dict, algorithm, core_algos) -> torch.Tensor:
    """Return the reward of each response token (B, R): the score at the end, less the KL."""
    mask = batch["mask"]
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), batch["response_lengths"] - 1] = batch["scores"]
    if not algorithm.use_kl_in_reward:
        return rewards
    control = core_algos.get_kl_controller(algorithm.kl_ctrl)
    kl = core_algos.kl_penalty(batch["logprobs"], batch["ref_logprobs"], algorithm.kl_penalty)
    return rewards - control.value * kl * mask


def verl_logprobs(model, batch: dict) -> torch.Tensor:
    """Return the network's log-probabilities of the response tokens (B, R), in nats."""
    from verl.utils.torch_functional import logprobs_from_logits

    ids = batch["input_ids"]
    positions = response_columns(batch)
    rows = torch.arange(len(ids))[:, None]
    logits = model(ids).logits[rows, positions - 1]
    return logprobs_from_logits(logits, ids[rows, positions]) * batch["mask"]


@cache
def compose_verl(overrides: tuple[str, ...]):
    """Return verl's configuration; Hydra raises an error for an unknown key."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", list(overrides))


def trl(folder: Path, batch: dict, lines: dict, prompts: list[str]) -> tuple[dict, list[dict]]:
    """Return trl's numbers, and three sets of settings: defaults, the run's, settings.txt's."""
    trainer = load_module(folder, "train").make_trainer()  # raises an error for an unknown field
    run = yaml.safe_load("\n".join(lines["run"]))
    now = yaml.safe_load("\n".join(lines["now"]))
    fields = type(trainer.args).__dataclass_fields__
    default = {key: fields[key].default for key in run}
    positions = response_columns(batch)
    answers = []
    for row, size in enumerate(batch["response_lengths"].tolist()):
        answers.append(batch["input_ids"][row, positions[row, :size]].tolist())
    is_grpo = "GRPO" in type(trainer).__name__
    generated = (answers, None) if is_grpo else answers
    trainer._generate_single_turn = lambda *_: generated  # the recorded answers
    trainer.reward_funcs = [lambda **_: batch["scores"].tolist()]
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": text} for text in prompts])
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    mask = batch["mask"]
    with torch.no_grad():
        new_logprobs, *_ = trainer._get_per_token_logps_and_entropies(
            model, ids, attention_mask, mask.shape[1]
        )
    old_logprobs = (new_logprobs - batch["noise"]) * mask
    inputs["old_logps"] = old_logprobs.sum(1)
    inputs["old_per_token_logps"] = old_logprobs
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    numbers = {
        "logprobs": new_logprobs * mask,
        "advantages": inputs["advantages"],
        "policy loss": loss,
        "gradient norm": gradient_norm(model),
    }
    return numbers, [default, run, default | now]


def response_columns(batch: dict) -> torch.Tensor:
    """Return the column numbers (B, R) of the response tokens in input_ids."""
    columns = batch["query_lengths"][:, None] + torch.arange(batch["mask"].shape[1])
    return columns.clamp(max=batch["input_ids"].shape[1] - 1)


def gradient_norm(model) -> torch.Tensor:
    norms = [weight.grad.norm() for weight in model.parameters() if weight.grad is not None]
    return torch.stack(norms).norm()


def replay_scores(prompts: list[str], answers: list[str]) -> torch.Tensor:
    """Return the scores (B,) that the hand-over's reward.py computes."""
    from reward import compute_score

    scores = []
    for prompt, answer in zip(prompts, answers, strict=True):
        score = compute_score(
            data_source="",
            solution_str=answer,
            ground_truth="",
            extra_info={"prompt": prompt},
        )
        scores.append(score)
    return torch.tensor(scores)


def has_same_queries(folder: Path, expected: dict) -> bool:
    """Return whether the chat template yields the run's tokens for every prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    conversations = [[{"role": "user", "content": prompt}] for prompt in expected["prompts"]]
    queries = tokenizer.apply_chat_template(conversations, return_dict=False)
    return queries == expected["queries"]


def load_module(folder: Path, name: str):
    """Return a module of a hand-over, imported again, so that ``import`` finds it by its name."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(engine: str, folder: Path) -> int:
    """Print differences from the run's numbers and settings; return 2 if a check fails, else 0."""
    load_module(folder, "reward")
    batch = load_file(folder / "batch.safetensors")
    expected = json.loads((folder / "expected.json").read_text("utf-8"))
    text = (folder / "settings.txt").read_text("utf-8").replace("HERE", str(folder))
    now_lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    lines = {"default": [], "run": expected["settings"], "now": now_lines}
    prompts = expected["prompts"]
    replay = {"verl": verl, "trl": trl}[engine]
    try:
        numbers, (default, run, now) = replay(folder, batch, lines, prompts)
    except Exception as error:  # an unknown setting, a missing package, …
        print(f"{engine} fails: {type(error).__name__}: {' '.join(str(error).split())}")
        return 2
    numbers["scores"] = replay_scores(prompts, expected["answers"])
    problems = []
    if not has_same_queries(folder, expected):
        problems.append("DIFFERS: the prompts' tokens")
    for name, engine_value in numbers.items():
        course_value = batch[name] if name in batch else expected["numbers"][name]
        course_value = torch.as_tensor(course_value)
        difference = (engine_value.detach() - course_value).abs()
        gap = (difference / course_value.abs().clamp(min=1)).max().item()
        print(f"{name}: differs by at most {gap:.1e}")
        tolerance = NETWORK if name in ("logprobs", "gradient norm") else TOLERANCE
        if not gap <= tolerance:  # NaN is no small gap
            problems.append(f"DIFFERS: {name}, by {gap:.1e}")
    for name, value in run.items():
        if default[name] != value:
            print(f"{name}: {value}; {engine}'s default is {default[name]}")
        if now[name] != value:
            problems.append(f"DIFFERS: {name} is {now[name]}; the run has {value}")
    if not problems:
        print(f"{engine} computes this run's numbers, within {TOLERANCE:g}.")
        return 0
    print("\n".join(problems))
    return 2


if __name__ == "__main__":
    sys.exit(max(main(sys.argv[1], Path(name).resolve()) for name in sys.argv[2:]))
