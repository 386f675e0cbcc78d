"""Builds, once, what a preset needs and has no hub for; ``python -m rlhf_course.offline.world`` builds all of it."""

from __future__ import annotations

from rlhf_course import command

if __name__ == "__main__":
    command.loading()

import ast
import hashlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
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
NEEDS = "This preset needs {}, with columns {}: "
NEEDS += 'overrides={{"dataset": FOLDER}} in a notebook, --dataset FOLDER for a command.'
MANIFEST = ".manifest.json"
PACKAGE = Path(__file__).resolve().parents[1]
_READING = Lock()  # Python 3.11 cannot parse sources in two threads at once


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
        raise ValueError(NEEDS.format("a dataset", "text and label"))
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
    return cached("reviews", _reviews)


def _reviews(folder: Path) -> None:
    rows = reviews.make_reviews(8000, SEED)
    for split, part in (("train", rows[:6000]), ("test", rows[6000:])):
        table = datasets.Dataset.from_list([{"text": r.text, "label": r.label} for r in part])
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def prepare_reward_model(settings: Settings, revision: str | None = None) -> SimpleNamespace:
    """Folders or hub ids for the preference pairs and the base of notebook 01 (of a revision); built if not cached."""
    if settings.dataset is None:
        raise ValueError(NEEDS.format("pairs", "chosen and rejected"))
    dataset = str(build_dialogues()) if settings.dataset == "offline" else str(settings.dataset)
    model = str(build_reward_base(dataset, settings)) if settings.model == "scratch" else settings.model
    download(model, revision)
    return SimpleNamespace(dataset=dataset, model=model)


def build_dialogues() -> Path:
    """The embedded preference pairs as a folder like hh-rlhf: 24,000 to train on, 2,000 held out, with their gold."""
    return cached("dialogues", _dialogues)


def _dialogues(folder: Path) -> None:
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


def build_reward_base(dataset: str, settings: Settings) -> Path:
    """A small GPT-2 and its tokenizer for a reward model to start from, pretrained for base_steps on the dialogues."""
    return cached("reward-base", _reward_base, settings, data=Path(dataset))


def _reward_base(folder: Path, data: Path, data_dir, vocab_size, n_layer, n_embd, base_steps, max_length) -> None:
    pairs, _ = load_pairs(data, "train", data_dir)
    texts = [f"{row['prompt']} {row['chosen']}" for row in pairs]
    tokenizer = models.train_tokenizer(texts, vocab_size)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # so that a final EOS is a token like any other
    # Far more positions than training uses: the audit asks about very long answers.
    config = {"n_positions": 4 * max_length, "activation_function": "gelu_pytorch_tanh"}
    config["initializer_range"] = 0.05  # GPT-2's 0.02 suits its width; a narrow model starts to learn late with it
    model = models.pretrain_gpt2(texts, tokenizer, n_layer, n_embd, base_steps, 32, 128, 2e-3, **config)
    model.config.initializer_range = 0.02  # a reward head that has hardly an opinion yet
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer(dataset: str, settings: Settings) -> Path:
    """A byte-level BPE of the reviews, which policy and classifier share."""
    return cached("tokenizer", _tokenizer, settings, data=Path(dataset))


def _tokenizer(folder: Path, data: Path, vocab_size: int) -> None:
    models.train_tokenizer(load_reviews(data, "train")["text"], vocab_size).save_pretrained(folder)


def build_language_model(dataset: str, settings: Settings) -> Path:
    """A GPT-2 pretrained on the reviews, with its tokenizer."""
    reader = build_tokenizer(dataset, settings)
    return cached("gpt2", _language_model, settings, data=Path(dataset), reader=reader)


