"""Load short questions: synthetic ones, hh-rlhf's, or your own."""

import json
import random
from pathlib import Path

import yaml

from rlhf_course.synthetic.dialogues import make_pairs
from rlhf_course.synthetic.grammar import Pair

FACTS = Path(__file__).parent / "data" / "facts.yaml"
SYNTHETIC = 3000  # dialogues from which the synthetic questions come


def load_questions(source: str | Path) -> tuple[list[str], list[str]]:
    """Return two lists of distinct questions: to train on, and held out.

    ``source`` is ``dialogues`` for synthetic questions, or a folder with ``train.jsonl`` and
    ``test.jsonl``, whose lines have the key ``question``. Raises ``ValueError`` if a file is
    missing or a line has no question.
    """
    if source == "dialogues":
        return synthetic_questions()
    return read_questions(Path(source) / "train.jsonl"), read_questions(Path(source) / "test.jsonl")


def load_answered(source: str | Path) -> list[tuple[str, str]]:
    """Return held-out questions, each with the answer that was preferred in the data."""
    if source == "dialogues":
        _, held_out = synthetic_questions()
        answers = {question_of(pair): pair.chosen.strip() for pair in synthetic_pairs()}
        return [(question, answers[question]) for question in held_out]
    lines = (Path(source) / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["question"], row["answer"]) for row in rows if row.get("answer")]


def synthetic_pairs() -> list[Pair]:
    """Return the synthetic dialogues."""
    return make_pairs(SYNTHETIC, seed=0)


def question_of(pair: Pair) -> str:
    """Return the question of a synthetic dialogue with one turn."""
    return pair.prompt.partition("Human: ")[2].partition("\n\nAssistant:")[0].strip()


def synthetic_questions() -> tuple[list[str], list[str]]:
    """Return distinct synthetic questions: four fifths to train on, the others held out."""
    distinct = list(dict.fromkeys(question_of(pair) for pair in synthetic_pairs()))
    border = len(distinct) * 4 // 5
    return distinct[:border], distinct[border:]


def read_questions(file: Path) -> list[str]:
    """Return the distinct questions of a JSONL file."""
    if not file.exists():
        raise ValueError(f"There is no file {file}; a folder of questions has it.")
    questions = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not row.get("question"):
            raise ValueError(f"Line {number} of {file} has no question.")
        questions.append(row["question"])
    return list(dict.fromkeys(questions))


def ask_sums(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return questions about sums of two numbers below 50, each with its answer."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        first = generator.randrange(50)
        second = generator.randrange(50)
        rows.append((f"What is {first} + {second}?", str(first + second)))
    return rows


def ask_facts(count: int = 100) -> list[tuple[str, str]]:
    """Return ``count`` questions of facts.yaml, each with its answer; all kinds take part."""
    kinds = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    rows = []
    for kind in kinds:
        for subject, answer in kind["facts"].items():
            rows.append((kind["question"].format(subject), answer))
    return random.Random(0).sample(rows, min(count, len(rows)))
