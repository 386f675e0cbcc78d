"""Write each dialogue as one text, as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862)."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain

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


def prompt_ids(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of prompts; dialogues use the tokenizer's chat template, if any.

    Qwen3's template does not open a thought.
    """
    if not tokenizer.chat_template:
        return tokenizer(prompts)["input_ids"]
    rows = []
    for text in prompts:
        if text.rstrip().endswith(ASSISTANT):
            ids = tokenizer.apply_chat_template(
                as_messages(text)[:-1],  # the template opens the answer
                add_generation_prompt=True,
                enable_thinking=False,
                return_dict=False,
            )
        else:
            ids = tokenizer(text)["input_ids"]
        rows.append(ids)
    return rows


def answer_ids(tokenizer, answers: Sequence[str]) -> list[list[int]]:
    """Return each answer's token ids, with EOS, to append to ids from :func:`prompt_ids`."""
    gap = "" if tokenizer.chat_template else " "
    texts = [f"{gap}{answer}" if answer else "" for answer in answers]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [[*row, end_token(tokenizer)] for row in ids]


def encode(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> list[list[int]]:
    """Return each row's token ids, as a reward model reads them: prompt, answer, EOS."""
    if tokenizer.chat_template:
        starts = prompt_ids(tokenizer, prompts)
        ends = answer_ids(tokenizer, answers)
        return [start + end for start, end in zip(starts, ends, strict=True)]
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
    eos_id = end_token(tokenizer)
    if tokenizer.chat_template:
        dialogue = f"{HUMAN} ?{ASSISTANT} !{HUMAN} ?{ASSISTANT}"
        [ids] = prompt_ids(tokenizer, [dialogue])
        if eos_id not in ids:
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
