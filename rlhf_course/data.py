"""What is learnt from: film reviews and queries for PPO, preference pairs, and answers for SFT."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import datasets

from rlhf_course.dataset_files import load_split
from rlhf_course.transcripts import ASSISTANT, HUMAN, as_prompt, as_text, split_answer
from rlhf_course.transcripts import last_question as last_question

HALF = "\ufffd"  # what the first bytes of a character are decoded as
SENTIMENTS = {"0": 0, "1": 1, "negative": 0, "positive": 1, "neg": 0, "pos": 1, "false": 0, "true": 1}


def load_reviews(source: str | Path, split: str) -> datasets.Dataset:
    """The columns text (str) and label (0 negative, 1 positive) of one split of a local folder or a hub dataset.

    Labels may be numbers, truth values, or their names, as words or as a ClassLabel has them: see ``SENTIMENTS``.
    Raises ``FileNotFoundError`` when nothing is there and ``ValueError`` when a column, text or class is missing.
    """
    where = f"split {split!r} of {source}"
    reviews = load_split(source, split)
    missing = {"text", "label"} - set(reviews.column_names)
    if missing:
        raise ValueError(
            f"No column {' or '.join(sorted(missing))} in {where}; it has {', '.join(reviews.column_names)}. "
            "Rename the columns to text and label (0 negative, 1 positive)."
        )
    reviews = reviews.select_columns(["text", "label"])
    for row, text in enumerate(reviews["text"]):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"Row {row} of {where} has no text: {text!r}. Remove such rows from the dataset.")
    names = enumerate(getattr(reviews.features["label"], "names", ()))
    names = {index: name for index, name in names if name.lower() in SENTIMENTS}
    given = [str(names.get(label, label)) for label in reviews["label"]]
    labels = [SENTIMENTS.get(label.strip().lower().removesuffix(".0")) for label in given]
    if {*labels} != {0, 1}:
        found = ", ".join(sorted({*given})[:5])
        raise ValueError(f"The labels in {where} are {found}; both 0 (negative) and 1 (positive) are needed.")
    return reviews.remove_columns("label").add_column("label", labels)


def build_queries(
    reviews: datasets.Dataset, tokenizer, lengths: Callable[[], int], min_characters: int = 200
) -> datasets.Dataset:
    """The first few tokens of every review longer than ``min_characters``, as columns input_ids and query.

    Each row draws its own length from ``lengths``, and is shorter where that ends inside a character. Raises
    ``ValueError`` when no review is long enough.
    """
    kept = reviews.filter(lambda texts: [len(t) > min_characters for t in texts], batched=True, input_columns="text")
    if len(kept) == 0:
        longest = max(map(len, reviews["text"]))
        raise ValueError(
            f"None of the {len(reviews)} reviews has more than {min_characters} characters; the longest has {longest}. "
            "Lower min_characters, or check that the column holds whole reviews."
        )
    drawn = [lengths() for _ in range(len(kept))]
    tokens = tokenizer([text[: 16 * max(drawn)] for text in kept["text"]])["input_ids"]
    cut = [ids[:length] for ids, length in zip(tokens, drawn, strict=True)]
    texts = tokenizer.batch_decode(cut)
    for row, text in enumerate(texts):
        if text.endswith(HALF):
            cut[row] = _whole(tokenizer, tokens[row], drawn[row])
            texts[row] = tokenizer.decode(cut[row])
    return datasets.Dataset.from_dict({"input_ids": cut, "query": texts}).with_format("torch")


def _whole(tokenizer, ids: list[int], length: int) -> list[int]:
    """The first tokens, fewer than ``length``, that end with a character; more, where the first one needs them."""
    for size in (*range(length - 1, 0, -1), *range(length + 1, len(ids))):
        text = tokenizer.decode(ids[:size], skip_special_tokens=True)
        if text and not text.endswith(HALF):
            return ids[:size]
    return ids[:length]


def collate(rows: list[dict]) -> dict[str, list]:
    """Rows as one dictionary of lists: queries stay ragged."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def endless(loader: Iterable) -> Iterator:
    """A loader's batches, epoch after epoch, each in a new order."""
    while True:
        yield from loader


FAULTS = {  # why a pair is of no use, in the order in which it is looked for
    "no assistant turn": lambda c, r: not (c[1] and r[1]),
    "ends on the human": lambda c, r: HUMAN in c[2] or HUMAN in r[2],
    "chosen equals rejected": lambda c, r: c == r,
    "different prompts": lambda c, r: c[0] != r[0],
    "empty answer": lambda c, r: not (c[2] and r[2]),
}


