"""Parse train_ppo.py's options: its own, and the settings of notebook 04 or 05."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path

from rlhf_course.command_line import options
from rlhf_course.command_line.options import option
from rlhf_course.course.presets import PRESETS, Settings, load_preset, read_spec
from rlhf_course.ppo.config import PPOConfig

IMDB = "04_gpt2_imdb_ppo"
CHAT = "05_lora_rlhf_baichuan"
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

    def choose(early: dict) -> tuple[tuple[type, type], dict]:
        if "report_to" in early:  # trl's trainers use this name
            early["log_with"] = early.pop("report_to")
        early.setdefault("preset", "tiny")
        experiment = CHAT if any(early.get(name) for name in ADAPTERS) else IMDB
        settings = load_preset(experiment, early["preset"])
        defaults = {
            "gradient_checkpointing": getattr(settings, "gradient_checkpointing", False),
        }
        return (Options, settings_class(experiment, settings)), defaults

    chosen, changes = options.parse(about, ["preset", *ADAPTERS], choose, arguments)
    check(chosen)
    chosen.output = Path(chosen.output).expanduser()
    settings = load_preset(experiment_of(chosen), chosen.preset, vars(changes))
    PPOConfig(**config_fields(chosen, settings))  # rejects invalid options
    return chosen, settings


def check(chosen: Options) -> None:
    """Raise ``ValueError`` if this script's own options conflict or are out of range."""
    folders = {name: getattr(chosen, name) for name in ADAPTERS}
    if any(folders.values()) and not all(folders.values()):
        raise ValueError(f"Pass both --sft_adapter and --reward_adapter; {MAKERS} write them.")
    if chosen.quantization and not chosen.sft_adapter:
        raise ValueError("--quantization needs adapters. Omit it, or pass --sft_adapter.")
    for name, folder in folders.items():
        if folder and not Path(folder, "adapter_config.json").exists():
            raise ValueError(f"--{name} {folder} has no adapter_config.json. Pass an adapter.")
    for name in ("save_every", "sample_batch_size"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}.")


def experiment_of(chosen: Options) -> str:
    """Return the name of the run's notebook."""
    return CHAT if chosen.sft_adapter else IMDB


def used_settings(experiment: str) -> list[str]:
    """Return the names of a notebook's settings that PPO uses."""
    return CHAT_SETTINGS if experiment == CHAT else [*read_spec(experiment)]


def settings_class(experiment: str, settings: Settings) -> type:
    """Return a dataclass of a notebook's settings; the preset gives the defaults."""
    spec = read_spec(experiment)
    fields = []
    for name in used_settings(experiment):
        help_text = spec[name]["help"].replace("%", "%%")  # argparse formats this text
        aliases = ["--report_to"] if name == "log_with" else []
        entry = option(getattr(settings, name), help_text, aliases=aliases)
        fields.append((name, setting_type(spec[name]), entry))
    namespace = {"_argument_group_name": f"settings of {experiment}"}
    return make_dataclass("NotebookSettings", fields, namespace=namespace)


def setting_type(entry: dict) -> type:
    """Return the type of a setting, which its values in the presets show.

    A setting that is null in every preset is a text.
    """
    values = [entry[preset] for preset in PRESETS if entry[preset] is not None]
    if not values:
        return str | None
    if isinstance(values[0], list):
        return list[type(values[0][0])]
    return type(values[0]) | None


def config_fields(chosen: Options, settings: Settings) -> dict:
    """Return the PPOConfig fields that settings and options set, as a dict."""
    fields = {name: getattr(chosen, name) for name in OF_PPO}
    for name in (*SHARED, "target", "horizon", "vf_coef"):
        if hasattr(settings, name):
            fields[name] = getattr(settings, name)
    return fields
