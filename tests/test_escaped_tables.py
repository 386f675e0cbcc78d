"""Notebooks' styled tables of texts: markup in a dataset or a response is shown, not run."""

import re
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest

from rlhf_course.clinic import show
from rlhf_course.course.presets import ROOT, load_preset

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>"
COLUMNS = "text query response prompt chosen rejected question answer".split()
TEXTS = pd.DataFrame(dict.fromkeys(COLUMNS, [MARKUP])).assign(score=1.23456)


@pytest.mark.parametrize(
    ("notebook", "begins", "names"),
    [
        ("00_hello_rlhf", "styled = scored", {"scored": TEXTS}),
        ("00_hello_rlhf", "styled = side_by_side", {"side_by_side": TEXTS.set_axis([MARKUP])}),
        ("00_hello_rlhf", "styled = stages", {"stages": TEXTS.set_axis([MARKUP])}),
        ("01_reward_modeling", "styled = few", {"few": SimpleNamespace(to_pandas=lambda: TEXTS)}),
        ("01_reward_modeling", "styled = texts", {"texts": TEXTS.rename(columns={"text": MARKUP})}),
        ("04_gpt2_imdb_ppo", "styled = pd.DataFrame(texts)", {"texts": TEXTS, "pd": pd}),
        ("04_gpt2_imdb_ppo", "styled = pairs", {"pairs": TEXTS}),
        ("04_gpt2_imdb_ppo", "lowest = after", {"after": TEXTS}),
        ("05_lora_rlhf_baichuan", "def show", {"table": TEXTS[COLUMNS], "synthetic": False}),
    ],
)
def test_a_table_of_texts_is_escaped(notebook, begins, names):
    cells = nbformat.read(ROOT / f"notebooks/{notebook}.ipynb", as_version=4).cells
    (source,) = (c.source for c in cells if re.search(f"^{re.escape(begins)}", c.source, re.M))
    code = source[source.index(begins) :].split("\n\n\n")[0]
    if code.startswith("def show"):
        code += f"\nshow({next(iter(names))})"
    *lines, last = code.splitlines()
    exec("\n".join(lines), names)
    html = eval(last, names).to_html()
    assert not re.search("<script|<img", html) and "&lt;script&gt;" in html
    if "score" in html:
        assert ("1.23<" in html) == ("precision" in code or ".2f" in code)


def test_the_clinics_table_of_answers_is_escaped():
    html = show({"SFT": TEXTS.assign(gold=1.0)}).to_html()
    assert not re.search("<script|<img", html) and "&lt;script&gt;" in html


def test_a_setting_is_escaped():
    html = load_preset("04_gpt2_imdb_ppo", "tiny", {"dataset": MARKUP}).table().to_html()
    assert not re.search("<script|<img", html) and "&lt;script&gt;" in html
