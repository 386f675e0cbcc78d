"""Write models/hh-questions: short first questions from hh-rlhf's helpful dialogues.

    python dev/models/make_hh_questions.py PATH/TO/hh-rlhf build/models/SmolLM2-135M-Instruct

The second argument is the tokenizer that counts a question's tokens.
"""

import argparse
import json
import re
from pathlib import Path

from transformers import AutoTokenizer

from rlhf_course.course.presets import ROOT
from rlhf_course.data.rows import load_split
from rlhf_course.data.transcripts import ASSISTANT, HUMAN
from rlhf_course.runtime.files import atomic_file

PARTS = ("helpful-base", "helpful-rejection-sampled")
SPLITS = {"train": 1200, "test": 300}  # questions to keep
TOKENS = range(5, 41)  # tokens of a question
ANSWER_TOKENS = range(5, 121)  # tokens of an answer


def first_exchange(transcript: str) -> tuple[str, str]:
    """Return the first question and its answer."""
    first = transcript.removeprefix(HUMAN).partition(HUMAN)[0]
    question, _, answer = first.partition(ASSISTANT)
    return question.strip(), answer.strip()


def read_exchanges(folder: Path, split: str, tokenizer) -> dict[str, dict]:
    """Return the usable first exchanges of a split, by the lower-case letters of the question."""
    rows = {}
    for part in PARTS:
        for row in load_split(folder, split, data_dir=part):
            question, answer = first_exchange(row["chosen"])
            key = re.sub(r"[^a-z0-9]+", " ", question.lower()).strip()
            is_one_question = question.endswith("?") and question.isascii() and "\n" not in question
            lengths = [len(tokenizer(text)["input_ids"]) for text in (question, answer)]
            if is_one_question and lengths[0] in TOKENS and lengths[1] in ANSWER_TOKENS:
                rows.setdefault(key, {"question": question, "answer": answer})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="folder of hh-rlhf")
    parser.add_argument("tokenizer", help="folder or hub id of a tokenizer")
    parser.add_argument("--output", type=Path, default=ROOT / "models" / "hh-questions")
    chosen = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(chosen.tokenizer)
    exchanges = {split: read_exchanges(chosen.source, split, tokenizer) for split in SPLITS}
    for key in exchanges["train"].keys() & exchanges["test"].keys():
        del exchanges["train"][key]
    for split, most in SPLITS.items():
        rows = list(exchanges[split].values())
        print(f"{split}: {len(rows):,} questions, keep {min(most, len(rows)):,}")
        if split == "train":  # only held-out answers are needed
            rows = [{"question": row["question"]} for row in rows]
        with atomic_file(chosen.output / f"{split}.jsonl") as file:
            lines = [json.dumps(row, ensure_ascii=False) for row in rows[:most]]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
