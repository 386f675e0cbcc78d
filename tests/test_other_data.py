"""Data in the layouts of others: folders, splits and columns."""

import re
import textwrap

import datasets
import pytest
from builders import invalid, write_rows

from rlhf_course.data import as_prompt, describe, load_answers, load_pairs

QUESTION = as_prompt("Late?")
PAIR = {"prompt": QUESTION, "chosen": "Yes.", "rejected": "No."}
ROW = {"prompt": "Late?", "chosen": "Yes.", "rejected": "No."}
NUMBERED = {"prompt": "Late?", "response1": "Yes.", "response2": "No.", "preference": 1}
CODE = '    for line in text.split("\\n"):\n        print(line, end="\\n")'


def turn(role: str, text: str, names=("from", "value")) -> dict:
    return dict(zip(names, (role, text), strict=True))


def read(folder, rows, load=load_pairs, **options) -> dict:
    """The first row that a loader returns, without columns that it only keeps."""
    loaded, report = load(write_rows(folder, rows), **options)
    assert describe(report) == "no row was dropped"
    return {name: loaded[0][name] for name in (*PAIR, "answer") if name in loaded.column_names}


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Late?", "response_j": "Yes.", "response_k": "No."},
        {"question": "Late?", "response_chosen": "Yes.", "response_rejected": "No."},
        {"input": "Late?", "accept": "Yes.", "reject": "No."},
        {"instruction": "Late?", "input": "", "chosen": "Yes.", "rejected": "No."},
        {
            "conversations": [turn("human", "Late?")],
            "chosen": turn("gpt", "Yes."),
            "rejected": turn("gpt", "No."),
        },
        {
            "chosen": [turn("human", "Late?"), turn("gpt", "Yes.")],
            "rejected": [turn("human", "Late?"), turn("gpt", "No.")],
        },
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "Late?"}]}],
            "chosen": "Yes.",
            "rejected": "No.",
        },
        {"system": "", "history": [], **ROW},
    ],
)
def test_a_layout_in_common_use_gives_the_same_pair(row, tmp_path):
    assert read(tmp_path, [row]) == PAIR


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("chosen=good,rejected=bad", {"prompt": "Late?", "good": "Yes.", "bad": "No."}),
        ("chosen=output[0],rejected=output[1]", {"prompt": "Late?", "output": ["Yes.", "No."]}),
        (
            "prompt=title",
            {"prompt": "wrong", "title": "Late?", "chosen": "Yes.", "rejected": "No."},
        ),
    ],
)
def test_columns_are_named_on_the_command_line(columns, row, tmp_path):
    assert read(tmp_path, [row], columns=columns) == PAIR


def test_text_before_the_prompt_is_joined(tmp_path):
    more = {"system": "Be brief.", "history": [["Hello!", "Hi."]]}
    before = "\n\nBe brief.\n\nHuman: Hello!\n\nAssistant: Hi."
    assert read(tmp_path / "pairs", [more | ROW])["prompt"] == before + QUESTION
    answers = [more | {"instruction": "Late?", "input": "", "output": "Yes."}]
    expected = {"prompt": before + QUESTION, "answer": "Yes."}
    assert read(tmp_path / "answers", answers, load_answers) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Late?", "answer": "Yes."},
        {"prompt": "Late?", "completion": "Yes."},
        {"instruction": "Late?", "output": "Yes."},
        {"conversations": [turn("human", "Late?"), turn("gpt", "Yes.")]},
        {"prompt": [turn("user", "Late?")], "completion": [turn("assistant", "Yes.")]},
    ],
)
def test_a_layout_of_answers_in_common_use(row, tmp_path):
    assert read(tmp_path, [row], load_answers) == {"prompt": QUESTION, "answer": "Yes."}


