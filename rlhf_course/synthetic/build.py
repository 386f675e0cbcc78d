"""Build data and models for the synthetic world; dev/build_world.py builds them all."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import datasets
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rlhf_course.baichuan import convert, sentencepiece, toy_checkpoint
from rlhf_course.course.presets import ROOT, Settings, check_named, shipped
from rlhf_course.data import as_prompt, load_answers, load_pairs
from rlhf_course.runtime.files import read_json
from rlhf_course.runtime.hub import download
from rlhf_course.synthetic import chinese, dialogues, small_models
from rlhf_course.synthetic.cache import SEED, cached

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SFT_ADAPTER = ROOT / "models/baichuan-mini-sft"


def prepare_reward_model(
    settings: Settings, revision: str | None = None, reading: dict | None = None
) -> SimpleNamespace:
    """Return notebook 01's dataset (pairs) and model as folders or hub ids; build them if needed.

    ``reading`` has load_pairs's ``split`` and ``columns``, where these are not the defaults.
    Raises ``ValueError`` if no dataset is named; so does :func:`prepare_chat`.
    """
    check_named(settings, dataset="chosen and rejected")
    dataset = str(build_dialogues()) if settings.dataset == "offline" else settings.dataset
    usual = {"split": "train", "columns": None}
    unusual = {name: x for name, x in (reading or {}).items() if x != usual[name]}
    if settings.model == "scratch":
        base = cached(
            "reward-base",
            _reward_base,
            data=Path(dataset),
            data_dir=settings.data_dir,
            vocab_size=settings.vocab_size,
            n_layer=settings.n_layer,
            n_embd=settings.n_embd,
            base_steps=settings.base_steps,
            max_length=settings.max_length,
            **unusual,  # the defaults are not in the cache's key
        )
        model = str(base)
    else:
        model = settings.model
    download(model, revision)
    return SimpleNamespace(dataset=dataset, model=model)


def prepare_chat(settings: Settings) -> SimpleNamespace:
    """Return sft_dataset, dataset (pairs) and checkpoint (a Baichuan) as folders or hub ids."""
    check_named(
        settings,
        sft_dataset="question, human_answers and chatgpt_answers",
        dataset="chosen and rejected",
    )
    sft_dataset = settings.sft_dataset
    if sft_dataset == "offline":
        sft_dataset = str(build_answers())
    dataset = settings.dataset
    if dataset == "offline":
        dataset = str(build_preferences())
    if settings.checkpoint == "scratch":
        checkpoint = cached(
            "baichuan",
            _checkpoint,
            sft_dataset=Path(sft_dataset),
            sft_files=settings.sft_files,
            dataset=Path(dataset),
            vocab_size=settings.vocab_size,
            n_layer=settings.n_layer,
            n_embd=settings.n_embd,
            base_steps=settings.base_steps,
            base_batch_size=settings.base_batch_size,
            base_learning_rate=settings.base_learning_rate,
            max_length=settings.max_length,
        )
    else:
        checkpoint = download(shipped(settings.checkpoint), to_convert=True)
    return SimpleNamespace(sft_dataset=sft_dataset, dataset=dataset, checkpoint=str(checkpoint))


def build_dialogues() -> Path:
    """Return a folder of English preference pairs with gold utilities, in hh-rlhf's layout."""
    return cached("dialogues", _dialogues)


def build_answers() -> Path:
    """Return a folder of Chinese questions and answers, in HC3's layout."""
    return cached("chinese-answers", _answers)


def build_preferences() -> Path:
    """Return a folder of Chinese preference pairs with gold utilities."""
    return cached("chinese-preferences", _preferences)


def _dialogues(folder: Path) -> None:
    rows = []
    for pair in dialogues.make_pairs(18000, SEED):
        row = {
            "chosen": f"{pair.prompt} {pair.chosen}",
            "rejected": f"{pair.prompt} {pair.rejected}",
            "gold_chosen": pair.gold_chosen,
            "gold_rejected": pair.gold_rejected,
        }
        rows.append(row)
    _write(folder, train=rows[2000:], test=rows[:2000])


