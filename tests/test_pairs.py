"""Preference pairs: what is kept, what is dropped and why, and the tokens that a reward model is
trained on.
"""

import pytest
from builders import invalid, write_rows
from transformers import PreTrainedTokenizerFast

from rlhf_course.data import describe, encode, load_pairs, tokenize_pairs
from rlhf_course.synthetic import small_models

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("own_cache")]
QUESTION = "\n\nHuman: Why is the sky blue?\n\nAssistant:"
TALK = "\n\nHuman: Hello!\n\nAssistant: Hi. What is it?\n\nHuman: Is it late?\n\nAssistant:"
GOOD = [
    (QUESTION + " It scatters blue light.", QUESTION + " No idea."),
    (TALK + " It is nine.\n\nGo to bed: now.", TALK + " Look it up."),
    (QUESTION + " Because of the air.", QUESTION + " Because."),
]
BAD = {
    "no assistant turn": [
        ("\n\nHuman: Hello?", QUESTION + " No."),
        (QUESTION + " No.", "Assistant: no line before it"),
        ("\n\nHuman: Hello?",) * 2,  # equal, too: counted under the first reason alone
        (None, QUESTION + " No."),
        (QUESTION + " No.", None),
    ],
    "ends on the human": [
        (QUESTION + " Yes.\n\nHuman: Thanks", QUESTION + " No."),
        (QUESTION + " Yes.", QUESTION + " No.\n\nHuman: What?"),
        (QUESTION + " Yes.\n\nHuman: Thanks", QUESTION + " Yes.\n\nHuman: Thanks"),
        (TALK + " Yes.\n\nHuman: Thanks", QUESTION + " No."),
    ],
    "chosen equals rejected": [
        (QUESTION + " Yes.", QUESTION + " Yes."),
        (QUESTION, QUESTION),
        (TALK, TALK),
    ],
    "different prompts": [(QUESTION + " Yes.", TALK + " Yes."), (QUESTION + " Yes.", TALK)],
    "empty answer": [(QUESTION, QUESTION + " No.")],
    "dialogue quoted in the prompt": [
        tuple(f"Summarize:{TALK} {word}" for word in ("A greeting.", "No."))
    ],
    "prompt repeated": [
        tuple(f"{QUESTION} Why is the sky blue? {word}" for word in ("Yes.", "No."))
    ],
}


def write(folder, pairs, name="train.jsonl", **columns):
    """A dataset folder of (chosen, rejected) and further columns."""
    more = [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ] or [{}] * len(pairs)
    rows = [{"chosen": c, "rejected": r} | row for (c, r), row in zip(pairs, more, strict=True)]
    return write_rows(folder, rows, name)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_models.train_tokenizer([text for pair in GOOD for text in pair], 300)


def test_each_fault_is_counted_once_and_other_columns_stay_with_their_rows(tmp_path):
    bad = [pair for pairs in BAD.values() for pair in pairs]
    rows = [*bad[:4], GOOD[0], *bad[4:9], GOOD[1], *bad[9:], GOOD[2]]
    notes = [{"row": [i]} for i in range(len(rows))]
    pairs, report = load_pairs(write(tmp_path, rows, note=notes))
    assert report == {name: len(found) for name, found in BAD.items()}
    whole = [(f"{r['prompt']} {r['chosen']}", f"{r['prompt']} {r['rejected']}") for r in pairs]
    assert whole == GOOD
    assert [note["row"] for note in pairs["note"]] == [[4], [10], [len(rows) - 1]]


def test_a_transcript_is_cut_at_the_last_answer(tmp_path):
    pairs, report = load_pairs(write(tmp_path, GOOD))
    assert pairs["prompt"][:] == [QUESTION, TALK, QUESTION]
    assert pairs["chosen"][1] == "It is nine.\n\nGo to bed: now."
    assert pairs["rejected"][:] == ["No idea.", "Look it up.", "Because."]
    assert describe(report) == "no row was dropped"


@pytest.mark.parametrize(
    "prompt", ["Why is the sky blue?", "\n\nHuman: Why is the sky blue?", QUESTION]
)
def test_a_prompt_column_gets_the_frame_it_lacks(tmp_path, prompt):
    rows = [(" It is. ", "No."), ("same", "same "), (" \n", "No."), ("Yes.", f"Yes.{QUESTION[:9]}")]
    pairs, report = load_pairs(write(tmp_path, rows, prompt=[prompt] * 4))
    assert pairs[:] == {"prompt": [QUESTION], "chosen": ["It is."], "rejected": ["No."]}
    assert describe(report) == "1 ends on the human, 1 chosen equals rejected, 1 empty answer"


