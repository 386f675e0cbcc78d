"""Notebook 09: no answer is lost, a session continues, and agreement is Cohen's."""

import ast
import json
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from rlhf_course.course.presets import ROOT

NAMES = {"Session", "ask", "show_buttons", "kappa", "merge"}
IMPORTS = "import json, os\nfrom html import escape\nfrom pathlib import Path\n"
CHILD = """
import sys
def plan(answers):
    return {"number": len(answers) + 1, "texts": ["a", "b"]}
session = Session(sys.argv[1], plan)
while True:
    number = session.question["number"]
    session.answer(number % 2)
    print(number, flush=True)
"""


def sources() -> dict[str, str]:
    """The notebook's functions and classes that answers pass through, by name."""
    notebook = json.loads((ROOT / "notebooks/09_your_own_feedback.ipynb").read_text("utf-8"))
    code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    parts = [(cell, part) for cell in code for part in ast.parse(cell).body]
    found = {p.name: ast.get_source_segment(c, p) for c, p in parts if hasattr(p, "name")}
    return {name: found[name] for name in NAMES}


@pytest.fixture(scope="module")
def notebook():
    found = {}
    exec(IMPORTS + "import pandas as pd\n" + "\n\n".join(sources().values()), found)
    return SimpleNamespace(**{name: found[name] for name in NAMES})


def plan_of(count, k=2):
    """A plan of `count` questions about k texts."""

    def plan(answers):
        number = len(answers) + 1
        texts = [f"{number}{letter}" for letter in "abcd"[:k]]
        question = {"number": number, "of": count, "texts": texts, "openings": ["…"] * k}
        return question if number <= count else None

    return plan


def test_a_process_killed_at_ten_random_moments_loses_no_answer(tmp_path, notebook):
    file, script, dice = tmp_path / "answers.jsonl", tmp_path / "child.py", random.Random(0)
    script.write_text(IMPORTS + sources()["Session"] + CHILD, encoding="utf-8")
    told, heard = 0, []
    for _ in range(10):
        child = subprocess.Popen(
            [sys.executable, str(script), str(file)], stdout=subprocess.PIPE, text=True
        )
        first = int(child.stdout.readline())
        assert first == told + 1, "a new start does not go on where the file ends"
        time.sleep(dice.uniform(0, 0.05))
        child.kill()
        heard = [first, *map(int, child.stdout.read().split())]
        child.wait()
        answers = notebook.Session(file, plan_of(0)).answers
        told = len(answers)
        assert [a["number"] for a in answers] == [*range(1, told + 1)]
        assert told >= heard[-1]
        assert all(a["best"] == a["number"] % 2 for a in answers)


def test_a_line_that_broke_off_is_asked_again(tmp_path, notebook):
    file = tmp_path / "answers.jsonl"
    notebook.ask(session := notebook.Session(file, plan_of(3)), lambda question: 1)
    assert session.question is None and len(session.answers) == 3
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    again = notebook.Session(file, plan_of(3))
    assert again.question["number"] == 3
    again.answer(1)
    assert file.read_bytes() == whole


def test_typed_letters_and_undo(tmp_path, notebook, monkeypatch):
    typed = iter(["a", "u", "b", "nonsense", "=", "d"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    session = notebook.Session(tmp_path / "answers.jsonl", plan_of(3, k=4))
    notebook.ask(session, "letters")
    assert [a["best"] for a in session.answers] == [1, "equal", 3]
    assert notebook.Session(session.path, plan_of(3)).answers == session.answers


def test_buttons(tmp_path, notebook):
    session = notebook.Session(tmp_path / "answers.jsonl", plan_of(2))
    box = notebook.ask(session, "buttons")

    def press(name):
        sides, more = (part.children for part in box.children[1:])
        buttons = [*(side.children[1] for side in sides), *more]
        {button.description: button for button in buttons}[name].click()

    for name in ("right", "undo", "left", "equal"):
        press(name)
    assert [a["best"] for a in session.answers] == [0, "equal"]
    press("undo")
    assert [a["best"] for a in session.answers] == [0]


def test_kappa_by_hand(notebook):
    first, second = [0] * 5 + [1] * 5, [0, 0, 0, 0, 1, 0, 0, 1, 1, 1]
    # Equal in 7 of 10; by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5: (0.7 − 0.5) / (1 − 0.5).
    assert notebook.kappa(first, second) == pytest.approx(0.4)
    assert notebook.kappa(first, first) == 1


def test_merged_files_compare_texts_and_not_sides(tmp_path, notebook):
    for name, texts, best in (("ann", ["x", "y"], 0), ("bob", ["y", "x"], 1)):
        session = notebook.Session(tmp_path / f"{name}.jsonl", lambda answers: None)
        session.question = {"texts": texts}
        session.answer(best)
    table = notebook.merge(tmp_path.glob("*.jsonl"))
    assert len(table) == 2 and table["best"].nunique() == 1