def _answers(folder: Path) -> None:
    _write(folder, train=chinese.make_qa(4000, SEED))


def _preferences(folder: Path) -> None:
    rows = [asdict(pair) for pair in chinese.make_preferences(9000, SEED)]
    _write(folder, train=rows[1000:], test=rows[:1000])


def _write(folder: Path, **splits: list[dict]) -> None:
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")


def _reward_base(
    folder: Path,
    data: Path,
    data_dir: str | None,
    vocab_size: int,
    n_layer: int,
    n_embd: int,
    base_steps: int,
    max_length: int,
    split: str = "train",
    columns: str | None = None,
) -> None:
    """Pretrain a small GPT-2 on the dialogues, for a reward model to start from."""
    pairs, _ = load_pairs(data, split, data_dir, columns)
    texts = [f"{row['prompt']} {row['chosen']}" for row in pairs]
    tokenizer = small_models.train_tokenizer(texts, vocab_size)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # so that the final EOS is trained
    head_width = 64 if n_embd % 64 == 0 else 32
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_embd // head_width,
        n_positions=4 * max_length,  # the audit scores very long answers
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        activation_function="gelu_pytorch_tanh",
        initializer_range=0.05,  # with GPT-2's 0.02, narrow models learn late
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    small_models.pretrain(model, texts, tokenizer, steps=base_steps, batch=32, block=128, lr=2e-3)
    model.config.initializer_range = 0.02  # a new reward head then gives nearly equal scores
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _checkpoint(
    folder: Path,
    sft_dataset: Path,
    sft_files: str | None,
    dataset: Path,
    vocab_size: int,
    n_layer: int,
    n_embd: int,
    base_steps: int,
    base_batch_size: int,
    base_learning_rate: float,
    max_length: int,
) -> None:
    """Pretrain a small Baichuan2 on both datasets' answers, without their questions."""
    answers, _ = load_answers(sft_dataset, "train", sft_files)
    pairs, _ = load_pairs(dataset, "train")
    texts = [*answers["answer"], *pairs["chosen"], *pairs["rejected"]]
    # 500 empty prompts make Human: and Assistant: one piece each, as in a large vocabulary.
    empty_prompts = [as_prompt("")] * 500
    spm_model = toy_checkpoint.train_sentencepiece(
        texts + empty_prompts, vocab_size, folder.with_name("sentencepiece")
    )
    tokenizer = sentencepiece.sentencepiece_to_fast(spm_model, **toy_checkpoint.SPECIAL)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=n_embd,
        intermediate_size=n_embd * 8 // 3 // 8 * 8,
        num_hidden_layers=n_layer,
        num_attention_heads=n_embd // 32,
        max_position_embeddings=max(512, 4 * max_length),
        initializer_range=0.05,
        **toy_checkpoint.SPECIAL_IDS,
    )
    model = toy_checkpoint.norm_head(LlamaForCausalLM(config))
    small_models.pretrain(
        model,
        texts,
        tokenizer,
        steps=base_steps,
        batch=base_batch_size,
        block=64,
        lr=base_learning_rate,
    )
    toy_checkpoint.write_baichuan_checkpoint(model, spm_model, folder)


def build_base(settings: Settings) -> Path:
    """Return the folder of a native Llama, converted from the checkpoint."""
    checkpoint = Path(prepare_chat(settings).checkpoint)
    return cached("baichuan-llama", _base, checkpoint=checkpoint)


def _base(folder: Path, checkpoint: Path) -> None:
    convert.convert_to_llama(checkpoint, folder, report=lambda line: None)


def build_sft_adapter(settings: Settings) -> Path:
    """Return a folder with the shipped SFT adapter, whose config names the base's folder."""
    base = str(build_base(settings))  # a string for the adapter's config
    return cached("chinese-sft", _sft_adapter, base=base, adapter=SFT_ADAPTER)


def _sft_adapter(folder: Path, base: str, adapter: Path) -> None:
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    file = folder / "adapter_config.json"
    config = read_json(file)
    config["base_model_name_or_path"] = base
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
