"""Folders and files of data: damage, copies, missing parts, columns, messages."""

import gzip
import re
import shutil
import warnings

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from builders import (
    invalid,
    make_policy,
    save_classifier,
    word_tokenizer,
    write_rows,
)
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GPT2ForSequenceClassification

from dev.models.train_baichuan_mini import make_prose
from rlhf_course import LengthSampler
from rlhf_course.course.presets import ROOT, shipped
from rlhf_course.data import (
    as_prompt,
    build_queries,
    load_answers,
    load_pairs,
    load_reviews,
    tokenize_answers,
    tokenize_pairs,
)
from rlhf_course.data.rows import as_numbers, load_split
from rlhf_course.rewards import RewardModel, SentimentReward
from rlhf_course.synthetic import small_models

ROWS = "".join(f'{{"text": "film {i}", "label": {i % 2}}}\n' for i in range(60)).encode()
PROMPT = "\n\nHuman: Hello!\n\nAssistant: Hi. What is it?\n\nHuman: Is it late?\n\nAssistant:"
QUESTION = as_prompt("Is it late?")


def labelled(folder, labels, names=None):
    """A folder with a review per label."""
    rows = datasets.Dataset.from_dict({"text": ["a film"] * len(labels), "label": labels})
    if names:
        rows = rows.cast_column("label", datasets.ClassLabel(names=names))
    rows.to_parquet(folder / "train.parquet")
    return folder


def message(role: str, content) -> dict:
    return {"role": role, "content": content}


def pair(before: list, **prompt) -> dict:
    """A row of messages."""
    return {"chosen": before + LATE, "rejected": before + NO} | prompt


def write(folder, **columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return write_rows(write_rows(folder, rows, "train.parquet"), rows, "test.parquet")


def refused(words: str):
    """Expect an error with a sentence that holds these words."""
    return pytest.raises((ValueError, TypeError, OSError), match=words)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """A sentiment classifier's folder, and a reward model with its tokenizer."""
    save_classifier(folder := tmp_path_factory.mktemp("classifier"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = make_policy(vocab_size=len(tokenizer), num_labels=1).config
    return folder, RewardModel(GPT2ForSequenceClassification(config).eval(), tokenizer)


TALK = [
    message("user", "Hello!"),
    message("assistant", "Hi. What is it?"),
    message("user", "Is it late? "),
]
LATE, NO = [message("assistant", " Late.")], [message("assistant", "No.")]


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
        [{"from": "function_call", "value": "f()"}],
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
        ("train.jsonl", '{"text": "好看", "label": 1}\n'.encode("gbk")),
    ],
)
def test_a_damaged_file_is_one_sentence(name, data, tmp_path):
    write_rows(tmp_path, data, name)
    with invalid(f"{tmp_path}/{re.escape(name)} cannot be read: ") as raised:
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


def test_unusable_review_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="No dataset folder at .*missing"):
        load_reviews(tmp_path / "missing", "train")
    good = {"text": ["a good film"] * 2, "label": [0, 1]}
    for name, columns, message in (
        ("column", {"review": ["a"], "label": [0]}, "No column text .* it has review, label"),
        ("empty", good | {"text": ["a", "  "]}, "Row 1 of split 'train' .* has no text"),
        ("number", good | {"text": [1, 2]}, "Row 0 .* has no text: 1"),
        ("class", good | {"label": [1, 1]}, "are 1; both 0 .* and 1"),
    ):
        with invalid(message):
            load_reviews(write(tmp_path / name, **columns), "train")
    with invalid(r"Unknown split .validation.\. Should be one of \['train', 'test'"):
        load_reviews(write(tmp_path / "good", **good), "validation")
    assert load_reviews(tmp_path / "good", "train")["label"] == good["label"]


def test_reviews_that_are_all_too_short():
    reviews = datasets.Dataset.from_dict({"text": ["short", "also short"], "label": [0, 1]})
    with invalid("None of the 2 reviews has more than 200 characters; the longest has 10"):
        build_queries(reviews, None, LengthSampler(2, 8))


def test_transcripts_without_their_first_blank_line(tmp_path):
    talk = "Human: Which film?\n\nAssistant:"
    row = {"prompt": talk, "chosen": f"{talk} Heat.", "rejected": f"{talk} No."}
    for rows in ([row], [{key: row[key] for key in ("chosen", "rejected")}]):
        pairs, _ = load_pairs(write_rows(tmp_path / str(len(rows[0])), rows), "train")
        assert pairs[0] == {"prompt": f"\n\n{talk}", "chosen": "Heat.", "rejected": "No."}