def load_pairs(
    source: str | Path, split: str = "train", data_dir: str | None = None
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Preference pairs with the columns prompt, chosen and rejected (answers), and how many rows were dropped and why.

    Rows are transcripts as in hh-rlhf (Bai et al. 2022, arXiv:2204.05862): chosen and rejected hold the whole dialogue,
    "\\n\\nHuman: … \\n\\nAssistant: …", or its messages {role, content}. With a column prompt, chosen and rejected may
    be the answers alone. ``split`` may be a slice like ``train[:5000]``; ``data_dir`` is a subfolder. Other columns are
    kept.

    Raises ``FileNotFoundError`` when nothing is there, and ``ValueError`` for a missing column, no row, or no row left.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_dir=data_dir)
    if missing := {"chosen", "rejected"} - set(rows.column_names):
        raise ValueError(
            f"No column {' or '.join(sorted(missing))} in {where}; it has {', '.join(rows.column_names)}. Preference "
            "pairs have the columns chosen and rejected (whole transcripts), or prompt, chosen and rejected."
        )
    report, kept, parsed = dict.fromkeys(FAULTS, 0), [], {"prompt": [], "chosen": [], "rejected": []}
    table = [*rows.select_columns([c for c in parsed if c in rows.column_names])]
    repeated = sum(map(_repeats_prompt, table)) > len(table) / 2
    for index, row in enumerate(table):
        try:
            prompt = None if row.get("prompt") is None else as_text(row["prompt"])
            chosen, rejected = (split_answer(row[side], prompt, repeated) for side in ("chosen", "rejected"))
        except ValueError as error:
            raise ValueError(f"Row {index} of {where}: {error}") from None
        fault = next((name for name, found in FAULTS.items() if found(chosen, rejected)), None)
        if fault:
            report[fault] += 1
            continue
        kept.append(index)
        for name, text in zip(parsed, (chosen[0] + ASSISTANT, chosen[2], rejected[2]), strict=True):
            parsed[name].append(text)
    if not kept:
        raise ValueError(f"No usable pair is left of the {len(rows)} in {where}: {describe(report)}.")
    others = {name: rows.select(kept)[name][:] for name in rows.column_names if name not in parsed}
    return datasets.Dataset.from_dict(parsed | others), report


def _repeats_prompt(row: dict) -> bool:
    """Whether both answers begin with the prompt's text; where most do, they all are whole transcripts."""
    texts = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return False
    return all(text.strip().startswith(texts[0].strip()) for text in texts[1:])


def describe(report: dict[str, int]) -> str:
    """A report of dropped rows as a phrase."""
    return ", ".join(f"{count} {reason}" for reason, count in report.items() if count) or "nothing was dropped"


SCHEMAS = (("question", "human_answers", "chatgpt_answers"), ("instruction", "input", "output"))


