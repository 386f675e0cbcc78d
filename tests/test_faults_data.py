"""Faults in datasets: their labels, formats and files, and what the cache makes of them."""

import gzip
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from builders import invalid, word_tokenizer, write_rows
from tokenizers import pre_tokenizers

from dev.models.train_baichuan_mini import make_prose
from rlhf_course import LengthSampler
from rlhf_course.course.presets import load_preset
from rlhf_course.data import (
    as_prompt,
    build_queries,
    load_answers,
    load_pairs,
    load_reviews,
    tokenize_answers,
    tokenize_pairs,
)
from rlhf_course.synthetic import build, cache, small_models

pytestmark = pytest.mark.usefixtures("own_cache")
ROWS = "".join(f'{{"text": "film {i}", "label": {i % 2}}}\n' for i in range(60)).encode()


def labelled(folder, labels, names=None):
    """A folder with a review per label."""
    rows = datasets.Dataset.from_dict({"text": ["a film"] * len(labels), "label": labels})
    if names:
        rows = rows.cast_column("label", datasets.ClassLabel(names=names))
    rows.to_parquet(folder / "train.parquet")
    return folder


@pytest.mark.parametrize(
    ("labels", "names"), [([0, 1], None), ([0.0, 1.0], None), ([0, 1], ["neg", "pos"])]
)
def test_labels_are_0_and_1(labels, names, tmp_path):
    labels = load_reviews(labelled(tmp_path, labels, names), "train")["label"][:]
    assert labels == [0, 1] and torch.tensor(labels).dtype == torch.int64  # as a loss takes them


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, 2], None),
        ([0.1, 0.9], None),
        ([0, 1, None], None),
        (["bad", "good"], None),
        ([0, 1], ["positive", "negative"]),
    ],
)
def test_labels_that_could_mean_anything_are_refused(labels, names, tmp_path):
    with invalid(r"both 0 \(negative\) and 1 \(positive\) are needed"):
        load_reviews(labelled(tmp_path, labels, names), "train")


PROMPT = "\n\nHuman: Hello!\n\nAssistant: Hi. What is it?\n\nHuman: Is it late?\n\nAssistant:"
QUESTION = as_prompt("Is it late?")


def message(role: str, content) -> dict:
    return {"role": role, "content": content}


TALK = [
    message("user", "Hello!"),
    message("assistant", "Hi. What is it?"),
    message("user", "Is it late? "),
]
LATE, NO = [message("assistant", " Late.")], [message("assistant", "No.")]


def pair(before: list, **prompt) -> dict:
    """A row of messages."""
    return {"chosen": before + LATE, "rejected": before + NO} | prompt


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (pair(TALK), PROMPT),
        (pair([message("system", "Be brief."), *TALK]), f"\n\nBe brief.{PROMPT}"),
        (pair([], prompt=TALK), PROMPT),
        (pair(TALK[2:], prompt="Is it late?"), QUESTION),
        (pair([], prompt="Is it late?"), QUESTION),
        ({"prompt": TALK, "chosen": " Late.", "rejected": "No."}, PROMPT),
        ({"prompt": "Is it late?", "chosen": f"{QUESTION} Late.", "rejected": "No."}, QUESTION),
    ],
)
def test_messages_and_transcripts_beside_a_prompt(row, prompt, tmp_path):
    pairs, _ = load_pairs(write_rows(tmp_path, [row] * 3))
    assert pairs[:] == {"prompt": [prompt] * 3, "chosen": ["Late."] * 3, "rejected": ["No."] * 3}


@pytest.mark.parametrize(
    "turns",
    [
        TALK + [message("tool", "9 pm")] + LATE,
        [message("user", [{"type": "image"}]), *LATE],
        [{"from": "human", "value": "Hello!"}],
        ["Hello!", "Hi."],
        str(TALK + LATE),
    ],
)
def test_messages_of_another_kind_are_refused(turns, tmp_path):
    write_rows(tmp_path, [{"chosen": turns, "rejected": turns}])
    with invalid("Row 0 of split 'train' .* neither a text nor messages"):
        load_pairs(tmp_path)


@pytest.mark.parametrize(
    ("column", "value"), [("human_answers", "['Late.']"), ("chatgpt_answers", 4), ("question", 4)]
)
def test_values_of_another_type_are_refused(column, value, tmp_path):
    row = {"question": "Late?", "human_answers": ["No."], "chatgpt_answers": ["No."]}
    write_rows(tmp_path, [row | {column: value}])
    with invalid("Row 0 of .*: (answers must be lists|.* is not text)"):
        load_answers(tmp_path)


