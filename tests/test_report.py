"""The page over runs, and the pages of executed notebooks: what they show, and what they drop."""

import json
import re
import shutil
from importlib.util import find_spec

import nbformat
import pandas
import pytest
from bs4 import BeautifulSoup

from rlhf_course.command_line import exits, run_report
from rlhf_course.command_line.notebook_html import page
from rlhf_course.course.presets import ROOT
from scripts import report

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
        "history": {"kl": [0.0, 3.0, 1.0], "score": [1, None, 2], "flat": [1, 1, 1]}
        | {"time/ppo": [1, 2, 3]},
        "lambda": {"λ": [0, 1, 4], "bias": [1, 2, 4]},
        "probes": {"probe": ["<b>empty</b>", "long"], "share": [0.5, 1]},
    },
}


def put(folder, name: str, card) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = card if isinstance(card, str) else json.dumps(card)
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def read(page) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def asks(soup: BeautifulSoup) -> list[str]:
    """Whatever makes a browser load something that is not in the page."""
    found = [tag["src"] for tag in soup.select("[src]") if not tag["src"].startswith("data:")]
    found += [tag["href"] for tag in soup.select("link[href]")]
    styles = [tag.text for tag in soup.select("style")]
    styles = " ".join(styles + [tag["style"] for tag in soup.select("[style]")])
    return found + re.findall(r"@import[^;]*|url\((?!\s*['\"]?(?:data:|#))[^)]*\)", styles)


def test_the_headline_has_the_objective_beside_the_score():
    assert run_report.headline(CARD) == "score 1.00 → 2.50"
    objective = {"objective_before": 1, "objective_after": 1.25}
    card = CARD | {"metrics": CARD["metrics"] | objective}
    assert run_report.headline(card) == "score 1.00 → 2.50 (objective 1.00 → 1.25)"
    assert run_report.headline(CARD | {"metrics": objective}) == "objective 1.00 → 1.25"


def run(*arguments) -> int:
    return exits.run("report.py", report.main, [*map(str, arguments)])


def test_a_run_shows_its_checks_numbers_and_curves(tmp_path):
    put(tmp_path / "run_cards", "09_x", CARD)
    (tmp_path / "html").mkdir()
    (tmp_path / "html/09_x.html").touch()
    entries = run_report.write([tmp_path], tmp_path / "index.html")
    assert [entry["passed"] for entry in entries] == [1]
    soup = read(tmp_path / "index.html")
    assert asks(soup) == [] and soup.title.text and not soup.select("script, b")
    rows = [[cell.text for cell in row.select("td")] for row in soup.select("section tr")]
    assert ["score rises", "passed", "1.5", "> 1"] in rows
    assert ["<script>alert(1)</script>", "failed", "–", "a & b"] in rows
    assert ["<b>empty</b>", "0.5"] in rows
    assert soup.select_one("section a")["href"] == "./html/09_x.html"
    for said in ("score 1.00 → 2.50", "61 s", "1.0 GB", "1 of 2 checks passed", "torch 2"):
        assert said in " ".join(soup.text.split())
    curves = {
        svg["aria-label"]: [line["points"] for line in svg.select("polyline")]
        for svg in soup.select("svg")
    }
    assert curves == {
        "kl, history: 0 → 1": ["0.0,48.0 80.0,0.0 160.0,32.0"],
        "score, history: 1 → 2": ["0.0,48.0 160.0,0.0"],
        "bias, lambda over λ: 1 → 4": ["0.0,48.0 40.0,32.0 160.0,0.0"],
    }


def test_an_example_stands_on_the_first_screen(tmp_path):
    texts = {"before": "A <dull> film.", "after": "A wonderful film."}
    put(tmp_path / "run_cards", "09_x", CARD | {"texts": texts})
    run_report.write([tmp_path], tmp_path / "index.html")
    [cell] = read(tmp_path / "index.html").select(".summary .texts")
    assert [part.text for part in cell.select("p")] == ["A <dull> film.", "A wonderful film."]


