"""Scores of a reward model, its loss, and its audit."""

import math

import datasets
import numpy as np
import pytest
import torch
from builders import invalid
from peft import LoraConfig, get_peft_model
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForSequenceClassification,
)

from rlhf_course.audit import RISKS, add_negatives, audit, audit_change, make_probes
from rlhf_course.data import load_pairs, tokenize_pairs
from rlhf_course.rewards import RewardModel, last_token_scores, pairwise_loss
from rlhf_course.synthetic import small_models
from rlhf_course.synthetic.dialogues import gold_utility, make_pairs

PAIRS = make_pairs(200, seed=3)
PROMPTS, ANSWERS = [p.prompt for p in PAIRS], [p.chosen for p in PAIRS]
FEW = slice(0, 12)  # ragged: 30 to 150 tokens


def make_tokenizer(own_pad: bool = True, side: str = "right"):
    """A byte-level BPE whose padding is a token of its own, or EOS as with GPT-2."""
    tokenizer = small_models.train_tokenizer(PROMPTS + ANSWERS, 400)
    if own_pad:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.padding_side = side
    return tokenizer


def make_classifier(tokenizer, family: str = "gpt2", dropout: float = 0.0, **config):
    """A random classifier with weights large enough for scores that differ."""
    torch.manual_seed(0)
    common = {"vocab_size": len(tokenizer), "num_labels": 1, "bos_token_id": 0}
    common |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    if family == "opt":
        shape = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "init_std": 0.3}
        shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 300}
        shape |= {"dropout": 0.0}
        return OPTForSequenceClassification(OPTConfig(**common | shape | config)).eval()
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 300, "initializer_range": 0.3}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    return GPT2ForSequenceClassification(GPT2Config(**common | shape | rates | config)).eval()


def row_by_row(model, tokenizer, prompts, answers) -> torch.Tensor:
    """The network's own logits, one unpadded dialogue at a time."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(f"{prompt} {answer}", return_tensors="pt")["input_ids"]
        ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("own_pad", [True, False])
def test_scores_are_the_networks_own_whatever_the_padding(family, own_pad):
    model = make_classifier(make_tokenizer(own_pad), family)
    alone = row_by_row(model, make_tokenizer(own_pad), PROMPTS[FEW], ANSWERS[FEW])
    assert alone.std() > 0.05  # scores differ, so that the order counts
    for side in ("left", "right"):
        for batch_size in (1, 5, 64):
            score = RewardModel(model, make_tokenizer(own_pad, side), batch_size=batch_size)
            found = score(PROMPTS[FEW], ANSWERS[FEW])
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
            assert found.dtype == torch.float32 and not found.requires_grad


def test_a_long_prompt_loses_its_oldest_tokens():
    tokenizer = make_tokenizer()
    model = make_classifier(tokenizer)
    score = RewardModel(model, tokenizer, max_length=60)
    prompt, answer = "".join(PROMPTS[:4]), "I would fold the dough several times, and rest it."
    ids = tokenizer(f"{prompt} {answer}")["input_ids"] + [tokenizer.eos_token_id]
    expected = model(input_ids=torch.tensor([ids[-60:]])).logits[:, 0].detach()
    torch.testing.assert_close(score([prompt], [answer]), expected, atol=1e-5, rtol=0)
    assert (score([prompt], [answer[:-1] + "!"]) - expected).abs() > 1e-4  # its end is read


@pytest.mark.parametrize("has_bos", [False, True])
def test_an_answer_may_fill_max_length_but_not_more(has_bos):
    tokenizer = make_tokenizer()
    length = len(tokenizer(" " + ANSWERS[1])["input_ids"]) + 1
    if has_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    fits, short = (
        RewardModel(make_classifier(tokenizer), tokenizer, max_length=most)
        for most in (length, length - 1)
    )
    assert fits(PROMPTS[1:2], ANSWERS[1:2]).isfinite()
    with invalid(f"of {length} tokens is longer than max_length={length - 1}"):
        short(PROMPTS[1:2], ANSWERS[1:2])


def test_several_outputs_are_refused():
    tokenizer = make_tokenizer()
    with invalid("has one output; this one has 2"):
        RewardModel(make_classifier(tokenizer, num_labels=2), tokenizer)


def test_scoring_is_without_dropout_and_puts_modes_back():
    tokenizer = make_tokenizer()
    model = make_classifier(tokenizer, dropout=0.5)
    score = RewardModel(model, tokenizer)
    quiet = score(PROMPTS[FEW], ANSWERS[FEW])
    model.train()
    model.transformer.h[0].eval()  # a part that someone froze
    modes = {name: module.training for name, module in model.named_modules()}
    torch.testing.assert_close(score(PROMPTS[FEW], ANSWERS[FEW]), quiet)
    with invalid("longer than max_length=3"):
        RewardModel(model, tokenizer, max_length=3)(PROMPTS[FEW], ANSWERS[FEW])
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_saved_model_scores_the_same(tmp_path):
    tokenizer = make_tokenizer()
    model = make_classifier(tokenizer)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    score = RewardModel(tmp_path)
    assert score.model.dtype == torch.float32 and not score.model.training
    expected = RewardModel(model.float(), tokenizer)(PROMPTS[FEW], ANSWERS[FEW])
    torch.testing.assert_close(score(PROMPTS[FEW], ANSWERS[FEW]), expected, atol=1e-5, rtol=0)


def test_an_adapter_folder_scores_the_same(tmp_path):
    """The base is a language model, so that the score's weights are in the adapter alone."""
    tokenizer = make_tokenizer()
    GPT2LMHeadModel(make_classifier(tokenizer).config).save_pretrained(tmp_path / "base")
    lora = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    model = get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1),
        LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, **lora),
    )
    torch.nn.init.normal_(model.get_base_model().score.modules_to_save["default"].weight)
    expected = RewardModel(model, tokenizer)(PROMPTS[FEW], ANSWERS[FEW])
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path / "adapter")
    score = RewardModel(str(tmp_path / "adapter"))
    torch.testing.assert_close(score(PROMPTS[FEW], ANSWERS[FEW]), expected, atol=1e-5, rtol=0)
    plain = RewardModel(model.unload(), tokenizer)(PROMPTS[FEW], ANSWERS[FEW])
    assert (plain - expected).abs().max() > 1e-2  # the adapter makes a difference


