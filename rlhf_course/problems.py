"""Load problems whose answers a program can verify: sums, instructions, or your own file."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from rlhf_course.course.presets import Settings, check_named, shipped
from rlhf_course.data.instructions import TRAINED, Instruction
from rlhf_course.data.rows import check_columns, load_split

Problem = dict[str, str]  # question and answer


def sums(n: int, fewest: int, most: int, seed: int) -> list[Problem]:
    """Return n problems: sums of two numbers that have ``fewest`` to ``most`` digits each."""
    generator = random.Random(seed)
    problems = []
    for _ in range(n):
        digits = generator.randint(fewest, most)
        a, b = (generator.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        problems.append({"question": f"{a}+{b}=", "answer": str(a + b)})
    return problems


def instruction_problems(split: str, chosen: Sequence[Instruction]) -> list[Problem]:
    """Return a problem per question of a split; the ``chosen`` instructions take turns.

    The answer is the instruction's name.
    """
    file = Path(shipped("models/hh-questions"), f"{split}.jsonl")
    problems = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        instruction = chosen[number % len(chosen)]
        question = instruction.append_to(json.loads(line)["question"])
        problems.append({"question": question, "answer": instruction.name})
    return problems


def load_problems(settings: Settings, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on, and ``held_out`` others.

    ``dataset`` is ``sums``, ``instructions``, a JSONL file, or a folder or hub id. Of an answer in
    GSM8K's format, only the part after ``####`` is kept.
    """
    if settings.dataset == "sums":
        return sums(20_000, 3, 3, seed), sums(settings.held_out, 3, 3, 1000 + seed)
    if settings.dataset == "instructions":
        test = instruction_problems("test", TRAINED)
        return instruction_problems("train", TRAINED), test[: settings.held_out]
    check_named(settings, dataset="question and answer")
    if settings.dataset.endswith(".jsonl"):
        lines = Path(settings.dataset).read_text(encoding="utf-8").splitlines()
        rows = Dataset.from_list([json.loads(line) for line in lines if line.strip()])
    else:
        rows = load_split(settings.dataset, "train", name=settings.subset)
    check_columns(rows, ["question", "answer"], settings.dataset)
    rows = rows.select_columns(["question", "answer"]).shuffle(seed=0).to_list()
    for row in rows:
        row["answer"] = str(row["answer"]).split("####")[-1].strip().replace(",", "")
    return rows[settings.held_out :], rows[: settings.held_out]
