"""Runs on verifiable instructions: resuming, the recorded cards, and the page that shows them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer

from dev.records import record_instructions
from dev.records.record_instructions import (
    Settings,
    compare,
    draw_batch,
    evaluate,
    leave_one_out,
    load_recorded,
    run,
)
from dev.simulated_hub.chat import SPECIAL, smollm2
from docs._ext import real_model
from rlhf_course.data.instructions import ONLY_TESTED, TRAINED

TOY = Settings(
    steps=3,
    questions=3,
    answers=3,
    new_tokens=6,
    first_layer=1,
    held_out=4,
    held_out_untrained=2,
    save_every=1,
)


@pytest.fixture
def toy_model(tmp_path, monkeypatch):
    """A toy chat model in place of SmolLM2, with rewards that its answers get."""
    folder = tmp_path / "toy"
    folder.mkdir()
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["Answer a question in one sentence."], 300, special_tokens=SPECIAL)
    bpe.save_model(str(folder))
    for name, content in smollm2(bpe, folder).items():
        is_text = isinstance(content, str)
        (folder / name).write_bytes(content.encode() if is_text else content)
    monkeypatch.setattr(record_instructions, "MODEL", folder)
    monkeypatch.setattr(record_instructions, "verify", parity)


def parity(_, answers) -> list[float]:
    """Return rewards that differ within most groups: the length's parity."""
    return [float(len(response) % 2) for response in answers.responses]


def adapter(folder):
    return load_file(folder / "08_0_adapter.safetensors")


def test_a_resumed_run_is_the_uninterrupted_run(toy_model, tmp_path, monkeypatch):
    card = run(TOY, tmp_path / "whole", tmp_path / "work")
    step = record_instructions.train_step

    def interrupted(*arguments):
        if arguments[-1] == 2:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(record_instructions, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(TOY, tmp_path / "resumed", tmp_path / "other")
    monkeypatch.setattr(record_instructions, "train_step", step)
    resumed = run(TOY, tmp_path / "resumed", tmp_path / "other")
    assert resumed["instructions"] == card["instructions"]
    whole, again = adapter(tmp_path / "whole"), adapter(tmp_path / "resumed")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert any(weight.any() for name, weight in whole.items() if "lora_B" in name)
    policy, tokenizer = load_recorded(0, tmp_path / "whole")
    tables = evaluate(policy, tokenizer, TOY, tmp_path / "again")
    for name, row in compare(tables, tables).items():
        assert row["after"] == card["instructions"][name]["after"]
    texts = [json.loads(line) for line in (tmp_path / "whole/08_0_texts.jsonl").open("rb")]
    answers = [row["answer"] for row in tables["one sentence"]["rows"]]
    assert answers == [row["after"] for row in texts[: TOY.held_out]]
    with pytest.raises(ValueError, match="another steps"):
        run(Settings(**{**vars(TOY), "steps": 4}), tmp_path / "more", tmp_path / "other")


def test_a_batch_has_every_trained_instruction_and_depends_on_seed_and_step():
    prompts, instructions = draw_batch(Settings(), 0)
    assert [i.name for i in instructions[:: Settings.answers]] == [i.name for i in TRAINED] * 4
    assert all(p.endswith(i.words) for p, i in zip(prompts, instructions, strict=True))
    assert draw_batch(Settings(), 0)[0] == prompts
    assert draw_batch(Settings(), 1)[0] != prompts != draw_batch(Settings(seed=1), 0)[0]


def test_leave_one_out():
    advantages = leave_one_out(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    third = 1 / 3
    expected = torch.tensor([[1.0, -third, -third, -third], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected)


def test_the_committed_page_is_that_of_its_cards():
    committed = real_model.PAGE.read_text(encoding="utf-8")
    assert committed == real_model.page(), "run python docs/_ext/real_model.py"


def test_the_cards_have_one_setting_and_agree_about_the_start():
    cards = real_model.read_cards()
    settings = [{**card["settings"], "seed": None} for card in cards]
    assert all(values == settings[0] for values in settings)
    for card in cards:
        assert list(card["instructions"]) == [i.name for i in (*TRAINED, *ONLY_TESTED)]
        for name, row in card["instructions"].items():
            assert row["before"] == cards[0]["instructions"][name]["before"]
        texts = (real_model.CARDS / f"08_{card['settings']['seed']}_texts.jsonl").read_text("utf-8")
        verifiers = {instruction.words: instruction.obeys for instruction in TRAINED}
        for row in map(json.loads, texts.splitlines()):
            if row["obeys_after"]:
                assert verifiers[row["instruction"]](row["after"], True)


def test_the_page_claims_what_the_cards_show():
    cards = real_model.read_cards()
    for card in cards:
        rows = card["instructions"]
        for name in ("one sentence", "fifteen words"):
            assert rows[name]["difference"] > rows[name]["interval"]
        assert rows["final question"]["difference"] < rows["final question"]["interval"]
        assert all(row["tokens_after"] < row["tokens_before"] for row in rows.values())
        groups = card["settings"]["questions"] / len(TRAINED)
        successes = [row["reward, final question"] for row in card["steps"]]
        assert sum(successes) / len(successes) * groups * card["settings"]["answers"] < groups / 2
    gains = [card["instructions"]["fifteen words"] for card in cards]
    by_kl = sorted(gains, key=lambda row: row["kl"])
    assert by_kl == sorted(gains, key=lambda row: row["after"])
