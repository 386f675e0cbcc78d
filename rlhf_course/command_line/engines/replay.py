"""Replay a recorded batch in an engine's own code.

    python replay.py verl|trl FOLDER …

hand_over.py --check runs this file in an engine's environment, without the course. Exits with 2 if
a setting differs from the run's, or a number differs from the run's by more than 1e-5 (1e-4 for
log-probabilities and the gradient norm).
"""

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
    from verl.trainer.ppo import core_algos
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.torch_functional import logprobs_from_logits

    configs = [compose_verl(*lines[k]) for k in ("default", "run", "now")]
    validate_config(configs[2], use_reference_policy=True, use_critic=True)
    keys = [line.partition("=")[0] for line in lines["run"]]
    settings = [{key: OmegaConf.select(config, key) for key in keys} for config in configs]
    actor, critic, algorithm = (
        configs[2].actor_rollout_ref.actor,
        configs[2].critic,
        configs[2].algorithm,
    )
    mask, values, noise, scores = (batch[k] for k in ("mask", "values", "noise", "scores"))
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), batch["response_lengths"] - 1] = scores
    if algorithm.use_kl_in_reward:
        control = core_algos.get_kl_controller(algorithm.kl_ctrl)
        kl = core_algos.kl_penalty(batch["logprobs"], batch["ref_logprobs"], algorithm.kl_penalty)
        rewards = rewards - control.value * kl * mask
    how = rewards, values, mask, algorithm.gamma, algorithm.lam
    advantages, returns = core_algos.get_adv_estimator_fn(algorithm.adv_estimator)(*how)
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    ids, at, rows = batch["input_ids"], columns(batch), torch.arange(len(mask))[:, None]
    new = logprobs_from_logits(model(ids).logits[rows, at - 1], ids[rows, at]) * mask
    here = batch["logprobs"] + new - new.detach()  # recorded values with the network's gradient
    how = batch["logprobs"] - noise, here, advantages, mask, actor.loss_agg_mode
    policy_loss = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)
    loss, _ = policy_loss(*how, omega_conf_to_dataclass(actor))
    loss.backward()
    how = returns, values, mask, critic.cliprange_value, critic.loss_agg_mode
    found = {"logprobs": new.detach(), "advantages": advantages * mask}
    found |= {"returns": returns * mask, "policy loss": loss, "gradient norm": norm(model)}
    return found | {"value loss": core_algos.compute_value_loss(values + noise, *how)[0]}, settings


@cache
def compose_verl(*overrides: str):
    """Return verl's configuration; Hydra raises an error for an unknown key."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides])


def trl(folder: Path, batch: dict, lines: dict, prompts: list[str]) -> tuple[dict, list[dict]]:
    """Return trl's numbers, and three sets of settings: defaults, the run's, settings.txt's."""
    from train import make_trainer

    trainer = make_trainer()  # raises an error for an unknown field
    run, now = (yaml.safe_load("\n".join(lines[k])) for k in ("run", "now"))
    fields = type(trainer.args).__dataclass_fields__
    default = {key: fields[key].default for key in run}
    ids, at, mask = batch["input_ids"], columns(batch), batch["mask"]
    sizes = batch["response_lengths"].tolist()
    answers = [ids[row, at[row, :size]].tolist() for row, size in enumerate(sizes)]
    is_grpo = "GRPO" in type(trainer).__name__
    trainer._generate_single_turn = lambda *_: (answers, None) if is_grpo else answers
    trainer.reward_funcs = [lambda **_: batch["scores"].tolist()]
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": text} for text in prompts])
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        new, *_ = trainer._get_per_token_logps_and_entropies(model, ids, seen, mask.shape[1])
    old = (new - batch["noise"]) * mask
    inputs |= {"old_logps": old.sum(1), "old_per_token_logps": old}
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    found = {"logprobs": new * mask, "advantages": inputs["advantages"], "policy loss": loss}
    return found | {"gradient norm": norm(model)}, [default, run, default | now]


def columns(batch: dict) -> torch.Tensor:
    """Return the column numbers (B, R) of the response tokens in input_ids."""
    at = batch["query_lengths"][:, None] + torch.arange(batch["mask"].shape[1])
    return at.clamp(max=batch["input_ids"].shape[1] - 1)


def norm(model) -> torch.Tensor:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def main(engine: str, folder: Path) -> int:
    """Print differences from the run's numbers and settings; return 2 if a check fails, else 0."""
    sys.path.insert(0, str(folder))
    for name in ("reward", "train"):  # drop another hand-over's modules
        sys.modules.pop(name, None)
    from reward import compute_score

    batch = load_file(folder / "batch.safetensors")
    expected = json.loads((folder / "expected.json").read_text("utf-8"))
    text = (folder / "settings.txt").read_text("utf-8").replace("HERE", str(folder))
    lines = {"now": [line for line in text.splitlines() if line and line[0] != "#"]}
    lines |= {"default": [], "run": expected["settings"]}
    replay, prompts = {"verl": verl, "trl": trl}[engine], expected["prompts"]
    try:
        found, (default, run, now) = replay(folder, batch, lines, prompts)
    except Exception as error:  # an unknown setting, a missing package, …
        print(f"{engine} fails: {type(error).__name__}: {' '.join(str(error).split())}")
        return 2
    rows = zip(prompts, expected["answers"], strict=True)
    found["scores"] = torch.tensor([compute_score("", a, "", {"prompt": p}) for p, a in rows])
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    same = tokenizer.apply_chat_template(talks, return_dict=False) == expected["queries"]
    wrong = [] if same else ["DIFFERS: the prompts' tokens"]
    for name, theirs in found.items():
        ours = torch.as_tensor(batch[name] if name in batch else expected["numbers"][name])
        gap = ((theirs.detach() - ours).abs() / ours.abs().clamp(min=1)).max().item()
        print(f"{name}: differs by at most {gap:.1e}")
        most = NETWORK if name in ("logprobs", "gradient norm") else TOLERANCE
        wrong += [] if gap <= most else [f"DIFFERS: {name}, by {gap:.1e}"]
    for name, ours in run.items():
        if default[name] != ours:
            print(f"{name}: {ours}; {engine}'s default is {default[name]}")
        if now[name] != ours:
            wrong.append(f"DIFFERS: {name} is {now[name]}; the run has {ours}")
    print(
        *wrong or [f"{engine} computes this run's numbers, within {TOLERANCE:g}."],
        sep="\n",
    )
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(max(main(sys.argv[1], Path(name).resolve()) for name in sys.argv[2:]))
