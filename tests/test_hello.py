"""The first minute: ``make hello`` trains a policy and shows it."""

import re

import pytest

from scripts import hello


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return what six steps print and the page that they write."""
    folder = tmp_path_factory.mktemp("hello")
    capture = pytest.MonkeyPatch()
    lines = []
    capture.setattr(hello.Console, "print", lambda self, *items, **_: lines.extend(items))
    assert hello.main(["--steps", "6", "--output", str(folder / "hello.html")]) == 0
    capture.undo()
    page = (folder / "hello.html").read_text(encoding="utf-8")
    return [line for line in lines if isinstance(line, str)], page


def test_the_policy_learns(shown):
    lines, _ = shown
    sentence = next(line for line in lines if line.startswith("Mean score"))
    before, half_before, after, half_after = map(float, re.findall(r"-?\d+\.\d+", sentence))
    assert after - half_after > before + half_before + 0.3


def test_the_page_has_the_result_the_curves_and_the_texts(shown):
    lines, page = shown
    assert next(line for line in lines if line.startswith("Mean score")) in page
    assert page.count("<svg") == 1 and page.count("<tr") == hello.SHOWN + 1


def test_texts_are_shown_as_text(tmp_path):
    texts = hello.pd.DataFrame([{"opening": "<b>", "before": "[red]", "after": "&"}])
    console = hello.Console(record=True, width=80)
    hello.show(texts, "done", console)
    assert "[red]" in console.export_text()
    curve = hello.pd.DataFrame({"score": [0.0, 1.0], "KL": [0.0, 1.0]})
    hello.write_page(tmp_path / "page.html", texts, "done", curve)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page and "<b>" not in page


def test_too_few_steps_end_in_a_sentence(capsys):
    assert hello.exits.run("hello.py", hello.main, ["--steps", "0"]) == 1
    assert capsys.readouterr().err == "hello.py: --steps is 0; it must be at least 1.\n"
