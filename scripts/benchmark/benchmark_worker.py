"""One variant of benchmark_ppo.py in a process of its own, in this environment or in one with TRL
0.11.4.

    python benchmark_worker.py VARIANT PLAN.json

It answers every line of stdin, a PPO step to take, with a line of JSON: seconds per phase, tokens,
memory.
"""

import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path

SAMPLING = {"do_sample": True, "top_k": 0, "top_p": 1.0, "return_prompt": False}


class Tokens:
    """All that the trainer asks of a tokenizer, where there are no texts."""

    pad_token_id = eos_token_id = 0


def ours(plan: dict, tokenizer):
    """This course's PPO on GPT-2 with a sentiment classifier: (trainer, generate, score)."""
    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer
    from rlhf_course.rewards import SentimentReward

    model = AutoModelForCausalLMWithValueHead.from_pretrained(plan["model"])
    trainer = PPOTrainer(config(plan), model, tokenizer=tokenizer)
    reward = SentimentReward(plan["reward_model"])

    def generate(queries, lengths):
        return trainer.generate(queries, length_sampler=LengthSampler(*lengths), **SAMPLING)

    return trainer, generate, lambda rows, responses: reward(texts(rows, responses, tokenizer))


def lora(plan: dict, tokenizer):
    """Policy, reference and reward model as adapters on one Llama with random weights: (trainer,
    generate, score).
    """
    import tempfile

    import torch
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer
    from rlhf_course.policy.adapters import RewardAdapter
    from rlhf_course.rewards import last_token_scores

    shape = LlamaConfig(**plan["llama"], pad_token_id=0, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, plan["dtype"]))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        base = LlamaForCausalLM(shape)
    torch.set_default_dtype(torch.float32)
    shared = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}
    adapter = LoraConfig(task_type="CAUSAL_LM", **shared)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=adapter)
    with tempfile.TemporaryDirectory() as folder:  # a reward model as training would leave it
        state = get_peft_model_state_dict(model.pretrained_model, adapter_name="policy")
        weights = {name: weight.contiguous().cpu() for name, weight in state.items()}
        weights["base_model.model.score.weight"] = torch.randn(1, shape.hidden_size)
        save_file(weights, Path(folder, "adapter_model.safetensors"))
        LoraConfig(task_type="SEQ_CLS", **shared).save_pretrained(folder)
        reward = RewardAdapter(model, folder)
    trainer = PPOTrainer(config(plan), model, tokenizer=tokenizer)

    def generate(queries, lengths):
        how = SAMPLING | {"length_sampler": LengthSampler(*lengths), "eos_token_id": []}
        return trainer.generate(queries, **how)

    def score(rows, responses):
        device, scores = trainer.accelerator.device, []
        for row, response in zip(rows, responses, strict=True):
            ids = torch.cat([torch.tensor(row["input_ids"], device=device), response]).unsqueeze(0)
            with torch.no_grad(), trainer.accelerator.autocast():
                scores.append(last_token_scores(reward, ids, torch.ones_like(ids)))
        return torch.cat(scores).float()

    return trainer, generate, score


def config(plan: dict):
    """PPOConfig of the plan."""
    from rlhf_course import PPOConfig

    precision = {"mixed_precision": "bf16" if plan["bf16"] else "no"}
    return PPOConfig(accelerator_kwargs=precision, **plan["ppo"])


