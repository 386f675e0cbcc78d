"""Write each dialogue as one text, as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862)."""

import re

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
MARKS = {"system": "\n\n", "user": f"{HUMAN} ", "assistant": f"{ASSISTANT} "}


def as_prompt(question: str) -> str:
    """Return a question, or a transcript, as a prompt that ends with "Assistant:"."""
    question = question.rstrip().removesuffix(ASSISTANT)
    return (question if HUMAN in question else f"{HUMAN} {question.lstrip()}") + ASSISTANT


def last_question(prompt: str) -> str:
    """Return the last human turn of a prompt, without "Human:"."""
    return prompt.rpartition(HUMAN)[2].partition(ASSISTANT)[0].strip()


def as_text(turns: str | list[dict] | None) -> str:
    """Return a text, or messages {role, content} as a transcript; begin with HUMAN, not "Human:".

    Raises ``ValueError`` for anything else, such as messages stored as text in a CSV file.
    """
    if turns is None or isinstance(turns, str) and not re.match(r"\s*\[\s*{.*role", turns):
        return f"\n\n{turns}" if turns and turns.startswith("Human:") else turns or ""
    try:
        return "".join(MARKS[turn["role"]] + turn["content"].strip() for turn in turns)
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            f"{turns!r:.80} is neither a text nor messages from {', '.join(MARKS)}; convert it."
        ) from None


def as_messages(text: str) -> list[dict]:
    """Return a transcript as the messages {role, content} that chat templates expect."""
    system, *turns = re.split(f"{HUMAN}|({ASSISTANT})", text)
    roles = ["assistant" if mark else "user" for mark in turns[::2]]
    messages = [
        {"role": role, "content": said.strip()}
        for role, said in zip(roles, turns[1::2], strict=True)
    ]
    return ([{"role": "system", "content": system.strip()}] if system.strip() else []) + messages


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
