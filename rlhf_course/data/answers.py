"""Questions with answers for SFT, as HC3 or instructions, and as tokens."""

from __future__ import annotations

import ast
import json
import random
import re
from pathlib import Path

import datasets

from rlhf_course.data.files import describe, load_split
from rlhf_course.data.transcripts import as_prompt, end_token

SCHEMAS = (("question", "human_answers", "chatgpt_answers"), ("instruction", "input", "output"))


def load_answers(
    source: str | Path, split: str = "train", data_files: str | None = None
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Questions with one answer each, as columns prompt and answer, and how many answers were dropped and why.

    Rows are as in HC3 (question, and lists human_answers and chatgpt_answers; Guo et al. 2023, arXiv:2301.07597), each
    answer a row of its own, or instructions (instruction, input, output). A literal backslash-n becomes a line break.
    In a CSV file, which has no lists, answers may be a list as Python or JSON prints it, or one plain answer.

    Raises ``FileNotFoundError`` when nothing is there, and ``ValueError`` for missing columns, for what is not text, or
    no answer left.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_files=data_files)
    schema = next((schema for schema in SCHEMAS if set(schema) <= set(rows.column_names)), None)
    if schema is None:
        known = " or ".join(", ".join(schema) for schema in SCHEMAS)
        raise ValueError(f"{where} has the columns {', '.join(rows.column_names)}; wanted are {known}.")
    report, found, seen = {"empty question or answer": 0, "repeated row": 0}, {"prompt": [], "answer": []}, set()
    for index, row in enumerate(rows.select_columns(list(schema))):
        try:
            first, *rest = (_texts(row[name], "answers" in name) for name in schema)
        except ValueError as error:
            raise ValueError(f"Row {index} of {where}: {error}") from None
        if schema == SCHEMAS[1]:
            first, rest = [*first, *rest[0]], [rest[1] or [""]]
        question = "\n".join(filter(None, first))
        for answer in (answer for answers in rest for answer in answers):
            pair = tuple(text.replace("\\n", "\n").strip() for text in (question, answer))
            fault = next((f for f, is_so in zip(report, (not all(pair), pair in seen), strict=True) if is_so), None)
            if fault:
                report[fault] += 1
                continue
            seen.add(pair)
            found["prompt"].append(as_prompt(pair[0]))
            found["answer"].append(pair[1])
    if not found["prompt"]:
        raise ValueError(f"No usable answer is left of the {len(rows)} rows in {where}: {describe(report)}.")
    return datasets.Dataset.from_dict(found), report


def _texts(value, printed: bool) -> list[str]:
    """The texts in a cell; ``printed`` lists, as they stand in CSV files, are read back.

    Raises ``ValueError`` for what is no text, and for lists as numpy prints them, which lack what parts their items.
    """
    if printed and isinstance(value, str) and re.match(r"\[\s*(['\"\]]|None\b|null\b)", value.strip()):
        for read in (json.loads, ast.literal_eval):
            try:
                found = read(value)
            except (ValueError, SyntaxError):
                continue
            if read is json.loads or str(found) == value.strip():
                value = found
                break
        else:
            raise ValueError(f"{value!r:.80} is a list that cannot be read back; save the dataset as JSON or Parquet.")
    values = value if isinstance(value, list) else [] if value is None else [value]
    values = ["" if text is None else text for text in values]
    if wrong := [text for text in values if not isinstance(text, str)]:
        raise ValueError(f"{wrong[0]!r:.80} is no text.")
    return values


def hold_out(rows: datasets.Dataset, share: float, seed: int = 0) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Rows to learn from, and held-out ones: all rows of a share of the prompts, drawn at random.

    By prompt, because one that has several answers would otherwise stand on both sides. Raises ``ValueError`` when
    nothing would be left.
    """
    prompts = list(dict.fromkeys(rows["prompt"]))
    count = max(1, round(share * len(prompts)))
    if count >= len(prompts):
        raise ValueError(f"{len(prompts)} questions are too few to hold out {count} of them.")
    drawn = set(random.Random(seed).sample(prompts, count))
    held = [prompt in drawn for prompt in rows["prompt"]]
    return tuple(rows.select([row for row, is_held in enumerate(held) if is_held is side]) for side in (False, True))


def tokenize_answers(answers: datasets.Dataset, tokenizer, max_length: int) -> tuple[datasets.Dataset, int]:
    """Columns input_ids and completion_mask (1 on the answer and its EOS), as trl's SFTTrainer takes them.

    Also how many rows are gone because they have more than ``max_length`` tokens: cut, they would teach to break off.
    Prompt and answer are tokenized apart, because PPO samples the answer after the prompt's tokens. Raises
    ``ValueError`` when all rows go.
    """
    prompts = tokenizer(answers["prompt"][:])["input_ids"]
    texts = [f" {answer}" if answer else "" for answer in answers["answer"]]
    texts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = [(prompt, [*answer, end_token(tokenizer)]) for prompt, answer in zip(prompts, texts, strict=True)]
    kept = [(prompt, answer) for prompt, answer in rows if len(prompt) + len(answer) <= max_length]
    if not kept:
        shortest = min(len(prompt) + len(answer) for prompt, answer in rows)
        raise ValueError(
            f"All {len(rows)} rows have more than max_length={max_length} tokens; the shortest has {shortest}. "
            "Raise max_length."
        )
    columns = {
        "input_ids": [prompt + answer for prompt, answer in kept],
        "completion_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer in kept],
    }
    return datasets.Dataset.from_dict(columns), len(rows) - len(kept)
