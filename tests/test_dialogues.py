"""The embedded preference pairs: their gold, their noise, their text; and the world that holds
them.
"""

import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rlhf_course.course.presets import load_preset
from rlhf_course.data import load_pairs
from rlhf_course.rewards import RewardModel, load_reward_model
from rlhf_course.synthetic import build, dialogues
from rlhf_course.synthetic.dialogues import TOPICS, draw_answers, gold_utility, make_pairs


@pytest.fixture(scope="module")
def pairs():
    return make_pairs(4000, seed=0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_a_pair_depends_on_the_seed_and_its_place_alone(pairs):
    assert make_pairs(40, seed=0) == pairs[:40] == make_pairs(41, seed=0)[:40]
    assert not set(make_pairs(40, seed=1)) & set(pairs)


def test_the_gold_of_a_pair_is_its_utility(pairs):
    for p in pairs[:500]:
        assert p.gold_chosen == gold_utility(p.prompt, p.chosen)
        assert p.gold_rejected == gold_utility(p.prompt, p.rejected)


def test_gold_reaches_the_ceiling_and_no_more(pairs):
    """Verdicts are drawn: accuracy is within three standard errors of the ceiling."""
    gaps = np.array([p.gold_chosen - p.gold_rejected for p in pairs])
    right = np.where(gaps == 0, 0.5, gaps > 0)  # a tie is a guess
    expected = sigmoid(np.abs(gaps))
    assert 0.745 < expected.mean() < 0.775
    error = math.sqrt((expected * (1 - expected)).sum()) / len(gaps)
    assert abs(right.mean() - expected.mean()) < 3 * error


BIKE = "How can I look after a road bike?"
CHAIN = "How do I clean the chain of my old bike?"
TABLE = [  # the last question, an answer, its utility in nats
    (BIKE, "Fill the tyres.", 0.15),
    (BIKE, "Fill the tyres. A tyre is soft.", 0.15),  # one word, in two forms
    (BIKE, "Fill the tyres, clean the chain and oil it.", 0.45),
    (BIKE, "Tyres, pump, chain, rag, oil, brake.", 0.6),  # words beyond the fourth earn nothing
    (CHAIN, "Clean the chain.", 0.0),  # on topic, and nothing that the question did not say
    (CHAIN, "Clean the chain with a rag.", 0.15),
    (BIKE, "Ride it gently.", -0.6),
    (BIKE, "Use fresh beans.", -0.6),  # words of another topic
    ("How do I do that?", "Fill the tyres.", -0.6),  # no topic, no words
    (BIKE, "Good luck with the chain.", 1.05),
    (BIKE, "Happy to help! Good luck with the chain.", 1.05),  # each trait counts once
    (BIKE, "Oil it, because rust is bad.", 1.05),
    (BIKE, "Oil it; otherwise it will rust.", 1.05),
    (BIKE, "Oil it, so that it lasts.", 1.05),
    (BIKE, "It depends. Oil it.", -1.05),
    (BIKE, "I am not. Sure, oil it.", 0.15),  # no marker runs over the end of a sentence
    (BIKE, "Only a lazy person asks. Oil it.", -1.85),
    (BIKE, "Lazily oil it.", 0.15),  # a part of a word is no marker
    (BIKE, "Oil it. Oil it!", -0.35),
    (BIKE, "Oil it. Ride. Oil it. oil it.", -0.85),
    (BIKE, "", -3.0),
    (BIKE, " ... ", -3.0),
    (BIKE, "How can I look after a road bike?", -1.6),
    (BIKE, "You ask: how can I look after a road bike? Oil it.", -0.85),
    ("My bike?", "My bike? Oil it.", 0.15),  # too short to be a copy
    (BIKE, "Oil the chain", -0.2),
    (BIKE, "Oil the chain, because", 0.7),
    (BIKE, 'Oil the "chain."', 0.3),
    (BIKE, "Happy to help. It depends. Oil it, because it is stupid and", -1.75),
]


@pytest.mark.parametrize(("question", "answer", "expected"), TABLE)
def test_gold_by_hand(question, answer, expected):
    coffee = " How do I make coffee?\n\nAssistant: Use a mug.\n\nHuman:"
    for before in ("", " Hello!\n\nAssistant: Hi.\n\nHuman:", coffee):
        prompt = f"\n\nHuman:{before} {question}\n\nAssistant:"
        assert gold_utility(prompt, answer) == pytest.approx(expected), prompt


def spoken(pairs):
    """Every distinct turn of the pairs."""
    found = set()
    for p in pairs:
        found |= {turn.strip() for turn in re.split(r"\n\n(?:Human|Assistant):", p.prompt)} | {
            p.chosen,
            p.rejected,
        }
    return found - {""}


def test_the_text_is_clean(pairs):
    for text in spoken(pairs):
        assert text[0].isupper() and text[-1] in ".!?", text
        assert not re.search(r"[.!?] +[^A-Z]|  |\s[,.;:!?]|[*>|{}()/\\_]", text), text
        assert not re.search(r"\b(\w+) \1\b", text, re.IGNORECASE), text
        assert not re.search(r"[.!?,;]{2}|\bi\b", text), text


@pytest.fixture
def folder(tmp_path, monkeypatch, own_cache):
    """The dialogues of the world, with 300 pairs to train on instead of 16,000."""
    asked = []

    def fewer(n, seed):
        asked.append((n, seed))
        return make_pairs(2300, seed)

    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "world"))
    monkeypatch.setattr(dialogues, "make_pairs", fewer)
    built = build.build_dialogues()
    assert build.build_dialogues() == built and asked == [(18000, 0)]  # built once
    return built


