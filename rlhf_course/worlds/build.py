"""Builds, once, what a preset needs and has no hub for; ``python -m rlhf_course.worlds.build`` builds all of it."""

from __future__ import annotations

from rlhf_course.runtime import command

if __name__ == "__main__":
    command.loading()

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
from transformers import AutoTokenizer

from rlhf_course.course.presets import Settings, load_preset
from rlhf_course.course.run_card import quiet_libraries
from rlhf_course.data import load_pairs, load_reviews
from rlhf_course.runtime.hub import download
from rlhf_course.worlds import dialogues, reviews, small_models
from rlhf_course.worlds.cache import SEED, cached

NEEDS = "This preset needs {}, with columns {}: "
NEEDS += 'overrides={{"dataset": FOLDER}} in a notebook, --dataset FOLDER for a command.'


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
    tokenizer = small_models.train_tokenizer(texts, vocab_size)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # so that a final EOS is a token like any other
    # Far more positions than training uses: the audit asks about very long answers.
    config = {"n_positions": 4 * max_length, "activation_function": "gelu_pytorch_tanh"}
    config["initializer_range"] = 0.05  # GPT-2's 0.02 suits its width; a narrow model starts to learn late with it
    model = small_models.pretrain_gpt2(texts, tokenizer, n_layer, n_embd, base_steps, 32, 128, 2e-3, **config)
    model.config.initializer_range = 0.02  # a reward head that has hardly an opinion yet
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer(dataset: str, settings: Settings) -> Path:
    """A byte-level BPE of the reviews, which policy and classifier share."""
    return cached("tokenizer", _tokenizer, settings, data=Path(dataset))


def _tokenizer(folder: Path, data: Path, vocab_size: int) -> None:
    small_models.train_tokenizer(load_reviews(data, "train")["text"], vocab_size).save_pretrained(folder)


def build_language_model(dataset: str, settings: Settings) -> Path:
    """A GPT-2 pretrained on the reviews, with its tokenizer."""
    reader = build_tokenizer(dataset, settings)
    return cached("gpt2", _language_model, settings, data=Path(dataset), reader=reader)


def _language_model(
    folder: Path, data: Path, reader: Path, n_layer, n_embd, lm_steps, lm_batch, lm_block, lm_lr
) -> None:
    tokenizer, texts = AutoTokenizer.from_pretrained(reader), load_reviews(data, "train")["text"]
    model = small_models.pretrain_gpt2(texts, tokenizer, n_layer, n_embd, lm_steps, lm_batch, lm_block, lm_lr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_classifier(dataset: str, settings: Settings) -> Path:
    """A DistilBERT sentiment classifier trained on some of the reviews' labels, with its tokenizer."""
    reader = build_tokenizer(dataset, settings)
    return cached("classifier", _classifier, settings, data=Path(dataset), reader=reader)


def _classifier(folder: Path, data: Path, reader: Path, classifier_labels: int, classifier_steps: int) -> None:
    rows = load_reviews(data, "train").shuffle(seed=SEED)
    tokenizer = small_models.classifier_tokenizer(AutoTokenizer.from_pretrained(reader))
    rows = rows.select(range(min(classifier_labels, len(rows))))
    model = small_models.train_classifier(rows["text"], rows["label"], tokenizer, classifier_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Build all that preset tiny needs, and say where it is. Raises ``ValueError`` for arguments: there are none."""
    from rlhf_course.worlds.chat import build_base, build_sft_adapter, prepare_chat

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
    sys.exit(command.run("rlhf_course.worlds.build", main))