def test_each_answer_of_a_dialogue_is_a_row(tmp_path):
    talk = [turn("user", "Hi!"), turn("assistant", "Hello."), turn("user", "Late?")]
    talk.append(turn("assistant", "Yes."))
    answers, _ = load_answers(write_rows(tmp_path, [{"messages": talk}]))
    assert answers["answer"][:] == ["Hello.", "Yes."]
    assert answers["prompt"][1] == "\n\nHuman: Hi!\n\nAssistant: Hello." + QUESTION


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"prompt": "a", "good": "b", "bad": "c"},
            None,
            "No column chosen or rejected .*--columns",
        ),
        ({"prompt": "a", "completion": "b"}, None, "No column chosen or rejected .*two answers"),
        (NUMBERED, None, "response1 and response2 hold no order.* rejected by preference"),
        (ROW, "chosen=good", "No column good in .*Correct --columns"),
        (ROW, "better=chosen", "--columns sets better; choose from prompt, chosen"),
        (ROW, "chosen", "--columns has 'chosen'. Write it like"),
        (ROW, "chosen=prompt[1]", "Row 0 of .*prompt is 'Late.', which has no item 1"),
        (ROW | {"history": ["a"]}, None, "history has 'a'; write"),
        ({"chosen": "Yes.", "rejected": "No."}, None, "1 no assistant turn.*--columns prompt=NAME"),
        (
            {"question": "a", "instruction": "b", "chosen": "c", "rejected": "d"},
            None,
            "could both be the prompt",
        ),
        (ROW | {"prompt": "[INST] Late? [/INST]"}, None, "a chat template was already applied"),
        (
            {"system": "Short.", "chosen": [turn("system", "Long.")], "rejected": "No."}
            | PAIR
            | {"prompt": [turn("system", "Long."), turn("user", "Late?")]},
            None,
            "has a system text, and column system or history has another",
        ),
    ],
)
def test_what_is_not_clear_is_refused(row, columns, message, tmp_path):
    with invalid(message):
        load_pairs(write_rows(tmp_path, [row]), columns=columns)


def test_numbered_answers_beside_a_preference_are_warned_of(tmp_path):
    columns = "chosen=response1,rejected=response2"
    with pytest.warns(UserWarning, match="may hold no order, and preference"):
        load_pairs(write_rows(tmp_path, [NUMBERED]), columns=columns)


def test_a_text_with_the_whole_dialogue_gets_advice_that_can_be_followed(tmp_path):
    rows = [{"text": "### Human: Late?### Assistant: Yes."}]
    with invalid("No column prompt or answer .* it has text. Split whole dialogues into"):
        load_answers(write_rows(tmp_path, rows))


@pytest.mark.parametrize(
    ("load", "row", "column"),
    [
        (load_answers, {"prompt": "Late?", "completion": f"\n{CODE}\n"}, "answer"),
        (
            load_answers,
            {"messages": [turn("user", "Late?"), turn("assistant", CODE)]},
            "answer",
        ),
        (load_pairs, ROW | {"chosen": CODE}, "chosen"),
        (load_pairs, {"chosen": f"{QUESTION} {CODE}", "rejected": f"{QUESTION} No."}, "chosen"),
    ],
)
def test_code_keeps_its_escapes_and_its_indentation(load, row, column, tmp_path):
    answer = read(tmp_path, [row], load)[column]
    assert answer == CODE
    compile(textwrap.dedent(answer), "answer", "exec")


def test_hc3s_code_keeps_its_escapes(tmp_path):
    code = ['Try:\nprint("a\\n")', "```\ns = 'a\\nB'\n```"]
    row = {"question": "Late?", "human_answers": ["1.\\n2.", *code, 'He:\\n"No."']}
    answers, _ = load_answers(write_rows(tmp_path, [row | {"chatgpt_answers": []}]))
    assert answers["answer"][:] == ["1.\n2.", *code, 'He:\n"No."']


