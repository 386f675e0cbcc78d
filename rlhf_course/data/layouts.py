"""Find the prompts and answers of a dataset, whatever its columns are called.

A column has a *role*: it contains the prompt, an answer, or text that belongs before the prompt.
Roles are recognized by names in common use, or chosen with --columns.
"""

import re
import warnings
from collections.abc import Iterable

from datasets import Dataset, Value

from rlhf_course.data.transcripts import (
    ASSISTANT,
    CONTENTS,
    HUMAN,
    MARKS,
    as_prompt,
    as_text,
)

PAIR_NAMES = {
    "prompt": ("prompt", "question", "instruction", "query", "conversations"),
    "chosen": ("chosen", "response_chosen", "chosen_response", "response_j", "accepted", "accept"),
    "rejected": ("rejected", "response_rejected", "rejected_response", "response_k", "reject"),
}
ANSWER_NAMES = {
    "prompt": ("prompt", "question", "instruction", "query"),
    "answer": ("answer", "output", "completion", "response"),
}
DIALOGUES = ("messages", "conversations")
BEFORE = ("system", "history", "input")  # texts that belong to the prompt
SCANNED = 1000  # rows whose messages are searched for keys that are not read
PREFERENCE = re.compile(r"prefer|better|winner|best|choice|label|rank|vote", re.IGNORECASE)
TWIN = re.compile(
    r"(.*(?:response|answer|completion|output|reply|conversation|ref))(?:_?\d|_[ab]|_?[AB])"
)
GOLD = ("gold_chosen", "gold_rejected")  # scores that train_reward_model.py reads
TEMPLATE_MARKS = re.compile(
    r"\[/?INST\]|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|(?:user|assistant)\|>"
    r"|### ?(?:Human|Instruction|Response|Assistant):"
)


def parse_columns(text: str | None) -> dict[str, str]:
    """Return the roles in a text such as "prompt=question,chosen=response_j".

    Raises ``ValueError`` for another form.
    """
    roles = {}
    for part in (text or "").split(","):
        role, equals, column = part.partition("=")
        if equals and role.strip() and column.strip():
            roles[role.strip()] = column.strip()
        elif part.strip():
            raise ValueError(
                f"--columns has {part.strip()!r}. Write it like prompt=question,chosen=response_j."
            )
    return roles


def find_roles(
    rows: Dataset, names: dict[str, tuple[str, ...]], columns: str | None, where: str
) -> dict[str, str]:
    """Return which column has which role; ``columns`` is the text of --columns.

    A column in ``names`` with exactly the role's name comes first. Prints roles that were
    recognized by another name. Raises ``ValueError`` for unknown columns and roles, and if several
    columns could have one role.
    """
    roles = parse_columns(columns)
    _check_roles(rows, roles, (*names, *BEFORE), where)
    taken = {_split_item(column)[0] for column in roles.values()}
    for role in (*names, *BEFORE):
        known = names.get(role, (role,))
        present = [name for name in known if name in rows.column_names and name not in taken]
        if role in roles or not present:
            continue
        if len(present) > 1 and present[0] != role:
            raise ValueError(
                f"Columns {' and '.join(present)} of {where} could both be the {role}. Choose one:"
                f" --columns {role}={present[0]}."
            )
        roles[role] = present[0]
    if "prompt" not in roles and "input" in roles:
        roles["prompt"] = roles.pop("input")
    renamed = [f"{role} from {column}" for role, column in roles.items() if role != column]
    if renamed:
        print(f"Reading {', '.join(renamed)} in {where}.")
    return roles


def _check_roles(rows: Dataset, roles: dict[str, str], known: Iterable[str], where: str) -> None:
    """Raise ``ValueError`` for a role or a column that does not exist."""
    for role, column in roles.items():
        if role not in known:
            raise ValueError(f"--columns sets {role}; choose from {', '.join(known)}.")
        if _split_item(column)[0] not in rows.column_names:
            raise ValueError(
                f"No column {column} in {where}; it has {', '.join(rows.column_names)}. Correct"
                " --columns."
            )


def require_roles(roles: dict[str, str], needed: Iterable[str], rows: Dataset, where: str) -> None:
    """Raise ``ValueError`` if a role has no column."""
    missing = [role for role in needed if role not in roles]
    if missing:
        _refuse_unordered(missing, rows, where)
        _refuse_whole_texts(missing, roles, rows, where)
        example = ",".join(f"{role}=NAME" for role in missing)
        raise ValueError(
            f"No column {' or '.join(missing)} in {where}; it has {', '.join(rows.column_names)}."
            f" Say which columns these are: --columns {example} (NAME[0] is a list's first item)."
        )


def _refuse_unordered(missing: list[str], rows: Dataset, where: str) -> None:
    """Raise ``ValueError`` if chosen and rejected are missing, but numbered answers are there."""
    twins = _find_twins(rows.column_names)
    if not twins or not {"chosen", "rejected"} <= set(missing):
        return
    judges = [name for name in rows.column_names if PREFERENCE.search(name)]
    raise ValueError(
        f"No column chosen or rejected in {where}; it has {', '.join(rows.column_names)}."
        f" {' and '.join(twins)} hold no order: read as chosen and rejected, they would swap about"
        f" half of the pairs. Sort them, row by row, into columns chosen and rejected by"
        f" {' or '.join(judges) or 'the preference'}."
    )


