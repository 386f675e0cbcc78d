"""The synthetic world is built once per set of inputs, and again when something changes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import write_rows

from rlhf_course.course.presets import load_preset
from rlhf_course.data import (
    as_prompt,
)
from rlhf_course.synthetic import build, cache

ROWS = "".join(f'{{"text": "film {i}", "label": {i % 2}}}\n' for i in range(60)).encode()
QUESTION = as_prompt("Is it late?")


@pytest.fixture
def key(tmp_path, monkeypatch):
    """What the cache calls an item; nothing is built."""
    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "is_intact", lambda folder: True)
    names = ("sft_dataset", "dataset", "checkpoint")
    folders = {name: str(write_rows(tmp_path / name, b"a")) for name in names}
    prepare_chat = build.prepare_chat
    monkeypatch.setattr(build, "prepare_chat", lambda settings: SimpleNamespace(**folders))
    monkeypatch.setattr(build, "download", lambda source, revision=None: source)
    given = {name: folders[name] for name in names[:2]}
    settings = load_preset("05_lora_rlhf_baichuan", "scratch", given)
    pairs = [{"chosen": f"{QUESTION} {i}", "rejected": f"{QUESTION} not"} for i in range(9)]
    rows = write_rows(tmp_path / "pairs", pairs)

    def ask(item: str) -> str:
        if item == "reward_base":
            chosen = load_preset("01_reward_modeling", "scratch", {"dataset": str(rows)})
            return Path(build.prepare_reward_model(chosen).model).name
        if item == "checkpoint":
            return Path(prepare_chat(settings).checkpoint).name
        return getattr(build, f"build_{item}")(settings).name

    ask.settings, ask.folders, ask.rows = settings, folders, rows
    yield ask
    cache.code.cache_clear()


def flip(key, monkeypatch) -> None:
    path = key.rows / "train.jsonl"
    text = path.read_text().replace("chosen", "other").replace("rejected", "chosen")
    path.write_text(text.replace("other", "rejected"))


def rename(key, monkeypatch) -> None:
    write_rows(key.rows, (key.rows / "train.jsonl").read_bytes(), "validation.jsonl")


def change(name: str, old: str, new: str):
    """The text of a file of this package is another."""

    def changed(key, monkeypatch) -> None:
        read = Path.read_text
        assert old in read(cache.PACKAGE / name, encoding="utf-8")

        def swap(path, *arguments, **options):
            text = read(path, *arguments, **options)
            return text.replace(old, new) if path == cache.PACKAGE / name else text

        monkeypatch.setattr(Path, "read_text", swap)
        cache.code.cache_clear()

    return changed


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        ("reward_base", flip),
        ("reward_base", rename),
        ("checkpoint", change("synthetic/grammars/chinese.yaml", "面粉", "大米")),
        ("reward_base", change("data/preferences.py", "chosen", "better")),
    ],
)
def test_what_is_built_from_something_else_is_another_item(item, fault, key, monkeypatch):
    before = key(item)
    assert key(item) == before
    fault(key, monkeypatch)
    assert key(item) != before


def test_a_dataset_that_was_moved_or_got_hidden_files_is_the_same(key, tmp_path):
    before = key("reward_base")
    write_rows(key.rows / ".cache", b"1", "times.json")
    assert key("reward_base") == before
    shutil.move(key.rows, tmp_path / "moved")
    key.rows.symlink_to(tmp_path / "moved")
    assert key("reward_base") == before
