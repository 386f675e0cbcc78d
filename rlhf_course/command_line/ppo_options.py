"""Parse train_ppo.py's options: its own, and the settings of notebook 04 or 05."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path

import yaml

from rlhf_course.command_line import options
from rlhf_course.command_line.options import option
from rlhf_course.course.presets import PRESETS, Settings, load_preset, read_spec
from rlhf_course.ppo.config import PPOConfig

IMDB, CHAT = "04_gpt2_imdb_ppo", "05_lora_rlhf_baichuan"
ADAPTERS = ["sft_adapter", "reward_adapter"]
# PPOConfig fields: notebook settings, then this script's options.
SHARED = "learning_rate batch_size mini_batch_size ppo_epochs init_kl_coef log_with".split()
OF_PPO = "seed logprob_chunk_size gradient_accumulation_steps gradient_checkpointing".split()
OF_PPO += ["early_stopping", "target_kl", "lam"]
# Notebook 05's settings that PPO uses.
CHAT_SETTINGS = "dataset train_subset max_length max_prompt max_new_tokens dtype steps".split()
CHAT_SETTINGS += [*SHARED, "vf_coef", "sigmoid_score", "mixed_precision", "save_at"]
MAKERS = "train_sft.py and train_reward_model.py --use_peft"


@dataclass
class Options:
    """Hold options other than the notebook's settings."""

    preset: str = option("tiny", f"size of the run: {', '.join(PRESETS)}")
    sft_adapter: str | None = option(None, "folder of the adapter for policy and reference")
    reward_adapter: str | None = option(None, "folder of an adapter with a score head")
    output: str = option("build/train_ppo", "output folder of the run")
    seed: int = option(0, "seed")
    save_every: int = option(50, "steps between checkpoints")
    resume: bool = option(False, "continue from the last complete checkpoint in --output")
    early_stopping: bool = option(False, "end a step's epochs if KL exceeds 1.5 times --target_kl")
    target_kl: float = option(1.0, "KL per step for --early_stopping, in nats")
    lam: float = option(0.95, "λ of GAE; use 1 for long responses and a large batch")
    gradient_accumulation_steps: int = option(1, "mini-batches per optimizer step")
    sample_batch_size: int | None = option(None, "queries to answer in one call; None: all")
    gradient_checkpointing: bool = option(False, "recompute activations, to save memory")
    logprob_chunk_size: int | None = option(
        None, "response tokens whose logits are in memory together; None: all"
    )
    quantization: str | None = option(None, "load the frozen base in 8bit or 4bit")


def parse(about: str, arguments: list[str] | None = None) -> tuple[Options, Settings]:
    """Return the options and settings; raise ``ValueError`` if one is invalid."""

    def choose(given: dict) -> tuple:
        if "report_to" in given:  # trl's trainers use this name
            given["log_with"] = given.pop("report_to")
        experiment = CHAT if any(given.get(name) for name in ADAPTERS) else IMDB
        settings = load_preset(experiment, given.setdefault("preset", "tiny"))
        own = settings_class(experiment, settings)
        is_on = getattr(settings, "gradient_checkpointing", False)
        return (Options, own), {"gradient_checkpointing": is_on}

    chosen, texts = options.parse(about, ["preset", *ADAPTERS], choose, arguments)
    found = vars(texts).items()
    overrides = {k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in found}
    folders = {name: getattr(chosen, name) for name in ADAPTERS}
    if any(folders.values()) and not all(folders.values()):
        raise ValueError(f"Pass both --sft_adapter and --reward_adapter; {MAKERS} write them.")
    if chosen.quantization and not chosen.sft_adapter:
        raise ValueError("--quantization needs adapters. Omit it, or pass --sft_adapter.")
    for name, folder in folders.items():
        if folder and not Path(folder, "adapter_config.json").exists():
            raise ValueError(f"--{name} {folder} has no adapter_config.json. Pass an adapter.")
    for name in ("save_every", "sample_batch_size"):
        if (value := getattr(chosen, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}.")
    chosen.output = Path(chosen.output).expanduser()
    settings = load_preset(experiment_of(chosen), chosen.preset, overrides)
    PPOConfig(**config_fields(chosen, settings))  # rejects invalid options
    return chosen, settings


def experiment_of(chosen: Options) -> str:
    """Return the name of the run's notebook."""
    return CHAT if chosen.sft_adapter else IMDB


def used_settings(experiment: str) -> list[str]:
    """Return the names of a notebook's settings that PPO uses."""
    return CHAT_SETTINGS if experiment == CHAT else [*read_spec(experiment)]


def settings_class(experiment: str, settings: Settings) -> type:
    """Return a dataclass with a notebook's settings as strings; the preset gives defaults."""
    spec, entries = read_spec(experiment), []
    for name in used_settings(experiment):
        value, aliases = getattr(settings, name), ["--report_to"] if name == "log_with" else []
        text = spec[name]["help"].replace("%", "%%")
        value = value if value is None else str(value)
        entries.append((name, str | None, option(value, text, aliases=aliases)))
    namespace = {"_argument_group_name": f"settings of {experiment}"}
    return make_dataclass("GivenSettings", entries, namespace=namespace)


def config_fields(chosen: Options, settings: Settings) -> dict:
    """Return the PPOConfig fields that settings and options set, as a dict."""
    names = [n for n in (*SHARED, "target", "horizon", "vf_coef") if hasattr(settings, n)]
    found = {name: getattr(settings, name) for name in names}
    return found | {name: getattr(chosen, name) for name in OF_PPO}