def test_rows_whose_texts_spell_eos_are_dropped(capsys):
    """A model would learn that the dialogue ends there."""
    split = pre_tokenizers.Split("", "isolated")
    tokenizer = word_tokenizer(["<pad>", "</s>", "a"], split, unk_token="<pad>")
    answers = datasets.Dataset.from_dict({"prompt": ["a", "a"], "answer": ["a", "a</s>a"]})
    kept, too_long = tokenize_answers(answers, tokenizer, 9)
    assert len(kept) == 1 and too_long == 0
    assert capsys.readouterr().out == "Dropped 1 rows that contain </s>, which ends a dialogue.\n"
    for side in ("chosen", "rejected"):
        rows = {"prompt": ["a"], "chosen": ["a"], "rejected": ["a"]} | {side: ["b</s>"]}
        with invalid("All 1 rows contain </s>, which ends a dialogue"):
            tokenize_pairs(datasets.Dataset.from_dict(rows), tokenizer, 9)


def test_no_query_ends_inside_a_character():
    texts = [make_prose(1, seed)[0] * 3 for seed in range(40)]
    tokenizer = small_models.train_tokenizer(texts, 300)  # almost no character is one token
    reviews = datasets.Dataset.from_dict({"text": texts})
    queries = build_queries(reviews, tokenizer, LengthSampler(1, 8), 20)
    assert len(queries) == 40
    for row, (ids, query) in enumerate(zip(queries["input_ids"], queries["query"], strict=True)):
        assert query and texts[row].startswith(query) and len(ids) <= 7
        assert tokenizer.decode(ids) == query


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("train.parquet", b"PAR1 and no more"),
        ("train.jsonl", ROWS[:-9]),
        ("train.jsonl.gz", gzip.compress(ROWS)[:-30]),
        ("train.jsonl.gz", ROWS),
        ("train.csv", "text,label\n好看,1\n".encode("gbk")),
    ],
)
def test_a_damaged_file_is_one_sentence(name, data, tmp_path):
    write_rows(tmp_path, data, name)
    with invalid(f"A file of {tmp_path} cannot be read: ") as raised:
        load_reviews(tmp_path, "train")
    assert "\n" not in str(raised.value)


def test_a_missing_part_of_a_split_is_refused(tmp_path):
    write_rows(write_rows(tmp_path, ROWS, "train-00000-of-00003.jsonl"), ROWS, "test.jsonl")
    with invalid("train has 1 files, not 3"):
        load_reviews(tmp_path, "train")


def test_two_formats_of_one_split_are_refused(tmp_path):
    write_rows(write_rows(tmp_path, ROWS), b"text,label\na,0\nb,1\n", "train.csv")
    with invalid(r"train\.csv and train\.jsonl are the same split"):
        load_reviews(tmp_path, "train")


def test_a_backup_beside_a_split_is_refused(tmp_path):
    write_rows(write_rows(tmp_path, ROWS, "train-1.jsonl"), ROWS, "train-2.jsonl")
    load_reviews(tmp_path, "train")
    write_rows(tmp_path, ROWS, "train-1_old.jsonl")
    with invalid(r"train-1\.jsonl and train-1_old\.jsonl are the same split"):
        load_reviews(tmp_path, "train")


def test_a_file_that_was_downloaded_twice(tmp_path):
    write_rows(write_rows(tmp_path, ROWS), ROWS, "train (1).jsonl")
    with invalid(r"train \(1\)\.jsonl and train\.jsonl are the same split"):
        load_reviews(tmp_path, "train")


def test_train_and_test_that_are_identical(tmp_path):
    write_rows(write_rows(tmp_path, ROWS), ROWS, "test.jsonl")
    with pytest.warns(UserWarning, match=r"test\.jsonl and train\.jsonl are identical"):
        load_reviews(tmp_path, "test")
    write_rows(tmp_path, ROWS * 2, "test.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_reviews(tmp_path, "train")


def test_a_loading_script_is_not_run(tmp_path):
    folder = write_rows(tmp_path / "mine", b"1 / 0", "mine.py")
    write_rows(folder, [{"question": "Late?", "human_answers": ["No."], "chatgpt_answers": []}])
    with invalid("mine comes with a loading script, which is not run here"):
        load_answers(folder)
    assert load_answers(folder, "train", "train.jsonl")[0]["answer"][:] == ["No."]


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
