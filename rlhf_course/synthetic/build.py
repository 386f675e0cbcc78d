"""Build data and models for the synthetic world; dev/build_world.py builds them all."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rlhf_course.baichuan import convert, sentencepiece, toy_checkpoint
from rlhf_course.course.presets import ROOT, Settings, check_named
from rlhf_course.course.shipped import shipped
from rlhf_course.data import as_prompt, load_answers, load_pairs
from rlhf_course.runtime.files import read_json
from rlhf_course.runtime.hub import download
from rlhf_course.synthetic import chinese, dialogues, small_models
from rlhf_course.synthetic.cache import SEED, cached

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SFT_ADAPTER = ROOT / "models/baichuan-mini-sft"


def prepare_reward_model(settings: Settings, revision: str | None = None) -> SimpleNamespace:
    """Return notebook 01's dataset (pairs) and model as folders or hub ids; build them if needed.

    Raises ``ValueError`` if no dataset is named; so does :func:`prepare_chat`.
    """
    check_named(settings, dataset="chosen and rejected")
    dataset = str(build_dialogues() if settings.dataset == "offline" else settings.dataset)
    model = (
        str(cached("reward-base", _reward_base, settings, data=Path(dataset)))
        if settings.model == "scratch"
        else settings.model
    )
    download(model, revision)
    return SimpleNamespace(dataset=dataset, model=model)


def prepare_chat(settings: Settings) -> SimpleNamespace:
    """Return sft_dataset, dataset (pairs) and checkpoint (a Baichuan) as folders or hub ids."""
    check_named(
        settings,
        sft_dataset="question, human_answers and chatgpt_answers",
        dataset="chosen and rejected",
    )
    own = settings.sft_dataset != "offline"
    found = {
        "sft_dataset": str(settings.sft_dataset if own else build_answers()),
        "dataset": str(build_preferences() if settings.dataset == "offline" else settings.dataset),
    }
    data = {name: Path(folder) for name, folder in found.items()}
    checkpoint = (
        cached("baichuan", _checkpoint, settings, **data)
        if settings.checkpoint == "scratch"
        else download(shipped(settings.checkpoint), to_convert=True)
    )
    return SimpleNamespace(**found, checkpoint=str(checkpoint))


def _dialogues(folder: Path) -> None:
    rows = [vars(pair).copy() for pair in dialogues.make_pairs(18000, SEED)]
    for row in rows:
        prompt = row.pop("prompt")
        row |= {side: f"{prompt} {row[side]}" for side in ("chosen", "rejected")}
    _write(folder, train=rows[2000:], test=rows[:2000])


def _answers(folder: Path) -> None:
    _write(folder, train=chinese.make_qa(4000, SEED))


def _preferences(folder: Path) -> None:
    rows = [vars(pair) for pair in chinese.make_preferences(9000, SEED)]
    _write(folder, train=rows[1000:], test=rows[:1000])


def _write(folder: Path, **splits: list[dict]) -> None:
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")


# Each function builds a dataset in the hub's layout or finds it cached; pairs have gold utilities.
build_dialogues = partial(cached, "dialogues", _dialogues)
build_answers = partial(cached, "chinese-answers", _answers)  # like HC3
build_preferences = partial(cached, "chinese-preferences", _preferences)


def _reward_base(
    folder: Path, data: Path, data_dir, vocab_size, n_layer, n_embd, base_steps, max_length
) -> None:
    """Pretrain a small GPT-2 on the dialogues, for a reward model to start from."""
    pairs, _ = load_pairs(data, "train", data_dir)
    texts = [f"{row['prompt']} {row['chosen']}" for row in pairs]
    tokenizer = small_models.train_tokenizer(texts, vocab_size)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # so that the final EOS is trained
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_embd // (64 if n_embd % 64 == 0 else 32),
        n_positions=4 * max_length,  # the audit scores very long answers
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        activation_function="gelu_pytorch_tanh",
        initializer_range=0.05,  # with GPT-2's 0.02, narrow models learn late
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = GPT2LMHeadModel(config)
    small_models.pretrain(model, texts, tokenizer, base_steps, 32, 128, 2e-3)
    model.config.initializer_range = 0.02  # a new reward head then gives nearly equal scores
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _checkpoint(
    folder: Path,
    sft_dataset: Path,
    sft_files,
    dataset,
    vocab_size,
    n_layer,
    n_embd,
    base_steps,
    base_batch_size,
    base_learning_rate,
    max_length,
) -> None:
    """Pretrain a small Baichuan2 on both datasets' answers, without their questions."""
    answers, _ = load_answers(sft_dataset, "train", sft_files)
    pairs, _ = load_pairs(dataset, "train")
    texts = [*answers["answer"], *pairs["chosen"], *pairs["rejected"]]
    # 500 empty prompts make Human: and Assistant: one piece each, as in a large vocabulary.
    spm_model = toy_checkpoint.train_sentencepiece(
        [*texts, *[as_prompt("")] * 500], vocab_size, folder.with_name("sentencepiece")
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
        model, texts, tokenizer, base_steps, base_batch_size, 64, base_learning_rate
    )
    toy_checkpoint.write_baichuan_checkpoint(model, spm_model, folder)


def build_base(settings: Settings) -> Path:
    """Return the folder of a native Llama, converted from the checkpoint."""
    return cached("baichuan-llama", _base, checkpoint=Path(prepare_chat(settings).checkpoint))


def _base(folder: Path, checkpoint: Path) -> None:
    convert.convert_to_llama(checkpoint, folder, report=lambda line: None)


def build_sft_adapter(settings: Settings) -> Path:
    """Return a folder with the shipped SFT adapter, whose config names the base's folder."""
    base = str(build_base(settings))  # a string for the adapter's config
    return cached("chinese-sft", _sft_adapter, base=base, adapter=SFT_ADAPTER)


def _sft_adapter(folder: Path, base: str, adapter: Path) -> None:
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    config = read_json(folder / "adapter_config.json") | {"base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
