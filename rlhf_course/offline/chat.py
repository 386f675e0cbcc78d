"""What notebooks 04 and 05 start from: Chinese answers and preferences, and a base in Baichuan's own layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import datasets
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_course import baichuan, sentencepiece_to_fast
from rlhf_course.data import as_prompt, load_answers, load_pairs, tokenize_answers
from rlhf_course.hub import download
from rlhf_course.offline import baichuan_layout, chinese, models
from rlhf_course.offline.world import SEED, cached, fingerprint
from rlhf_course.presets import Settings

BASE_RECIPE = ("vocab_size", "n_layer", "n_embd", "base_steps")
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

    def build(folder: Path) -> None:
        rows = [vars(row) for row in chinese.make_qa(4000, SEED)]
        datasets.Dataset.from_list(rows).to_parquet(folder / "train-00000-of-00001.parquet")

    return cached("chinese-answers", {}, [chinese], build)


def build_preferences() -> Path:
    """The embedded Chinese preferences with their gold: 8,000 to train on, 1,000 held out."""

    def build(folder: Path) -> None:
        rows = [vars(row) for row in chinese.make_preferences(9000, SEED)]
        for split, part in (("train", rows[1000:]), ("test", rows[:1000])):
            datasets.Dataset.from_list(part).to_parquet(folder / f"{split}-00000-of-00001.parquet")

    return cached("chinese-preferences", {}, [chinese], build)


def build_checkpoint(found: SimpleNamespace, settings: Settings) -> Path:
    """A small Baichuan2, pretrained on prose alone: the embedded one, or the answers of real datasets.

    It has not seen a question with its answer, which is what SFT is for.
    """
    recipe = {key: getattr(settings, key) for key in BASE_RECIPE} | {"max_length": settings.max_length}
    data = "offline" if settings.sft_dataset == "offline" else [*map(fingerprint, (found.sft_dataset, found.dataset))]

    def build(folder: Path) -> None:
        if data == "offline":
            texts = chinese.make_prose(8000, SEED)
        else:
            answers, _ = load_answers(found.sft_dataset, "train", settings.sft_files)
            pairs, _ = load_pairs(found.dataset, "train")
            texts = [*answers["answer"], *pairs["chosen"], *pairs["rejected"]]
        marks = [as_prompt("")] * 500  # so that Human: and Assistant: are a piece each, as in a large vocabulary
        spm_model = baichuan_layout.train_sentencepiece([*texts, *marks], settings.vocab_size, folder / "aside")
        tokenizer = sentencepiece_to_fast.sentencepiece_to_fast(spm_model, baichuan_layout.SPECIAL)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=settings.n_embd,
                intermediate_size=settings.n_embd * 8 // 3 // 8 * 8,
                num_hidden_layers=settings.n_layer,
                num_attention_heads=settings.n_embd // 32,
                max_position_embeddings=max(512, 4 * settings.max_length),
                initializer_range=0.05,  # a narrow model starts to learn late with 0.02
                **baichuan_layout.SPECIAL_IDS,
            )
        )
        baichuan_layout.norm_head(model)
        models.pretrain(model, texts, tokenizer, settings.base_steps, 32, 64, 3e-3)
        baichuan_layout.write_baichuan_checkpoint(model, spm_model, folder)

    return cached("baichuan", {"data": data, **recipe}, [models, baichuan_layout, chinese], build)


def build_base(settings: Settings) -> Path:
    """The checkpoint converted to a native Llama, for whoever does not convert it by hand."""
    checkpoint = prepare_chat(settings).checkpoint

    def build(folder: Path) -> None:
        baichuan.convert_to_llama(checkpoint, folder, report=lambda line: None)

    return cached("baichuan-llama", {"checkpoint": fingerprint(checkpoint)}, [baichuan, sentencepiece_to_fast], build)


def build_sft_adapter(settings: Settings) -> Path:
    """An SFT adapter on :func:`build_base`, trained on answers as they were scraped: a few are empty."""
    base, answers = build_base(settings), prepare_chat(settings).sft_dataset

    def build(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(base)
        rows = datasets.load_dataset(answers, split="train")
        pairs = [(as_prompt(row["question"]), answer) for row in rows for answer in row["human_answers"]]
        tokens, _ = tokenize_answers(
            datasets.Dataset.from_dict(dict(zip(("prompt", "answer"), zip(*pairs, strict=True), strict=True))),
            tokenizer,
            settings.max_length,
        )
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA))
        models.fine_tune(model, tokens["input_ids"], tokens["completion_mask"], 300, 16, 5e-3, "fine-tuning")
        model.save_pretrained(folder)

    return cached("chinese-sft", {"base": fingerprint(base)}, [models, chinese], build)