def test_the_measured_cards_make_a_whole_page(tmp_path):
    entries = run_report.write(MEASURED, tmp_path / "page.html")
    soup = read(tmp_path / "page.html")
    assert len(entries) == len(MEASURED) == len(soup.select("section")) and asks(soup) == []
    assert not any(entry["problem"] for entry in entries) and len(soup.select("svg")) > 50


def table(page) -> list[list[str]]:
    rows = read(page).table.select("tr")
    return [[cell.text.strip() for cell in row.select("th, td")] for row in rows]


def test_a_class_is_a_table_of_who_passed_what(tmp_path, capsys):
    put(tmp_path / "class/ann", "09_x", CARD)
    put(tmp_path / "class/ann", "10_y", CARD | {"checks": {}})  # which promises nothing
    put(tmp_path / "class/bo/build/run_cards", "09_x", '{"checks":')
    odd = tmp_path / "javascript:alert(1) #2"
    put(odd / "run_cards", "09_x", CARD)
    (odd / "html").mkdir()
    (odd / "html/09_x.html").touch()
    assert run_report.read(odd / "run_cards/09_x.json", tmp_path / "x")["link"] == (
        "./javascript%3Aalert%281%29%20%232/html/09_x.html"
    )
    target = tmp_path / "class.html"
    assert run(tmp_path / "class/ann", tmp_path / "class/bo", "--output", target) == 1
    wanted = [["who", "09 x", "10 y"], ["ann", "1 of 2", "failed"], ["bo", "failed", "–"]]
    assert table(target) == wanted
    said = capsys.readouterr().err
    assert "ann: 09_x did not pass. <script>alert(1)</script>" in said
    assert "ann: 10_y did not pass. The run card has no checks." in said
    assert "bo: 09_x did not pass. " in said and "is damaged or not JSON" in said


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        {"checks": {"a": 1}},
        {"checks": {"a": {"passed": True}}, "curves": {"a": [1]}},
        CARD | {"wall_s": "long"},
        CARD | {"metrics": [1]},
    ],
)
def test_a_bad_card_is_a_row(bad, tmp_path):
    """The others are still shown."""
    put(tmp_path / "run_cards", "09_x", CARD)
    put(tmp_path / "run_cards", "08_bad", bad)
    first, second = run_report.write([tmp_path], tmp_path / "index.html")
    assert "08_bad.json" in first["problem"] and not second["problem"]
    rows = table(tmp_path / "index.html")
    assert [row[:2] for row in rows[1:]] == [["08 bad", "failed"], ["09 x", "1 of 2"]]


def test_the_runners_own_result_decides(tmp_path):
    """A notebook that failed after its card was written, and one that wrote none."""
    fine = CARD | {"checks": {"runs": {"passed": True, "value": 1, "want": "1"}}}
    for name in ("07_good", "08_late"):
        put(tmp_path / "run_cards", name, fine)
    run_report.add_results(tmp_path, {"07_good": "", "09_early": "cell 3: KeyError: 'x'"})
    run_report.add_results(tmp_path, {"08_late": "cell 40: ValueError: too late"})
    run_report.write([tmp_path], tmp_path / "index.html")
    rows = table(tmp_path / "index.html")
    assert [row[1] for row in rows[1:]] == ["all 1", "failed", "failed"]
    text = read(tmp_path / "index.html").text
    assert "cell 3: KeyError" in text and "too late" in text


