"""The page over runs, the executed notebooks' pages, and what the runner says of the time."""

import io
import json
import re
import sys
import time

import nbformat
import progress
import pytest
import report
import run_notebooks
from bs4 import BeautifulSoup
from notebook_html import page
from progress import Progress

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime import command

MEASURED = sorted((ROOT / "figs/measured").glob("0*.json"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.ipynb"))
CARD = {
    "notebook": "09_x",
    "preset": "tiny",
    "versions": {"python": "3.11", "torch": "2"},
    "wall_s": 61,
    "peak_rss_mb": 1024,
    "peak_cuda_mb": 0,
    "metrics": {"score_before": 1, "score_after": 2.5, "lost": None},
    "checks": {
        "score rises": {"passed": True, "value": 1.5, "want": "> 1"},
        "<script>alert(1)</script>": {"passed": False, "value": None, "want": "a & b"},
    },
    "curves": {
        "history": {
            "kl": [0.0, 3.0, 1.0],
            "score": [1, None, 2],
            "flat": [1, 1, 1],
            "time/ppo": [1, 2, 3],
        },
        "lambda": {"critic": ["a", "a", "b", "b"], "λ": [0, 1, 0, 1], "bias": [1, 2, 3, 4]},
        "probes": {"probe": ["<b>empty</b>", "long"], "share": [0.5, 1]},
    },
}


def put(folder, name: str, card) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(
        card if isinstance(card, str) else json.dumps(card), encoding="utf-8"
    )


def asks(soup: BeautifulSoup) -> list[str]:
    """Whatever makes a browser load something that is not in the page."""
    found = [tag["src"] for tag in soup.select("[src]") if not tag["src"].startswith("data:")]
    found += [tag["href"] for tag in soup.select("link[href]")]
    styles = " ".join(tag.text for tag in soup.select("style")) + " ".join(
        tag["style"] for tag in soup.select("[style]")
    )
    return found + re.findall(r"@import[^;]*|url\((?!\s*['\"]?(?:data:|#))[^)]*\)", styles)


def run(*arguments) -> int:
    return command.run("report.py", report.main, [*map(str, arguments)])


def test_a_run_shows_its_checks_numbers_and_curves(tmp_path):
    put(tmp_path / "run_cards", "09_x", CARD)
    (tmp_path / "html").mkdir()
    (tmp_path / "html/09_x.html").touch()
    assert [entry["passed"] for entry in report.write([tmp_path], tmp_path / "index.html")] == [1]
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    soup = BeautifulSoup(text, "html.parser")
    assert asks(soup) == [] and soup.title.text and not soup.select("script, b")
    rows = [[cell.text for cell in row.select("td")] for row in soup.select("section tr")]
    assert ["score rises", "passed", "1.5", "> 1"] in rows
    assert ["<script>alert(1)</script>", "failed", "–", "a & b"] in rows and [
        "<b>empty</b>",
        "0.5",
    ] in rows
    assert soup.select_one("section a")["href"] == "html/09_x.html"
    for said in ("score 1.00 → 2.50", "61 s, 1.0 GB", "1 of 2 checks passed", "torch 2"):
        assert said in " ".join(soup.text.split())
    curves = {
        svg["aria-label"]: [line["points"] for line in svg.select("polyline")]
        for svg in soup.select("svg")
    }
    assert curves == {
        "kl, history: 0 → 1": ["0.0,48.0 80.0,0.0 160.0,32.0"],
        "score, history: 1 → 2": ["0.0,48.0 160.0,0.0"],
        "bias, lambda over λ: 1 … 4": ["0.0,48.0 160.0,32.0", "0.0,16.0 160.0,0.0"],
    }


def test_the_measured_cards_make_a_whole_page(tmp_path):
    entries = report.write(MEASURED, tmp_path / "page.html")
    soup = BeautifulSoup((tmp_path / "page.html").read_text(encoding="utf-8"), "html.parser")
    checks = {
        name for path in MEASURED for name in json.loads(path.read_text(encoding="utf-8"))["checks"]
    }
    assert checks <= {cell.text for cell in soup.select("section td:first-child")}
    assert len(entries) == len(MEASURED) == len(soup.select("section")) and asks(soup) == []
    assert not any("problem" in entry for entry in entries) and len(soup.select("svg")) > 50


def test_a_class_is_a_table_of_who_passed_what(tmp_path, capsys):
    put(tmp_path / "class/ann", "09_x", CARD)
    put(tmp_path / "class/ann", "10_y", CARD | {"checks": {}})
    put(tmp_path / "class/bo/build/run_cards", "09_x", '{"checks":')
    assert (
        run(tmp_path / "class/ann", tmp_path / "class/bo", "--output", tmp_path / "class.html") == 1
    )
    soup = BeautifulSoup((tmp_path / "class.html").read_text(encoding="utf-8"), "html.parser")
    rows = [[cell.text.strip() for cell in row.select("th, td")] for row in soup.table.select("tr")]
    assert rows == [["who", "09 x", "10 y"], ["ann", "1 of 2", "all 0"], ["bo", "no result", "–"]]
    words = [section.text for section in soup.select("section")]
    assert len(words) == 2 and "a & b" in words[0] and "is damaged, or not in JSON" in words[1]
    assert "not passed: <script>" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage", ['{"x": 1}', '{"checks": {"a": 1}}', '{"checks": {}, "curves": {"a": [1]}}']
)
def test_what_is_no_run_card_is_said(damage, tmp_path, capsys):
    put(tmp_path, "09_x", damage)
    assert run(tmp_path / "09_x.json", "--output", tmp_path / "page.html") == 1
    said = f"{tmp_path / '09_x.json'} is no run card"
    assert said in capsys.readouterr().out and said in (tmp_path / "page.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("place", "message"), [("none", "There is no "), (".", "holds no run card")]
)
def test_no_cards_are_a_sentence(place, message, tmp_path, capsys):
    assert run(tmp_path / place, "--output", tmp_path / "page.html") == 1
    assert message in capsys.readouterr().err and not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_an_executed_notebook_is_a_page_that_asks_nobody(path):
    notebook = nbformat.read(path, as_version=4)
    soup = BeautifulSoup(page(notebook, path.parent), "html.parser")
    assert asks(soup) == [] and not soup.select("script, merror")
    assert f"# {soup.title.text}\n" in notebook.cells[0].source.replace("`", "") + "\n"
    prose = re.sub(
        r"```.*?```|`[^`]*`",
        "",
        "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"),
    )
    assert len(soup.select("math")) == len(re.findall(r"\$\$.+?\$\$|\$.+?\$", prose, re.S))
    assert all(
        image["alt"].strip() and "No description" not in image["alt"]
        for image in soup.select("img")
    )
    local = [
        tag["href"] for tag in soup.select("a[href]") if not tag["href"].startswith(("http", "#"))
    ]
    assert local and all(link.startswith(ROOT.as_uri()) for link in local)


