"""A handout holds no solution, and what students hand in is graded."""

import csv
import importlib
import json
import shutil
import subprocess
import sys
from zipfile import ZipFile

import nbformat
import pytest

from dev.exercises import make_handout
from dev.exercises.make_exercises import SETS, load, notebook, solution_source
from scripts import grade

frozen = importlib.import_module("frozen")
EXERCISES = {
    (found.notebook, key): exercise
    for found in map(load, SETS)
    for key, exercise in found.exercises.items()
}
CODE = {  # what the third student writes
    "word_reward": "def word_reward(text, word):\n    while True:\n        pass",
    "response_logprobs": "import os\nos._exit(3)\ndef response_logprobs(*arguments): return 0",
    "mean_kl": "def mean_kl(logprobs, ref_logprobs):\n    return (1",
    "balance": "def balance(longer_won):\n    longer_won.clear()\n    return []",
}


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "handout"
    make_handout.main(["--output", str(folder)])
    return folder


def test_a_handout_holds_no_solution(handout):
    files = [path for path in handout.rglob("*") if path.is_file()]
    with ZipFile(handout.with_suffix(".zip")) as archive:
        names = {name for name in archive.namelist() if name[-1] != "/"}
    assert names == {path.relative_to(handout.parent).as_posix() for path in files}
    assert {path.suffix for path in files} == {".ipynb", ".py", ".json", ".md", ".txt", ""}
    assert not [path.name for path in files if "solved" in path.name or path.name[:2] == "ex"]
    text = "".join(path.read_text("utf-8") for path in files if "checks" not in path.parts)
    for exercise in EXERCISES.values():
        body = solution_source(exercise).partition('"""\n')[2]
        for line in json.dumps(body)[1:-1].split("\\n"):
            line = line.strip()
            assert len(line) < 20 or line not in text.replace("    ", ""), line
        assert not exercise.reply or exercise.reply not in text


@pytest.mark.parametrize("name", EXERCISES, ids=lambda name: name[1])
def test_frozen_checks_accept_what_is_right_and_name_what_is_wrong(handout, name):
    exercise = EXERCISES[name]
    file = handout / "frozen" / f"{name[0]}.json"
    made = frozen.Frozen(json.loads(file.read_text("utf-8"))[name[1]])
    assert len(made.expected(0)[0]) == 20 and made.points == exercise.difficulty
    for answer in (exercise.solution, *exercise.alternatives):
        assert made.judge(answer) is None
    for mistake, (_, *answers) in exercise.mistakes.items():
        for answer in answers:
            assert made.judge(answer).name == mistake


def test_a_student_is_told_what_is_missing(handout, tmp_path, monkeypatch):
    folder = shutil.copytree(handout, tmp_path / "mine")
    nbformat.write(notebook(SETS[0], True)[1], folder / "00_hello_rlhf.ipynb")
    command = [sys.executable, folder / "frozen.py", "00", "09"]
    ran = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ""})
    said = ran.stdout.splitlines()
    assert ran.returncode == 1 and said[0] == "✔ 00_hello_rlhf word_reward"
    assert said[-1] == "  09_your_own_feedback/by_chance"
    monkeypatch.setattr(frozen, "HERE", folder)
    assert frozen.main(["00"]) == 0


def hand_in(folder, code=None):
    """Write two solved notebooks, with some other code."""
    folder.mkdir(parents=True)
    for name in SETS:
        path, made = notebook(name, True)
        for cell in made.cells:
            exercise = cell.metadata.get("exercise", {"part": "", "id": "/"})
            if exercise["part"] == "answer":
                cell.source = (code or {}).get(exercise["id"].split("/")[1], cell.source)
        if name[2:4] in ("00", "06"):
            nbformat.write(made, folder / path.name.replace("_solved", ""))


def test_grades_cost_one_exercise_each_and_name_the_mistake(tmp_path, capsys):
    hand_in(tmp_path / "in" / "a")
    wrong = "def mean_kl(p, q): return by_row(q - p).mean()\n\ndef by_row(x): return x.sum(-1)"
    hand_in(tmp_path / "in" / "b", {"mean_kl": wrong})
    hand_in(tmp_path / "in" / "c", CODE)
    given = [str(tmp_path / "in"), "--seed", "5000", "--only", "00", "06", "--limit", "3"]
    assert grade.main([*given, "--output", str(tmp_path)]) is None
    assert "a: 13 of 13 points\nb: 12 of 13 points\nc: 7 of 13 points" in capsys.readouterr().out
    with (tmp_path / "grades.csv").open() as file:
        rows = list(csv.DictReader(file))
    mistakes = {(x["student"], x["exercise"][3:].split("/")[1]): x["mistake"] for x in rows}
    assert mistakes["b", "mean_kl"] == "wrong_way_round"
    found = {key: mistakes["c", key] for key in CODE}
    assert list(found.values()) == ["stopped", "stopped", "error", "place"]
    graded = {who: [row for row in rows if row["student"] == who] for who in "abc"}
    grade.page(tmp_path / "grades.html", graded)
    page = (tmp_path / "grades.html").read_text("utf-8")
    assert "<td>wrong way round</td>" in page


def test_gradescope_and_classroom_50_read_one_students_files(tmp_path, monkeypatch):
    hand_in(tmp_path / "in")
    monkeypatch.setenv("SUBMISSION_TAG", "submit/1")
    given = [str(tmp_path / "in"), "--seed", "5000", "--only", "00", "--output", str(tmp_path)]
    for form in ("gradescope", "classroom50"):
        grade.main([*given, "--format", form])
    made = json.loads((tmp_path / "results.json").read_text())
    assert [test["score"] for test in made["tests"]] == [1, 2, 1]
    assert all(set(test) == {"name", "score", "max_score", "output"} for test in made["tests"])
    made = json.loads((tmp_path / "result.json").read_text())
    assert (made["schema"], made["submission"]) == ("classroom50/result/v1", "submit/1")
    assert made["score"] == made["max-score"] == 4 and made["tests"][0]["passed"] is True


def test_seeds_that_students_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--seed is 7; use 1000 or more"):
        grade.main([str(tmp_path), "--seed", "7"])


def test_files_of_students_and_teachers_are_not_replaced(tmp_path):
    hand_in(tmp_path / "in" / "a")
    given = [str(tmp_path / "in"), "--seed", "5000", "--only", "00", "--output"]
    with pytest.raises(ValueError, match="inside HANDED_IN"):
        grade.main([*given, str(tmp_path / "in")])
    (mine := tmp_path / "grades.csv").write_text("name,mark\n")
    with pytest.raises(ValueError, match="was not written by grade.py"):
        grade.main([*given, str(tmp_path)])
    assert mine.read_text() == "name,mark\n"
