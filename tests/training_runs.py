"""Short runs of the three training commands, on adapters of one small base: inputs, ends and
outputs.
"""

import random
import signal
from pathlib import Path

import pytest
import torch
from builders import WORDS, save_base, write_rows
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Trainer

from rlhf_course import PPOTrainer
from rlhf_course.synthetic.small_models import train_tokenizer
from scripts import train_ppo, train_reward_model, train_sft

COMMANDS = {"PPO": train_ppo, "SFT": train_sft, "the reward model": train_reward_model}
SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_length": 64, "max_new_tokens": 8}
LORA = {"lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def words(rng, most=6) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def make_base(folder, tokenizer, width=32):
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "max_position_embeddings": 128, "initializer_range": 0.1}
    save_base(folder, tokenizer, **sizes)


def make_adapters(base, folder, rank=4):
    """An SFT and a reward adapter with weights as if trained, and no tokenizer beside them."""
    torch.manual_seed(1)
    classifier = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    kinds = {"sft": (LlamaForCausalLM, {}, {"task_type": "CAUSAL_LM"})}
    kinds["reward"] = (LlamaForSequenceClassification, {"num_labels": 1}, classifier)
    for name, (kind, options, task) in kinds.items():
        network = kind.from_pretrained(base, **options)
        model = get_peft_model(network, LoraConfig(**LORA, **task, r=rank))
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / name)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A base without a padding token, two adapters on it, and folders of answers and of pairs."""
    folder, rng = tmp_path_factory.mktemp("world"), random.Random(0)
    pairs = [
        {"prompt": f"What is {words(rng, 3)} {row}?", "chosen": words(rng), "rejected": words(rng)}
        for row in range(56)
    ]
    long = {"prompt": "Why " * 70, "chosen": "fog", "rejected": "sun"}  # no room for an answer
    pairs += [pairs[0], long]
    answers = [{"instruction": r["prompt"], "input": "", "output": r["chosen"]} for r in pairs[:24]]
    write_rows(folder / "pairs", pairs)
    write_rows(folder / "answers", answers)
    texts = [f"\n\nHuman: {r['prompt']}\n\nAssistant: {r['chosen']}" for r in pairs]
    tokenizer = train_tokenizer(texts, 330)
    tokenizer.pad_token = None
    make_base(folder / "base", tokenizer)
    make_adapters(folder / "base", folder)
    return folder


def as_options(given: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in given.items()]


def arguments(world, output, *more, **given) -> list[str]:
    """The options of a short run of train_ppo.py."""
    adapters = {"sft_adapter": world / "sft", "reward_adapter": world / "reward"}
    defaults = adapters | SIZES | {"dataset": world / "pairs", "steps": 3, "ppo_epochs": 2}
    return [*as_options(defaults | given), f"--output={output}", "--learning_rate=1e-2", *more]


def options_of(kind: str, world, output, *more, **given) -> list[str]:
    """The options of a short run with checkpoints at every step, or every other one."""
    if kind == "PPO":
        return arguments(world, output, "--save_every=1", *more, **given)
    defaults = {"dataset": world / ("answers" if kind == "SFT" else "pairs"), "max_length": 80}
    defaults |= {"model_name_or_path": world / "base", "output_dir": output, "lora_r": 4}
    defaults |= {"disable_tqdm": "true", "save_steps": 2, "use_peft": "true", "max_steps": 4}
    defaults |= {"logging_steps": 1}
    defaults |= {"per_device_train_batch_size": 8} | ({} if kind == "SFT" else {"audit_prompts": 2})
    return [*as_options(defaults | given), *more]


def run(kind: str, world, output, *more, **given) -> int:
    """A command's exit code."""
    return COMMANDS[kind].main(options_of(kind, world, output, *more, **given))


def resume(kind: str, *rest, **given) -> int:
    option = "--resume" if kind == "PPO" else "--resume_from_checkpoint=true"
    return run(kind, *rest, option, **given)


def weights(kind: str, output: Path) -> bytes:
    folder = output / ("policy" if kind == "PPO" else "model")
    return (folder / "adapter_model.safetensors").read_bytes()


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in output.rglob("checkpoint-*"))


@pytest.fixture
def signals():
    """What commands do about signals ends with the test; for ``usefixtures``."""
    found = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    yield
    for kind, handler in found.items():
        signal.signal(kind, handler)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """The output of each command, run to its end."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in COMMANDS:
        assert run(kind, world, folder / kind) == 0
    return folder


@pytest.fixture
def said(capsys):
    """What was said in the end, in one sentence or two."""
    return lambda: capsys.readouterr().err.strip().splitlines()[-1]


@pytest.fixture
def at_step(monkeypatch):
    """Have something done at the end of a step's computations."""

    def change(kind: str, step: int, do) -> None:
        owner, name = (PPOTrainer, "step") if kind == "PPO" else (Trainer, "training_step")
        original, seen = getattr(owner, name), []

        def counted(*given, **options):
            result = original(*given, **options)
            seen.append(step)
            if len(seen) == step:
                do()
            return result

        monkeypatch.setattr(owner, name, counted)

    return change
