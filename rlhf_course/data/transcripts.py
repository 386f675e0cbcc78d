"""Write each dialogue as one text, as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862)."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain

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


def prompt_ids(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts; dialogues use the tokenizer's chat template, if any.

    Qwen3's template does not open a thought.
    """
    if not tokenizer.chat_template:
        return tokenizer(prompts)["input_ids"]
    how = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False}
    return [
        tokenizer.apply_chat_template(as_messages(text)[:-1], **how)
        if text.rstrip().endswith(ASSISTANT)
        else tokenizer(text)["input_ids"]
        for text in prompts
    ]


def answer_ids(tokenizer, answers: Sequence[str]) -> list[list[int]]:
    """Return each answer's token ids, with EOS, to append to ids from :func:`prompt_ids`."""
    gap = "" if tokenizer.chat_template else " "
    texts = [f"{gap}{answer}" if answer else "" for answer in answers]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [[*row, end_token(tokenizer)] for row in ids]


def encode(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> list[list[int]]:
    """Return each row's token ids, as a reward model reads them: prompt, answer, EOS."""
    if tokenizer.chat_template:
        both = (prompt_ids(tokenizer, prompts), answer_ids(tokenizer, answers))
        return [prompt + answer for prompt, answer in zip(*both, strict=True)]
    texts = [f"{prompt} {answer}" for prompt, answer in zip(prompts, answers, strict=True)]
    return [[*ids, end_token(tokenizer)] for ids in tokenizer(texts)["input_ids"]]


def end_token(tokenizer) -> int:
    """Return the id of EOS; raise ``ValueError`` if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no EOS token; set tokenizer.eos_token.")
    return tokenizer.eos_token_id


def refuse_eos(tokenizer, *columns: Iterable[str]) -> None:
    """Raise ``ValueError`` for a text containing EOS, which would end the dialogue early.

    Also raise it for a chat template that never writes EOS.
    """
    end, talk = end_token(tokenizer), [f"{HUMAN} ?{ASSISTANT} !{HUMAN} ?{ASSISTANT}"]
    if tokenizer.chat_template and end not in prompt_ids(tokenizer, talk)[0]:
        raise ValueError(
            f"The chat template does not end turns with EOS, {tokenizer.eos_token}: correct"
            " eos_token in tokenizer_config.json."
        )
    for text in chain(*columns):
        if tokenizer.eos_token in text:
            raise ValueError(
                f"A text contains {tokenizer.eos_token}, which ends a dialogue: {text!r:.60}."
                " Remove this token."
            )
