"""Headlines at several seeds: what measure_seeds.py collects, and where the README shows it."""

import json

import pytest
from make import measure_seeds


def card(folder, seed, after):
    """A run card in an output folder."""
    metrics = {"score_before": 0.0, "score_after": after, "loss": 1.0}
    checks = {"score rises": {"passed": after > 1}}
    path = folder / "run_cards" / "04_x.json"
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"notebook": "04_x", "seed": seed, "metrics": metrics, "checks": checks})
    )
    return folder


def test_what_moved_is_kept_for_each_seed(tmp_path):
    found = measure_seeds.collect(
        [card(tmp_path / str(seed), seed, after) for seed, after in ((0, 1.5), (1, 0.5))]
    )
    assert found == {
        "04_x": {
            "0": {"score_before": 0.0, "score_after": 1.5, "passed": 1, "checks": 1},
            "1": {"score_before": 0.0, "score_after": 0.5, "passed": 0, "checks": 1},
        }
    }


def test_a_seed_twice_and_an_empty_folder_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="a second card of 04_x at seed 0"):
        measure_seeds.collect([card(tmp_path / name, 0, 1.0) for name in "ab"])
    with pytest.raises(ValueError, match="holds no run cards"):
        measure_seeds.collect([tmp_path / "empty"])
