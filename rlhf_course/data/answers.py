"""Load questions with answers for SFT, and tokenize them."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from datasets import Dataset

from rlhf_course.data.encoding import answer_ids, check_template, drop_eos, prompt_ids
from rlhf_course.data.layouts import (
    ANSWER_NAMES,
    DIALOGUES,
    check_templates,
    find_roles,
    name_unread,
    put_before,
    read_opening,
    read_question,
    require_roles,
    value_of,
)
from rlhf_course.data.rows import check_columns, keep_short, keep_usable, load_split
from rlhf_course.data.transcripts import (
    ASSISTANT,
    FLAGS,
    HUMAN,
    as_prompt,
    as_text,
    is_context,
    read_turn,
    split_answer,
    trim,
)

HC3 = ("question", "human_answers", "chatgpt_answers")
EMPTY = "empty question or answer"
REPEATED = "repeated row"
CONTEXT = "turn marked as context"
ADVICE = {CONTEXT: "Set weight, train or loss to 1 in the turns to train on."}
LITERAL_BREAK = re.compile(r"\\n(?![a-z])")  # not in words such as \nabla


def load_answers(
    source: str | Path,
    split: str = "train",
    data_files: str | None = None,
    columns: str | None = None,
) -> tuple[Dataset, dict[str, int]]:
    """Return one row (prompt, answer) per answer, and the number of answers dropped per reason.

    The source has the columns in ``HC3`` (lists of answers; Guo et al. 2023, arXiv:2301.07597), a
    question and an answer under one of ``ANSWER_NAMES``, or dialogues, each of whose assistant
    turns is an answer. A system text, earlier turns and an input become part of the prompt.
    ``columns`` names other columns, as in "prompt=title,answer=body". Columns that are not read are
    printed. Turns with weight 0 or train false are context, not answers. In HC3's layout, a literal
    backslash-n becomes a line break. Raises :func:`load_split`'s errors, and ``ValueError`` for
    missing columns, values of the wrong type, or no usable answer.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_files)
    check_columns(rows, (), where)
    read_row = _choose_reader(rows, columns, where)
    seen = set()

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        for question, answer in read_row(row):
            reason = None
            if answer is None:
                reason = CONTEXT
            elif not (question and answer):
                reason = EMPTY
            elif (question, answer) in seen:
                reason = REPEATED
            seen.add((question, answer))
            yield {"prompt": as_prompt(question), "answer": answer}, reason

    answers, report = keep_usable(rows, parse, (EMPTY, REPEATED, CONTEXT), where, ADVICE)
    if not report[CONTEXT]:
        del report[CONTEXT]  # most data have no marks
    check_templates(answers["prompt"][:], where)
    _name_literal_breaks(answers["answer"][:], where)
    return answers, report


def _choose_reader(rows: Dataset, columns: str | None, where: str) -> Callable:
    """Return a function from a row to its (question, answer); print the columns not read."""
    is_hc3 = {"human_answers", "chatgpt_answers"} & set(rows.column_names)
    if is_hc3 and not columns:
        check_columns(rows, HC3, where)
        name_unread(rows, HC3, where)
        return _read_hc3
    roles = find_roles(rows, ANSWER_NAMES, columns, where)
    dialogues = [name for name in DIALOGUES if name in rows.column_names]
    if "answer" not in roles and dialogues:
        roles = {role: name for role, name in roles.items() if role == "system"}
        name_unread(rows, (dialogues[0], *roles.values()), where, FLAGS)
        return lambda row: _read_dialogue(row, dialogues[0], roles)
    require_roles(roles, ANSWER_NAMES, rows, where)
    name_unread(rows, roles.values(), where)
    return lambda row: _read_answer(row, roles)


def _read_hc3(row: dict) -> list[tuple[str, str]]:
    """Return a row's question with each answer of humans and of ChatGPT."""
    question = _clean(_break_lines(row["question"]))
    pairs = []
    for name in HC3[1:]:
        if not isinstance(row[name], list | None):
            raise ValueError(
                "answers must be lists; CSV cannot hold lists, so use JSON Lines or Parquet."
            )
        pairs += [(question, _clean(_break_lines(answer))) for answer in row[name] or []]
    return pairs


def _read_answer(row: dict, roles: dict[str, str]) -> list[tuple[str, str]]:
    """Return a row's question, after its system text and history, and its only answer."""
    question = _clean(read_question(row, roles))
    _, _, answer = split_answer(value_of(row, roles, "answer"), question)
    if question:
        question = put_before(read_opening(row, roles), question)
    return [(question, _clean(answer))]


def _read_dialogue(row: dict, column: str, roles: dict[str, str]) -> list[tuple[str, str | None]]:
    """Return each assistant turn of a dialogue, with all text before it; None marks context."""
    messages = row[column] or []
    opening = read_opening(row, roles)
    pairs = []
    for position, message in enumerate(messages):
        transcript = as_text(messages[: position + 1])
        before, mark, answer = transcript.rpartition(ASSISTANT)
        if mark and read_turn(message)[0] == "assistant":
            question = put_before(opening, before) if before else ""
            if is_context(message):
                pairs.append((question, None))
            else:
                pairs.append((_clean(question), trim(answer.removeprefix(" "))))
    return pairs


def _text(value: str | None) -> str:
    """Return a text, "" for None; raise ``ValueError`` for a value of another type."""
    if not isinstance(value, str | None):
        raise ValueError(f"{value!r:.80} is not text. Convert or remove it.")
    return value or ""


def _clean(value: str | None) -> str:
    """Return a text without surrounding blank lines and spaces; a transcript keeps its first."""
    text = _text(value)
    is_transcript = HUMAN in text  # begins with a blank line
    return text.rstrip() if is_transcript else trim(text)


def _break_lines(value: str | None) -> str:
    """Return a text of HC3 with a line break for each literal backslash-n, except in code.

    Code has real line breaks, and a fence or an escape beside a quotation mark.
    """
    text = _text(value)
    has_breaks = "\n" in text.strip()
    has_code = re.search(r"```|[\"'`]\\n|\\n[\"'`]", text)
    return text if has_breaks and has_code else LITERAL_BREAK.sub("\n", text)


def _name_literal_breaks(answers: list[str], where: str) -> None:
    """Print how many answers have a literal backslash-n for a line break, if most have."""
    marked = [text for text in answers if "\n" not in text and LITERAL_BREAK.search(text)]
    if 2 * len(marked) > len(answers):
        print(
            f"{len(marked)} of {len(answers)} answers in {where} contain a literal \\n, and no line"
            " break. They stay as they are; if line breaks are meant, replace \\n in the data."
        )


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
