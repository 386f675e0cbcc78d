"""The embedded preference pairs: their gold, their noise, their text; and the world that holds
them.
"""

import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_course.course.presets import load_preset
from rlhf_course.data import load_pairs
from rlhf_course.rewards import RewardModel, load_reward_model
from rlhf_course.worlds import build, dialogues
from rlhf_course.worlds.dialogues import gold_utility, make_pairs
from rlhf_course.worlds.grammar import ceiling


@pytest.fixture(scope="module")
def pairs():
    return make_pairs(4000, seed=0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_a_pair_depends_on_the_seed_and_its_place_alone(pairs):
    assert make_pairs(40, seed=0) == pairs[:40] == make_pairs(41, seed=0)[:40]
    assert not set(make_pairs(40, seed=1)) & set(pairs)


def test_the_two_answers_of_a_pair_differ_and_so_do_the_pairs(pairs):
    assert all(p.chosen != p.rejected for p in pairs)
    assert len({(p.prompt, p.chosen, p.rejected) for p in pairs}) == len(pairs)
    assert len({p.chosen for p in pairs}) > 0.9 * len(pairs)


def test_the_gold_of_a_pair_is_its_utility(pairs):
    for p in pairs[:500]:
        assert p.gold_chosen == gold_utility(p.prompt, p.chosen)
        assert p.gold_rejected == gold_utility(p.prompt, p.rejected)


def test_gold_reaches_the_ceiling_and_no_more(pairs):
    """The verdicts are drawn, so accuracy is within three standard errors of its expectation."""
    gaps = np.array([p.gold_chosen - p.gold_rejected for p in pairs])
    right = np.where(gaps == 0, 0.5, gaps > 0)  # a tie is a guess
    expected = sigmoid(np.abs(gaps))
    assert ceiling(pairs) == pytest.approx(expected.mean()) and 0.745 < ceiling(pairs) < 0.775
    error = math.sqrt((expected * (1 - expected)).sum()) / len(gaps)
    assert abs(right.mean() - ceiling(pairs)) < 3 * error


def test_verdicts_are_as_noisy_as_bradley_and_terry_say(pairs):
    gaps = np.array([p.gold_chosen - p.gold_rejected for p in pairs])
    bins = [(0, 1), (1, 2), (2, 9)]
    for low, high in bins:
        inside = gaps[(np.abs(gaps) > low) & (np.abs(gaps) <= high)]
        expected = sigmoid(np.abs(inside))
        error = math.sqrt((expected * (1 - expected)).sum()) / len(inside)
        assert len(inside) > 500 and abs((inside > 0).mean() - expected.mean()) < 3 * error, (
            low,
            high,
        )


def test_length_tells_little(pairs):
    longer = [len(p.chosen) > len(p.rejected) for p in pairs if len(p.chosen) != len(p.rejected)]
    assert 0.5 < np.mean(longer) < 0.62


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


@pytest.mark.parametrize("kind", dialogues.POINTS)
def test_every_kind_of_points_has_an_example(kind, monkeypatch):
    monkeypatch.setitem(dialogues.POINTS, kind, 7.0)
    prompts = [f"\n\nHuman: {question}\n\nAssistant:" for question, *_ in TABLE]
    assert any(
        gold_utility(p, a) != pytest.approx(u) for p, (_, a, u) in zip(prompts, TABLE, strict=True)
    )


def test_prompts_and_answers_have_their_frame(pairs):
    follow_ups = 0
    for p in pairs:
        turns = re.split(r"\n\n(Human|Assistant):", p.prompt)
        assert (
            turns[0] == ""
            and turns[-1] == ""
            and turns[1::2] == ["Human", "Assistant"] * (len(turns) // 4)
        )
        follow_ups += len(turns) > 5
        assert "\n" not in p.chosen + p.rejected and 8 <= len(p.chosen.split()) <= 60
    assert 0.17 < follow_ups / len(pairs) < 0.23


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


def test_articles_are_right(pairs):
    """Spelling tells, but for a few words."""
    vowel_sound = re.compile(r"(?!use|uni|one\b|eu)[aeiou]|hour|honest", re.IGNORECASE)
    seen = {"a": 0, "an": 0}
    for text in spoken(pairs):
        for article, word in re.findall(r"\b(an?) (\w+)", text, re.IGNORECASE):
            seen[article.lower()] += 1
            assert bool(vowel_sound.match(word)) == (article.lower() == "an"), f"{article} {word}"
    assert min(seen.values()) > 100


@pytest.fixture
def folder(tmp_path, monkeypatch, own_cache):
    """The dialogues of the world, with 300 pairs to train on instead of 24,000."""
    asked = []

    def fewer(n, seed):
        asked.append((n, seed))
        return make_pairs(2300, seed)

    monkeypatch.setenv("RLHF_COURSE_CACHE", str(tmp_path / "world"))
    monkeypatch.setattr(dialogues, "make_pairs", fewer)
    built = build.build_dialogues()
    assert build.build_dialogues() == built and asked == [(26000, 0)]  # built once
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
    assert tokenizer.pad_token == "[PAD]" and tokenizer.pad_token_id != tokenizer.eos_token_id
    model = load_reward_model(found.model, new_head=True)
    assert model.config.pad_token_id == tokenizer.pad_token_id and model.config.n_layer == 1
    assert (
        model.get_input_embeddings().num_embeddings == len(tokenizer) and model.config.n_embd == 32
    )
    score = RewardModel(model, tokenizer)
    assert score.max_length >= 2 * settings.max_length  # room for the audit's very long answers
    pairs = make_pairs(6, seed=9)
    assert score([p.prompt for p in pairs], [p.chosen for p in pairs]).isfinite().all()
    assert build.prepare_reward_model(settings) == found
    settings.n_embd = 64
    assert build.prepare_reward_model(settings).model != found.model


def test_a_base_with_steps_has_learnt_something(folder):
    """Its loss on dialogues, in nats a token, falls below that of a guess among all tokens."""
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 300, "n_layer": 1, "n_embd": 32, "max_length": 100}
    losses = {}
    for steps in (0, 25):
        settings = load_preset("01_reward_modeling", "tiny", sizes | {"base_steps": steps})
        base = build.prepare_reward_model(settings).model
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(base),
            AutoTokenizer.from_pretrained(base),
        )
        pair = make_pairs(1, seed=9)[0]
        ids = tokenizer(f"{pair.prompt} {pair.chosen}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            losses[steps] = model(input_ids=ids, labels=ids).loss.item()
    assert losses[0] == pytest.approx(math.log(301), abs=0.3) and losses[25] < losses[0] - 0.5


def test_pairs_of_your_own_are_asked_for(folder, monkeypatch):
    with pytest.raises(ValueError, match="columns chosen and rejected"):
        build.prepare_reward_model(load_preset("01_reward_modeling", "scratch"))
    asked = []
    monkeypatch.setattr(build, "download", lambda source, revision: asked.append(source))
    own = load_preset("01_reward_modeling", "full", {"dataset": "my/pairs", "model": "my/base"})
    assert vars(build.prepare_reward_model(own)) == {"dataset": "my/pairs", "model": "my/base"}
    assert asked == ["my/base"]


def test_a_classifier_on_the_base_has_one_output_by_default(folder):
    base = build.prepare_reward_model(
        load_preset("01_reward_modeling", "tiny", {"n_embd": 32})
    ).model
    assert load_reward_model(base, new_head=True).config.num_labels == 1
    assert AutoModelForSequenceClassification.from_pretrained(base).config.num_labels == 2
