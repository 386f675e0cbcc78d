"""What the notebooks at presets scratch and full promise about their data and their sentences."""

import pytest
from datasets import Dataset

from rlhf_course.course.presets import load_preset, shipped
from rlhf_course.data import held_out_reviews, load_reviews

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