def test_a_formula_that_cannot_be_set_is_shown_as_it_is():
    cells = [nbformat.v4.new_markdown_cell("# T\n\n$\\left(a$ and $a<b$")]
    soup = BeautifulSoup(page(nbformat.v4.new_notebook(cells=cells), ROOT), "html.parser")
    assert "\\left(a" in soup.main.code.text and soup.select_one("math mo").text == "<"


def test_a_page_of_somebody_elses_stays(tmp_path, capsys):
    (tmp_path / "index.html").write_text("<title>My page</title>")
    assert (
        command.run(
            "run_notebooks.py", run_notebooks.main, ["--only", "00", "--output", str(tmp_path)]
        )
        == 1
    )
    assert "is not the page over a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when told to."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_follows_this_machine(clock, capsys):
    plan = Progress(["a", "b", "c"], {"a": 60, "b": 120, "c": 120})
    assert plan.left() == 300 and plan.share() == 0
    with plan.at("a"):
        clock[0] += 150  # and not 60
    assert plan.left() == 240 * (30 + 150) / (30 + 60)
    with plan.at("b"):
        clock[0] += 60
        assert plan.left() == 420 and plan.share() == 210 / 630
        clock[0] += 10_000
        assert plan.left() == 240  # c
    said = ["[1/3] a · about 5 min left", "[2/3] b · about 8 min left"]
    assert capsys.readouterr().out.splitlines() == said


def test_nothing_is_said_of_time_that_nobody_measured(clock):
    plan = Progress(["a", "b"], {"a": 60})
    with plan.at("a"):
        assert plan.line() == "[1/2] a" and plan.share() == 0
        clock[0] += 5
    with plan.at("b"):
        assert plan.line() == "[2/2] b" and plan.share() == 0.5


def test_two_at_a_time_take_half_of_all_but_no_less_than_the_longest(clock, capsys):
    plan = Progress(["a", "b", "c"], {"a": 200, "b": 100, "c": 40}, jobs=2)
    assert plan.left() == 1.4 * 200
    with plan.at("a"), plan.at("b"):
        clock[0] += 140
        assert plan.left() == 1.4 * 200 - 140 and plan.running() == ["a", "b"]
    assert capsys.readouterr().out.splitlines()[1] == "[2/3] a, b · about 5 min left"


def test_a_terminal_shows_one_bar_and_leaves_nothing(monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    plan = Progress(["a"], {"a": 200})
    with pytest.raises(KeyboardInterrupt), plan.shown(), plan.at("a"):
        while terminal.getvalue().count("\r") < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt
    said = terminal.getvalue()
    assert (
        "[1/1] a · about 3 min left |" in said
        and "\n" not in said
        and not said.rsplit("\r")[-1].strip()
    )
    assert capsys.readouterr().out == ""
