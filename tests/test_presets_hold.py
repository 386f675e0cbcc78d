"""What the notebooks at presets scratch and full promise about their data and their sentences."""

import html
import json
import re

import matplotlib as mpl
import pytest
from datasets import Dataset

from dev.simulated_hub import serve
from dev.simulated_hub.repositories import repositories
from rlhf_course.course.presets import ROOT, load_preset, shipped
from rlhf_course.course.run_card import CheckFailed
from rlhf_course.data import held_out_reviews, load_reviews
from rlhf_course.synthetic import chinese

OUTCOMES = {  # figures whose captions begin with the outcome of a run
    "01_reward_modeling": ("1.1", "1.2", "1.3", "1.4"),
    "04_gpt2_imdb_ppo": ("4.2", "4.3", "4.4"),
    "05_lora_rlhf_baichuan": ("5.2", "5.4", "5.6"),
}
OPENINGS = shipped("models/imdb-openings")


def test_reviews_that_the_second_judge_has_seen_are_left_out_of_notebook_04_at_full():
    """A whole review with HTML matches its opening; another review does not."""
    opening = load_reviews(OPENINGS, "test")["text"][0].split()
    assert len(opening) == 64
    held_out = " ".join(opening[:9]) + "<br /><br />" + " ".join(opening[9:]) + " And so on."
    rows = {"text": ["A film that nobody held out.", held_out], "label": [0, 1]}
    reviews = Dataset.from_dict(rows)
    assert held_out_reviews(reviews, OPENINGS)["text"][:] == [held_out]
    with pytest.raises(ValueError, match="None of 1 reviews begins like a text in"):
        held_out_reviews(reviews.select([0]), OPENINGS)
    assert load_preset("04_gpt2_imdb_ppo", "full").judge_openings == "models/imdb-openings"


@pytest.mark.parametrize("name", OUTCOMES)
def test_captions_that_state_an_outcome_name_the_preset_of_the_run(name):
    notebook = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))
    prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    for figure in OUTCOMES[name]:
        assert f"**Figure {figure}.** At `tiny`, " in prose


def test_the_opening_of_notebook_05_shows_the_answers_of_its_run_card():
    """The cell reads the card of the rendering before; after a change, render twice."""
    name = "05_lora_rlhf_baichuan"
    card = json.loads((ROOT / f"figs/measured/{name}.json").read_text(encoding="utf-8"))
    notebook = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))
    (cell,) = (cell for cell in notebook["cells"][:5] if '"answers"' in "".join(cell["source"]))
    shown = "".join(cell["outputs"][0]["data"]["text/html"])
    answers = card["curves"]["answers"]
    assert list(answers)[:3] == ["question", "base", "SFT"] and len(answers["question"]) == 5
    texts = [text for column in answers.values() for text in column]
    assert not [text for text in texts if text not in shown], "render notebook 05 again"
    english = [chinese.in_english(text) for text in answers["question"]]
    assert not [text for text in english if html.escape(text) not in shown]


@pytest.mark.slow
def test_notebook_04_at_full_runs_with_its_own_ids(tmp_path, monkeypatch, capsys):
    """Without a GPU; toy models stand under the ids, and a check that fails is named."""
    mpl.use("agg")
    notebook = json.loads((ROOT / "notebooks/04_gpt2_imdb_ppo.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    few = {"steps": 2, "batch_size": 16, "mini_batch_size": 16, "eval_queries": 32}
    names = {"__name__": "notebook"}
    parameters = {"preset": "full", "overrides": few, "output_dir": str(tmp_path / "run")}
    failed = set()
    with serve(repositories(tmp_path)) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        for number, cell in enumerate(code):
            try:
                exec(compile(cell, f"cell {number}", "exec"), names)
            except CheckFailed as error:
                assert number == len(code) - 1
                failed |= {*re.findall(r"(?:pass: |; )([^:;]+):", str(error))}
            if number == 0:
                names |= parameters
        hub.check(tmp_path)
    said = capsys.readouterr().out
    unseen, total = re.search(r"has not seen ([\d,]+) of ([\d,]+) test reviews", said).groups()
    assert 0 < int(unseen) == len(names["test_reviews"]) <= int(total) == 600
    card = json.loads((tmp_path / "run/run_cards/04_gpt2_imdb_ppo.json").read_text())
    assert card["preset"] == "full" and card["checks"]["reloads unchanged"]["passed"]
    assert failed == {name for name, check in card["checks"].items() if not check["passed"]}
