"""Faults around files: what is not ours stays, what is half-written goes, what is saved can be read."""

import os

import pytest
from conftest import make_policy

KIND = "Files"


@pytest.mark.fault("save_pretrained into a folder with notes and data in it")
def test_what_is_not_ours_stays(tmp_path, outcome):
    (tmp_path / "mywork" / "data").mkdir(parents=True)
    (tmp_path / "mywork" / "notes.txt").write_text("mine")
    (tmp_path / "mywork" / "data" / "rows.csv").write_text("mine")
    for _ in range(2):
        make_policy().save_pretrained(tmp_path / "mywork")
    assert (tmp_path / "mywork/notes.txt").read_text() == (tmp_path / "mywork/data/rows.csv").read_text() == "mine"
    assert (tmp_path / "mywork/model.safetensors").exists() and os.listdir(tmp_path) == ["mywork"]
    outcome("The policy's files are written there; all others stay.")
