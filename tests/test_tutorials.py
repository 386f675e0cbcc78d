"""The tutorials that the course follows: their settings against preset `full`, their faults."""

import inspect
import json
import re

import pytest
import torch
import yaml
from builders import EOS, SAMPLING, make_policy, make_samples, make_trainer

from docs._ext import tutorials
from rlhf_course.course.presets import CONFIGS, ROOT, read_spec
from rlhf_course.rewards import SentimentReward

pytestmark = pytest.mark.quick

PUBLISHED = yaml.safe_load((CONFIGS / "published.yaml").read_text(encoding="utf-8"))
NOTEBOOKS = [name for name in PUBLISHED if name[0].isdigit()]


def cells(notebook: str) -> list[dict]:
    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_preset_changes_with_its_row(notebook):
    """The column `full` equals the preset, and what the notebook's cells set."""
    spec = {key: entry["full"] for key, entry in read_spec(notebook).items()}
    spec = {key: "none" if value is None else value for key, value in spec.items()}
    rows = {name: row[1] for name, row in PUBLISHED[notebook].items()}
    assert all(len(row) == 3 and row[2] for row in PUBLISHED[notebook].values())
    changed = {k: (rows[k], spec[k]) for k in rows if rows[k] != spec.get(k, rows[k])}
    assert not changed, f"preset full of {notebook} has changed: published.yaml says {changed}"
    code = "".join("".join(cell["source"]) for cell in cells(notebook))
    if notebook.startswith("04"):
        size = inspect.signature(SentimentReward).parameters["batch_size"].default
        assert rows["classifier's batch"] == size and "SentimentReward(assets" in code
    if notebook.startswith("05"):
        updates = spec["ppo_epochs"] * spec["batch_size"] // spec["mini_batch_size"]
        assert rows["optimizer updates per PPO step"] == updates
        assert f'lr_scheduler_type="{rows["schedule"]}"' in code
        assert not re.search("lora_dropout|weight_decay|gradient_accumulation|early_stop", code)


def test_every_table_of_settings_is_shown():
    """The page has one table per notebook, with a row per setting, and all four columns."""
    page = (ROOT / "docs/from-tutorials.md").read_text(encoding="utf-8")
    shown = [name for _, name, _ in tutorials.SETTINGS.findall(page)]
    assert sorted(shown) == NOTEBOOKS
    for notebook in NOTEBOOKS:
        rows = tutorials.settings(notebook).splitlines()[2:]
        names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
        assert names == [*PUBLISHED[notebook]]
        assert all(row in page and row.count(" | ") == 3 for row in rows)


def test_the_tables_are_those_of_the_run_cards_and_of_the_published_settings():
    for path in tutorials.PAGES:
        page = path.read_text(encoding="utf-8")
        assert page == tutorials.with_tables(page) != tutorials.BLOCK.sub("", page), (
            "run python docs/_ext/tutorials.py"
        )


def test_what_the_page_refers_to_is_there():
    """Each test, and each section or case of a notebook."""
    page = (ROOT / "docs/from-tutorials.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)` in\s+`(tests/\w+\.py)`", page)
    missing = [name for name, at in named if f"def {name}(" not in (ROOT / at).read_text()]
    assert len(named) > 5 and not missing
    headings = {
        path.stem[:2]: re.findall(
            r"## (\w+) · ", "".join("".join(c["source"]) for c in cells(path.stem))
        )
        for path in ROOT.glob("notebooks/[0-9]*.ipynb")
    }
    found = re.findall(r"notebook (\d\d), (?:section|cases?) (\w+)", page)
    assert len(found) > 20 and not [x for x in found if x[1] not in headings[x[0]]]


def test_a_slice_from_the_end_takes_query_tokens():
    """`squeeze()[-gen_len:]` after an early EOS; `return_prompt=False` gives the response."""
    trainer, query = make_trainer(make_policy(initializer_range=0.5)), torch.tensor([1, 2, 3])
    answers = []
    for options in ({}, {"return_prompt": False}):
        torch.manual_seed(3)
        answers += trainer.generate(query, max_new_tokens=30, **SAMPLING, **options)
    whole, response = answers
    assert response[-1] == EOS and whole[len(query) :].equal(response)
    assert len(response) < 27 and whole.squeeze()[-30:][: len(query)].equal(query)


def test_the_spread_of_one_sample_is_no_nan():
    queries, responses, scores = (rows[:1] for rows in make_samples())
    stats = make_trainer(batch_size=1, mini_batch_size=1).step(queries, responses, scores)
    spreads = {name: x for name, x in stats.items() if "std" in name}
    assert len(spreads) == 3 and set(spreads.values()) == {0.0}
