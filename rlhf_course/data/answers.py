"""Questions with answers for SFT, as HC3 or instructions, and as tokens."""

import ast
import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import datasets

from rlhf_course.data.files import load_split
from rlhf_course.data.row_checks import keep_short, keep_usable
from rlhf_course.data.transcripts import as_prompt, end_token

HC3 = ("question", "human_answers", "chatgpt_answers")
INSTRUCTIONS = ("instruction", "input", "output")
EMPTY, REPEATED = "empty question or answer", "repeated row"


def load_answers(
    source: str | Path, split: str = "train", data_files: str | None = None
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Questions with one answer each, as columns prompt and answer, and how many answers were
    dropped and why.

    Rows are as in HC3 (question, and lists human_answers and chatgpt_answers; Guo et al. 2023,
    arXiv:2301.07597), or instructions (instruction, input, output). A literal backslash-n becomes a
    line break. In a CSV file answers may be a list as Python or JSON prints it, or one plain
    answer. Raises ``OSError`` where nothing is found, and ``ValueError`` for missing columns, for
    what is not text, or no answer left.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_files=data_files)
    schema = next(
        (schema for schema in (HC3, INSTRUCTIONS) if {*schema} <= {*rows.column_names}), None
    )
    if schema is None:
        known = f"{', '.join(HC3)} or {', '.join(INSTRUCTIONS)}"
        raise ValueError(
            f"{where} has the columns {', '.join(rows.column_names)}; wanted are {known}."
        )
    seen = set()

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        first, second, third = (_texts(row[name], is_list="answers" in name) for name in schema)
        question, answers = (
            (first, second + third) if schema == HC3 else (first + second, third or [""])
        )
        question = _clean("\n".join(filter(None, question)))
        for answer in map(_clean, answers):
            is_empty, is_repeated = not (question and answer), (question, answer) in seen
            seen.add((question, answer))
            reason = EMPTY if is_empty else REPEATED if is_repeated else None
            yield {"prompt": as_prompt(question), "answer": answer}, reason

    return keep_usable(rows.select_columns(list(schema)), parse, (EMPTY, REPEATED), where)


def _clean(text: str) -> str:
    return text.replace("\\n", "\n").strip()


def _texts(value, is_list: bool) -> list[str]:
    """The texts in a cell; a printed list in a column of lists is read back. Raises ``ValueError``
    for others.
    """
    if (
        is_list
        and isinstance(value, str)
        and re.match(r"\[\s*(['\"\]]|None\b|null\b)", value.strip())
    ):
        value = _read_list(value.strip())
    values = value if isinstance(value, list) else [] if value is None else [value]
    values = ["" if text is None else text for text in values]
    if wrong := [text for text in values if not isinstance(text, str)]:
        raise ValueError(f"{wrong[0]!r:.80} is no text.")
    return values


def _read_list(printed: str) -> list:
    """A list as JSON or Python prints it. Raises ``ValueError`` for others."""
    with suppress(ValueError):
        return json.loads(printed)
    with suppress(ValueError, SyntaxError):
        found = ast.literal_eval(printed)
        if str(found) == printed:  # numpy leaves out commas, and Python would join the texts
            return found
    raise ValueError(
        f"{printed!r:.80} is a list that cannot be read back; save the dataset as JSON or Parquet."
    )


def hold_out(
    rows: datasets.Dataset, share: float, seed: int = 0
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Rows to train on, and held-out ones: all rows of a share of the prompts, drawn at random.

    By prompt, because one with several answers would be on both sides. Raises ``ValueError`` when
    none would be left.
    """
    prompts = list(dict.fromkeys(rows["prompt"]))
    count = max(1, round(share * len(prompts)))
    if count >= len(prompts):
        raise ValueError(f"{len(prompts)} questions are too few to hold out {count} of them.")
    drawn = set(random.Random(seed).sample(prompts, count))
    held = [prompt in drawn for prompt in rows["prompt"]]
    return tuple(
        rows.select([row for row, is_held in enumerate(held) if is_held is side])
        for side in (False, True)
    )


def tokenize_answers(
    answers: datasets.Dataset, tokenizer, max_length: int
) -> tuple[datasets.Dataset, int]:
    """Columns input_ids and completion_mask (1 on the answer and its EOS), as trl's SFTTrainer
    takes them.

    Also how many rows are gone because they have more than ``max_length`` tokens: cut, they would
    teach to break off. Prompt and answer are tokenized apart, as PPO samples them. Raises
    ``ValueError`` when all rows go.
    """
    prompts = tokenizer(answers["prompt"][:])["input_ids"]
    texts = [f" {answer}" if answer else "" for answer in answers["answer"]]
    ids = [
        [*row, end_token(tokenizer)]
        for row in tokenizer(texts, add_special_tokens=False)["input_ids"]
    ]
    both = list(zip(prompts, ids, strict=True))
    columns = {
        "input_ids": [prompt + answer for prompt, answer in both],
        "completion_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer in both],
    }
    return keep_short(
        datasets.Dataset.from_dict(columns), [*map(len, columns["input_ids"])], max_length
    )
