"""Pretrain models/baichuan-mini, a small Baichuan2 that has read prose and never an answer.

    python scripts/make/train_baichuan_base.py

Training goes on where it was stopped; its checkpoints are in build/baichuan_mini.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from rlhf_course.baichuan import sentencepiece, toy_checkpoint
from rlhf_course.course.presets import ROOT
from rlhf_course.data import as_prompt
from rlhf_course.worlds import chinese

SEED = 0
TEXTS, HELD_OUT = 40_000, 500
BLOCK = 64  # tokens


class Blocks(Dataset):
    """``count`` random blocks of a stream of tokens; every second begins where a text begins."""

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


def pretrain(work: Path, steps: int) -> tuple[LlamaForCausalLM, Path]:
    """Return the model with its NormHead, and the path of its SentencePiece model."""
    texts = chinese.make_prose(TEXTS, SEED)
    # With 500 of them Human: and Assistant: are a piece each, as in a large vocabulary.
    spm_model = toy_checkpoint.train_sentencepiece(
        [*texts[:8000], *[as_prompt("")] * 500], 1200, work / "sentencepiece"
    )
    tokenizer = sentencepiece.sentencepiece_to_fast(spm_model, **toy_checkpoint.SPECIAL)
    transformers.set_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=512,
        initializer_range=0.05,  # a narrow model starts to learn late with 0.02
        **toy_checkpoint.SPECIAL_IDS,
    )
    model = toy_checkpoint.norm_head(LlamaForCausalLM(config))
    batch = 32
    arguments = TrainingArguments(
        str(work),
        max_steps=steps,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        learning_rate=2e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.02},
        warmup_steps=300,
        weight_decay=0.01,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=500,
        save_steps=250,
        save_total_limit=1,
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    held_out = chinese.make_prose(HELD_OUT, SEED + 1)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Blocks(texts, tokenizer, steps * batch),
        eval_dataset=Blocks(held_out, tokenizer, 40 * batch),
    )
    trainer.train(resume_from_checkpoint=any(work.glob("checkpoint-*")))
    (work / "log.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")
    return model, spm_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "models/baichuan-mini")
    parser.add_argument("--work", type=Path, default=ROOT / "build/baichuan_mini")
    parser.add_argument("--steps", type=int, default=8000)
    options = parser.parse_args()
    model, spm_model = pretrain(options.work, options.steps)
    toy_checkpoint.write_baichuan_checkpoint(model.to(torch.bfloat16), spm_model, options.output)


if __name__ == "__main__":
    main()