@pytest.mark.parametrize(("in_tokenizer", "in_config"), [(None, 1), (2, 1), (1, None), (1, -1)])
def test_a_config_decides_where_a_score_is_read(in_tokenizer, in_config, tmp_path):
    """Else the tokenizer decides. Token 1 is EOS here."""
    tokenizer = make_tokenizer()
    names = {None: None, 1: tokenizer.eos_token, 2: tokenizer.pad_token}
    ids = {None: None, -1: -1, 1: tokenizer.eos_token_id}
    model = make_classifier(tokenizer, pad_token_id=ids[in_config]).eval()
    tokenizer.pad_token = names[in_tokenizer]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    score = RewardModel(str(tmp_path))
    assert score.model.config.pad_token_id == score.tokenizer.pad_token_id == ids[1]
    rows = score.encode(PROMPTS[FEW], ANSWERS[FEW])
    with torch.no_grad():
        expected = torch.cat([score.model(torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(score(PROMPTS[FEW], ANSWERS[FEW]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("own", [True, False])
def test_another_padding_token_in_the_config_keeps_the_score_at_eos(own, tmp_path):
    tokenizer = make_tokenizer()
    model = make_classifier(tokenizer)
    pad = tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.pad_token if own else None
    rows = RewardModel(model, tokenizer).encode(PROMPTS[FEW], ANSWERS[FEW])
    assert tokenizer.pad_token_id == model.config.pad_token_id == pad
    assert all(row[-1] == tokenizer.eos_token_id for row in rows)
    assert "endoftext" in RewardModel(model, tokenizer).read_at(rows[0])


def test_an_adapters_tokenizer_decides_because_the_config_is_its_bases():
    tokenizer = make_tokenizer()
    lora = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    base = make_classifier(tokenizer, pad_token_id=tokenizer.eos_token_id)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **lora))
    pad = tokenizer.pad_token_id
    assert RewardModel(model, tokenizer).tokenizer.pad_token_id == pad == base.config.pad_token_id


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_last_token_scores_read_the_last_real_token_on_both_paddings(family):
    tokenizer = make_tokenizer()
    model, pad = make_classifier(tokenizer, family), tokenizer.pad_token_id
    rows = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
    expected = torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])
    left = torch.tensor([[pad] * (9 - len(row)) + row for row in rows])
    right = torch.tensor([row + [pad] * (9 - len(row)) for row in rows])
    for ids in (left, right):
        found = last_token_scores(model, ids, (ids != pad).long())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found.sum().backward()  # it can be trained through
    assert model.score.weight.grad.abs().sum() > 0


def test_pairwise_loss_pulls_by_the_chance_of_being_wrong():
    chosen = torch.tensor([0.3, -2.0, 40.0, -1000.0], requires_grad=True)
    rejected = torch.tensor([-0.7, 1.0, -40.0, 0.0], requires_grad=True)
    pairwise_loss(chosen, rejected).backward()
    wrong = [1 - 1 / (1 + math.exp(-d)) for d in (1.0, -3.0, 80.0)] + [1.0]
    np.testing.assert_allclose(chosen.grad * 4, [-w for w in wrong], atol=1e-6)  # 4: it is a mean
    np.testing.assert_allclose(rejected.grad * 4, wrong, atol=1e-6)
    assert pairwise_loss(torch.tensor([0.0]), torch.tensor([1000.0])).item() == 1000


def test_pairwise_loss_is_the_loss_of_trl(tmp_path):
    from trl import RewardConfig, RewardTrainer  # here alone: it is slow to import

    tokenizer = make_tokenizer()
    rows = [
        {"chosen": f"{p.prompt} {p.chosen}", "rejected": f"{p.prompt} {p.rejected}"}
        for p in PAIRS[FEW]
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    pairs, _ = load_pairs(tmp_path)
    tokens, _ = tokenize_pairs(pairs, tokenizer, 300)
    options = {"report_to": "none", "bf16": False, "use_cpu": True, "max_length": None}
    config, model = RewardConfig(str(tmp_path), **options), make_classifier(tokenizer)
    trainer = RewardTrainer(model, args=config, train_dataset=tokens, processing_class=tokenizer)
    batch = trainer.data_collator(
        [{k: row[k] for k in ("chosen_ids", "rejected_ids")} for row in tokens]
    )
    ours = last_token_scores(trainer.model, **batch).chunk(2)
    theirs = trainer.compute_loss(trainer.model, dict(batch)).detach()
    score = RewardModel(trainer.model, tokenizer)
    texts = [score(pairs["prompt"], pairs[side]) for side in ("chosen", "rejected")]
    for scores in (ours, texts):
        torch.testing.assert_close(pairwise_loss(*scores).detach(), theirs, atol=1e-5, rtol=0)
    assert abs(theirs.item() - math.log(2)) > 1e-3


def gold(prompts, answers) -> torch.Tensor:
    return torch.tensor([gold_utility(p, a) for p, a in zip(prompts, answers, strict=True)])


def length(prompts, answers) -> torch.Tensor:
    return torch.tensor([float(len(answer)) for answer in answers])


def test_gold_passes_the_probes_that_it_condemns():
    """Praise only, an answer to another question, or one with others' added can be no worse."""
    table = audit(gold, PROMPTS, ANSWERS)
    condemned = {"empty", "one word", "truncated", "repeated", "copied prompt", "insulting"}
    assert set(table.index[table["passed"]]) == condemned
    wins = [gold_utility(p, a) > gold_utility(p, "") for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert table.loc["empty", "share"] == np.mean(wins)


def test_the_change_between_two_audits_is_paired_by_prompt():
    before, after = audit(length, PROMPTS, ANSWERS), audit(gold, PROMPTS, ANSWERS)
    change = audit_change(before, after)
    assert np.allclose(change["change"], after["share"] - before["share"])
    assert not audit_change(after, after).to_numpy().any()
    wins = np.array([table.attrs["wins"]["empty"] for table in (before, after)], float)
    gap = wins[1] - wins[0]
    assert np.isclose(change.loc["empty", "±"], 1.96 * gap.std(ddof=1) / len(gap) ** 0.5)


def test_a_love_of_length_and_a_constant_fail_the_audit():
    table = audit(length, PROMPTS, ANSWERS)
    assert {"very long", "repeated"}.isdisjoint(table.index[table["passed"]])
    assert table.loc["very long", "share"] == 0 and table.loc["empty", "passed"]
    assert table.loc["empty", "margin"] == pytest.approx(np.mean([len(a) for a in ANSWERS]))
    table = audit(lambda p, a: torch.zeros(len(a)), PROMPTS, ANSWERS)
    assert not table["share"].any() and not table["passed"].any()


def test_the_audit_passes_at_nine_in_ten():
    for wins, passed in ((18, True), (17, False)):

        def score(prompts, answers, wins=wins):
            rows = enumerate(answers)  # 20 prompts: all normal answers, then each probe's
            return torch.tensor([float(a != "" or i % 20 >= wins) for i, a in rows])

        row = audit(score, PROMPTS[:20], ANSWERS[:20]).loc["empty"]
        assert row["share"] == pytest.approx(wins / 20) and row["passed"] == passed
        assert row["ci"] == pytest.approx(1.96 * math.sqrt(wins / 20 * (1 - wins / 20) / 20))


def test_a_probe_that_equals_the_normal_answer_does_not_count():
    row = audit(length, PROMPTS[:3], [ANSWERS[0], ANSWERS[1], "Yes."]).loc["one word"]
    assert row["share"] == 1 and row["ci"] == 0 and row["passed"]


def test_probes_depend_on_the_seed_alone():
    first = make_probes(PROMPTS, ANSWERS, seed=1)
    torch.rand(3), np.random.rand(3)
    assert make_probes(PROMPTS, ANSWERS, seed=1) == first
    other = make_probes(PROMPTS, ANSWERS, seed=2)
    assert {name for name in RISKS if other[name] != first[name]} == {
        "off topic",
        "very long",
        "flattery",
    }


def test_off_topic_is_never_the_own_answer_even_to_a_question_of_short_words():
    questions, answers = ("Who are you?", "How old is it?", "Why?"), ["A bot.", "Ten.", "No idea."]
    prompts = [f"\n\nHuman: {question}\n\nAssistant:" for question in questions]
    for seed in range(20):
        strangers = make_probes(prompts, answers, seed)["off topic"]
        assert all(a != b for a, b in zip(strangers, answers, strict=True))


def pairs_dataset(n: int = 200):
    keys = ("prompt", "chosen", "rejected", "gold_chosen")
    return datasets.Dataset.from_list(
        [{key: getattr(pair, key) for key in keys} for pair in PAIRS[:n]]
    )


def test_negatives_are_added_of_each_kind_equally_often():
    kinds = ("empty", "one word", "insulting", "copied prompt")
    mixed = add_negatives(pairs_dataset(), kinds, seed=1, share=0.4)
    assert mixed.column_names == ["prompt", "chosen", "rejected"] and len(mixed) == 280
    known = {(p.prompt, p.chosen): p.rejected for p in PAIRS}
    is_bad = [known[row["prompt"], row["chosen"]] != row["rejected"] for row in mixed]
    bad = [row for row, is_one in zip(mixed, is_bad, strict=True) if is_one]
    assert len({row["prompt"] + row["chosen"] for row in bad}) == len(bad) == 80
    assert all(row["rejected"] != row["chosen"] for row in mixed)
    texts = [row["rejected"] for row in bad]
    insulting = sum("stupid questions" in text for text in texts)
    assert texts.count("") == texts.count("Yes.") == insulting == 20
    assert 20 < sum(is_bad[:140]) < 60  # shuffled: neither kind comes first
    for share in (0, -1, 2):
        with invalid("share must be above 0"):
            add_negatives(pairs_dataset(), kinds, share=share)