def test_a_copy_of_a_data_file_is_refused(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    shutil.copy(write_rows(tmp_path, rows) / "train.jsonl", tmp_path / "train.jsonl.bak")
    with invalid("are the same split"):
        load_pairs(tmp_path, "train")


def test_a_split_in_the_root_and_in_a_subfolder_is_refused(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    write_rows(write_rows(tmp_path, rows), rows * 2, "data/train-00000-of-00001.parquet")
    with invalid("train.jsonl .*the same split"):
        load_pairs(tmp_path, "train")


@pytest.mark.parametrize("name", ["train.csv", "train.tsv"])
def test_answers_that_look_like_missing_values_are_texts(name, tmp_path):
    table = pd.DataFrame(
        {
            "prompt": ["q", "r", "s"],
            "chosen": ["NA", "None", "null"],
            "rejected": ["a", "b", "c"],
            "score": [0.5, None, 1.0],
        }
    )
    table.to_csv(tmp_path / name, index=False, sep="," if name == "train.csv" else "\t")
    data_file = None if name == "train.csv" else name
    rows = as_numbers(load_split(tmp_path, "train", data_file), ["score"])
    assert rows["chosen"][:] == ["NA", "None", "null"]
    assert rows["score"][:] == [0.5, None, 1.0]


@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_cell_of_a_csv_file_is_a_text(name, separator, tmp_path):
    answers = ["42", "007", "True", "1.50"]
    table = pd.DataFrame({"prompt": [*"abcd"], "chosen": answers, "rejected": "one, two; three"})
    table = table.assign(gold_chosen=[1, 0.5, 2, 3], note=None)
    table.to_csv(tmp_path / name, sep=separator, encoding="utf-8-sig")  # with row numbers
    pairs, _ = load_pairs(tmp_path)
    assert pairs["chosen"][:] == answers and pairs["rejected"][0] == "one, two; three"
    assert pairs["gold_chosen"][:] == [1, 0.5, 2, 3] and pairs["note"][0] is None


def test_csv_files_with_different_separators(tmp_path):
    write_rows(tmp_path, b"prompt,answer\nq,a\n", "train.csv")
    write_rows(tmp_path, b"prompt;answer\nq;a\n", "test.csv")
    with invalid("have different separators, ',' and ';'. Save them"):
        load_answers(tmp_path)


def test_csv_rows_with_more_fields_than_the_header(tmp_path):
    write_rows(tmp_path, b"prompt,chosen,rejected\nq,a,b,anna\nr,c,d,anna\n", "train.csv")
    with invalid("more fields than the header: 4 and 3, separated by ','"):
        load_pairs(tmp_path, "train")
    write_rows(tmp_path, b"text\na film, and good\n", "train.csv")
    with invalid("more fields than the header: 2 and 1"):
        load_split(tmp_path, "train")
    write_rows(tmp_path, b"prompt,answer\nq,a\nq,a, b\n", "train.csv")
    with invalid("Expected 2 fields in line 3, saw 3. Put texts that contain the separator in"):
        load_split(tmp_path, "train")


def test_a_folder_of_ones_own_comes_before_the_projects(tmp_path, monkeypatch):
    name = "models/gpt2-imdb-mini"
    assert shipped(name) == str(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert shipped(name) == str(ROOT / name)
    (tmp_path / name).mkdir(parents=True)
    assert shipped(name) == str(tmp_path / name)


def test_a_column_of_texts_is_scored_whatever_holds_it(classifiers):
    reward, texts = SentimentReward(classifiers[0]), ["A fine film.", "A dull film."]
    columns = pd.Series(texts, index=[7, 3]), np.array(texts), (text for text in texts)
    for column in columns:
        torch.testing.assert_close(reward(column), reward(texts))


def test_answers_without_an_end(classifiers):
    tokenizer = AutoTokenizer.from_pretrained(classifiers[0])
    tokenizer.eos_token = None
    answers = datasets.Dataset.from_dict({"prompt": ["A film?"] * 2, "answer": ["Good.", "Bad."]})
    with refused("EOS|eos_token"):
        tokenize_answers(answers, tokenizer, 64)
