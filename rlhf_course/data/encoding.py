"""Turn prompts and answers into token ids: one encoding for SFT, reward models, PPO, hand-over.

A *form* says how the two texts become one row of ids. SFT, PPO and reward models trained here use
``transcript`` or ``chat``; the other two forms are for reward models that were trained elsewhere.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from rlhf_course.data.transcripts import ASSISTANT, HUMAN, as_messages, as_prompt, trim
from rlhf_course.runtime.files import atomic_file, read_json

FORMS = {
    "transcript": "the texts of prompt and answer, then EOS",
    "chat": "the prompt in the tokenizer's chat template, then the answer and EOS",
    "template": "the whole dialogue in the tokenizer's chat template",
    "pair": "tokenizer(prompt, answer), as encoders such as BERT expect",
}
FORM_FILE = "encoding.json"  # beside a reward model that was trained here


def default_form(tokenizer) -> str:
    """Return the form that SFT, PPO and reward training use with a tokenizer."""
    return "chat" if tokenizer.chat_template else "transcript"


def write_form(folder: Path, form: str) -> None:
    """Write into a reward model's folder the form that the model was trained with."""
    with atomic_file(folder / FORM_FILE) as path:
        path.write_text(json.dumps({"form": form}) + "\n", encoding="utf-8")


def read_form(folder: Path) -> str | None:
    """Return the form that a reward model was trained with, or None if its folder has no record.

    Raises ``ValueError`` for an unknown form.
    """
    file = folder / FORM_FILE
    if not file.exists():
        return None
    form = read_json(file).get("form")
    if form not in FORMS:
        raise ValueError(f"{file} has the form {form!r}; choose one of {', '.join(FORMS)}.")
    return form


def encode(
    tokenizer, prompts: Sequence[str], answers: Sequence[str], form: str | None = None
) -> list[list[int]]:
    """Return one row of token ids per prompt and answer; see ``FORMS``.

    The default is :func:`default_form`, whose rows are ids from :func:`prompt_ids` followed by ids
    from :func:`answer_ids`, as SFT trains them and as PPO samples them.
    """
    form = form or default_form(tokenizer)
    if form == "pair":
        return tokenizer(list(prompts), list(answers))["input_ids"]
    if form == "template":
        dialogues = [
            as_messages(f"{as_prompt(prompt)} {answer}")
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return tokenizer.apply_chat_template(dialogues, return_dict=False)
    rows = zip(
        prompt_ids(tokenizer, prompts, form), answer_ids(tokenizer, answers, form), strict=True
    )
    return [prompt + answer for prompt, answer in rows]


def prompt_ids(tokenizer, prompts: Sequence[str], form: str | None = None) -> list[list[int]]:
    """Return the token ids of prompts, up to where an answer begins.

    In the form ``chat``, a dialogue is formatted by the template; a text that is no dialogue, such
    as a film review's opening, is tokenized as it is.
    """
    form = form or default_form(tokenizer)
    if form != "chat":
        return tokenizer(list(prompts))["input_ids"]
    rows = []
    for text in prompts:
        if not text.rstrip().endswith(ASSISTANT):
            rows.append(tokenizer(text)["input_ids"])
            continue
        *question, _ = as_messages(text)  # without the empty answer
        # enable_thinking=False: Qwen3's template then opens no thought.
        ids = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        rows.append(ids)
    return rows


def answer_ids(tokenizer, answers: Sequence[str], form: str | None = None) -> list[list[int]]:
    """Return each answer's token ids, with EOS, to append to ids from :func:`prompt_ids`.

    In a transcript, a space separates "Assistant:" from the answer. An empty answer is only EOS,
    as a policy samples it.
    """
    form = form or default_form(tokenizer)
    gap = "" if form == "chat" else " "
    texts = [f"{gap}{answer}" if answer else "" for answer in answers]
    end = end_token(tokenizer)
    return [[*ids, end] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def decode_answers(tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of sampled answers, as :func:`answer_ids` takes them."""
    gap = "" if default_form(tokenizer) == "chat" else " "
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [trim(text.removeprefix(gap)) for text in texts]


def end_token(tokenizer) -> int:
    """Return the id of EOS; raise ``ValueError`` if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no EOS token; set tokenizer.eos_token.")
    return tokenizer.eos_token_id


def check_template(tokenizer) -> None:
    """Raise ``ValueError`` for a chat template that does not end turns with EOS."""
    if not tokenizer.chat_template:
        return
    # EOS must close the first answer before the second question.
    dialogue = f"{HUMAN} ?{ASSISTANT} !{HUMAN} ?{ASSISTANT}"
    if end_token(tokenizer) not in prompt_ids(tokenizer, [dialogue])[0]:
        raise ValueError(
            f"The chat template does not end turns with EOS, {tokenizer.eos_token}: correct"
            " eos_token in tokenizer_config.json."
        )


def drop_eos(rows: Dataset, tokenizer, columns: Sequence[str]) -> Dataset:
    """Return the rows without EOS in these columns, whose text would end the dialogue early.

    Prints how many rows were dropped. Raises ``ValueError`` if no row remains.
    """
    end_token(tokenizer)
    texts = zip(*(rows[name] for name in columns), strict=True)
    kept = [
        index for index, row in enumerate(texts) if not any(tokenizer.eos_token in x for x in row)
    ]
    dropped = len(rows) - len(kept)
    if not kept:
        raise ValueError(
            f"All {dropped} rows contain {tokenizer.eos_token}, which ends a dialogue. Remove this"
            " token from the texts."
        )
    if dropped:
        print(f"Dropped {dropped} rows that contain {tokenizer.eos_token}, which ends a dialogue.")
        return rows.select(kept)
    return rows
