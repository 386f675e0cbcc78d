"""Parse train_ppo.py's options: its own, and the settings of notebook 04 or 05."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path

from rlhf_course.command_line import command_presets, options
from rlhf_course.command_line.options import option
from rlhf_course.course.presets import PRESETS, Settings, read_spec
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
LORA = ["lora_r", "lora_alpha", "lora_target_modules"]  # of a new adapter
CHAT_SETTINGS += LORA


@dataclass
class Options:
    """Hold options other than the notebook's settings."""

    preset: str = option("tiny", command_presets.HELP)
    sft_adapter: str | None = option(
        None, "folder of the adapter for policy and reference; None: a new one on a chat model"
    )
    reward_adapter: str | None = option(None, "folder of an adapter with a score head")
    data_dir: str | None = option(None, "subfolder of --dataset")
    columns: str | None = option(
        None, "columns of preference pairs, such as prompt=question,chosen=response_j"
    )
    split: str = option("train", "split of the pairs whose prompts are used")
    eval_split: str = option("test", "split of the pairs whose prompts are held out")
    output: str = option("build/train_ppo", "output folder of the run")
    seed: int = option(0, "seed")
    save_every: int = option(50, "steps between checkpoints")
    eval_prompts: int = option(
        16, "held-out prompts, answered before training, at checkpoints and after it; 0: none"
    )
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
        settings = command_presets.load_settings(experiment, early["preset"])
        own_options = command_presets.load_options(experiment, early["preset"])
        defaults = {
            "gradient_checkpointing": getattr(settings, "gradient_checkpointing", False),
            "save_every": own_options.get("save_every", 50),
        }
        return (Options, settings_class(experiment, settings)), defaults

    chosen, changes = options.parse(about, ["preset", *ADAPTERS], choose, arguments)
    check(chosen)
    chosen.output = Path(chosen.output).expanduser()
    experiment = experiment_of(chosen)
    settings = command_presets.load_settings(experiment, chosen.preset, vars(changes))
    PPOConfig(**config_fields(chosen, settings))  # rejects invalid options
    return chosen, settings


def check(chosen: Options) -> None:
    """Raise ``ValueError`` if this script's own options conflict or are out of range."""
    folders = {name: getattr(chosen, name) for name in ADAPTERS}
    if chosen.sft_adapter and not chosen.reward_adapter:
        raise ValueError(
            "--sft_adapter needs --reward_adapter; train_reward_model.py --use_peft writes one."
        )
    if chosen.quantization and not chosen.reward_adapter:
        raise ValueError("--quantization needs adapters. Omit it, or pass --reward_adapter.")
    for name in ("columns", "split", "eval_split"):
        if getattr(chosen, name) != getattr(Options, name) and not chosen.reward_adapter:
            raise ValueError(
                f"--{name} is for preference pairs. Omit it, or pass --reward_adapter."
            )
    if chosen.eval_prompts < 0:
        raise ValueError(f"--eval_prompts must be at least 0; got {chosen.eval_prompts}.")
    for name, folder in folders.items():
        if folder and not Path(folder, "adapter_config.json").exists():
            raise ValueError(f"--{name} {folder} has no adapter_config.json. Pass an adapter.")
    for name in ("save_every", "sample_batch_size"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}.")


def experiment_of(chosen: Options) -> str:
    """Return the name of the run's notebook."""
    return CHAT if chosen.reward_adapter else IMDB


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
