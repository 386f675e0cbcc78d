"""The page about the real chat model and the README's examples, against the committed cards."""

import json

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


def test_a_larger_kl_coefficient_costs_less_and_gains_less():
    """As the page says of notebook 04; no coefficient has a large gain at a small cost."""
    runs = []
    for file in real_model.KL_COEFFICIENTS.values():
        card = json.loads((real_model.CARDS / file).read_text(encoding="utf-8"))
        numbers = card["metrics"]
        gain = numbers["score_after"] - numbers["score_before"]
        runs.append((gain, numbers["kl_after"], numbers["added_loss"]))
    assert runs == sorted(runs, reverse=True)
    assert [run[1:] for run in runs] == sorted((run[1:] for run in runs), reverse=True)
    assert not any(gain >= 1 and added <= 0.1 for gain, _, added in runs)


WISH_CARDS = [f"small/10_a_real_model{seed}" for seed in ("", "_1", "_2")] + ["10_a_real_model"]


def wish_numbers(name: str) -> dict:
    """Return the metrics of a committed run of notebook 10."""
    file = real_model.CARDS.parent / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))["metrics"]


@pytest.mark.parametrize("name", WISH_CARDS)
def test_notebook_10s_sentences_hold_in_each_run(name):
    """Every method raises gold; PPO lowers the hidden item most."""
    numbers = wish_numbers(name)
    methods = [key.removesuffix(", gold") for key in numbers if key.endswith(", gold")]
    assert methods[:4] == ["before", "DPO", "PPO", "RLOO"] and len(methods) == 5
    for method in methods[1:]:
        half_width = numbers[f"{method}, change of gold, ±"]
        if method in ("PPO", "RLOO") or name.startswith("small"):
            assert numbers[f"{method}, change of gold"] > half_width
        assert numbers[f"{method}, change of gold"] > 0
    hidden = {m: numbers[f"{m}, change of names the subject"] for m in methods[1:]}
    assert min(hidden, key=hidden.get) == "PPO"
    assert hidden["PPO"] + numbers["PPO, change of names the subject, ±"] < 0
    assert max(("DPO", "PPO", "RLOO"), key=lambda m: numbers[f"{m}, KL"]) == "PPO"
