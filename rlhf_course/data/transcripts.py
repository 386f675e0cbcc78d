"""Dialogues as one text, as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862)."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
MARKS = {"system": "\n\n", "user": f"{HUMAN} ", "assistant": f"{ASSISTANT} "}


def as_prompt(question: str) -> str:
    """Return a question as a dialogue that ends before its answer; leave a transcript unchanged."""
    question = question.rstrip().removesuffix(ASSISTANT)
    return (question if HUMAN in question else f"{HUMAN} {question.lstrip()}") + ASSISTANT


def last_question(prompt: str) -> str:
    """Return the last human turn of a prompt, without its label."""
    return prompt.rpartition(HUMAN)[2].partition(ASSISTANT)[0].strip()


def as_text(turns: str | list[dict] | None) -> str:
    """Return a text unchanged, and messages {role, content} as a transcript.

    Raises ``ValueError`` for anything else, such as messages stored as text in a CSV file.
    """
    if turns is None or isinstance(turns, str) and not re.match(r"\s*\[\s*{.*role", turns):
        return turns or ""
    try:
        return "".join(MARKS[turn["role"]] + turn["content"].strip() for turn in turns)
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            f"{turns!r:.80} is neither a text nor messages of {', '.join(MARKS)}."
        ) from None


def as_messages(text: str) -> list[dict]:
    """Return a transcript as messages {role, content}, as chat templates take them."""
    system, *turns = re.split(f"{HUMAN}|({ASSISTANT})", text)
    roles = ["assistant" if mark else "user" for mark in turns[::2]]
    messages = [
        {"role": role, "content": said.strip()}
        for role, said in zip(roles, turns[1::2], strict=True)
    ]
    first = [{"role": "system", "content": system.strip()}] if system.strip() else []
    return first + messages


def split_answer(turns: str | list[dict] | None, prompt: str | None) -> tuple[str, str, str]:
    """Return what precedes the last "Assistant:", that mark (empty if missing), and what follows.

    ``turns`` are a whole transcript, or the answer to a ``prompt``.
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


def encode(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompt, answer and EOS, as a reward model reads them."""
    texts = [f"{prompt} {answer}" for prompt, answer in zip(prompts, answers, strict=True)]
    return [[*ids, end_token(tokenizer)] for ids in tokenizer(texts)["input_ids"]]


def end_token(tokenizer) -> int:
    """Return the token that ends a dialogue; raise ``ValueError`` if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no EOS token: set tokenizer.eos_token.")
    return tokenizer.eos_token_id


def refuse_eos(tokenizer, *columns: Iterable[str]) -> None:
    """Raise ``ValueError`` for a text that spells EOS: it would end the dialogue."""
    end_token(tokenizer)
    for text in chain(*columns):
        if tokenizer.eos_token in text:
            raise ValueError(
                f"A text contains {tokenizer.eos_token}, which ends a dialogue: {text!r:.60}."
            )
