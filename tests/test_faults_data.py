"""Faults in datasets: their files, formats and names, and what the cache makes of them."""

import gzip
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from builders import write_rows

from rlhf_course import AutoModelForCausalLMWithValueHead, LengthSampler
from rlhf_course.course.presets import load_preset
from rlhf_course.data import as_prompt, build_queries, load_answers, load_pairs, load_reviews
from rlhf_course.rewards import RewardModel, SentimentReward
from rlhf_course.runtime.hub import download
from rlhf_course.worlds import build, cache, chinese, small_models

KIND = "Data"
pytestmark = pytest.mark.usefixtures("own_cache")


def faults(*cases) -> pytest.MarkDecorator:
    """One test for several faults: what was done, and the arguments."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(rest, id=done, marks=pytest.mark.fault(done)) for done, *rest in cases],
    )


def says(outcome, kinds, load, *arguments) -> str:
    """The one sentence that a call raises, kept for the page."""
    with pytest.raises(kinds) as raised:
        load(*arguments)
    text = str(raised.value)
    assert "\n" not in text and len(text) < 400
    outcome(text)
    return text


# --- labels
# -------------------------------------------------------------------------------------------------------

TWO, REVERSED = (
    datasets.ClassLabel(names=names) for names in (["neg", "pos"], ["positive", "negative"])
)


@faults(
    ("reviews with the labels 0.0 and 1.0", [0.0, 1.0], None),
    ("reviews with the labels false and true", [False, True], None),
    ("reviews with the labels “0” and “1”", ["0", "1"], None),
    ("reviews with the labels “negative” and “Positive”", ["negative", "Positive"], None),
    ("reviews whose labels are a ClassLabel of neg, pos", [0, 1], TWO),
    ("reviews whose labels are a ClassLabel of positive, negative", [1, 0], REVERSED),
)
def test_labels_of_another_type_are_read(case, tmp_path, outcome):
    labels, feature = case
    rows = datasets.Dataset.from_dict({"text": ["bad", "good"], "label": labels})
    if feature:
        rows = rows.cast_column("label", feature)
    rows.to_parquet(tmp_path / "train.parquet")
    reviews = load_reviews(tmp_path, "train")
    assert [(row["text"], row["label"]) for row in reviews] == [("bad", 0), ("good", 1)]
    assert torch.tensor(reviews["label"]).dtype == torch.int64  # what a loss over classes takes
    outcome("They are read as 0 (negative) and 1 (positive).")


@faults(
    ("reviews with the labels 1 and 2", [1, 2]),
    ("reviews with the labels −1 and 1", [-1, 1]),
    ("reviews with shares as labels", [0.1, 0.9]),
    ("reviews with a label that is missing", [0, 1, None]),
    ("reviews with the labels good and bad", ["bad", "good"]),
)
def test_labels_that_could_mean_anything_are_refused(case, tmp_path, outcome):
    write_rows(tmp_path, [{"text": "some words", "label": label} for label in case[0]])
    assert "both 0 (negative) and 1 (positive) are needed" in says(
        outcome, ValueError, load_reviews, tmp_path, "train"
    )


# --- preference pairs
# ---------------------------------------------------------------------------------------------

HELLO, REPLY = "\n\nHuman: Hello!", "\n\nAssistant: Hi. What is it?"
PROMPT = f"{HELLO}{REPLY}\n\nHuman: Is it late?\n\nAssistant:"


def message(role: str, content) -> dict:
    return {"role": role, "content": content}


TALK = [
    message("user", "Hello!"),
    message("assistant", "Hi. What is it?"),
    message("user", "Is it late? "),
]
LATE, NO = [message("assistant", " Late.")], [message("assistant", "No.")]
SYSTEM = [message("system", "Be brief.")]


QUESTION = as_prompt("Is it late?")


def pair(before: list, **prompt) -> dict:
    """A row of messages."""
    return {"chosen": before + LATE, "rejected": before + NO} | prompt


@faults(
    ("pairs as lists of messages", pair(TALK), PROMPT),
    (
        "pairs as lists of messages, with a system message",
        pair(SYSTEM + TALK),
        f"\n\nBe brief.{PROMPT}",
    ),
    ("messages with a column prompt of messages", pair([], prompt=TALK), PROMPT),
    (
        "messages with a system message in the column prompt",
        pair([], prompt=SYSTEM + TALK),
        f"\n\nBe brief.{PROMPT}",
    ),
    ("messages that repeat the column prompt", pair(TALK, prompt=TALK), PROMPT),
    ("messages that repeat a prompt given as text", pair(TALK[2:], prompt="Is it late?"), QUESTION),
    (
        "messages of the answer after a prompt given as text",
        pair([], prompt="Is it late?"),
        QUESTION,
    ),
    (
        "plain answers after a prompt of messages",
        {"prompt": TALK, "chosen": " Late.", "rejected": "No."},
        PROMPT,
    ),
)
def test_messages_become_transcripts(case, tmp_path, outcome):
    row, prompt = case
    pairs, report = load_pairs(write_rows(tmp_path, [row] * 3))
    assert pairs[:] == {"prompt": [prompt] * 3, "chosen": ["Late."] * 3, "rejected": ["No."] * 3}
    assert not any(report.values())
    outcome("They are read as transcripts, “Human: … Assistant: …”.")


def test_unusable_messages_are_counted_as_unusable_transcripts_are(tmp_path):
    bad = [
        {"chosen": TALK, "rejected": TALK},
        {"chosen": TALK + LATE, "rejected": TALK[:1] + LATE},
        {"chosen": TALK + LATE, "rejected": TALK + LATE},
        {"chosen": TALK + LATE, "rejected": TALK + [message("assistant", " ")]},
        {"chosen": TALK + LATE, "rejected": []},
        {"chosen": TALK[:1], "rejected": TALK[:1] + LATE},
    ]
    pairs, report = load_pairs(write_rows(tmp_path, [pair(TALK), *bad]))
    assert len(pairs) == 1 and [*report.values()] == [2, 1, 1, 1, 1]


@faults(
    ("pairs with a message of a tool", TALK + [message("tool", "9 pm")] + LATE),
    ("pairs with a picture among the messages", [message("user", [{"type": "image"}]), *LATE]),
    ("pairs with messages in another format (from, value)", [{"from": "human", "value": "Hello!"}]),
    ("pairs with lists of texts", ["Hello!", "Hi."]),
    ("pairs with numbers for answers", 3),
)
def test_messages_that_are_no_text_are_refused(case, tmp_path, outcome):
    write_rows(tmp_path, [{"chosen": case[0], "rejected": case[0]}])
    text = says(outcome, ValueError, load_pairs, tmp_path)
    assert (
        text.startswith(f"Row 0 of split 'train' of {tmp_path}: ")
        and "is neither a text nor a message" in text
    )


@faults(
    ("pairs with a prompt, and whole transcripts as answers", "Is it late?", f"{QUESTION} "),
    ("the same, without the first line breaks", "Is it late?", f"{QUESTION} ".lstrip()),
    ("the same, with the prompt in the frame, too", QUESTION, f"{QUESTION} "),
    (
        "the same, with the prompt in the frame without line breaks",
        QUESTION.strip(),
        f"{QUESTION} ".lstrip(),
    ),
    ("pairs whose answers begin with the assistant's mark", "Is it late?", "\n\nAssistant: "),
    ("pairs whose answers begin with the prompt", "Is it late?", "Is it late?\n"),
    ("the same, with a mark between them", "Is it late?", "Is it late?\n\nAssistant: "),
)
def test_an_answer_is_not_its_whole_transcript(case, tmp_path, outcome):
    prompt, before = case
    rows = [
        {"prompt": prompt, "chosen": f"{before}Late {i}.", "rejected": f"{before}No."}
        for i in range(3)
    ]
    pairs, _ = load_pairs(write_rows(tmp_path, rows))
    assert (
        pairs["chosen"][:] == ["Late 0.", "Late 1.", "Late 2."]
        and pairs["rejected"][:] == ["No."] * 3
    )
    assert set(pairs["prompt"]) == {QUESTION}
    outcome("The answers are what follows the prompt.")


def test_an_answer_that_happens_to_begin_as_its_prompt_does_stays_whole(tmp_path):
    rows = [{"prompt": "Hi", "chosen": "Hi there.", "rejected": "Hi!"}]
    rows += [{"prompt": "Hi", "chosen": f"Good morning {i}.", "rejected": "No."} for i in range(2)]
    assert load_pairs(write_rows(tmp_path / "a", rows))[0]["chosen"][:] == [
        row["chosen"] for row in rows
    ]
    rows[1:] = [
        {"prompt": "Hi", "chosen": f"Hi\n{i}", "rejected": f"Hi\n{i + 1}"} for i in range(3)
    ]
    rows.append(
        {"prompt": "Hi", "chosen": "Hello, 1", "rejected": "Hi 2"}
    )  # not after its prompt, as the others are
    pairs, report = load_pairs(write_rows(tmp_path / "b", rows))
    assert pairs["chosen"][:] == ["there.", "0", "1", "2"] and report["different prompts"] == 1


# --- answers
# ------------------------------------------------------------------------------------------------------


@faults(
    ("HC3 as CSV: its lists printed by Python", str(["It's late.", 'He said "no".'])),
    ("HC3 as CSV: its lists printed as JSON", json.dumps(["It's late.", 'He said "no".'])),
)
def test_printed_lists_are_lists_again(case, tmp_path, outcome):
    rows = [{"question": "Late?", "human_answers": case[0], "chatgpt_answers": "[]"}]
    answers, report = load_answers(write_rows(tmp_path, rows, "train.csv"))
    assert answers["answer"][:] == ["It's late.", 'He said "no".'] and not any(report.values())
    outcome("The lists are read back, each answer a row of its own.")


@faults(
    ("human_answers is one answer, not a list", "Late."),
    ("human_answers is one answer in brackets", "[deleted]"),
)
def test_a_plain_answer_is_one_answer(case, tmp_path, outcome):
    row = {"question": "Late?", "human_answers": case[0], "chatgpt_answers": None}
    for name in ("train.csv", "train.jsonl"):
        answers, _ = load_answers(write_rows(tmp_path / name, [row], name))
        assert answers["answer"][:] == case
    outcome("It is one answer, not a row per letter.")


@faults(
    (
        "HC3 as CSV: its lists printed by numpy",
        "human_answers",
        str(np.array(["Late.", "No."], dtype=object)),
    ),
    ("HC3 as CSV: a printed list that is cut off", "human_answers", str(["Late.", "No."])[:-4]),
    ("answers that are numbers", "chatgpt_answers", 4),
    ("questions that are numbers", "question", 4),
)
def test_answers_that_cannot_be_told_are_refused(case, tmp_path, outcome):
    name, value = case
    row = {"question": "Late?", "human_answers": "No.", "chatgpt_answers": "No."} | {name: value}
    write_rows(tmp_path, [row], "train.csv")
    text = says(outcome, ValueError, load_answers, tmp_path)
    assert text.startswith(f"Row 0 of split 'train' of {tmp_path}: ")
    assert text.endswith(
        "save the dataset as JSON or Parquet." if name == "human_answers" else ": 4 is no text."
    )


# --- queries
# ------------------------------------------------------------------------------------------------------


@pytest.mark.fault("queries from Chinese reviews")
def test_no_query_ends_inside_a_character(outcome):
    texts = [chinese.make_prose(1, seed)[0] * 3 for seed in range(40)]
    tokenizer = small_models.train_tokenizer(texts, 300)  # hardly a character is a token
    reviews = datasets.Dataset.from_dict({"text": texts})
    queries = build_queries(reviews, tokenizer, LengthSampler(1, 8), 20)
    assert len(queries) == 40
    for row, (ids, query) in enumerate(zip(queries["input_ids"], queries["query"], strict=True)):
        assert query and texts[row].startswith(query) and len(ids) <= 7
        assert tokenizer.decode(ids) == query
    outcome("No query ends inside a character: the tokens of an incomplete one are left out.")


# --- files
# --------------------------------------------------------------------------------------------------------

ROWS = "".join(f'{{"text": "film {i}", "label": {i % 2}}}\n' for i in range(60)).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> bytes:
    """The rows as Parquet."""
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    datasets.Dataset.from_list([json.loads(line) for line in ROWS.splitlines()]).to_parquet(path)
    return path.read_bytes()


@faults(
    ("a Parquet file is cut off", "train.parquet", None),
    ("a Parquet file is empty", "train.parquet", b""),
    ("a JSON-lines file is cut off", "train.jsonl", ROWS[:-9]),
    ("a gzipped file is cut off", "train.jsonl.gz", gzip.compress(ROWS)[:-30]),
    ("a .gz file is none", "train.jsonl.gz", ROWS),
    ("a web page was saved as the dataset", "train.json", b"<!DOCTYPE html><html>Sign in</html>"),
    ("a CSV file is empty", "train.csv", b""),
    ("a CSV file in GBK", "train.csv", "text,label\n好看,1\n".encode("gbk")),
)
def test_a_damaged_file_is_named(case, tmp_path, parquet, outcome):
    name, data = case
    write_rows(tmp_path / "data", parquet[:-50] if data is None else data, name)
    if name.endswith(("jsonl", "gz")):
        write_rows(tmp_path / "data", ROWS, "test.jsonl")  # a whole one beside it
    text = says(outcome, ValueError, load_reviews, tmp_path / "data", "train")
    assert text.startswith(f"{tmp_path / 'data' / name} cannot be read: ") and "get it anew" in text


@faults(
    ("git-lfs left pointers in place of JSON lines", "train.jsonl"),
    ("git-lfs left pointers in place of CSV", "train.csv"),
    ("git-lfs left pointers in place of Parquet", "sub/train.parquet"),
    ("git-lfs left pointers in place of a model's weights", "model.safetensors"),
)
def test_pointers_of_git_lfs_are_named(case, tmp_path, outcome):
    write_rows((tmp_path / "data" / case[0]).parent, POINTER, Path(case[0]).name)
    load, *split = (download,) if "model" in case[0] else (load_reviews, "train")
    text = says(outcome, ValueError, load, tmp_path / "data", *split)
    assert text.endswith(
        f"{case[0]} is not the file itself but git-lfs's pointer to it: run git lfs pull."
    )


# --- names
# --------------------------------------------------------------------------------------------------------


@faults(
    ("a typo in a dataset's path, from here", load_pairs, "data/imdbb"),
    ("a typo in a dataset's path, from the root", load_pairs, "/data/imdbb"),
    ("a typo in a dataset's path, of three parts", load_answers, "my/data/imdbb"),
    ("a typo in a dataset's path, with a slash at its end", load_answers, "imdbb/"),
    ("a dataset's path that begins with ~", load_answers, "~/imdb"),
    ("a typo in a model's path, from here", download, "data/model"),
    ("a typo in a model's path, with a slash at its end", download, "model/"),
    (
        "a typo in a saved policy's path",
        AutoModelForCausalLMWithValueHead.from_pretrained,
        "data/policy",
    ),
    ("a typo in a classifier's path", SentimentReward, "data/classifier"),
    ("a typo in a reward model's path", RewardModel, "./reward"),
)
def test_a_path_that_does_not_exist_is_a_missing_folder(case, tmp_path, monkeypatch, outcome):
    load, source = case
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "data", ROWS, "imdb.jsonl")
    text = says(outcome, FileNotFoundError, load, source)
    assert text.startswith(
        f"No {'dataset' if load in (load_pairs, load_answers) else 'model'} folder at {source}."
    )


@pytest.mark.fault("a dataset's file in place of its folder")
def test_a_file_is_no_folder(tmp_path, outcome):
    file = write_rows(tmp_path, ROWS) / "train.jsonl"
    assert "name the one that holds it" in says(outcome, FileNotFoundError, load_pairs, file)


# --- the cache
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path, monkeypatch):
    """What the cache calls an item; nothing is built."""
    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "is_intact", lambda folder: True)
    found = {
        name: str(write_rows(tmp_path / name, b"a"))
        for name in ("sft_dataset", "dataset", "checkpoint")
    }
    prepare_chat = build.prepare_chat
    monkeypatch.setattr(build, "prepare_chat", lambda settings: SimpleNamespace(**found))
    monkeypatch.setattr(build, "download", lambda source, revision=None: source)
    settings = load_preset(
        "05_lora_rlhf_baichuan", "scratch", {k: v for k, v in found.items() if k != "checkpoint"}
    )
    pairs = [
        {"chosen": f"Human: {i}? Assistant: yes", "rejected": f"Human: {i}? Assistant: not"}
        for i in range(9)
    ]
    rows = write_rows(tmp_path / "pairs", pairs)

    def ask(item: str) -> str:
        if item == "reward_base":
            return Path(
                build.prepare_reward_model(
                    load_preset("01_reward_modeling", "scratch", {"dataset": str(rows)})
                ).model
            ).name
        if item == "checkpoint":
            return Path(prepare_chat(settings).checkpoint).name
        return getattr(build, f"build_{item}")(settings).name

    ask.settings, ask.found, ask.rows = settings, found, rows
    return ask


def flip(key, monkeypatch) -> None:
    path = key.rows / "train.jsonl"
    text = path.read_text()
    path.write_text(
        text.replace("chosen", "chose").replace("rejected", "chosen").replace('chose"', 'rejected"')
    )
    assert path.read_text() != text and len(path.read_text()) == len(text)


def rename(key, monkeypatch) -> None:
    write_rows(key.rows, (key.rows / "train.jsonl").read_bytes(), "test.jsonl")


def another_checkpoint(key, monkeypatch) -> None:
    write_rows(Path(key.found["checkpoint"]), b"b")


def set_length(key, monkeypatch) -> None:
    key.settings.max_length += 1


def name_files(key, monkeypatch) -> None:
    key.settings.sft_files = "train.jsonl"


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


@faults(
    ("all labels of a dataset were flipped, its size the same", "reward_base", flip),
    ("a file of a dataset was copied under another name", "reward_base", rename),
    (
        "another checkpoint of the same size is converted (base_steps 3, not 2)",
        "base",
        another_checkpoint,
    ),
    (
        "other LoRA settings for the SFT adapter",
        "sft_adapter",
        change("worlds/build.py", '"r": 16', '"r": 8'),
    ),
    ("another max_length for the SFT adapter", "sft_adapter", set_length),
    ("another file of the dataset is named (sft_files)", "checkpoint", name_files),
    (
        "a number in a builder's code was changed",
        "sft_adapter",
        change("worlds/build.py", "300, 16", "301, 16"),
    ),
    (
        "a word in a grammar's file was changed",
        "checkpoint",
        change("worlds/grammars/chinese.yaml", "面粉", "大米"),
    ),
    (
        "the code that reads a dataset was changed",
        "reward_base",
        change("data/preferences.py", "chosen", "better"),
    ),
    (
        "the code that reads a dataset's files was changed",
        "reward_base",
        change("data/files.py", "a slice", "a part"),
    ),
)
def test_what_is_built_from_something_else_is_another_item(case, key, monkeypatch, outcome):
    item, fault = case
    before = key(item)
    assert key(item) == before
    fault(key, monkeypatch)
    assert key(item) != before
    cache.code.cache_clear()
    outcome("It is built anew: the cache's key holds arguments, contents and code.")


def test_a_dataset_that_was_moved_or_got_hidden_files_is_the_same(key, tmp_path, monkeypatch):
    before = key("reward_base")
    write_rows(key.rows / ".cache", b"1", "times.json")
    assert key("reward_base") == before
    shutil.move(key.rows, tmp_path / "moved")
    key.rows.symlink_to(tmp_path / "moved")
    assert key("reward_base") == before


def test_a_builder_sees_its_arguments_alone():
    steps = 3
    with pytest.raises(TypeError, match="takes what it needs as arguments"):
        cache.cached("thing", lambda folder: folder.write_text(str(steps)))
