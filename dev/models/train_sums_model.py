"""Train notebook 08's initial models on sums, and write their cards."""

import random

import torch
import yaml
from tokenizers import Tokenizer, decoders, models
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import atomic_file, atomic_folder
from rlhf_course.synthetic.small_models import EOS

BATCH = 64
RATE = 2e-3
CHARACTERS = {c: i for i, c in enumerate([EOS, *"0123456789+=:,;c"])}
SHAPE = {"n_layer": 3, "n_embd": 96, "n_head": 4, "n_positions": 64, "vocab_size": len(CHARACTERS)}
SHAPE |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
SHAPE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
# fewest and most digits, training batches, share of answers with the addition's steps
MODELS = {"sums-mini": (3, 3, 625, 0.4), "sums-5-mini": (2, 5, 900, 0.3)}


def draw(dice: random.Random, fewest: int, most: int) -> list[int]:
    """Return two numbers with the same number of digits."""
    digits = dice.randint(fewest, most)
    return [dice.randrange(10 ** (digits - 1), 10**digits) for _ in range(2)]


def digit_by_digit(a: int, b: int) -> str:
    """Return the addition's steps, with c for a carry, then the answer."""
    steps = []
    carry = 0
    for x, y in zip(str(a)[::-1], str(b)[::-1], strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'c' * carry}:{total % 10}")
        carry = total // 10
    return f"{','.join(steps)};{a + b}"


def train(fewest: int, most: int, steps: int, share: float) -> GPT2LMHeadModel:
    """Return a bfloat16 model, trained on ``steps`` batches of sums."""
    dice = random.Random(0)
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE)).train()
    adam = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01, fused=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1, (step + 1) / 50))
    for _ in range(steps):
        rows = []
        labels = []
        for _ in range(BATCH):
            a, b = draw(dice, fewest, most)
            answer = digit_by_digit(a, b) if dice.random() < share else str(a + b)
            question, answer = ([CHARACTERS[c] for c in text] for text in (f"{a}+{b}=", answer))
            rows.append(torch.tensor([*question, *answer, 0]))
            labels.append(torch.tensor([-100] * len(question) + [*answer, 0]))
        ids = pad_sequence(rows, True)
        labels = pad_sequence(labels, True, -100)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        warm_up.step()
        adam.zero_grad()
    return model.bfloat16()


def main() -> None:
    plain = Tokenizer(models.BPE(CHARACTERS, []))
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=EOS, pad_token=EOS, padding_side="left"
    )
    card = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))["sums"]
    for name, (fewest, most, steps, share) in MODELS.items():
        model = train(fewest, most, steps, share)
        target = ROOT / "models" / name
        with atomic_folder(target) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        with atomic_file(target / "README.md") as path:
            path.write_text(card.format(name, fewest, most, steps, share), encoding="utf-8")


if __name__ == "__main__":
    main()
