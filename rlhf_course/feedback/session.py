"""Ask questions about texts, and store each answer as a line of a file.

A *question* is a dict with ``number``, ``of``, ``openings`` and ``texts``, and usually ``rows``,
the texts' rows in a table. With ``"ask": "worst"``, the person names the worst text, not the best.
A *plan* is a function from the answers so far to the next question, or to None at the end. An
*answer* is its question and ``best``: the place of the chosen text, or ``"equal"``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

import pandas as pd

Plan = Callable[[list[dict]], dict | None]


class Session:
    """Ask the questions of a plan; each answer is on disk before the next question appears.

    A new session continues where its file ends. An undo is a line of the file too.
    """

    def __init__(self, path: str | os.PathLike, plan: Plan) -> None:
        self.path = Path(path)
        self.plan = plan
        self.answers = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for line in self._complete_lines():
            self._apply(json.loads(line))
        self.question = plan(self.answers)

    def _complete_lines(self) -> list[bytes]:
        """Return the file's lines; remove a last line that was not written to its end."""
        with open(self.path, "ab+") as file:
            file.seek(0)
            content = file.read()
            length = content.rfind(b"\n") + 1
            file.truncate(length)
        return content[:length].splitlines()

    def _apply(self, entry: dict) -> None:
        if entry["best"] == "undo":
            del self.answers[-1:]
        else:
            self.answers.append(entry)

    def answer(self, best: int | str) -> None:
        """Record an answer (a text's place, ``"equal"`` or ``"undo"``); plan the next question."""
        if best == "undo":
            entry = {"best": best}
        else:
            entry = {**self.question, "best": best}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._apply(entry)
        self.question = self.plan(self.answers)

    def all_answers(self) -> list[dict]:
        """Return the answers; raise ``RuntimeError`` if questions remain."""
        if self.question:
            raise RuntimeError("Answer all questions above, then run this cell again.")
        return self.answers


def ask(session: Session, answer_by: str | Callable[[dict], int | str]):
    """Ask until the plan ends: by ``"buttons"``, by ``"letters"``, or a function that answers."""
    if answer_by == "buttons":
        return show_buttons(session)
    while session.question:
        if callable(answer_by):
            session.answer(answer_by(session.question))
        else:
            ask_by_letter(session)


def ask_by_letter(session: Session) -> None:
    """Print the question, and record a typed letter; ignore input that is not an answer."""
    question = session.question
    choices = {"=": "equal", "u": "undo"}
    letters = "abcdefgh"
    for place, text in enumerate(question["texts"]):
        print(f"{letters[place]}: {question['openings'][place]} | {text}")
        choices[letters[place]] = place
    prompt = f"{question['number']} of {question['of']}: the {question.get('ask', 'best')}?"
    typed = input(f"{prompt} letter, = or u(ndo) ").strip()
    if typed in choices:
        session.answer(choices[typed])


def show_buttons(session: Session):
    """Return a widget with the question's texts, a button for each, "equal" and "undo"."""
    from ipywidgets import HTML, Button, HBox, Layout, VBox

    box = VBox()

    def button(name: str, best: int | str) -> Button:
        widget = Button(description=name, layout=Layout(width="8em"))
        widget.on_click(lambda pressed: press(best))
        return widget

    def press(best: int | str) -> None:
        session.answer(best)
        draw()

    def draw() -> None:
        question = session.question
        status = f"{len(session.answers)} answers"
        columns = []
        more = [button("undo", "undo")]
        if question:
            status += f" of {question['of']}. Which is the {question.get('ask', 'best')}?"
            columns = [text_with_button(place) for place in range(len(question["texts"]))]
            more.insert(0, button("equal", "equal"))
        box.children = [HTML(status), HBox(columns), HBox(more)]

    def text_with_button(place: int) -> VBox:
        question = session.question
        names = ["left", "right"] if len(question["texts"]) == 2 else list("abcd")
        opening = escape(question["openings"][place])
        text = escape(question["texts"][place])
        return VBox([HTML(f"<b>{opening}</b>{text}"), button(names[place], place)])

    draw()
    return box


def kappa(first: Iterable, second: Iterable) -> float:
    """Return Cohen's κ, the agreement of two lists of answers beyond chance (Cohen 1960)."""
    first = pd.Series(list(first))
    second = pd.Series(list(second))
    agreement = (first == second).mean()
    shares = [answers.value_counts(normalize=True) for answers in (first, second)]
    chance = shares[0].mul(shares[1], fill_value=0).sum()
    if chance == 1:
        return 1.0
    return (agreement - chance) / (1 - chance)


def merge(files: Iterable[str | os.PathLike]) -> pd.DataFrame:
    """Return the answers about pairs in several people's files, one row per answer.

    ``person`` is the file's name, ``pair`` the two texts in alphabetical order, ``best`` the place
    in ``pair`` or ``"equal"``, and ``time`` counts the person's earlier answers about this pair.
    """
    rows = []
    for path in map(Path, files):
        for answer in Session(path, plan=lambda answers: None).answers:
            pair = sorted(answer["texts"])
            best = answer["best"]
            if best != "equal":
                best = pair.index(answer["texts"][best])
            rows.append({"person": path.stem, "pair": tuple(pair), "best": best})
    table = pd.DataFrame(rows, columns=["person", "pair", "best"])
    table["time"] = table.groupby(["person", "pair"]).cumcount()
    return table