@pytest.mark.parametrize(
    "name", ["train.jsonl.gz", "train-00000-of-00001.parquet", "sub/train.jsonl.gz"]
)
def test_files_as_the_hub_has_them(tmp_path, name):
    write(tmp_path, GOOD, name)
    pairs, _ = load_pairs(str(tmp_path), "train", "sub" if "/" in name else None)
    assert pairs["rejected"][:] == ["No idea.", "Look it up.", "Because."]


def test_splits_and_slices(tmp_path):
    rows = [(f"{QUESTION} {i}.", f"{QUESTION} not {i}.") for i in range(8)]
    write(write(tmp_path, rows), GOOD, "test.jsonl")
    assert load_pairs(tmp_path, "train[:5]")[0]["chosen"][:] == ["0.", "1.", "2.", "3.", "4."]
    assert load_pairs(tmp_path, "train[6:]")[0]["rejected"][:] == ["not 6.", "not 7."]
    assert len(load_pairs(tmp_path, "test")[0]) == 3


def test_errors_say_what_is_wrong(tmp_path):
    write(tmp_path / "all", GOOD)
    write_rows(tmp_path / "other", [{"chosen": "a", "worse": "b"}], "train.parquet")
    with invalid("No column rejected in .*; it has chosen, worse"):
        load_pairs(tmp_path / "other")
    with invalid("Unknown split .held_out."):
        load_pairs(tmp_path / "all", "held_out")
    with pytest.raises(FileNotFoundError, match="No dataset folder at .*nowhere"):
        load_pairs(tmp_path / "nowhere")
    write(tmp_path / "bad", [*BAD["different prompts"], *BAD["empty answer"]])
    with invalid("the 3 rows in .*: 2 different prompts, 1 empty"):
        load_pairs(tmp_path / "bad")


ROW = '{"chosen": "a", "rejected": "b"}\n'


@pytest.mark.parametrize(
    ("text", "split", "message"),
    [
        ("", "train", "Split 'train' of .* has no rows"),
        (ROW, "train[:0]", "corresponds to no data"),
        (ROW, "train[9:]", "corresponds to no data"),
    ],
)
def test_an_empty_dataset_or_slice_is_called_so(tmp_path, text, split, message):
    (tmp_path / "train.jsonl").write_text(text)
    with invalid(message):
        load_pairs(tmp_path, split)


def test_tokens_are_those_of_the_whole_dialogue_and_eos(tmp_path, tokenizer):
    pairs, _ = load_pairs(write(tmp_path, GOOD, gold_chosen=[0.5, 1.5, 2.5]))
    tokens, gone = tokenize_pairs(pairs, tokenizer, max_length=500)
    assert gone == 0 and tokens["gold_chosen"][:] == [0.5, 1.5, 2.5]
    for row, sides in zip(tokens, GOOD, strict=True):
        for name, text in zip(("chosen_ids", "rejected_ids"), sides, strict=True):
            assert row[name] == tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        assert row["length"] == max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def test_encode_joins_by_one_space_and_needs_an_answer_per_prompt(tokenizer):
    (ids,) = encode(tokenizer, [QUESTION], ["Yes."])
    assert tokenizer.decode(ids) == f"{QUESTION} Yes.{small_models.EOS}"
    with invalid("shorter"):
        encode(tokenizer, [QUESTION, TALK], ["Yes."])


def test_a_pair_is_dropped_if_either_side_is_too_long(tmp_path, tokenizer):
    long, no = QUESTION + " because" * 40, QUESTION + " No."
    pairs, _ = load_pairs(write(tmp_path, [(long, no), (no, long), GOOD[0]]))
    limit = max(len(tokenizer(text)["input_ids"]) + 1 for text in GOOD[0])
    tokens, gone = tokenize_pairs(pairs, tokenizer, limit)  # as long as allowed is not too long
    assert gone == 2 and tokens["length"][:] == [limit]
    message = f"All 3 rows are longer than max_length={limit - 1} .* has {limit}"
    with invalid(message):
        tokenize_pairs(pairs, tokenizer, limit - 1)