def test_the_world_holds_the_pairs_with_their_gold(folder, pairs):
    sides = {}
    for split in ("train", "test"):
        rows, report = load_pairs(folder, split)
        assert not any(report.values())
        keys = ("prompt", "chosen", "rejected", "gold_chosen", "gold_rejected")
        sides[split] = [dialogues.Pair(*(row[key] for key in keys)) for row in rows]
    assert sides["test"] == pairs[:2000] and sides["train"] == pairs[2000:2300]


def test_the_base_of_the_world_becomes_a_reward_model(folder):
    sizes = {"vocab_size": 400, "n_layer": 1, "n_embd": 32, "base_steps": 2, "max_length": 100}
    settings = load_preset("01_reward_modeling", "tiny", sizes)
    state = torch.get_rng_state()
    found = build.prepare_reward_model(settings)
    assert torch.equal(state, torch.get_rng_state()) and found.dataset == str(folder)
    tokenizer = AutoTokenizer.from_pretrained(found.model)
    model = load_reward_model(found.model, new_head=True)
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    score = RewardModel(model, tokenizer)
    assert score.max_length >= 2 * settings.max_length  # room for the audit's very long answers
    pairs = make_pairs(6, seed=9)
    assert score([p.prompt for p in pairs], [p.chosen for p in pairs]).isfinite().all()
    assert build.prepare_reward_model(settings) == found
    settings.n_embd = 64
    assert build.prepare_reward_model(settings).model != found.model


def test_pairs_of_your_own_are_asked_for(folder, monkeypatch):
    with pytest.raises(ValueError, match="columns chosen and rejected"):
        build.prepare_reward_model(load_preset("01_reward_modeling", "scratch"))
    asked = []
    monkeypatch.setattr(build, "download", lambda source, revision: asked.append(source))
    own = load_preset("01_reward_modeling", "full", {"dataset": "my/pairs", "model": "my/base"})
    assert vars(build.prepare_reward_model(own)) == {"dataset": "my/pairs", "model": "my/base"}
    assert asked == ["my/base"]


def test_answers_to_a_prompt_are_those_of_its_pairs(pairs):
    """Their utilities have the same distribution, and no tip of an earlier turn comes again."""
    several = [p for p in pairs if p.prompt.count("Human:") == 2][:200]
    drawn = {p.prompt: draw_answers(p.prompt, 4) for p in several}
    assert draw_answers(several[0].prompt, 4) == drawn[several[0].prompt]
    assert draw_answers(several[0].prompt, 4, seed=1) != drawn[several[0].prompt]
    means = [
        np.mean([gold_utility(p.prompt, text) for p in several for text in texts(p)])
        for texts in (lambda p: drawn[p.prompt], lambda p: (p.chosen, p.rejected))
    ]
    assert means[0] == pytest.approx(means[1], abs=0.2)
    tips = [tip.replace("*", "").partition(">")[0] for t in TOPICS.values() for tip in t["tips"]]
    for prompt, answers in drawn.items():
        earlier = [tip for tip in tips if tip.lower() in prompt.lower()]
        assert not any(tip.lower() in text.lower() for text in answers for tip in earlier)
    with pytest.raises(ValueError, match="'How do I do that.' is on none of the world's topics"):
        draw_answers("\n\nHuman: How do I do that?\n\nAssistant:", 2)
