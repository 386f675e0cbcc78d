"""Load preference pairs in hh-rlhf's format, and tokenize them for a reward model."""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from rlhf_course.data.encoding import check_template, drop_eos, encode
from rlhf_course.data.layouts import (
    PAIR_NAMES,
    check_templates,
    find_roles,
    name_unread,
    put_before,
    read_opening,
    read_question,
    require_roles,
    value_of,
    warn_unordered,
)
from rlhf_course.data.rows import (
    as_numbers,
    check_columns,
    keep_short,
    keep_usable,
    load_split,
)
from rlhf_course.data.transcripts import ASSISTANT, HUMAN, last_question, split_answer

SIDES = ("chosen", "rejected")
FAULTS = (
    "no assistant turn",
    "ends on the human",
    "chosen equals rejected",
    "different prompts",
    "empty answer",
    "prompt repeated",
    "dialogue quoted in the prompt",
)
ADVICE = {
    "no assistant turn": "A whole dialogue begins with a blank line and Human:, and its answer"
    " follows a blank line and Assistant:. If chosen and rejected are only answers, name the column"
    " with their prompt: --columns prompt=NAME.",
    "ends on the human": "Remove what follows the last answer.",
}


def load_pairs(
    source: str | Path,
    split: str = "train",
    data_dir: str | None = None,
    columns: str | None = None,
) -> tuple[Dataset, dict[str, int]]:
    """Return columns prompt, chosen and rejected, and the number of pairs dropped for each reason.

    The columns chosen and rejected contain transcripts as in hh-rlhf, or messages {role, content};
    with a prompt column, answers without prompts suffice. A system text, earlier turns and an input
    become part of the prompt. ``columns`` names other columns, as in
    "prompt=question,chosen=response_j"; common names are known. Other columns are kept, and
    printed. ``split`` may be a slice like ``train[:5000]``; ``data_dir`` is a subfolder. Raises
    :func:`load_split`'s errors, and ``ValueError`` for missing columns, values of the wrong type,
    or no usable pair.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_dir=data_dir)
    check_columns(rows, (), where)
    roles = find_roles(rows, PAIR_NAMES, columns, where)
    require_roles(roles, SIDES, rows, where)
    name_unread(rows, roles.values(), where)
    warn_unordered(rows, roles, where)
    others = [name for name in rows.column_names if name not in roles.values()]
    rows = as_numbers(rows, others)

    def parse(row: dict) -> Iterator[tuple[dict, str | None]]:
        question = read_question(row, roles)
        opening = read_opening(row, roles)
        sides = []
        for side in SIDES:
            before, mark, answer = split_answer(value_of(row, roles, side), question)
            sides.append((put_before(opening, before), mark, answer))
        chosen, rejected = sides
        pair = {"prompt": chosen[0] + ASSISTANT, "chosen": chosen[2], "rejected": rejected[2]}
        more = {name: value for name, value in row.items() if name not in pair}
        fault = find_fault(chosen, rejected)
        yield pair | more, fault

    pairs, report = keep_usable(rows, parse, FAULTS, where, ADVICE)
    check_templates(pairs["prompt"][:], where)
    return pairs, report


def find_fault(chosen: tuple[str, str, str], rejected: tuple[str, str, str]) -> str | None:
    """Return the reason to drop a pair (see ``FAULTS``) or None; takes split_answer's results."""
    prompt, chosen_mark, chosen_answer = chosen
    rejected_prompt, rejected_mark, rejected_answer = rejected
    if not (chosen_mark and rejected_mark):
        return "no assistant turn"
    if HUMAN in chosen_answer or HUMAN in rejected_answer:
        return "ends on the human"
    if chosen == rejected:
        return "chosen equals rejected"
    if prompt != rejected_prompt:
        return "different prompts"
    if not (chosen_answer and rejected_answer):
        return "empty answer"
    if HUMAN in prompt and not prompt.startswith("\n\n"):
        return "dialogue quoted in the prompt"
    question = last_question(prompt)
    if question and chosen_answer.startswith(question) and rejected_answer.startswith(question):
        return "prompt repeated"
    return None


def tokenize_pairs(
    pairs: Dataset, tokenizer, max_length: int, form: str | None = None
) -> tuple[Dataset, int]:
    """Return the pairs with the columns that trl's RewardTrainer needs, and how many were dropped.

    New columns: chosen_ids, rejected_ids and length; ``form`` as in :func:`encode`. Pairs longer
    than ``max_length`` tokens are dropped, because truncation could remove the judged difference.
    Pairs that contain EOS are dropped, with a printed count. Raises ``ValueError`` if no pair
    remains.
    """
    if form != "pair":  # encoders have no EOS
        check_template(tokenizer)
        pairs = drop_eos(pairs, tokenizer, columns=("prompt", *SIDES))
    columns = pairs.to_dict()
    for side in SIDES:
        columns[f"{side}_ids"] = encode(tokenizer, pairs["prompt"][:], pairs[side][:], form)
    columns["length"] = [
        max(len(chosen), len(rejected))
        for chosen, rejected in zip(columns["chosen_ids"], columns["rejected_ids"], strict=True)
    ]
    return keep_short(Dataset.from_dict(columns), columns["length"], max_length)
