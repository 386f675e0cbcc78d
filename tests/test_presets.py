"""Presets: unknown names and values of the wrong type are refused with the valid ones."""

import json
import math

import pytest
from builders import (
    invalid,
)

from rlhf_course.course.presets import CONFIGS, load_preset, prepare, presets_of, read_spec
from rlhf_course.course.run_card import RunCard
from rlhf_course.runtime import smollm2

pytestmark = pytest.mark.quick
NOTEBOOKS = sorted(file.stem for file in CONFIGS.glob("0*.yaml"))


def test_unknown_presets_and_settings_list_the_valid_ones():
    with invalid("Unknown preset 'huge' for .*; choose one of tiny, small, scratch, full"):
        load_preset("04_gpt2_imdb_ppo", "huge")
    with invalid("Unknown preset 'small' for .*; choose one of tiny, scratch, full"):
        load_preset("05_lora_rlhf_baichuan", "small")
    with invalid("Unknown setting 'lr' .* learning_rate"):
        load_preset("04_gpt2_imdb_ppo", "tiny", {"lr": 1})
    wrong = [("steps", value, "whole number of at least 1") for value in ("many", 1.5, math.inf)]
    wrong += [("learning_rate", "fast", "finite number"), ("sigmoid_score", "yes", "value of")]
    for key, value, words in wrong:
        with invalid(f"Setting '{key}' takes a {words}"):
            load_preset("05_lora_rlhf_baichuan", "tiny", {key: value})


def test_an_incomplete_preset_small_is_not_offered():
    offered = [name for name in NOTEBOOKS if "small" in presets_of(read_spec(name))]
    assert offered == ["04_gpt2_imdb_ppo", "08_verifiable_rewards"]


def test_a_preset_makes_the_real_model_at_its_first_use(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(smollm2, "get_smollm2", lambda folder, card: made.append(folder.name))
    monkeypatch.setattr(smollm2, "sharpen", lambda *given: made.append(given[1].name))
    models = tmp_path / "build" / "models"
    models.mkdir(parents=True)
    smollm2.make_if_missing(str(models / "SmolLM2-135M-Instruct-T0.7"))
    smollm2.make_if_missing(str(models / "another"))
    smollm2.make_if_missing("models/gpt2-imdb-mini")
    assert made == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-T0.7"]
    (models / "SmolLM2-135M-Instruct-T0.7").mkdir()
    smollm2.make_if_missing(str(models / "SmolLM2-135M-Instruct-T0.7"))
    assert len(made) == 2


def test_scratch_needs_a_dataset():
    with invalid("needs a dataset with .* overrides="):
        prepare(load_preset("04_gpt2_imdb_ppo", "scratch"))


def test_a_bare_no_stays_a_word():
    assert (
        load_preset("04_gpt2_imdb_ppo", "full", {"mixed_precision": False}).mixed_precision == "no"
    )


def test_a_value_written_as_text_is_read_as_a_number():
    assert load_preset("04_gpt2_imdb_ppo", "tiny", {"learning_rate": "1e-4"}).learning_rate == 1e-4


@pytest.mark.parametrize("value", ["10,20", 10, {10: 20}])
def test_a_list_of_steps_is_a_list_and_nothing_that_python_could_turn_into_one(value):
    with invalid(r"Setting 'save_at' takes a value of type list, like \[10, 20, 30\]; got "):
        load_preset("05_lora_rlhf_baichuan", "tiny", {"save_at": value})


def test_what_is_in_a_list_has_the_type_that_the_preset_has_there():
    assert load_preset("05_lora_rlhf_baichuan", "tiny", {"save_at": ["1e1", 20]}).save_at == [
        10,
        20,
    ]
    with invalid("Setting 'dataset' takes a value of type str, like 'offline'; got "):
        load_preset("05_lora_rlhf_baichuan", "tiny", {"dataset": ["a", "b"]})


def test_a_table_of_some_settings_has_these_rows_in_this_order():
    settings = load_preset("05_lora_rlhf_baichuan", "tiny", {"steps": 3})
    table = settings.table("steps", "learning_rate").data
    assert [*table.index] == ["steps", "learning_rate"] and table.loc["steps", "in use"] == 3
    assert len(settings.table().data) == len(vars(settings)) - 1
    with pytest.raises(KeyError, match="stepz"):
        settings.table("stepz")


def test_a_table_may_show_only_the_settings_that_matter():
    settings = load_preset("01_reward_modeling", "tiny", {"epochs": 2})
    assert len(settings.table().data) == len(vars(settings)) - 1
    few = settings.table("learning_rate", "epochs").data
    assert [*few.index] == ["learning_rate", "epochs"] and few.loc["epochs", "in use"] == 2
    with pytest.raises(KeyError):
        settings.table("learning_rates")


def test_a_metric_of_nan_is_null(tmp_path):
    card = RunCard("mine", "tiny", 0, tmp_path)
    card.metric("score", math.nan)
    card.finish()
    text = (tmp_path / "run_cards/mine.json").read_text()
    assert "NaN" not in text and json.loads(text)["metrics"] == {"score": None}
