"""The figures: complete, up to date, and readable without eyes."""

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from rlhf_course.course.presets import ROOT

FIGS = ROOT / "figs"

from dev.figures import draw  # noqa: E402, F401 - registers the figures
from dev.figures.kit import BODY, FIGURES, save  # noqa: E402


def test_every_figure_is_there_and_none_is_left_over():
    assert {path.name for ending in ("svg", "png") for path in FIGS.glob(f"*.{ending}")} == {
        f"{name}.{ending}" for name in FIGURES for ending in ("svg", "png")
    }


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_svg_explains_itself_and_needs_nothing_else(name):
    text = (FIGS / f"{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    _, title, description = FIGURES[name]
    for tag, words in (("title", title), ("desc", description)):
        assert root.find(f"{{http://www.w3.org/2000/svg}}{tag}").text == words
    references = re.findall(r'(?:href="|src="|url\()([^")]*)', text)
    assert references and all(reference.startswith("#") for reference in references)
    assert not re.search(r"<!DOCTYPE|<script|@import|<image|<text", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len({*ids}) and {reference[1:] for reference in references} <= {*ids}


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_drawing_again_changes_nothing_and_no_word_is_smaller_than_the_body(
    name, tmp_path, monkeypatch
):
    drawn = []
    write = Figure.savefig

    def savefig(figure, *arguments, **options):
        drawn.append(figure)
        write(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    save(name, tmp_path, endings=["svg"])
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.svg"]
    committed = (FIGS / f"{name}.svg").read_text(encoding="utf-8")
    new = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    assert new == committed, "stale: run `make figs`"
    texts = drawn[0].findobj(Text)
    small = [text.get_text() for text in texts if text.get_text() and text.get_size() < BODY]
    assert len(texts) > 5 and not small