def load_answers(
    source: str | Path, split: str = "train", data_files: str | None = None
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Questions with one answer each, as columns prompt and answer, and how many answers were dropped and why.

    Rows are as in HC3 (question, and lists human_answers and chatgpt_answers; Guo et al. 2023, arXiv:2301.07597), each
    answer a row of its own, or instructions (instruction, input, output). A literal backslash-n becomes a line break.
    In a CSV file, which has no lists, answers may be a list as Python or JSON prints it, or one plain answer.

    Raises ``FileNotFoundError`` when nothing is there, and ``ValueError`` for missing columns, for what is not text, or
    no answer left.
    """
    where = f"split {split!r} of {source}"
    rows = load_split(source, split, data_files=data_files)
    schema = next((schema for schema in SCHEMAS if set(schema) <= set(rows.column_names)), None)
    if schema is None:
        known = " or ".join(", ".join(schema) for schema in SCHEMAS)
        raise ValueError(f"{where} has the columns {', '.join(rows.column_names)}; wanted are {known}.")
    report, found, seen = {"empty question or answer": 0, "repeated row": 0}, {"prompt": [], "answer": []}, set()
    for index, row in enumerate(rows.select_columns(list(schema))):
        try:
            first, *rest = (_texts(row[name], "answers" in name) for name in schema)
        except ValueError as error:
            raise ValueError(f"Row {index} of {where}: {error}") from None
        if schema == SCHEMAS[1]:
            first, rest = [*first, *rest[0]], [rest[1] or [""]]
        question = "\n".join(filter(None, first))
        for answer in (answer for answers in rest for answer in answers):
            pair = tuple(text.replace("\\n", "\n").strip() for text in (question, answer))
            fault = next((f for f, is_so in zip(report, (not all(pair), pair in seen), strict=True) if is_so), None)
            if fault:
                report[fault] += 1
                continue
            seen.add(pair)
            found["prompt"].append(as_prompt(pair[0]))
            found["answer"].append(pair[1])
    if not found["prompt"]:
        raise ValueError(f"No usable answer is left of the {len(rows)} rows in {where}: {describe(report)}.")
    return datasets.Dataset.from_dict(found), report


def _texts(value, printed: bool) -> list[str]:
    """The texts in a cell; ``printed`` lists, as they stand in CSV files, are read back.

    Raises ``ValueError`` for what is no text, and for lists as numpy prints them, which lack what parts their items.
    """
    if printed and isinstance(value, str) and re.match(r"\[\s*(['\"\]]|None\b|null\b)", value.strip()):
        for read in (json.loads, ast.literal_eval):
            try:
                found = read(value)
            except (ValueError, SyntaxError):
                continue
            if read is json.loads or str(found) == value.strip():
                value = found
                break
        else:
            raise ValueError(f"{value!r:.80} is a list that cannot be read back; save the dataset as JSON or Parquet.")
    values = value if isinstance(value, list) else [] if value is None else [value]
    values = ["" if text is None else text for text in values]
    if wrong := [text for text in values if not isinstance(text, str)]:
        raise ValueError(f"{wrong[0]!r:.80} is no text.")
    return values


def hold_out(rows: datasets.Dataset, share: float, seed: int = 0) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Rows to learn from, and held-out ones: all rows of a share of the prompts, drawn at random.

    By prompt, because one that has several answers would otherwise stand on both sides. Raises ``ValueError`` when
    nothing would be left.
    """
    prompts = list(dict.fromkeys(rows["prompt"]))
    count = max(1, round(share * len(prompts)))
    if count >= len(prompts):
        raise ValueError(f"{len(prompts)} questions are too few to hold out {count} of them.")
    drawn = set(random.Random(seed).sample(prompts, count))
    held = [prompt in drawn for prompt in rows["prompt"]]
    return tuple(rows.select([row for row, is_held in enumerate(held) if is_held is side]) for side in (False, True))


def tokenize_answers(answers: datasets.Dataset, tokenizer, max_length: int) -> tuple[datasets.Dataset, int]:
    """Columns input_ids and completion_mask (1 on the answer and its EOS), as trl's SFTTrainer takes them.

    Also how many rows are gone because they have more than ``max_length`` tokens: cut, they would teach to break off.
    Prompt and answer are tokenized apart, because PPO samples the answer after the prompt's tokens. Raises
    ``ValueError`` when all rows go.
    """
    prompts = tokenizer(answers["prompt"][:])["input_ids"]
    texts = [f" {answer}" if answer else "" for answer in answers["answer"]]
    texts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = [(prompt, [*answer, _end(tokenizer)]) for prompt, answer in zip(prompts, texts, strict=True)]
    kept = [(prompt, answer) for prompt, answer in rows if len(prompt) + len(answer) <= max_length]
    if not kept:
        shortest = min(len(prompt) + len(answer) for prompt, answer in rows)
        raise ValueError(
            f"All {len(rows)} rows have more than max_length={max_length} tokens; the shortest has {shortest}. "
            "Raise max_length."
        )
    columns = {
        "input_ids": [prompt + answer for prompt, answer in kept],
        "completion_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer in kept],
    }
    return datasets.Dataset.from_dict(columns), len(rows) - len(kept)


def encode(tokenizer, prompts: Sequence[str], answers: Sequence[str]) -> list[list[int]]:
    """Token ids of prompt, answer and EOS, as a reward model reads them."""
    texts = [f"{prompt} {answer}" for prompt, answer in zip(prompts, answers, strict=True)]
    return [[*ids, _end(tokenizer)] for ids in tokenizer(texts)["input_ids"]]


def _end(tokenizer) -> int:
    """The token that ends a dialogue. Raises ``ValueError`` where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no EOS token, which ends every dialogue; set tokenizer.eos_token.")
    return tokenizer.eos_token_id


def tokenize_pairs(pairs: datasets.Dataset, tokenizer, max_length: int) -> tuple[datasets.Dataset, int]:
    """Pairs with the columns chosen_ids, rejected_ids and length that trl's RewardTrainer takes, and how many are gone.

    A pair goes when either side has more than ``max_length`` tokens: cut at the end it would lose the very words that
    were judged. Raises ``ValueError`` when all of them go.
    """
    sides = {f"{side}_ids": encode(tokenizer, pairs["prompt"], pairs[side]) for side in ("chosen", "rejected")}
    lengths = [max(map(len, both)) for both in zip(*sides.values(), strict=True)]
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if not kept:
        raise ValueError(
            f"All {len(pairs)} pairs are longer than max_length={max_length} tokens; the shortest has {min(lengths)}. "
            "Raise max_length."
        )
    columns = pairs.to_dict() | sides | {"length": lengths}
    tokens = {name: [values[row] for row in kept] for name, values in columns.items()}
    return datasets.Dataset.from_dict(tokens), len(pairs) - len(kept)
