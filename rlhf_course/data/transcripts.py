"""Dialogues as one text, "\\n\\nHuman: … \\n\\nAssistant: …", as in hh-rlhf (Bai et al. 2022,
arXiv:2204.05862).
"""

from collections.abc import Sequence

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
MARKS = {"system": "\n\n", "user": f"{HUMAN} ", "assistant": f"{ASSISTANT} "}


def as_prompt(question: str) -> str:
    """A bare question as a dialogue that waits for its answer; a transcript stays as it is."""
    question = _with_opening(question).rstrip().removesuffix(ASSISTANT)
    return (question if HUMAN in question else f"{HUMAN} {question.lstrip()}") + ASSISTANT


def last_question(prompt: str) -> str:
    """The last human turn of a prompt, without its mark."""
    return prompt.rpartition(HUMAN)[2].partition(ASSISTANT)[0].strip()


def as_text(turns: str | list[dict] | None) -> str:
    """A text, or messages {role, content} as a transcript; what a system message says stands where
    it stood.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(turns, str) or turns in (None, []):
        return _with_opening(turns or "")
    text = ""
    for message in turns if isinstance(turns, list) else [turns]:
        role, content = (
            (message.get(key) for key in ("role", "content"))
            if isinstance(message, dict)
            else (None, None)
        )
        if role not in MARKS or not isinstance(content, str):
            raise ValueError(
                f"{message!r:.80} is neither a text nor a message, with a role (system, user or"
                " assistant) and content."
            )
        text += MARKS[role] + content.strip()
    return text


def split_answer(
    turns: str | list[dict] | None, prompt: str | None, repeated: bool = False
) -> tuple[str, str, str]:
    """What precedes the last "Assistant:", that mark (empty when there is none), and what follows
    it.

    ``turns`` are a whole transcript, which says its prompt itself, or, after a ``prompt``, the
    answer alone; ``repeated`` says that answers begin with the prompt's text, in whatever frame.
    """
    text = as_text(turns)
    if prompt is not None:
        opening = as_prompt(prompt).removesuffix(ASSISTANT)
        if text.lstrip().startswith(ASSISTANT.strip()):
            text = f"{opening}\n\n{text.lstrip()}"
        elif isinstance(turns, str | None) and not text.startswith(HUMAN):
            start = prompt.strip() if repeated else ""
            if not text.strip().startswith(start):
                return text, ASSISTANT, text  # to no known prompt
            answer = text.strip().removeprefix(start).strip()
            return opening, ASSISTANT, answer.removeprefix(ASSISTANT.strip()).strip()
    before, mark, answer = text.rpartition(ASSISTANT)
    return before, mark, answer.strip()


def _with_opening(text: str) -> str:
    """A transcript whose first line breaks were stripped gets them back."""
    return f"\n\n{text.lstrip()}" if text.lstrip().startswith(HUMAN.strip()) else text


def encode(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> list[list[int]]:
    """Token ids of prompt, answer and EOS, as a reward model reads them."""
    texts = [f"{prompt} {answer}" for prompt, answer in zip(prompts, answers, strict=True)]
    return [[*ids, end_token(tokenizer)] for ids in tokenizer(texts)["input_ids"]]


def end_token(tokenizer) -> int:
    """The token that ends a dialogue. Raises ``ValueError`` where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no EOS token, which ends every dialogue; set tokenizer.eos_token."
        )
    return tokenizer.eos_token_id