@pytest.mark.parametrize("place", ["none", "."])
def test_no_cards_are_a_sentence(place, tmp_path, capsys):
    assert run(tmp_path / place, "--output", tmp_path / "page.html") == 1
    assert "has no run card" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_card_named_as_the_output_stays_a_card(tmp_path, capsys):
    metrics = {"score_before": None, "score_after": 1.0}  # NaN in a run
    put(tmp_path, "09_x", CARD | {"metrics": metrics})
    before = (tmp_path / "09_x.json").read_bytes()
    assert run(tmp_path, "--output", tmp_path / "09_x.json") == 1
    assert "is not a run report" in capsys.readouterr().err
    assert (tmp_path / "09_x.json").read_bytes() == before
    assert run(tmp_path, "--output", tmp_path / "page.html") == 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_an_executed_notebook_is_a_page_that_asks_nobody(path):
    notebook = nbformat.read(path, as_version=4)
    soup = BeautifulSoup(page(notebook, path.parent), "html.parser")
    assert asks(soup) == [] and not soup.select("script, merror")
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    prose = re.sub(r"```.*?```|`[^`]*`", "", "\n\n".join(cells), flags=re.S)
    assert len(soup.select("math")) == len(re.findall(r"\$\$.+?\$\$|\$.+?\$", prose, re.S))
    for image in soup.select("img"):
        assert image["alt"].strip() and "No description" not in image["alt"]
    links = [tag["href"] for tag in soup.select("a[href]")]
    local = [link for link in links if not link.startswith(("http", "#"))]
    assert local and all(link.startswith(ROOT.as_uri()) for link in local)


def test_a_formula_that_cannot_be_set_is_shown_as_it_is():
    cells = [nbformat.v4.new_markdown_cell("# T\n\n$\\left(a$ and $a<b$")]
    soup = BeautifulSoup(page(nbformat.v4.new_notebook(cells=cells), ROOT), "html.parser")
    assert "\\left(a" in soup.main.code.text and soup.select_one("math mo").text == "<"


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload='alert(1)'><script>alert(1)</script></svg>",
    "<a href=' java\nscript:alert(1)'>read more</a>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe><form action=https://evil.example>",
    "<details open ontoggle=alert(1)><base href=https://evil.example>",
    (META := "<meta http-equiv=REFRESH content='0;url=https://evil.example'>"),
    f"<!-->{META}-->",
    f"<!--->{META}-->",
    f"<!-- --!>{META}-->",
    f"<svg><![CDATA[><style>{META}</style>]]></svg>",
    f"<?php ?>{META}?><!x {META}>",
    f"<svg><style>{META}</style></svg><style></style/>{META}</style>",
]


def test_a_hostile_dataset_runs_nothing_in_a_page(tmp_path):
    """Its rows are in two tables of pandas (a styled one escapes nothing) and in pictures."""
    rows = pandas.DataFrame({"response": HOSTILE})
    data = [{"text/html": rows.to_html()}, {"text/html": rows.style.to_html()}]
    data += [{"image/svg+xml": f"<svg>{row}</svg>"} for row in HOSTILE]
    data += [{"text/markdown": row} for row in HOSTILE]
    outputs = [nbformat.v4.new_output("display_data", data=each) for each in data]
    cells = [nbformat.v4.new_markdown_cell("# T"), nbformat.v4.new_code_cell("1", outputs=outputs)]
    text = page(nbformat.v4.new_notebook(cells=cells), ROOT)
    soup = BeautifulSoup(text, "html.parser")
    policy = soup.head.select_one("[http-equiv=Content-Security-Policy]")["content"]
    assert "default-src 'none'" in policy and "script-src" not in policy
    assert len(re.findall("http-equiv", text, re.I)) == 1 and "read more" in soup.text
    if not (find_spec("playwright") and shutil.which("chromium")):
        pytest.skip("whether a browser obeys the policy needs playwright and Chromium")
    from playwright.sync_api import sync_playwright

    (file := tmp_path / "page.html").write_text(text, encoding="utf-8")
    with sync_playwright() as playwright:
        how = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        tab, seen = playwright.chromium.launch(**how).new_page(), []
        tab.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
        tab.goto(file.as_uri())
        for link in tab.get_by_text("read more").all():
            link.dispatch_event("click")
        tab.wait_for_timeout(500)
        assert seen == [] and tab.url == file.as_uri()
