"""Write samples.txt: 1,024 continuations of eight openings by the shipped GPT-2."""

import torch
from rlhf_course.course.presets import shipped
from transformers import AutoModelForCausalLM, AutoTokenizer

from practice3 import SAMPLES

OPENINGS = (
    "The|The acting|The actors|I thought|This movie|The cast|What a|I really".split("|")
)


def main() -> None:
    folder, texts = shipped("models/gpt2-imdb-mini"), []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": 20}
    torch.manual_seed(0)
    for opening in OPENINGS:
        inputs = tokenizer([opening] * 128, return_tensors="pt")
        rows = model.generate(**inputs, **options, pad_token_id=tokenizer.eos_token_id)
        texts += [
            " ".join(tokenizer.decode(row, skip_special_tokens=True).split())
            for row in rows
        ]
    SAMPLES.write_text("\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
