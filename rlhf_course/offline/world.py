"""Builds, once, what a preset needs and has no hub for; ``python -m rlhf_course.offline.world`` builds all of it."""

from __future__ import annotations

from rlhf_course import command

if __name__ == "__main__":
    command.loading()

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import torch
from filelock import FileLock
from transformers import AutoTokenizer

from rlhf_course.data import load_pairs, load_reviews
from rlhf_course.files import atomic_folder, check_folder
from rlhf_course.hub import download
from rlhf_course.offline import dialogues, models, reviews
from rlhf_course.presets import ROOT, Settings, load_preset
from rlhf_course.run_card import quiet_libraries

SEED = 0  # the world is one and the same, whatever the seed of a run
MANIFEST = ".manifest.json"
LM_RECIPE = ("vocab_size", "n_layer", "n_embd", "lm_steps", "lm_batch", "lm_block", "lm_lr")
BASE_RECIPE = ("data_dir", "vocab_size", "n_layer", "n_embd", "base_steps")
CLASSIFIER_RECIPE = ("vocab_size", "classifier_labels", "classifier_steps")


def cache_root() -> Path:
    """Where built things are kept: $RLHF_COURSE_CACHE, or build/cache.

    Relative paths start at the project's root (an installed copy: at the working directory).
    """
    return ROOT / Path(os.environ.get("RLHF_COURSE_CACHE") or "build/cache").expanduser()


def prepare(settings: Settings) -> SimpleNamespace:
    """Folders or hub ids for dataset, model and reward_model; ``offline`` and ``scratch`` are built if not cached.

    Raises ``ValueError`` when no dataset is named.
    """
    if settings.dataset is None:
        raise ValueError('This preset needs a dataset: overrides={"dataset": FOLDER}, holding columns text and label.')
    dataset = str(build_reviews()) if settings.dataset == "offline" else str(settings.dataset)
    model, reward_model = settings.model, settings.reward_model
    if model == "scratch":
        model = str(build_language_model(dataset, settings))
    if reward_model == "scratch":
        reward_model = str(build_classifier(dataset, settings))
    for source in (model, reward_model):
        download(source)  # what cannot be had is said before anything runs
    return SimpleNamespace(dataset=dataset, model=model, reward_model=reward_model)


def build_reviews() -> Path:
    """The embedded reviews as a dataset folder in the hub's layout: 6,000 to train on, 2,000 held out."""

    def build(folder: Path) -> None:
        rows = reviews.make_reviews(8000, SEED)
        for split, part in (("train", rows[:6000]), ("test", rows[6000:])):
            table = datasets.Dataset.from_list([{"text": r.text, "label": r.label} for r in part])
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")

    return cached("reviews", {}, [reviews], build)


def prepare_reward_model(settings: Settings, revision: str | None = None) -> SimpleNamespace:
    """Folders or hub ids for the preference pairs and the base of notebook 01 (of a revision); built if not cached."""
    if settings.dataset is None:
        raise ValueError('This preset needs pairs: overrides={"dataset": FOLDER}, with columns chosen and rejected.')
    dataset = str(build_dialogues()) if settings.dataset == "offline" else str(settings.dataset)
    model = str(build_reward_base(dataset, settings)) if settings.model == "scratch" else settings.model
    download(model, revision)
    return SimpleNamespace(dataset=dataset, model=model)


def build_dialogues() -> Path:
    """The embedded preference pairs as a folder like hh-rlhf: 24,000 to train on, 2,000 held out, with their gold."""

    def build(folder: Path) -> None:
        pairs = dialogues.make_pairs(26000, SEED)
        for split, part in (("train", pairs[2000:]), ("test", pairs[:2000])):
            rows = [
                {
                    "chosen": f"{p.prompt} {p.chosen}",
                    "rejected": f"{p.prompt} {p.rejected}",
                    "gold_chosen": p.gold_chosen,
                    "gold_rejected": p.gold_rejected,
                }
                for p in part
            ]
            datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")

    return cached("dialogues", {}, [dialogues], build)


def build_reward_base(dataset: str, settings: Settings) -> Path:
    """A small GPT-2 and its tokenizer for a reward model to start from, pretrained for base_steps on the dialogues."""
    # Far more positions than training uses: the audit asks about very long answers.
    recipe = {key: getattr(settings, key) for key in BASE_RECIPE} | {"n_positions": 4 * settings.max_length}
    recipe["initializer_range"] = 0.05  # GPT-2's 0.02 suits its width; a narrow model starts to learn late with it

    def build(folder: Path) -> None:
        pairs, _ = load_pairs(dataset, "train", settings.data_dir)
        texts = [f"{row['prompt']} {row['chosen']}" for row in pairs]
        tokenizer = models.train_tokenizer(texts, settings.vocab_size)
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # so that a final EOS is a token like any other
        sizes = (settings.n_layer, settings.n_embd, settings.base_steps, 32, 128, 2e-3)
        config = {name: recipe[name] for name in ("n_positions", "initializer_range")}
        config["activation_function"] = "gelu_pytorch_tanh"
        model = models.pretrain_gpt2(texts, tokenizer, *sizes, **config)
        model.config.initializer_range = 0.02  # a reward head that has hardly an opinion yet
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached("reward-base", {"data": fingerprint(dataset), **recipe}, [models], build)


