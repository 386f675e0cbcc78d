"""The page about the real chat model and the README's examples, against the committed cards."""

import pytest

from docs._ext import real_model

pytestmark = pytest.mark.quick


def test_the_page_and_the_readme_follow_the_cards():
    repeat = "run python docs/_ext/real_model.py"
    assert real_model.PAGE.read_text(encoding="utf-8") == real_model.page(), repeat
    assert real_model.README.read_text(encoding="utf-8") == real_model.readme(), repeat


def test_the_readme_shows_answers_that_obey_only_after_training():
    header, _, *rows = real_model.readme_examples()
    assert header == "| question | before | after |"
    assert len(rows) == 2
    assert all(row.count(" | ") == 2 for row in rows)
