"""Write each dialogue as one text, as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862)."""

import re

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
MARKS = {"system": "\n\n", "user": f"{HUMAN} ", "assistant": f"{ASSISTANT} "}
# The names of roles in common formats → the keys of MARKS.
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
CONTENTS = ("content", "value")
FLAGS = ("weight", "train", "loss")  # 0 or false: a turn is context, not an answer


def trim(text: str) -> str:
    """Return a text without surrounding blank lines and spaces, but with a code's indentation.

    Indentation is a tab or two spaces, because one space often separates a text from its mark.
    """
    text = re.sub(r"\A(?:[^\S\n]*\n)+", "", text).rstrip()
    is_indented = text.startswith(("\t", "  "))
    return text if is_indented else text.lstrip()


def as_prompt(question: str) -> str:
    """Return a question, or a transcript, as a prompt that ends with "Assistant:"."""
    question = question.rstrip().removesuffix(ASSISTANT)
    if HUMAN not in question:
        question = f"{HUMAN} {trim(question)}"
    return question + ASSISTANT


def last_question(prompt: str) -> str:
    """Return the last human turn of a prompt, without "Human:"."""
    last_turns = prompt.rpartition(HUMAN)[2]
    return last_turns.partition(ASSISTANT)[0].strip()


def as_text(turns: str | dict | list[dict] | None) -> str:
    """Return a text, or messages as a transcript; begin with HUMAN, not "Human:".

    Messages are {role, content}, or {from, value} as in ShareGPT; see ``ROLES``. Raises
    ``ValueError`` for anything else, such as messages stored as text in a CSV file.
    """
    if turns is None:
        return ""
    is_text = isinstance(turns, str)
    is_quoted_list = is_text and re.match(r"\s*\[\s*{.*(role|from)", turns)
    if is_text and not is_quoted_list:
        return f"\n\n{turns}" if turns.startswith("Human:") else turns
    if isinstance(turns, dict):
        turns = [turns]
    try:
        parts = []
        for turn in turns:
            role, content = read_turn(turn)
            if role == "system" and parts:
                raise ValueError("a system message inside the dialogue")
            parts.append(MARKS[role] + content)
        return "".join(parts)
    except (AttributeError, KeyError, TypeError, ValueError):  # also for a quoted list
        raise ValueError(
            f"{turns!r:.80} is neither a text nor messages like"
            ' [{"role": "user", "content": "Hi"}] from system, user and assistant. Convert it;'
            " write tool calls as text, and leave out images."
        ) from None


def read_turn(turn: dict) -> tuple[str, str]:
    """Return a message's role, a key of ``MARKS``, and its text.

    Raises ``KeyError``, ``TypeError`` or ``AttributeError`` for anything else, such as an image or
    a tool call.
    """
    role = turn.get("role") or turn["from"]
    content = turn.get("content")
    if content is None:
        content = turn.get("value")
    if isinstance(content, list):  # parts {"type": "text", "text": …}
        if any(part["type"] != "text" for part in content):
            raise KeyError("type")
        content = "".join(part["text"] for part in content)
    for name, value in turn.items():
        if name not in CONTENTS and isinstance(value, list | dict) and value:
            raise KeyError(name)  # such as tool_calls
    return ROLES[role.lower()], trim(content)


def is_context(turn: dict) -> bool:
    """Return whether a message is marked as context, as with weight 0 or train false.

    Raises ``ValueError`` for a mark between 0 and 1, which no trainer here applies.
    """
    marks = {name: turn[name] for name in FLAGS if turn.get(name) is not None}
    for name, mark in marks.items():
        if mark not in (0, 1):
            raise ValueError(
                f"A message has {name} {mark!r:.20}. Write 1 to train on it, or 0 to read it as"
                " context."
            )
    return 0 in marks.values()


def as_messages(text: str) -> list[dict]:
    """Return a transcript as the messages {role, content} that chat templates expect."""
    system, *turns = re.split(f"({HUMAN}|{ASSISTANT})", text)
    messages = []
    if system.strip():
        messages.append({"role": "system", "content": system.strip()})
    for mark, content in zip(turns[::2], turns[1::2], strict=True):
        role = "user" if mark == HUMAN else "assistant"
        messages.append({"role": role, "content": trim(content.removeprefix(" "))})
    return messages


def split_answer(turns: str | dict | list[dict] | None, prompt: str | None) -> tuple[str, str, str]:
    """Return (text before the last "Assistant:", that mark or "", answer after it).

    ``turns`` is a whole transcript, or the answer to a ``prompt``.
    """
    text = as_text(turns)
    if prompt is not None:
        opening = as_prompt(prompt).removesuffix(ASSISTANT)
        if text.startswith(ASSISTANT):
            text = opening + text
        elif not isinstance(turns, list) and not text.startswith(HUMAN):
            return opening, ASSISTANT, trim(text)
    before, mark, answer = text.rpartition(ASSISTANT)
    return before, mark, trim(answer.removeprefix(" "))
