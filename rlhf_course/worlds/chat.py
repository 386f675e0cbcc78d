"""What notebooks 04 and 05 start from: Chinese answers and preferences, and a base in Baichuan's own layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import datasets
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_course.baichuan import convert, sentencepiece, toy_checkpoint
from rlhf_course.course.presets import Settings
from rlhf_course.data import as_prompt, load_answers, load_pairs, tokenize_answers
from rlhf_course.runtime.hub import download
from rlhf_course.worlds import chinese, small_models
from rlhf_course.worlds.cache import SEED, cached

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def prepare_chat(settings: Settings) -> SimpleNamespace:
    """Folders or hub ids: sft_dataset, dataset (pairs), checkpoint (in Baichuan's layout); built if not cached.

    Raises ``ValueError`` when a dataset is not named.
    """
    for name, columns in (("sft_dataset", "question, human_answers, chatgpt_answers"), ("dataset", "chosen, rejected")):
        if getattr(settings, name) is None:
            raise ValueError(f'This preset needs overrides={{"{name}": FOLDER}}, with the columns {columns}.')
    found = SimpleNamespace(sft_dataset=str(settings.sft_dataset), dataset=str(settings.dataset))
    if settings.sft_dataset == "offline":
        found.sft_dataset = str(build_answers())
    if settings.dataset == "offline":
        found.dataset = str(build_preferences())
    if settings.checkpoint == "scratch":
        found.checkpoint = str(build_checkpoint(found, settings))
    else:
        found.checkpoint = str(download(settings.checkpoint, to_convert=True))
    return found


def build_answers() -> Path:
    """The embedded questions and answers, 4,000 questions in HC3's schema."""
    return cached("chinese-answers", _answers)


def _answers(folder: Path) -> None:
    rows = [vars(row) for row in chinese.make_qa(4000, SEED)]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train-00000-of-00001.parquet")


def build_preferences() -> Path:
    """The embedded Chinese preferences with their gold: 8,000 to train on, 1,000 held out."""
    return cached("chinese-preferences", _preferences)


def _preferences(folder: Path) -> None:
    rows = [vars(row) for row in chinese.make_preferences(9000, SEED)]
    for split, part in (("train", rows[1000:]), ("test", rows[:1000])):
        datasets.Dataset.from_list(part).to_parquet(folder / f"{split}-00000-of-00001.parquet")


def build_checkpoint(found: SimpleNamespace, settings: Settings) -> Path:
    """A small Baichuan2, pretrained on prose alone: the embedded one, or the answers of real datasets.

    It has not seen a question with its answer, which is what SFT is for.
    """
    own = settings.sft_dataset != "offline"
    data = {name: Path(getattr(found, name)) if own else None for name in ("sft_dataset", "dataset")}
    return cached("baichuan", _checkpoint, settings, **data)


def _checkpoint(
    folder: Path,
    sft_dataset: Path | None,
    sft_files,
    dataset: Path | None,
    vocab_size: int,
    n_layer: int,
    n_embd: int,
    base_steps: int,
    max_length: int,
) -> None:
    if sft_dataset is None:
        texts = chinese.make_prose(8000, SEED)
    else:
        answers, _ = load_answers(sft_dataset, "train", sft_files)
        pairs, _ = load_pairs(dataset, "train")
        texts = [*answers["answer"], *pairs["chosen"], *pairs["rejected"]]
    marks = [as_prompt("")] * 500  # so that Human: and Assistant: are a piece each, as in a large vocabulary
    spm_model = toy_checkpoint.train_sentencepiece([*texts, *marks], vocab_size, folder.with_name("aside"))
    tokenizer = sentencepiece.sentencepiece_to_fast(spm_model, toy_checkpoint.SPECIAL)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=n_embd,
            intermediate_size=n_embd * 8 // 3 // 8 * 8,
            num_hidden_layers=n_layer,
            num_attention_heads=n_embd // 32,
            max_position_embeddings=max(512, 4 * max_length),
            initializer_range=0.05,  # a narrow model starts to learn late with 0.02
            **toy_checkpoint.SPECIAL_IDS,
        )
    )
    toy_checkpoint.norm_head(model)
    small_models.pretrain(model, texts, tokenizer, base_steps, 32, 64, 3e-3)
    toy_checkpoint.write_baichuan_checkpoint(model, spm_model, folder)


def build_base(settings: Settings) -> Path:
    """The checkpoint converted to a native Llama, for whoever does not convert it by hand."""
    return cached("baichuan-llama", _base, checkpoint=Path(prepare_chat(settings).checkpoint))


def _base(folder: Path, checkpoint: Path) -> None:
    convert.convert_to_llama(checkpoint, folder, report=lambda line: None)


def build_sft_adapter(settings: Settings) -> Path:
    """An SFT adapter on :func:`build_base`, trained on answers as they were scraped: a few are empty."""
    answers = Path(prepare_chat(settings).sft_dataset)
    base = str(build_base(settings))  # a name, not its files: the adapter's config names it, too
    return cached("chinese-sft", _sft_adapter, settings, base=base, answers=answers)


def _sft_adapter(folder: Path, base: str, answers: Path, max_length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = datasets.load_dataset(str(answers), split="train")
    pairs = [(as_prompt(row["question"]), answer) for row in rows for answer in row["human_answers"]]
    table = datasets.Dataset.from_dict(dict(zip(("prompt", "answer"), zip(*pairs, strict=True), strict=True)))
    tokens, _ = tokenize_answers(table, tokenizer, max_length)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA))
    small_models.fine_tune(model, tokens["input_ids"], tokens["completion_mask"], 300, 16, 5e-3, "fine-tuning")
    model.save_pretrained(folder)
