"""Write each dialogue as one text, as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862)."""

import re

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
MARKS = {"system": "\n\n", "user": f"{HUMAN} ", "assistant": f"{ASSISTANT} "}


def as_prompt(question: str) -> str:
    """Return a question, or a transcript, as a prompt that ends with "Assistant:"."""
    question = question.rstrip().removesuffix(ASSISTANT)
    if HUMAN not in question:
        question = f"{HUMAN} {question.lstrip()}"
    return question + ASSISTANT


def last_question(prompt: str) -> str:
    """Return the last human turn of a prompt, without "Human:"."""
    last_turns = prompt.rpartition(HUMAN)[2]
    return last_turns.partition(ASSISTANT)[0].strip()


def as_text(turns: str | list[dict] | None) -> str:
    """Return a text, or messages {role, content} as a transcript; begin with HUMAN, not "Human:".

    Raises ``ValueError`` for anything else, such as messages stored as text in a CSV file.
    """
    if turns is None:
        return ""
    is_text = isinstance(turns, str)
    is_quoted_list = is_text and re.match(r"\s*\[\s*{.*role", turns)
    if is_text and not is_quoted_list:
        return f"\n\n{turns}" if turns.startswith("Human:") else turns
    try:
        return "".join(MARKS[turn["role"]] + turn["content"].strip() for turn in turns)
    except (AttributeError, KeyError, TypeError):  # also for a quoted list
        raise ValueError(
            f"{turns!r:.80} is neither a text nor messages from {', '.join(MARKS)}; convert it."
        ) from None


def as_messages(text: str) -> list[dict]:
    """Return a transcript as the messages {role, content} that chat templates expect."""
    system, *turns = re.split(f"({HUMAN}|{ASSISTANT})", text)
    messages = []
    if system.strip():
        messages.append({"role": "system", "content": system.strip()})
    for mark, content in zip(turns[::2], turns[1::2], strict=True):
        role = "user" if mark == HUMAN else "assistant"
        messages.append({"role": role, "content": content.strip()})
    return messages


def split_answer(turns: str | list[dict] | None, prompt: str | None) -> tuple[str, str, str]:
    """Return (text before the last "Assistant:", that mark or "", answer after it).

    ``turns`` is a whole transcript, or the answer to a ``prompt``.
    """
    text = as_text(turns)
    if prompt is not None:
        opening = as_prompt(prompt).removesuffix(ASSISTANT)
        if text.startswith(ASSISTANT):
            text = opening + text
        elif not isinstance(turns, list) and not text.startswith(HUMAN):
            return opening, ASSISTANT, text.strip()
    before, mark, answer = text.rpartition(ASSISTANT)
    return before, mark, answer.strip()
