"""Small models made from texts: a tokenizer, causal models pretrained and fine-tuned, a DistilBERT to judge reviews."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tokenizers import ByteLevelBPETokenizer, processors
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

EOS = "<|endoftext|>"
CLASSIFIER_LENGTH = 128  # tokens the classifier can read
SHORTEST_PREFIX, LONGEST_PREFIX = 4, 48  # tokens


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2 uses it; EOS is its only special token and serves as padding too."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[EOS], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=EOS, eos_token=EOS, pad_token=EOS)


def classifier_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same BPE with [CLS] in front and a padding token of its own, as DistilBERT wants it."""
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, cls_token="[CLS]", pad_token="[PAD]", eos_token=EOS
    )
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", own.cls_token_id)]
    )
    own.model_max_length = CLASSIFIER_LENGTH
    return own


def pretrain_gpt2(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    n_layer: int,
    n_embd: int,
    steps: int,
    batch: int,
    block: int,
    lr: float,
    **config,
) -> GPT2LMHeadModel:
    """A GPT-2 trained on the texts; ``config`` goes to GPT2Config."""
    head_size = 64 if n_embd % 64 == 0 else 32
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_layer=n_layer,
            n_embd=n_embd,
            n_head=n_embd // head_size,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **{"n_positions": max(256, block)} | config,
        )
    )
    return pretrain(model, texts, tokenizer, steps, batch, block, lr)


def pretrain(model, texts: Sequence[str], tokenizer, steps: int, batch: int, block: int, lr: float):
    """The model trained on ``batch`` blocks of ``block`` tokens a step.

    Half of the blocks begin where a text begins, because that is where the queries of PPO come from.
    """
    encoded = tokenizer(list(texts))["input_ids"]
    starts = torch.tensor([0] + [len(ids) + 1 for ids in encoded]).cumsum(0)[:-1]
    stream = torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])
    starts = starts[starts < len(stream) - block]

    def loss() -> Tensor:
        begin = torch.randint(len(stream) - block, (batch,))
        begin[::2] = starts[torch.randint(len(starts), (len(begin[::2]),))]
        ids = stream[begin.unsqueeze(1) + torch.arange(block)].to(model.device)
        return model(input_ids=ids, labels=ids).loss

    fit(
        model,
        loss,
        lr,
        steps,
        f"pretraining {type(model).__name__.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}",
    )
    return model


def fine_tune(
    model, rows: Sequence[list[int]], masks: Sequence[list[int]], steps: int, batch: int, lr: float, title: str = ""
) -> None:
    """Train what is trainable in a causal model on the tokens where the masks are 1, ``batch`` rows a step."""
    examples = [(torch.tensor(ids), torch.tensor(mask)) for ids, mask in zip(rows, masks, strict=True)]

    def loss() -> Tensor:
        chosen = [examples[i] for i in torch.randint(len(examples), (batch,)).tolist()]
        ids = pad_sequence(
            [ids for ids, _ in chosen], batch_first=True
        )  # on the right: a causal model never looks there
        learnt = pad_sequence([mask for _, mask in chosen], batch_first=True).bool()
        labels = ids.masked_fill(~learnt, -100)
        return model(input_ids=ids.to(model.device), labels=labels.to(model.device)).loss

    fit(model, loss, lr, steps, title)


def train_classifier(
    texts: Sequence[str], labels: Sequence[int], tokenizer: PreTrainedTokenizerFast, steps: int
) -> DistilBertForSequenceClassification:
    """A small DistilBERT for NEGATIVE (0) and POSITIVE (1), trained on random beginnings of the texts.

    Beginnings, because PPO will ask it about texts of a few tokens.
    """
    ids = tokenizer(list(texts), truncation=True, max_length=CLASSIFIER_LENGTH)["input_ids"]
    labels = torch.tensor(labels)
    model = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=CLASSIFIER_LENGTH,
            n_layers=2,
            n_heads=2,
            dim=128,
            hidden_dim=512,
            pad_token_id=tokenizer.pad_token_id,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
        )
    )

    def loss() -> Tensor:
        rows = torch.randint(len(ids), (64,)).tolist()
        shares = torch.rand(len(rows)).tolist()
        ends = [SHORTEST_PREFIX + int(share * LONGEST_PREFIX) for share in shares]
        prefixes = [ids[i][:end] for i, end in zip(rows, ends, strict=True)]
        inputs = tokenizer.pad({"input_ids": prefixes}, return_tensors="pt").to(model.device)
        return model(**inputs, labels=labels[rows].to(model.device)).loss

    fit(model, loss, lr=5e-4, steps=steps, title="training the classifier")
    return model


def fit(model, loss: Callable[[], Tensor], lr: float, steps: int, title: str = "") -> None:
    """AdamW with a one-cycle schedule over ``steps`` losses, with a progress bar where there is a title for it."""
    if steps == 0:
        return
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    with tqdm(range(steps), desc=title, leave=False, disable=not title) as bar:
        for step in bar:
            value = loss()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 20 == 0:
                bar.set_postfix(loss=f"{value.item():.2f}")
    model.cpu().eval()