def test_a_literal_line_break_of_others_is_named(tmp_path, capsys):
    load_answers(write_rows(tmp_path, [{"prompt": "Late?", "answer": "Yes.\\nYes."}]))
    assert "1 of 1 answers in split 'train' of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [({"weight": 0}, {"weight": 1}), ({"train": False}, {"train": True}), ({"loss": 0}, {})],
)
def test_a_turn_marked_as_context_is_not_an_answer(flags, tmp_path):
    talk = [turn("user", "Hi!"), turn("assistant", "Hm.") | flags[0], turn("user", "Late?")]
    talk.append(turn("assistant", "Yes.") | flags[1])
    answers, report = load_answers(write_rows(tmp_path / "some", [{"messages": talk}]))
    assert answers["answer"][:] == ["Yes."] and "Assistant: Hm." in answers["prompt"][0]
    assert describe(report) == "1 turn marked as context"
    with invalid("1 turn marked as context. Set weight, train or loss to 1"):
        load_answers(write_rows(tmp_path / "none", [{"messages": talk[:2]}]))


def test_a_weight_between_0_and_1_is_refused(tmp_path):
    talk = [turn("user", "Late?"), turn("assistant", "Yes.") | {"weight": 0.5}]
    with invalid("Row 0 of .*: A message has weight 0.5. Write 1"):
        load_answers(write_rows(tmp_path, [{"messages": talk}]))


def test_keys_of_messages_that_are_not_read_are_named(tmp_path, capsys):
    answer = turn("assistant", "Yes.") | {"reasoning_content": "Nine.", "tool_calls": []}
    load_answers(write_rows(tmp_path / "answers", [{"messages": [turn("user", "Late?"), answer]}]))
    assert ": reasoning_content of messages.\n" in capsys.readouterr().out
    load_pairs(write_rows(tmp_path / "pairs", [ROW | {"chosen": [answer | {"weight": 0}]}]))
    assert ": reasoning_content of chosen, weight of chosen.\n" in capsys.readouterr().out


def test_columns_and_files_that_are_not_read_are_named(tmp_path, capsys):
    write_rows(tmp_path, [ROW | {"tools": ["search"], "score": 1}])
    write_rows(tmp_path, [ROW], "more.parquet")
    load_pairs(tmp_path)
    said = capsys.readouterr().out
    assert f"Not read in {tmp_path}: more.parquet." in said
    assert re.search("Not read in split 'train' of .*: (tools, score|score, tools)", said)


def test_files_that_one_split_joins_are_named(tmp_path, capsys):
    write_rows(write_rows(tmp_path, [ROW], "train_sft.jsonl"), [ROW] * 2, "train_prefs.jsonl")
    assert len(load_pairs(tmp_path)[0]) == 3
    assert "joins train_prefs.jsonl, train_sft.jsonl" in capsys.readouterr().out


def test_a_folder_of_save_to_disk(tmp_path):
    rows = datasets.Dataset.from_list([ROW | {"chosen": f"Yes, {i}."} for i in range(6)])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "two")
    saved = datasets.load_from_disk(tmp_path / "two")["train"]
    saved.map(lambda row: {"prompt": f"{row['prompt']}!"})
    assert list((tmp_path / "two/train").glob("cache-*.arrow"))  # what map wrote beside the data
    for folder in ("one", "two"):
        assert len(load_pairs(tmp_path / folder)[0]) == 6
        assert load_pairs(tmp_path / folder, "train[4:]")[0]["chosen"][:] == ["Yes, 4.", "Yes, 5."]
    assert len(load_pairs(tmp_path / "two", "test")[0]) == 1
    with invalid(r"Unknown split .test.*\['train'\].*commands have --split"):
        load_pairs(tmp_path / "one", "test")
    with invalid("corresponds to no data"):
        load_pairs(tmp_path / "one", "train[9:]")


def test_a_cache_of_datasets_is_not_data(tmp_path):
    write_rows(tmp_path, [ROW])
    (tmp_path / "cache-1.arrow").write_bytes(b"")
    with invalid("cache-1.arrow is a cache of datasets"):
        load_pairs(tmp_path)


def test_another_name_of_a_split_is_asked_for(tmp_path):
    write_rows(tmp_path, [ROW], "data/train_prefs-00000-of-00001.parquet")
    with invalid("Unknown split .train.*train_prefs.*commands have --split"):
        load_pairs(tmp_path)
    assert len(load_pairs(tmp_path, "train_prefs")[0]) == 1
