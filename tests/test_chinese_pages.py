"""The Chinese course: every translation keeps what its message has, and follows its source."""

import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
for package in ("polib", "sphinx", "myst_nb"):
    pytest.importorskip(package, reason="make site installs docs/requirements.txt")

import polib  # noqa: E402
from bs4 import BeautifulSoup  # noqa: E402

from docs._ext import (  # noqa: E402
    catalog,
    compare,
    editions,
    exercise_messages,
    figures,
    languages,
    messages,
)

NAMES = [catalog.page_name(path) for path in catalog.po_files()]
NOTEBOOKS = [name for name in NAMES if name.startswith("notebooks/")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "source"
    messages.collect_sources(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_translations_keep_numbers_formulas_code_links_and_terms(name):
    translations = catalog.finished(catalog.po_path(name))
    wrong = [compare.problems(message, text) for message, text in translations.items()]
    assert [problem for problem in wrong if problem] == []


WRONG = {
    ("A loss of 0.5", "损失为 0.6"): "number '0.5' is missing",
    ("Let $x$ be 1", "令 $y$ 为 1"): "formula '$x$' is missing",
    ("Run `make po`", "运行 `make`"): "code '`make po`' is missing",
    ("See [it](a.md)", "见[此](b.md)"): "link 'a.md' is missing",
    ("{{01.a:.1f}} now", "现在 {{01.b:.1f}}"): "placeholder '{{01.a:.1f}}' is missing",
    ("In May 2024", "2024 年 6 月"): "number '5' is missing",
    ("By arXiv:1706.03741", "见 arXiv:1706.0374"): "number '1706.03741' is missing",
    ("See {term}`GAE`", "见{term}`优势`"): "term 'termGAE' is missing",
    ("the reward model", "奖励的模型"): "'reward model' should be 奖励模型",
    ("Look: **it** works", "看，**它。**成了"): "edge of bold",
}


@pytest.mark.parametrize(("message", "translation"), WRONG)
def test_a_wrong_translation_is_found(message, translation):
    problems = compare.problems(message, translation)
    assert any(WRONG[message, translation] in problem for problem in problems)


def test_a_right_translation_has_no_problem():
    assert compare.problems("A {term}`GAE` of 3", "3 的{term}`优势估计 <GAE>`") == []


@pytest.mark.parametrize("name", sorted({*NAMES} - {"site", "exercises", "figures"}))
def test_every_message_stands_in_its_source(name, sources):
    page = next(sources.glob(f"{name}.[mi]*"))
    text = messages.source_text(page)
    expected = catalog.messages_of(name)
    stored = polib.pofile(str(catalog.po_path(name))).metadata["X-Source"]
    assert stored == messages.text_hash(text), "the English text changed: run make po"
    line = squeezed(text)
    assert [m for m in expected if squeezed(m) not in line] == [], "run make po"
    if name in (*NOTEBOOKS, "README"):
        marked = squeezed(editions.translated(text, {m: f"〖{m}〗" for m in expected}))
        assert [m for m in expected if f"〖{squeezed(m)}〗" not in marked] == []


def squeezed(text: str) -> str:
    """Markdown as one line, without the marks of quotations, and without escapes of bars."""
    return re.sub(r"[\s>]+", " ", text.replace(r"\|", "|"))


def test_the_readme_is_that_of_its_translations():
    written = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert written == editions.readme_in_chinese(), "run make zh"


def code_of(cell: dict) -> dict:
    """A cell without what is translated: figures, and a stub's docstring."""
    outputs = [x for x in cell["outputs"] if "image/svg+xml" not in x.get("data", {})]
    if "exercise" not in cell["metadata"]:
        return cell | {"outputs": outputs}
    return cell | {
        "outputs": outputs,
        "source": re.sub(r'""".+?"""', "", "".join(cell["source"]), flags=re.S),
    }


@pytest.mark.parametrize("name", ["exercises", "figures"])
def test_words_of_checks_and_figures_are_those_of_today(name):
    module = {"exercises": exercise_messages, "figures": figures}[name]
    assert catalog.messages_of(name) == module.messages(), "run make po"


def test_figures_are_drawn_with_their_translations(tmp_path):
    figures.draw(tmp_path, catalog.catalog("figures"))
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text("utf-8") for path in ROOT.glob("figs/zh/*")}
    assert drawn == kept, "run make zh"
    assert "策略</text>" in drawn["ppo_step.svg"]


def test_sentences_of_check_are_translated_and_values_stay(tmp_path, monkeypatch):
    from checks.languages import WORDS, say

    known = catalog.catalog("exercises")
    (tmp_path / "messages.json").write_text(json.dumps(known), "utf-8")
    monkeypatch.chdir(tmp_path)
    values = "first", "[0.5, 1.0]", "'THE END. The sum'", ""
    templates = [text for text in catalog.messages_of("exercises") if "{0}" in text]
    assert len(templates) > 40
    for text in templates:
        if not any(part in text for part in WORDS):
            assert say(text.format(*values)) == known[text].format(*values)
    both = "Changing `first` does not change your result. You return 0.5; expected 1.0."
    assert say(both) == "改变 `first`，你的结果不变。 你返回 0.5，应为 1.0。"
    both = "Your result is wrong only where `n` is below `k`. You return 0.5; expected 1.0."
    assert "`n` 小于 `k`" in say(both) and not re.search("[a-z] [a-z]", say(both))
    quoted = "The arguments were text = 'The END. there is no padding'."
    assert say(f"Only the last position is wrong.\n{quoted}").endswith(
        "text = 'The END. there is no padding'。"
    )


def test_check_answers_in_the_language_of_its_folder(tmp_path, monkeypatch, capsys):
    editions.write_notebooks(tmp_path)
    from ex00_hello_rlhf import check
    from ex03_ppo_step_by_step import check as check_step

    def word_reward(text, word):
        return text.lower().count(word.lower())

    def response_mask(ids, lengths, pad):
        return torch.zeros(ids.shape) + 0.5

    def wrong(text):
        return 0

    said = []
    for folder in (ROOT, tmp_path / "notebooks" / "exercises"):
        monkeypatch.chdir(folder)
        for judge, answer in ((check, word_reward), (check_step, response_mask), (check, wrong)):
            judge(answer, 7)
        said.append(re.sub(r"`.*?`", "", capsys.readouterr().out))
    english, chinese = (re.findall(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", text) for text in said)
    assert len(english) > 5 and chinese == [], said[1]


def test_notebooks_share_code_and_their_links_lead_to_files():
    for path in ROOT.glob("notebooks/**/*.ipynb"):
        old = json.loads(path.read_text())
        new = editions.notebook_in_chinese(path)
        pairs = list(zip(old["cells"], new["cells"], strict=True))
        assert all(code_of(a) == code_of(b) for a, b in pairs if a["cell_type"] == "code")
        text = "".join("".join(b["source"]) for _, b in pairs if b["cell_type"] == "markdown")
        links = re.findall(r"\]\(([^)#\s:]+)(?=[)#])", text)
        assert [link for link in links if not (path.parent / link).exists()] == [], path.name


def test_a_chinese_notebook_runs_and_learns(tmp_path):
    papermill = pytest.importorskip("papermill")
    name = "00_hello_rlhf"
    translated = tmp_path / "translated.ipynb"
    ran = tmp_path / "ran.ipynb"
    notebook = editions.notebook_in_chinese(ROOT / f"notebooks/{name}.ipynb")
    translated.write_text(json.dumps(notebook), encoding="utf-8")
    papermill.execute_notebook(
        translated,
        ran,
        parameters={"preset": "tiny", "output_dir": str(tmp_path)},
        cwd=ROOT / "notebooks",
        progress_bar=False,
    )
    card = json.loads((tmp_path / f"run_cards/{name}.json").read_text(encoding="utf-8"))
    assert card["checks"] and all(check["passed"] for check in card["checks"].values())
    assert "奖励" in ran.read_text(encoding="utf-8")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Build a page of two paragraphs whose translations are in a po file of its own."""
    from sphinx.application import Sphinx

    monkeypatch.setattr(catalog, "PO", tmp_path / "po")
    monkeypatch.setattr(catalog, "shared", lambda: {})
    po = messages.updated([], ["Title", "It has 3 cells.", "It is green."], "")
    for entry, text in zip(po, ["标题", "它有 3 格。", "它是绿的。"], strict=True):
        entry.msgstr = text

    def mark(app, name, template, context, doctree) -> None:  # as pages.polish does
        if "body" in context:
            body = BeautifulSoup(context["body"], "html.parser")
            languages.mark_english(app, name, body)
            context["body"] = str(body)

    def build(text: str) -> str:
        (tmp_path / "po").mkdir(exist_ok=True)
        (tmp_path / "po" / "page.po").write_text(str(po), encoding="utf-8")
        (tmp_path / "page.md").write_text(text)
        languages.compile_for_sphinx(tmp_path / "locale")
        settings = {"extensions": ["myst_nb", "docs._ext.languages"], "language": "zh_CN"}
        settings |= {"master_doc": "page", "html_theme": "basic", "gettext_auto_build": False}
        settings |= {"locale_dirs": [str(tmp_path / "locale")], "exclude_patterns": ["html"]}
        app = Sphinx(
            srcdir=tmp_path,
            confdir=None,
            outdir=tmp_path / "html",
            doctreedir=tmp_path / "trees",
            buildername="html",
            confoverrides=settings,
            status=None,
            freshenv=True,
        )
        app.connect("html-page-context", mark)
        app.build()
        return (tmp_path / "html" / "page.html").read_text(encoding="utf-8")

    return build, po


def test_an_edited_sentence_shows_in_english_and_is_counted(small):
    page = small[0]("# Title\n\nIt has 3\ncells.\n\nIt is green.\n")
    assert "它有 3 格。" in page and "它是绿的。" in page and "untranslated-count" not in page
    page = small[0]("# Title\n\nIt has 3\ncells.\n\nIt is quite green.\n")
    assert "它有 3 格。" in page and "It is quite green." in page and "它是绿的" not in page
    assert 'class="untranslated-count">1 ' in page


def test_new_numbers_are_carried_over_and_new_words_are_fuzzy(small):
    new = messages.updated(small[1], ["It has 4 cells.", "It is quite green.", "New."], "")
    assert [e.msgstr for e in new] == ["它有 4 格。", "它是绿的。", ""]
    assert [catalog.is_done(entry) for entry in new] == [True, False, False]
