"""Load questions with answers for SFT, and tokenize them."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from rlhf_course.data.rows import check_columns, keep_short, keep_usable, load_split
from rlhf_course.data.transcripts import answer_ids, as_prompt, prompt_ids, refuse_eos

HC3 = ("question", "human_answers", "chatgpt_answers")
INSTRUCTIONS = ("instruction", "input", "output")
EMPTY, REPEATED = "empty question or answer", "repeated row"


def load_answers(
    source: str | Path, split: str = "train", data_files: str | None = None
) -> tuple[Dataset, dict[str, int]]:
    """Return one row (prompt, answer) per answer, and the number of answers dropped per reason.

    The source has the columns in ``HC3`` (lists of answers; Guo et al. 2023, arXiv:2301.07597) or
    ``INSTRUCTIONS``. A literal backslash-n becomes a line break. Raises :func:`load_split`'s
    errors, and ``ValueError`` for missing columns, values of the wrong type, or no usable answer.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_files)
    is_hc3, seen = "question" in rows.column_names, set()
    check_columns(rows, schema := HC3 if is_hc3 else INSTRUCTIONS, where)

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        first, second, third = (row[name] for name in schema)
        if is_hc3 and not isinstance(second, list | None) & isinstance(third, list | None):
            raise ValueError(
                "answers must be lists; CSV cannot hold lists, so use JSON Lines or Parquet."
            )
        questions = [first] if is_hc3 else [first, second]
        answers = [*(second or ()), *(third or ())] if is_hc3 else [third]
        if wrong := [x for x in (*questions, *answers) if not isinstance(x, str | None)]:
            raise ValueError(f"{wrong[0]!r:.80} is not text. Convert or remove it.")
        question = _clean("\n".join(filter(None, questions)))
        for answer in map(_clean, answers):
            reason = REPEATED if (question, answer) in seen else None
            seen.add((question, answer))
            reason = reason if question and answer else EMPTY
            yield {"prompt": as_prompt(question), "answer": answer}, reason

    return keep_usable(rows, parse, (EMPTY, REPEATED), where)


def _clean(text: str | None) -> str:
    return re.sub(r"\\n(?![a-z])", "\n", text or "").strip()  # but keep \\nabla


def hold_out(rows: Dataset, share: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Return (training rows, held-out rows); all rows of randomly drawn prompts are held out.

    Raises ``ValueError`` if no prompt would remain for training.
    """
    prompts = list(dict.fromkeys(rows["prompt"]))
    count = max(1, round(share * len(prompts)))
    if count >= len(prompts):
        raise ValueError(f"{len(prompts)} questions are too few to hold out {count}. Add some.")
    drawn = set(random.Random(seed).sample(prompts, count))
    sides = [], []
    for row, prompt in enumerate(rows["prompt"]):
        sides[prompt in drawn].append(row)
    return rows.select(sides[0]), rows.select(sides[1])


def tokenize_answers(answers: Dataset, tokenizer, max_length: int) -> tuple[Dataset, int]:
    """Return the columns that trl's SFTTrainer expects, and how many long rows were dropped.

    Columns: input_ids, and completion_mask (1 on the answer and its EOS). Truncated rows would
    not teach how answers end. Raises ``ValueError`` if no row remains or a text contains
    EOS.
    """
    refuse_eos(tokenizer, answers["prompt"], answers["answer"])
    prompts = prompt_ids(tokenizer, answers["prompt"][:])  # tokenized without answers, as in PPO
    both = [*zip(prompts, answer_ids(tokenizer, answers["answer"]), strict=True)]
    columns = {
        "input_ids": [prompt + answer for prompt, answer in both],
        "completion_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer in both],
    }
    return keep_short(Dataset.from_dict(columns), [*map(len, columns["input_ids"])], max_length)
