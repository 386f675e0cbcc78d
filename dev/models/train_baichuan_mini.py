"""Train models/baichuan-mini and models/baichuan-mini-sft, and write their cards.

    python dev/models/train_baichuan_mini.py

baichuan-mini is a small Baichuan2 trained on Chinese prose. The SFT model is an adapter for it,
trained on uncleaned answers, a few of which are empty. Pretraining resumes from
build/baichuan_mini.
"""

import argparse
import math
import shutil
from pathlib import Path

import datasets
import torch
import transformers
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from rlhf_course.baichuan import sentencepiece, toy_checkpoint
from rlhf_course.baichuan.convert import convert_to_llama
from rlhf_course.course.presets import ROOT
from rlhf_course.data import as_prompt, tokenize_answers
from rlhf_course.runtime.files import atomic_file
from rlhf_course.synthetic import chinese, small_models
from rlhf_course.synthetic.build import LORA

SEED = 0
TEXTS = 40_000
HELD_OUT = 500
BLOCK = 64  # tokens
STEPS = 6000  # of 32 blocks
SFT_STEPS = 750  # of 16 answers
WORK = ROOT / "build/baichuan_mini"


class Blocks(Dataset):
    """Provide ``count`` random blocks from a token stream; half start where a text starts."""

    def __init__(self, texts: list[str], tokenizer, count: int) -> None:
        rows = [torch.tensor([*ids, tokenizer.eos_token_id]) for ids in tokenizer(texts).input_ids]
        self.stream = torch.cat(rows)
        generator = torch.Generator().manual_seed(SEED)
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0)
        starts = starts[starts < len(self.stream) - BLOCK]
        self.begin = torch.randint(len(self.stream) - BLOCK, (count,), generator=generator)
        half = len(self.begin[::2])
        self.begin[::2] = starts[torch.randint(len(starts), (half,), generator=generator)]

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, index: int) -> dict:
        ids = self.stream[self.begin[index] + torch.arange(BLOCK)]
        return {"input_ids": ids, "labels": ids}


def make_prose(n: int, seed: int = 0) -> list[str]:
    """Return n texts of Chinese prose.

    On average, a third are a topic's paragraphs, a third are pages of questions, and a third are
    questions with one or two replies of any style. A tenth of all texts are chats in which only the
    user or only the assistant speaks: the model learns the names Human and Assistant, but never
    sees an assistant answer a question.
    """
    made = []
    for rng, topic in chinese.streams("prose", n, seed):
        kind = rng.choice(["paragraph", "questions", "replies"])
        many = rng.randint(3, 6)
        name = {"paragraph": "Assistant: ", "questions": "Human: "}.get(kind, "")
        if kind == "paragraph":
            lines = [chinese.draw_text(rng, topic, kind)]
        elif kind == "questions":
            others = rng.choices(list(chinese.TOPICS), k=many)
            lines = [chinese.draw_question(rng, other) for other in others]
        else:
            replies = rng.choices(["human", "chatgpt", "preference"], k=rng.randint(1, 2))
            lines = [chinese.draw_question(rng, topic)]
            lines += [chinese.draw_text(rng, topic, reply) for reply in replies]
        if name and rng.random() < 0.15:
            lines = ["\n\n".join(name + line for line in lines)]
        made.append("\n".join(lines))
    return made


def pretrain() -> tuple[LlamaForCausalLM, Path, float]:
    """Return the model with a NormHead, its SentencePiece file, and its held-out loss."""
    texts = make_prose(TEXTS, SEED)
    # With 500 prompts, Human: and Assistant: become one piece each, as in a large vocabulary.
    spm_model = toy_checkpoint.train_sentencepiece(
        [*texts[:8000], *[as_prompt("")] * 500], 1200, WORK / "sentencepiece"
    )
    tokenizer = sentencepiece.sentencepiece_to_fast(spm_model, **toy_checkpoint.SPECIAL)
    transformers.set_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.05,  # at 0.02, a narrow model starts to learn late
        **toy_checkpoint.SPECIAL_IDS,
    )
    model = toy_checkpoint.norm_head(LlamaForCausalLM(config))
    batch = 32
    arguments = TrainingArguments(
        str(WORK),
        max_steps=STEPS,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        learning_rate=3e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.02},
        warmup_steps=300,
        weight_decay=0.01,
        save_total_limit=1,
        report_to="none",
        seed=SEED,
    )
    held_out = make_prose(HELD_OUT, SEED + 1)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Blocks(texts, tokenizer, STEPS * batch),
        eval_dataset=Blocks(held_out, tokenizer, 40 * batch),
    )
    trainer.train(resume_from_checkpoint=any(WORK.glob("checkpoint-*")))
    return model, spm_model, trainer.evaluate()["eval_loss"]


def train_adapter(base: Path, folder: Path) -> None:
    """Train an SFT adapter (LoRA), also on the empty answers, which notebook 06 needs; save it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [
        {"prompt": as_prompt(row["question"]), "answer": text}
        for row in chinese.make_qa(4000, SEED)
        for text in row["human_answers"] + row["chatgpt_answers"]
    ]
    tokens, _ = tokenize_answers(datasets.Dataset.from_list(rows), tokenizer, 112)
    torch.manual_seed(SEED)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA))
    ids = tokens["input_ids"]
    mask = tokens["completion_mask"]
    small_models.fine_tune(model, ids, mask, SFT_STEPS, 16, 5e-3, "fine-tuning")
    model.peft_config["default"].base_model_name_or_path = "models/baichuan-mini"
    model.save_pretrained(folder)


@torch.no_grad()
def answers(model, tokenizer, questions: list[str]) -> float:
    """Return the share of questions that a model answers at sampling temperature 1."""
    torch.manual_seed(SEED)
    batch = tokenizer([*map(as_prompt, questions)], return_tensors="pt", padding=True)
    output = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=48)
    answers = output[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(map(chinese.is_answer, questions, texts)) / len(texts)


def write_cards(base: Path, adapter: Path, converted: Path, **numbers) -> None:
    """Measure both models, and write their cards with the results."""
    tokenizer = AutoTokenizer.from_pretrained(converted, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    questions = [row["question"] for row in chinese.make_qa(500, SEED + 1)]
    numbers |= {"parameters": model.num_parameters() / 1e6, "texts": TEXTS, "sft_steps": SFT_STEPS}
    numbers["base"] = answers(model, tokenizer, questions)
    numbers["sft"] = answers(PeftModel.from_pretrained(model, adapter), tokenizer, questions)
    cards = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))
    for folder in (base, adapter):
        with atomic_file(folder / "README.md") as path:
            path.write_text(cards[folder.name].format(**numbers), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser("train_baichuan_mini.py", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "models")
    folder = parser.parse_args().output
    base = folder / "baichuan-mini"
    adapter = folder / "baichuan-mini-sft"
    converted = WORK / "converted"
    model, spm_model, loss = pretrain()
    toy_checkpoint.write_baichuan_checkpoint(model.to(torch.bfloat16), spm_model, base)
    shutil.rmtree(converted, ignore_errors=True)
    convert_to_llama(base, converted)
    train_adapter(converted, adapter)
    write_cards(base, adapter, converted, steps=STEPS, perplexity=math.exp(loss))


if __name__ == "__main__":
    main()
