"""Train the models of sums that notebook 08 starts from, and write their cards."""

import random

import yaml
from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import atomic_file, atomic_folder
from rlhf_course.worlds.small_models import EOS, fine_tune

BATCH, RATE = 64, 2e-3
CHARACTERS = {character: place for place, character in enumerate([EOS, *"0123456789+=:,;c"])}
SHAPE = {"n_layer": 3, "n_embd": 96, "n_head": 4, "n_positions": 64, "vocab_size": len(CHARACTERS)}
SHAPE |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
SHAPE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
MODELS = {  # fewest and most digits, training steps, share of answers with steps
    "sums-mini": (3, 3, 900, 0.2),
    "sums-5-mini": (2, 5, 1300, 0.15),
}


def draw(dice: random.Random, fewest: int, most: int) -> list[int]:
    """Return two numbers with the same number of digits."""
    digits = dice.randint(fewest, most)
    return [dice.randrange(10 ** (digits - 1), 10**digits) for _ in range(2)]


def digit_by_digit(a: int, b: int) -> str:
    """Return the steps from the last digit on, c for a carry, then the answer."""
    steps, carry = [], 0
    for x, y in zip(str(a)[::-1], str(b)[::-1], strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'c' * carry}:{total % 10}")
        carry = total // 10
    return f"{','.join(steps)};{a + b}"


def train(tokenizer, fewest: int, most: int, steps: int, share: float) -> GPT2LMHeadModel:
    dice, rows, masks = random.Random(0), [], []
    for _ in range(steps * BATCH):
        a, b = draw(dice, fewest, most)
        answer = digit_by_digit(a, b) if dice.random() < share else str(a + b)
        question, answer = tokenizer([f"{a}+{b}=", answer + EOS])["input_ids"]
        rows.append(question + answer)
        masks.append([0] * len(question) + [1] * len(answer))
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE))
    fine_tune(model, rows, masks, steps, BATCH, RATE, "sums")
    return model.bfloat16()


def main() -> None:
    characters = Tokenizer(models.BPE(CHARACTERS, []))
    characters.decoder = decoders.Fuse()
    marks = {"eos_token": EOS, "pad_token": EOS, "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, **marks)
    card = yaml.safe_load((ROOT / "models/cards.yaml").read_text(encoding="utf-8"))["sums"]
    for name, how in MODELS.items():
        model, target = train(tokenizer, *how), ROOT / "models" / name
        with atomic_folder(target) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        found = dict(zip(("fewest", "most", "steps", "share"), how, strict=True), name=name)
        found["parameters"] = model.num_parameters() / 1e6
        with atomic_file(target / "README.md") as path:
            path.write_text(card.format(**found), encoding="utf-8")


if __name__ == "__main__":
    main()
