"""Compute the numbers in quiz.yaml, and write quiz.md.

python docs/_ext/quiz.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from rlhf_course.ppo.algorithm import AdaptiveKLController
from rlhf_course.rewards import pairwise_loss

SOURCE = Path(__file__).parents[1].joinpath("quiz.yaml")
PAGE = Path(__file__).parents[1].joinpath("quiz.md")
INTRODUCTION = """# Quiz

Notebooks 00 to 09 have five questions or more each. Open the answer that you would give. The text
inside shows whether the answer is correct, and why.
"""


def sigmoid(x: float) -> float:
    """Return the logistic function of x."""
    return torch.tensor(float(x)).sigmoid().item()


def numbers() -> dict[str, float]:
    """Return the values of {name} placeholders in the questions."""
    before = 0.2
    controller = AdaptiveKLController(before, target=6, horizon=10_000)
    for _ in range(194):
        controller.update(2.0, 128)
    one_step = AdaptiveKLController(before, target=6, horizon=10_000)
    one_step.update(2.0, 128)
    return {
        "ln2": pairwise_loss(torch.zeros(1), torch.zeros(1)).item(),
        "half": sigmoid(0),
        "sigmoid1": sigmoid(1),
        "sigmoid2": sigmoid(2),
        "p5": sigmoid(5),
        "p10": sigmoid(10),
        "beta": controller.value,
        "shrink": 1 - one_step.value / before,
        "ci": 1.96 / math.sqrt(1024),
        "kl_half": math.log((1 - 0) / (1 - 0.5)),
        "smallest": 2.0**-24,
        "log4": math.log(4),
        "bon4": math.log(4) - 3 / 4,
        "p_rare": 0.01,
        "dead8": 0.01**8 + 0.99**8,
        "alive8": 1 - 0.01**8 - 0.99**8,
        "lower": 1.2,
        "higher": 1.28,
    }


def questions() -> Iterator[tuple[str, str, list[tuple[str, str, bool]]]]:
    """Yield notebook, question, and displayed answers: (text, explanation, whether correct)."""
    values = numbers()
    for notebook, entries in yaml.safe_load(SOURCE.read_text(encoding="utf-8")).items():
        for number, entry in enumerate(entries):
            answers = [(wrong["answer"], wrong["why"], False) for wrong in entry["wrong"]]
            answers.insert((number + int(notebook[:2])) % 3, (entry["right"], entry["why"], True))
            yield (
                notebook,
                entry["question"].format(**values),
                [
                    (str(text).format(**values), why.format(**values), is_right)
                    for text, why, is_right in answers
                ],
            )


def quiz_page() -> str:
    """Return quiz.md's text."""
    lines = [INTRODUCTION]
    last = None
    for notebook, question, answers in questions():
        if notebook != last:
            lines.append(f"## Notebook [{notebook[:2]}](../notebooks/{notebook}.ipynb)\n")
            number = 0
            last = notebook
        number += 1
        lines.append(f"**{number}.** {question}\n")
        for text, why, right in answers:
            verdict = "Right." if right else "No."
            lines.append(f"<details><summary>{text}</summary>\n\n{verdict} {why}\n\n</details>\n")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(quiz_page(), encoding="utf-8")
