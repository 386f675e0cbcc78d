"""The check-up of a reward model: what it refuses, what it lets pass, and its command."""

import json
import math
from zlib import crc32

import datasets
import numpy as np
import pytest
import torch
from builders import invalid, save_classifier, write_rows

from rlhf_course.audit.checkup import STOP, bag_of_words, check_up
from rlhf_course.command_line import exits
from rlhf_course.data.transcripts import as_messages, as_text
from rlhf_course.synthetic.dialogues import gold_utility, make_pairs
from scripts import check_reward_model

KEYS = ("prompt", "chosen", "rejected")
PAIRS = datasets.Dataset.from_list(
    [{key: getattr(pair, key) for key in KEYS} for pair in make_pairs(400, seed=5)]
)


def gold(prompts, answers):
    return torch.tensor([gold_utility(*both) for both in zip(prompts, answers, strict=True)])


def length(prompts, answers):
    return torch.tensor([float(len(answer)) for answer in answers])


def chance(prompts, answers):
    return torch.tensor([crc32(answer.encode()) % 997 / 99 for answer in answers])


def repeats(prompts, answers):
    """Gold, and much more for a sentence that comes again."""
    rows = [[*filter(None, answer.split(". "))] for answer in answers]
    return gold(prompts, answers) + 5 * torch.tensor([len(row) - len({*row}) for row in rows])


def sees_the_batch(prompts, answers):
    return gold(prompts, answers) + math.log(len(answers))


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (length, "no gain over a rule is shown (the longer answer wins)"),
        (chance, "may be chance"),
        (repeats, "repeated: one rewarding sentence in a loop"),
        (sees_the_batch, "depends on the padding"),
    ],
)
def test_what_would_spoil_ppo_stops_it(score, reason):
    found = check_up(score, PAIRS)
    assert found.verdict.startswith("Do not start PPO: ") and reason in found.verdict


def test_gold_may_start():
    found = check_up(gold, PAIRS)
    assert found.verdict.startswith("No objection") and not found.advice(STOP)
    assert np.isclose(found.pairs["right"].mean(), 0.75, atol=0.06)


def test_twice_too_sure_is_watched():
    assert "divide scores by" in check_up(lambda *texts: 20 * gold(*texts), PAIRS).verdict


def test_words_alone_order_pairs_that_differ_by_a_word():
    chosen, rejected = (
        [f"This is a {word} answer, number {i}." for i in range(60)] for word in ("good", "poor")
    )
    assert bag_of_words(chosen, rejected).mean() == 1
    assert bag_of_words(["好的回答"] * 20, ["坏的回答"] * 20).mean() == 1
    labels = np.random.default_rng(0).random(400) < 0.5
    texts = [("a b c", "d e f") if label else ("d e f", "a b c") for label in labels]
    assert abs(bag_of_words(*zip(*texts, strict=True)).mean() - 0.5) < 0.1


def test_bad_answers_of_ones_own():
    own = {"prompt": PAIRS["prompt"][:9], "answer": PAIRS["chosen"][:9], "shouting": ["OI!"] * 9}
    found = check_up(lambda p, a: -length(p, a), PAIRS, own)
    assert list(found.audit.index) == ["shouting"] and "shouting" in found.verdict
    with invalid("1 pairs are too few"):
        check_up(gold, PAIRS.select([0]))


def test_a_dialogue_as_messages_and_back():
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it late?"}]
    talk += [{"role": "assistant", "content": "No: 9 pm."}, {"role": "user", "content": "Thanks"}]
    assert as_messages(as_text(talk)) == talk and as_messages(as_text(talk[1:])) == talk[1:]


def run(*arguments) -> int:
    return exits.run("check_reward_model.py", check_reward_model.main, [*map(str, arguments)])


def test_the_command_writes_a_page_and_its_exit_code_is_the_verdict(tmp_path, capsys):
    model = save_classifier(tmp_path / "<i>model", labels=("score",))
    data = write_rows(tmp_path / "pairs", [*PAIRS.select(range(60))], "test.jsonl")
    output = tmp_path / "out"
    assert run(model, "--pairs", data, "--output", output) == 2
    assert "Do not start PPO" in capsys.readouterr().out
    result = json.loads((output / "check-up.json").read_text(encoding="utf-8"))
    assert result["pairs"] == 60 and len(result["findings"]) == 16
    page = (output / "check-up.html").read_text(encoding="utf-8")
    assert (
        "<i>" not in page and page.count("<img") == 2 and result["findings"][0]["measured"] in page
    )


def test_a_classifier_of_two_labels_needs_one_of_them(tmp_path, capsys):
    model = save_classifier(tmp_path / "model")
    data = write_rows(tmp_path / "pairs", [*PAIRS.select(range(4))], "test.jsonl")
    assert run(model, "--pairs", data, "--output", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "2 labels (NEGATIVE, POSITIVE)" in said and "check_reward_model.py --label NAME" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--split", "train"), "Unknown split"),
        (("--encoding", "template"), "has no chat template"),
        (("--label", "HELPFUL"), "has no label 'HELPFUL'"),
        (("--probes", "probes.jsonl"), "add prompt, answer, and"),
    ],
)
def test_what_cannot_be_checked(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = save_classifier(tmp_path / "model", labels=("score",))
    data = write_rows(tmp_path / "pairs", [*PAIRS.select(range(4))], "test.jsonl")
    write_rows(tmp_path, [{"prompt": "a", "reply": "b"}], "probes.jsonl")
    assert run(model, "--pairs", data, "--output", "out", *arguments) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
