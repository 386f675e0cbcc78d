"""Make small models from texts: train a tokenizer, pretrain and fine-tune causal models."""

from collections.abc import Callable, Sequence

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like GPT-2's; EOS, its only special token, also pads."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[EOS], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=EOS, eos_token=EOS, pad_token=EOS
    )


def pretrain(
    model, texts: Sequence[str], tokenizer, steps: int, batch: int, block: int, lr: float
) -> None:
    """Train the model on ``batch`` blocks of ``block`` tokens per step.

    Half of the blocks begin where a text begins, as PPO's queries do.
    """
    if steps == 0:
        return
    tokens = tokenizer(list(texts))["input_ids"]
    rows = [torch.tensor([*ids, tokenizer.eos_token_id]) for ids in tokens]
    stream = torch.cat(rows)
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    text_starts = torch.cat([torch.tensor([0]), ends[:-1]])
    last_start = len(stream) - block  # exclusive
    text_starts = text_starts[text_starts < last_start]

    def loss() -> Tensor:
        starts = torch.randint(last_start, (batch,))
        half = len(starts[::2])
        starts[::2] = text_starts[torch.randint(len(text_starts), (half,))]
        ids = stream[starts.unsqueeze(1) + torch.arange(block)].to(model.device)
        return model(input_ids=ids, labels=ids).loss

    fit(model, loss, lr, steps, "pretraining")


def fine_tune(
    model, rows: Sequence, masks: Sequence, steps: int, batch: int, lr: float, title: str = ""
) -> None:
    """Train a causal model on the tokens where the masks are 1, with ``batch`` rows per step."""
    inputs = [torch.tensor(ids) for ids in rows]
    labels = []
    for ids, mask in zip(inputs, masks, strict=True):
        labels.append(ids.where(torch.tensor(mask) == 1, -100))  # -100: no loss

    def loss() -> Tensor:
        chosen = torch.randint(len(inputs), (batch,)).tolist()
        # Padding is on the right, where a causal model never reads it.
        ids = pad_sequence([inputs[i] for i in chosen], batch_first=True)
        targets = pad_sequence([labels[i] for i in chosen], batch_first=True, padding_value=-100)
        return model(input_ids=ids.to(model.device), labels=targets.to(model.device)).loss

    fit(model, loss, lr, steps, title)


def fit(model, loss: Callable[[], Tensor], lr: float, steps: int, title: str = "") -> None:
    """Take ``steps`` AdamW steps with a one-cycle schedule; a title turns on a progress bar."""
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    with tqdm(range(steps), desc=title, leave=False, disable=None if title else True) as bar:
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