def old(plan: dict, tokenizer):
    """TRL 0.11's (trainer, generate, score), one by one or batched."""
    import torch
    from transformers import pipeline
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
    from trl.core import LengthSampler

    model = AutoModelForCausalLMWithValueHead.from_pretrained(plan["old_model"])
    trainer = PPOTrainer(PPOConfig(**plan["ppo"]), model, create_reference_model(model), tokenizer)
    folder, device = plan["old_reward_model"], trainer.accelerator.device
    classify = pipeline("sentiment-analysis", model=folder, tokenizer=folder, device=device)
    batched = plan["variant"] == "batched"
    sampling = SAMPLING | {"min_length": -1, "top_k": 0.0, "pad_token_id": tokenizer.eos_token_id}
    settings = {"top_k": None, "function_to_apply": "none"}
    settings["batch_size"] = plan["ppo"]["batch_size"] if batched else 16

    def generate(queries, bounds):
        draw = LengthSampler(*bounds)
        if batched:
            options = sampling | {"batch_size": len(queries), "max_new_tokens": bounds[1] - 1}
            return [tokens[: draw()] for tokens in trainer.generate(queries, **options)]
        one = {key: value for key, value in sampling.items() if key != "return_prompt"}
        found = [(q, trainer.generate(q, max_new_tokens=draw(), **one)) for q in queries]
        return [tokens.squeeze()[len(query) :] for query, tokens in found]

    def score(rows, responses):
        answers = classify(texts(rows, responses, tokenizer), **settings)
        found = [{entry["label"]: entry["score"] for entry in labels} for labels in answers]
        return torch.tensor([labels["POSITIVE"] for labels in found])

    return trainer, generate, score


def texts(rows: list, responses: list, tokenizer) -> list[str]:
    """Queries with their responses; random weights may have more tokens than the tokenizer, folded
    onto its own.
    """
    replies = tokenizer.batch_decode([tokens % len(tokenizer) for tokens in responses])
    return [row["query"] + reply for row, reply in zip(rows, replies, strict=True)]


def one_step(trainer, generate, score, rows: list, lengths: tuple[int, int]) -> dict:
    """Take one PPO step on these queries; return seconds per phase, tokens, and memory."""
    import torch
    from torch.utils.benchmark import timer  # it waits for the GPU

    device = trainer.accelerator.device
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    queries, ticks = [torch.tensor(row["input_ids"], device=device) for row in rows], [timer()]
    responses = generate(queries, lengths)
    ticks.append(timer())
    scores = list(score(rows, responses))
    ticks.append(timer())
    stats = trainer.step(queries, responses, scores)
    ticks.append(timer())
    forward = stats["time/ppo/forward_pass"]
    count = sum(map(len, responses))
    return {
        "generate": ticks[1] - ticks[0],
        "score": ticks[2] - ticks[1],
        "forward": forward,
        "update": ticks[3] - ticks[2] - forward,
        "total": ticks[3] - ticks[0],
        "response_tokens": count,
        "ms_per_token": 1000 * (ticks[3] - ticks[0]) / count,
        "peak_mb": (torch.cuda.max_memory_allocated() if gpu else peak_memory()) / 1e6,
    }


def peak_memory() -> int:
    """As that of run_card.py, which an environment with TRL 0.11 cannot import."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def main(variant: str, plan: dict) -> None:
    """Take the steps that stdin asks for; the answers go to what was stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    plan["variant"] = variant
    wanted = ("torch", "transformers", "accelerate", "trl", "numpy")
    versions = {
        d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"] in wanted
    }
    if variant != "ours" and not versions.get("trl", "").startswith("0.11."):
        error = (
            f"In the environment of --against trl is {versions.get('trl', 'missing')}; it must be"
            " 0.11.x"
        )
        return print(json.dumps({"error": error}), file=answers)
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(plan["threads"])
    if "llama" in plan:
        run = lora(plan, Tokens())
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            plan["model" if variant == "ours" else "old_model"]
        )
        run = (ours if variant == "ours" else old)(plan, tokenizer)
    trainer, queries, given = run[0], plan["queries"], 0
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        json.dumps({"versions": versions | {"python": sys.version.split()[0]}, "device": device}),
        file=answers,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        trainer.config.batch_size = trainer.config.mini_batch_size = size = asked["batch"]
        rows = [queries[(given + i) % len(queries)] for i in range(size)]
        given += size
        print(
            json.dumps(one_step(*run, rows, asked["lengths"])),
            file=answers,
        )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
