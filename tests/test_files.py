"""Files: what is not ours stays, and what is half-written or damaged is not used."""

import os
import threading
import time
from pathlib import Path

import pytest
from builders import make_policy

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import atomic_folder
from rlhf_course.synthetic import build, cache, dialogues


@pytest.fixture
def built(tmp_path, monkeypatch):
    """An empty cache, and quick dialogues: a list with an entry for each time they were made."""
    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "cache"))
    times, some = [], dialogues.make_pairs(8)

    def make(number: int, seed: int) -> list:
        times.append(number)
        time.sleep(0.2)
        return some * (number // 8)

    monkeypatch.setattr(dialogues, "make_pairs", make)
    return times


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "mywork" / "data").mkdir(parents=True)
    mine = [tmp_path / "mywork" / "notes.txt", tmp_path / "mywork" / "data" / "rows.csv"]
    for path in mine:
        path.write_text("mine")
    for _ in range(2):
        make_policy().save_pretrained(tmp_path / "mywork")
    assert all(path.read_text() == "mine" for path in mine)
    assert (tmp_path / "mywork/model.safetensors").exists() and os.listdir(tmp_path) == ["mywork"]


def test_a_relative_cache_starts_at_the_courses_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for given, place in (("my/cache", ROOT / "my/cache"), ("~/cache", Path.home() / "cache")):
        monkeypatch.setenv("RLHF_COURSE_CACHE", given)
        assert cache.cache_root() == place


def test_one_of_four_builds_and_the_others_wait(built):
    found = []
    together = [
        threading.Thread(target=lambda: found.append(sorted(build.build_dialogues().iterdir())))
        for _ in "1234"
    ]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(20)
    assert len(built) == 1 and len(found) == 4 and all(files == found[0] for files in found)


@pytest.mark.parametrize("how", ["cut", "gone", "more", "checksum"])
def test_a_damaged_item_is_built_again(how, built):
    whole = cache.checksum(folder := build.build_dialogues())
    test = folder / "test-00000-of-00001.parquet"
    {
        "cut": lambda: os.truncate(test, 100),
        "gone": test.unlink,
        "more": lambda: (folder / "train-00001-of-00002.parquet").write_bytes(test.read_bytes()),
        "checksum": (folder / cache.CHECKSUM).unlink,
    }[how]()
    assert build.build_dialogues() == folder and cache.checksum(folder) == whole
    (folder / ".DS_Store").write_bytes(b"a file browser's")
    build.build_dialogues()
    assert len(built) == 2  # once, and not for what nobody loads


def test_a_failed_write_leaves_what_stood_there(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("whole")
    with pytest.raises(OSError, match="full"), atomic_folder(tmp_path / "folder") as folder:
        (folder / "new").write_text("half")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.rglob("*")] == ["folder", "old"]
