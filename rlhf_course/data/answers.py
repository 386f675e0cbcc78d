"""Load questions with answers for SFT, and tokenize them."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from rlhf_course.data.encoding import answer_ids, check_template, drop_eos, prompt_ids
from rlhf_course.data.rows import check_columns, keep_short, keep_usable, load_split
from rlhf_course.data.transcripts import as_prompt

HC3 = ("question", "human_answers", "chatgpt_answers")
INSTRUCTIONS = ("instruction", "input", "output")
EMPTY = "empty question or answer"
REPEATED = "repeated row"


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
    is_hc3 = "question" in rows.column_names
    check_columns(rows, HC3 if is_hc3 else INSTRUCTIONS, where)
    read_row = _read_hc3 if is_hc3 else _read_instruction
    seen = set()

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        question, answers = read_row(row)
        for answer in answers:
            reason = None
            if not (question and answer):
                reason = EMPTY
            elif (question, answer) in seen:
                reason = REPEATED
            seen.add((question, answer))
            yield {"prompt": as_prompt(question), "answer": answer}, reason

    return keep_usable(rows, parse, (EMPTY, REPEATED), where)


def _read_hc3(row: dict) -> tuple[str, list[str]]:
    """Return a row's question, and the answers of humans and of ChatGPT."""
    answers = []
    for name in HC3[1:]:
        if not isinstance(row[name], list | None):
            raise ValueError(
                "answers must be lists; CSV cannot hold lists, so use JSON Lines or Parquet."
            )
        answers += row[name] or []
    return _clean(row["question"]), [_clean(answer) for answer in answers]


def _read_instruction(row: dict) -> tuple[str, list[str]]:
    """Return a row's instruction, with its input if it has one, and its only output."""
    instruction, more, output = (_text(row[name]) for name in INSTRUCTIONS)
    question = f"{instruction}\n{more}" if instruction and more else instruction or more
    return _clean(question), [_clean(output)]


def _text(value: str | None) -> str:
    """Return a text, "" for None; raise ``ValueError`` for a value of another type."""
    if not isinstance(value, str | None):
        raise ValueError(f"{value!r:.80} is not text. Convert or remove it.")
    return value or ""


def _clean(value: str | None) -> str:
    """Return a text with line breaks for each backslash-n, except in words such as \\nabla."""
    return re.sub(r"\\n(?![a-z])", "\n", _text(value)).strip()


def hold_out(rows: Dataset, share: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Return (training rows, held-out rows); all rows of randomly drawn prompts are held out.

    Raises ``ValueError`` if no prompt would remain for training.
    """
    prompts = list(dict.fromkeys(rows["prompt"]))
    count = max(1, round(share * len(prompts)))
    if count >= len(prompts):
        raise ValueError(f"{len(prompts)} questions are too few to hold out {count}. Add some.")
    drawn = set(random.Random(seed).sample(prompts, count))
    training = []
    held_out = []
    for index, prompt in enumerate(rows["prompt"]):
        side = held_out if prompt in drawn else training
        side.append(index)
    return rows.select(training), rows.select(held_out)


def tokenize_answers(answers: Dataset, tokenizer, max_length: int) -> tuple[Dataset, int]:
    """Return the columns that trl's SFTTrainer expects, and how many long rows were dropped.

    Columns: input_ids, and completion_mask (1 on the answer and its EOS). Truncated rows would
    not teach how answers end. Rows that contain EOS are dropped, with a printed count. Raises
    ``ValueError`` if no row remains.
    """
    check_template(tokenizer)
    answers = drop_eos(answers, tokenizer, columns=("prompt", "answer"))
    prompts = prompt_ids(tokenizer, answers["prompt"][:])  # tokenized without answers, as in PPO
    replies = answer_ids(tokenizer, answers["answer"][:])
    input_ids = []
    completion_mask = []
    for prompt, reply in zip(prompts, replies, strict=True):
        input_ids.append(prompt + reply)
        completion_mask.append([0] * len(prompt) + [1] * len(reply))
    rows = Dataset.from_dict({"input_ids": input_ids, "completion_mask": completion_mask})
    return keep_short(rows, [len(ids) for ids in input_ids], max_length)