def build_tokenizer(dataset: str, settings: Settings) -> Path:
    """A byte-level BPE of the reviews, which policy and classifier share."""

    def build(folder: Path) -> None:
        texts = load_reviews(dataset, "train")["text"]
        models.train_tokenizer(texts, settings.vocab_size).save_pretrained(folder)

    return cached("tokenizer", {"data": fingerprint(dataset), "vocab_size": settings.vocab_size}, [models], build)


def build_language_model(dataset: str, settings: Settings) -> Path:
    """A GPT-2 pretrained on the reviews, with its tokenizer."""
    recipe = {key: getattr(settings, key) for key in LM_RECIPE}

    def build(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(build_tokenizer(dataset, settings))
        model = models.pretrain_gpt2(
            load_reviews(dataset, "train")["text"],
            tokenizer,
            settings.n_layer,
            settings.n_embd,
            settings.lm_steps,
            settings.lm_batch,
            settings.lm_block,
            settings.lm_lr,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached("gpt2", {"data": fingerprint(dataset), **recipe}, [models], build)


def build_classifier(dataset: str, settings: Settings) -> Path:
    """A DistilBERT sentiment classifier trained on some of the reviews' labels, with its tokenizer."""
    recipe = {key: getattr(settings, key) for key in CLASSIFIER_RECIPE}

    def build(folder: Path) -> None:
        rows = load_reviews(dataset, "train").shuffle(seed=SEED)
        tokenizer = models.classifier_tokenizer(AutoTokenizer.from_pretrained(build_tokenizer(dataset, settings)))
        rows = rows.select(range(min(settings.classifier_labels, len(rows))))
        model = models.train_classifier(rows["text"], rows["label"], tokenizer, settings.classifier_steps)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached("classifier", {"data": fingerprint(dataset), **recipe}, [models], build)


def fingerprint(dataset: str) -> list:
    """What tells one dataset folder from another: its files' names and sizes; a hub id stands for itself."""
    files = [p for p in Path(dataset).rglob("*") if p.is_file()]
    return sorted([p.name, p.stat().st_size] for p in files) or [dataset]


def cached(name: str, recipe: dict, sources: list, build) -> Path:
    """The folder that ``build`` fills, made once per recipe and per text of the modules that make it.

    One process builds it and others wait. What is damaged is built again; its manifest holds every file's hash.
    """
    text = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in sources)
    key = hashlib.sha256((json.dumps(recipe, sort_keys=True) + text).encode()).hexdigest()[:12]
    folder = cache_root() / f"{name}-{key}"
    if is_whole(folder):
        return folder
    check_folder(folder).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock"), mode=0o666):
        if is_whole(folder):
            return folder
        if folder.exists():
            print(f"{folder} is damaged and is built again.")
        with atomic_folder(folder, stale=("**/[!.]*",)) as aside, torch.random.fork_rng():
            torch.manual_seed(SEED)
            build(aside)
            (aside / MANIFEST).write_text(json.dumps(hashes(aside)), encoding="utf-8")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file is there as it was built."""
    try:
        return hashes(folder) == json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder but hidden ones, which nobody loads: the manifest, a file browser's."""
    files = (path for path in sorted(folder.rglob("[!.]*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main(arguments: list[str]) -> None:
    """Build all that preset tiny needs, and say where it is. Raises ``ValueError`` for arguments: there are none."""
    from rlhf_course.offline.chat import build_base, build_sft_adapter, prepare_chat

    if arguments:
        raise ValueError(f"{arguments[0]} is no option: there is only --debug; RLHF_COURSE_CACHE says where to build.")
    quiet_libraries()
    started = time.perf_counter()
    built = vars(prepare(load_preset("03_gpt2_imdb_ppo", "tiny")))
    pairs = prepare_reward_model(load_preset("01_reward_modeling", "tiny"))
    built |= {"dialogues": pairs.dataset, "reward base": pairs.model}
    settings = load_preset("04_lora_rlhf_baichuan", "tiny")
    chat = prepare_chat(settings)
    built |= {"answers": chat.sft_dataset, "preferences": chat.dataset, "checkpoint": chat.checkpoint}
    built |= {"converted": build_base(settings), "SFT adapter": build_sft_adapter(settings)}
    for what, where in built.items():
        print(f"{what:13} {where}")
    print(f"The embedded world is ready ({time.perf_counter() - started:.0f} s).")


if __name__ == "__main__":
    sys.exit(command.run("rlhf_course.offline.world", main))
