"""Questions and answers for SFT: what is read, what is dropped, and which tokens are learnt."""

import datasets
import pytest
from builders import invalid, word_tokenizer, write_rows
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_course.data import (
    ASSISTANT,
    HUMAN,
    as_prompt,
    hold_out,
    last_question,
    load_answers,
    tokenize_answers,
)

pytestmark = pytest.mark.quick

PARQUET = "train-00000-of-00001.parquet"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    letters = sorted(set("\n HumanAsist:abcdefgh?.怎么好的。"))
    split = pre_tokenizers.Split("", "isolated")
    return word_tokenizer(
        ["<pad>", "</s>", "<s>", *letters], split, bos_token="<s>", unk_token="<pad>"
    )


def test_hc3_gives_a_row_per_answer_and_counts_what_it_drops(tmp_path):
    rows = [
        {
            "question": "a?",
            "human_answers": ["b.", "", "b."],
            "chatgpt_answers": ["c.\\nD \\nabla."],
        },
        {"question": " ", "human_answers": ["e."], "chatgpt_answers": []},
        {"question": "f?", "human_answers": None, "chatgpt_answers": [None, "g."]},
    ]
    answers, report = load_answers(str(write_rows(tmp_path / "hc3", rows, PARQUET)))
    assert answers["answer"][:] == ["b.", "c.\nD \\nabla.", "g."]
    assert answers["prompt"][:] == [as_prompt("a?"), as_prompt("a?"), as_prompt("f?")]
    assert report == {"empty question or answer": 3, "repeated row": 1}


def test_instructions_join_their_input(tmp_path):
    rows = [
        {"instruction": "a?", "input": "b", "output": "c."},
        {"instruction": "d?", "input": "", "output": "e."},
    ]
    answers, _ = load_answers(write_rows(tmp_path / "instructions", rows, PARQUET))
    assert answers["prompt"][:] == [as_prompt("a?\nb"), as_prompt("d?")]
    assert answers["answer"][:] == ["c.", "e."]


def test_what_cannot_be_used_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="No dataset folder at"):
        load_answers(tmp_path / "nothing")
    with invalid("No column prompt or answer in .* has text"):
        load_answers(write_rows(tmp_path / "texts", [{"text": "a"}]))
    rows = [{"instruction": "a?", "input": "", "output": " "}]
    with invalid("remains of the 1 rows .* 1 empty question or answer"):
        load_answers(write_rows(tmp_path / "none", rows))


def test_a_prompt_and_its_question():
    assert as_prompt("a?") == f"{HUMAN} a?{ASSISTANT}" == as_prompt(as_prompt("a?"))
    assert last_question(as_prompt("a?")) == "a?"
    assert last_question(f"{HUMAN} a?{ASSISTANT} b.{HUMAN} c?{ASSISTANT}") == "c?"


def test_held_out_prompts_are_not_learnt_with_another_answer():
    rows = datasets.Dataset.from_dict(
        {"prompt": [f"p{i // 3}" for i in range(60)], "answer": [*map(str, range(60))]}
    )
    train, held = hold_out(rows, 0.2, seed=3)
    assert len(train) + len(held) == 60 and len(set(held["prompt"])) == 4
    assert not set(train["prompt"]) & set(held["prompt"])
    again, other = (hold_out(rows, 0.2, seed=seed)[1].to_list() for seed in (3, 4))
    assert again == held.to_list() != other
    with invalid("1 questions are too few to hold out 1"):
        hold_out(rows.select(range(3)), 0.5)


def test_answer_and_eos_are_learnt_and_nothing_else():
    tokenizer = make_tokenizer()
    answers = datasets.Dataset.from_dict(
        {"prompt": [as_prompt("a?"), as_prompt("b?")], "answer": ["cd.", ""]}
    )
    rows, gone = tokenize_answers(answers, tokenizer, 40)
    assert gone == 0
    for row, question, answer in zip(rows, ("a?", "b?"), (" cd.", ""), strict=True):
        prompt = tokenizer(as_prompt(question))["input_ids"]
        learned = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        assert row["input_ids"] == prompt + learned
        assert row["completion_mask"] == [0] * len(prompt) + [1] * len(learned)


def test_long_rows_go_whole_and_are_counted():
    tokenizer = make_tokenizer()
    answers = datasets.Dataset.from_dict(
        {"prompt": [as_prompt("a?")] * 2, "answer": ["b", "b" * 40]}
    )
    length = len(tokenizer(as_prompt("a?"))["input_ids"]) + 3
    rows, gone = tokenize_answers(answers, tokenizer, length)
    assert len(rows) == 1 and gone == 1 and len(rows[0]["input_ids"]) == length
    with pytest.raises(
        ValueError,
        match=f"All 2 rows are longer than max_length=9 tokens; the shortest has {length}",
    ):
        tokenize_answers(answers, tokenizer, 9)