def _language_model(
    folder: Path, data: Path, reader: Path, n_layer, n_embd, lm_steps, lm_batch, lm_block, lm_lr
) -> None:
    tokenizer, texts = AutoTokenizer.from_pretrained(reader), load_reviews(data, "train")["text"]
    model = models.pretrain_gpt2(texts, tokenizer, n_layer, n_embd, lm_steps, lm_batch, lm_block, lm_lr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_classifier(dataset: str, settings: Settings) -> Path:
    """A DistilBERT sentiment classifier trained on some of the reviews' labels, with its tokenizer."""
    reader = build_tokenizer(dataset, settings)
    return cached("classifier", _classifier, settings, data=Path(dataset), reader=reader)


def _classifier(folder: Path, data: Path, reader: Path, classifier_labels: int, classifier_steps: int) -> None:
    rows = load_reviews(data, "train").shuffle(seed=SEED)
    tokenizer = models.classifier_tokenizer(AutoTokenizer.from_pretrained(reader))
    rows = rows.select(range(min(classifier_labels, len(rows))))
    model = models.train_classifier(rows["text"], rows["label"], tokenizer, classifier_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cached(name: str, build: Callable, settings: Settings | None = None, **inputs) -> Path:
    """The folder that ``build(folder, …)`` fills, made once for all that decides what it will hold.

    A builder sees its arguments, ``inputs`` or else settings of the same names, and nothing besides; the key is made of
    these (of a folder, which is given as a Path, its files) and of :func:`sources`. One process builds and others wait.
    What is damaged is built again; its manifest holds every file's hash.
    """
    if build.__closure__:
        raise TypeError(f"{build.__qualname__} takes what it needs as arguments, so that the cache's key holds it.")
    inputs |= {n: getattr(settings, n) for n in [*inspect.signature(build).parameters][1:] if n not in inputs}
    with _READING:
        text = sources(build)
    key = json.dumps([SEED, {n: fingerprint(v) for n, v in inputs.items()}, text], sort_keys=True)
    folder = cache_root() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
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
            build(aside, **inputs)
            (aside / MANIFEST).write_text(json.dumps(hashes(aside)), encoding="utf-8")
    return folder


def fingerprint(value):
    """What an input is known by in a key: a folder by its files' names and hashes, all else (and a hub id) by itself.

    Hidden files do not count: no builder reads them, and downloads keep their times there.
    """
    if not isinstance(value, Path):
        return value
    found = {}
    for path in sorted(value.rglob("[!.]*")):
        name = path.relative_to(value)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[str(name)] = _known(path, path.stat().st_size, path.stat().st_mtime_ns)
    return found or str(value)


def sources(build: Callable) -> dict[str, str]:
    """What makes an item, as text: a builder, what it uses of its own module, and each module of this package that it
    uses, with those which they import."""
    texts, functions, modules = {}, [build], []
    for function in functions:
        texts[function.__qualname__], names, codes = inspect.getsource(function), set(), [function.__code__]
        for code in codes:
            names |= {*code.co_names}
            codes += filter(inspect.iscode, code.co_consts)
        for name in sorted((names - texts.keys()) & function.__globals__.keys()):
            value = inspect.unwrap(function.__globals__[name])
            module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            if module == build.__module__ and inspect.isfunction(value):
                functions += [value] * (value not in functions)
            elif module in (None, build.__module__):
                texts[name] = repr(value) if module is None else inspect.getsource(value)
            else:
                modules.append(module)
    for module in modules:
        path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        if module not in texts and PACKAGE in path.parents and path.exists():
            texts[module] = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(texts[module])):
                if isinstance(node, ast.ImportFrom):
                    modules += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return texts


def is_whole(folder: Path) -> bool:
    """Whether every file is there as it was built."""
    try:
        return hashes(folder) == json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder but hidden ones, which nobody loads: the manifest, a file browser's."""
    files = (path for path in sorted(folder.rglob("[!.]*")) if path.is_file())
    return {str(path.relative_to(folder)): digest(path) for path in files}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _known(path: Path, size: int, changed: int) -> str:
    """A file's hash, found once in a process for each size and time of change."""
    return digest(path)


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