def _refuse_whole_texts(
    missing: list[str], roles: dict[str, str], rows: Dataset, where: str
) -> None:
    """Raise ``ValueError`` if fewer columns remain than --columns would have to name."""
    taken = {_split_item(column)[0] for column in roles.values()}
    free = [name for name in rows.column_names if name not in taken]
    has_lists = any(not isinstance(rows.features[name], Value) for name in free)
    if has_lists or len(free) >= len(missing):
        return
    action = "Each row needs two answers to one prompt, in columns chosen and rejected."
    if "answer" in missing:
        action = (
            "Split whole dialogues into columns prompt and answer, or into a column messages like"
            ' [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}].'
        )
    raise ValueError(
        f"No column {' or '.join(missing)} in {where}; it has {', '.join(rows.column_names)}."
        f" {action}"
    )


def _find_twins(names: Iterable[str]) -> list[str]:
    """Return columns of answers that differ only in a number or letter, as in response_1."""
    stems = {}
    for name in names:
        match = TWIN.fullmatch(name)
        if match:
            stems.setdefault(match[1], []).append(name)
    return next((group for group in stems.values() if len(group) > 1), [])


def warn_unordered(rows: Dataset, roles: dict[str, str], where: str) -> None:
    """Warn if chosen and rejected are numbered answers, and a column seems to say which is better.

    Two items of one list are numbered as well.
    """
    columns = [roles["chosen"], roles["rejected"]]
    names = {_split_item(column)[0] for column in columns}
    judges = [
        name for name in rows.column_names if PREFERENCE.search(name) and name not in roles.values()
    ]
    if judges and (len(names) == 1 or _find_twins(columns)):
        warnings.warn(
            f"{' and '.join(columns)} in {where} may hold no order, and {judges[0]}, which may say"
            " which answer is better, is not read. If so, sort the answers into columns chosen and"
            " rejected.",
            stacklevel=3,
        )


def name_unread(rows: Dataset, roles: Iterable[str], where: str, flags: Iterable[str] = ()) -> None:
    """Print the columns that no text is read from, and such keys of messages except ``flags``."""
    read = dict.fromkeys(_split_item(column)[0] for column in roles)
    unread = [name for name in rows.column_names if name not in read and name not in GOLD]
    for column in read:
        unread += [f"{key} of {column}" for key in _unread_keys(rows, column, flags)]
    if unread:
        print(f"Not read in {where}: {', '.join(unread)}.")


def _unread_keys(rows: Dataset, column: str, flags: Iterable[str]) -> list[str]:
    """Return the keys with a value that no text is read from, in a column's first messages."""
    if isinstance(rows.features[column], Value):
        return []
    read = {"role", "from", *CONTENTS, *flags}
    unread = set()
    for value in rows[:SCANNED][column]:
        for message in value if isinstance(value, list) else [value]:
            if isinstance(message, dict):
                unread |= {key for key in message if message[key] not in (None, "", [], {})} - read
    return sorted(unread)


def value_of(row: dict, roles: dict[str, str], role: str):
    """Return a row's value of a role, or None; "output[0]" is the first item of a list."""
    if role not in roles:
        return None
    column, item = _split_item(roles[role])
    value = row[column]
    if item is None or value is None:
        return value
    if not isinstance(value, list) or len(value) <= item:
        raise ValueError(f"{column} is {value!r:.60}, which has no item {item}.")
    return value[item]


def _split_item(column: str) -> tuple[str, int | None]:
    """Return a column's name, and the item that is meant in "output[0]"."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", column)
    if match:
        return match[1], int(match[2])
    return column, None


def read_question(row: dict, roles: dict[str, str]) -> str | None:
    """Return a row's prompt with its input, as text; None without a prompt column."""
    prompt = value_of(row, roles, "prompt")
    if prompt is None:
        return None
    parts = [as_text(prompt), as_text(value_of(row, roles, "input"))]
    return "\n".join(part for part in parts if part)


def read_opening(row: dict, roles: dict[str, str]) -> str:
    """Return a row's system text and earlier turns as the beginning of a transcript, often ""."""
    opening = ""
    system = as_text(value_of(row, roles, "system")).strip()
    if system:
        opening = MARKS["system"] + system
    for turn in value_of(row, roles, "history") or []:
        if isinstance(turn, dict):
            opening += as_text(turn)
        elif isinstance(turn, list) and len(turn) == 2:
            opening += f"{HUMAN} {turn[0]}{ASSISTANT} {turn[1]}"
        else:
            raise ValueError(f"history has {turn!r:.60}; write [question, answer].")
    return opening


def put_before(opening: str, transcript: str) -> str:
    """Return a transcript after an opening.

    Raises ``ValueError`` if the transcript has a system text of its own.
    """
    if not opening:
        return transcript
    framed = as_prompt(transcript).removesuffix(ASSISTANT)
    if not framed.startswith(HUMAN):
        raise ValueError(
            f"{framed.strip()!r:.60} has a system text, and column system or history has another."
            " Keep one."
        )
    return opening + framed


def check_templates(prompts: list[str], where: str) -> None:
    """Raise ``ValueError`` if most prompts already have the marks of a chat template."""
    marked = [match[0] for match in map(TEMPLATE_MARKS.search, prompts) if match]
    if 2 * len(marked) > len(prompts):
        raise ValueError(
            f"{len(marked)} of {len(prompts)} prompts in {where} contain {marked[0]}: a chat"
            " template was already applied. Remove its marks, or pass messages {role, content}."
        )
