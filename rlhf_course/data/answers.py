"""Questions with answers for SFT, and their tokens."""

import random
from collections.abc import Iterator
from pathlib import Path

import datasets

from rlhf_course.data.files import load_split
from rlhf_course.data.row_checks import check_columns, keep_short, keep_usable
from rlhf_course.data.transcripts import as_prompt, check_no_end, end_token

HC3 = ("question", "human_answers", "chatgpt_answers")
INSTRUCTIONS = ("instruction", "input", "output")
EMPTY, REPEATED = "empty question or answer", "repeated row"


def load_answers(
    source: str | Path, split: str = "train", data_files: str | None = None
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Return one answer per row, as columns prompt and answer, and how many were dropped and why.

    The dataset has the columns of ``HC3`` (lists of answers; Guo et al. 2023, arXiv:2301.07597) or
    ``INSTRUCTIONS``. A literal backslash-n becomes a line break. Raises ``OSError`` where nothing
    is there, and ``ValueError`` for missing columns, values of another type, or no answer left.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_files=data_files)
    is_hc3, seen = "question" in rows.column_names, set()
    check_columns(rows, schema := HC3 if is_hc3 else INSTRUCTIONS, where)

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        first, second, third = (row[name] for name in schema)
        if is_hc3 and not isinstance(second, list | None) & isinstance(third, list | None):
            raise ValueError("the answers are not lists (which CSV cannot hold: use JSON).")
        questions = [first] if is_hc3 else [first, second]
        answers = [*(second or ()), *(third or ())] if is_hc3 else [third]
        for text in (*questions, *answers):
            if not isinstance(text, str | None):
                raise ValueError(f"{text!r:.80} is not a text.")
        question = _clean("\n".join(filter(None, questions)))
        for answer in map(_clean, answers):
            reason = REPEATED if (question, answer) in seen else None
            seen.add((question, answer))
            reason = reason if question and answer else EMPTY
            yield {"prompt": as_prompt(question), "answer": answer}, reason

    return keep_usable(rows, parse, (EMPTY, REPEATED), where)


def _clean(text: str | None) -> str:
    return (text or "").replace("\\n", "\n").strip()


def hold_out(
    rows: datasets.Dataset, share: float, seed: int = 0
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return rows to train on, and all rows of a share of the prompts, drawn at random.

    By prompt, so that none is on both sides. Raises ``ValueError`` when no prompt would be left.
    """
    prompts = list(dict.fromkeys(rows["prompt"]))
    count = max(1, round(share * len(prompts)))
    if count >= len(prompts):
        raise ValueError(f"{len(prompts)} questions are too few to hold out {count} of them.")
    drawn = set(random.Random(seed).sample(prompts, count))
    sides = [], []
    for row, prompt in enumerate(rows["prompt"]):
        sides[prompt in drawn].append(row)
    return rows.select(sides[0]), rows.select(sides[1])


def tokenize_answers(
    answers: datasets.Dataset, tokenizer, max_length: int
) -> tuple[datasets.Dataset, int]:
    """Return input_ids and completion_mask (1 on the answer and its EOS), as trl's SFTTrainer takes
    them, and how many rows were dropped: cut to ``max_length``, they would teach to break off.

    Prompt and answer are tokenized apart, as PPO samples them. Raises ``ValueError`` when no row is
    left, or a text contains EOS.
    """
    check_no_end(tokenizer, answers["prompt"], answers["answer"])
    texts = [f" {answer}" if answer else "" for answer in answers["answer"]]
    prompts = tokenizer(answers["prompt"][:])["input_ids"]
    columns = {"input_ids": [], "completion_mask": []}
    answer_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for prompt, ids in zip(prompts, answer_ids, strict=True):
        columns["input_ids"].append([*prompt, *ids, end_token(tokenizer)])
        columns["completion_mask"].append([0] * len(prompt) + [1] * (len(ids) + 1))
    lengths = [*map(len, columns["input_ids"])]
    return keep_short(datasets.Dataset.from_dict(columns), lengths, max_length)
