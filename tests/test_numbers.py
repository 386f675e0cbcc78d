"""What is not finite never reaches weights or files, and a refused step leaves no trace."""

import math
import warnings

import pytest
import torch
from builders import EOS, SAMPLING, invalid, make_policy, make_samples, make_trainer, sgd, snapshot
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from rlhf_course import PPOConfig
from rlhf_course.audit import audit
from rlhf_course.ppo.algorithm import RunningMoments, gae
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.quick

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cliprange", -1),
        ("init_kl_coef", NAN),
        ("batch_size", 8.5),
        ("learning_rate", "fast"),
        ("seed", -1),
        ("max_grad_norm", -1),
        ("score_clip", "0"),
        ("logprob_chunk_size", 0),
        ("target", 0),
        ("ppo_epochs", True),
        ("vf_coef", INF),
        ("horizon", None),
        ("lam", 1.5),
    ],
)
def test_a_setting_out_of_range_is_refused(name, value):
    with invalid(f"{name} is .*; it must be a"):
        PPOConfig(**{name: value})


def test_settings_that_do_not_fit_together_are_refused():
    with invalid("the KL coefficient could turn negative"):
        PPOConfig(horizon=10)
    policy = make_policy()
    policy.pretrained_model.requires_grad_(False)  # as a PeftModel is loaded by default
    with pytest.raises(ValueError, match="Only the value head .* is_trainable=True"):
        make_trainer(policy)
    config = PPOConfig(learning_rate="1e-5", batch_size="8", mini_batch_size=8)  # as YAML reads it
    assert (config.learning_rate, config.batch_size) == (1e-5, 8)


@pytest.mark.parametrize("constant", [1.0, 0.1, -3e6])
def test_scores_without_a_spread_are_not_scaled(constant):
    trainer, (queries, responses, scores) = make_trainer(use_score_scaling=True), make_samples()
    stats = trainer.step(queries, responses, [torch.tensor(constant)] * 8)
    assert stats["ppo/mean_scores"] == pytest.approx(constant)
    stats = trainer.step(queries, responses, [constant + score for score in scores])
    spread = torch.stack(scores).std().item() / trainer.running.std
    assert stats["ppo/std_scores"] == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("one_token", [True, False])
def test_a_refused_step_leaves_no_trace(one_token):
    sizes = {"batch_size": 1, "mini_batch_size": 1} if one_token else {"use_score_norm": True}
    trainer = make_trainer(use_score_scaling=True, **sizes)
    queries, responses, scores = make_samples()
    if one_token:  # one token, which has no variance
        queries, responses, scores = queries[:1], [torch.tensor([3])], scores[:1]
    else:
        trainer.model.pretrained_model.transformer.ln_f.bias.data[0] = NAN
    with pytest.raises((ValueError, FloatingPointError)):
        trainer.step(queries, responses, scores)
    assert vars(trainer.running) == vars(RunningMoments()) and trainer.current_step == 0
    assert trainer.kl_ctl.value == trainer.config.init_kl_coef and trainer.is_whole


def nan_coefficient(trainer):
    trainer.kl_ctl.value = NAN


def nan_value_head(trainer):
    trainer.model.v_head.summary.bias.data[0] = NAN


def nan_gradient(trainer):
    trainer.model.v_head.summary.weight.register_hook(lambda gradient: gradient * NAN)


def huge_values(trainer):
    trainer.model.v_head.summary.bias.data[0] = 1e25


@pytest.mark.parametrize("config", [{}, {"fast": False, "mini_batch_size": 4}])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_coefficient, "the loss is nan"),
        (nan_value_head, "the value head's values for sample 0 are NaN"),
        (nan_gradient, "the gradient norm is nan"),
        (huge_values, "the loss is nan"),
    ],
)
def test_what_is_not_finite_ends_the_step_and_moves_no_weight(spoil, message, config):
    trainer = make_trainer(make_policy(), make_policy(1), ppo_epochs=1, **config)
    spoil(trainer)
    before = snapshot(trainer.model)
    with pytest.raises(FloatingPointError, match=f"Step 1: {message}"):
        trainer.step(*make_samples())
    after = snapshot(trainer.model)
    assert all(before[name].nan_to_num().equal(after[name].nan_to_num()) for name in before)


def test_returns_without_variance_leave_nothing_to_explain():
    policy = make_policy()
    for parameter in policy.v_head.parameters():
        parameter.data.zero_()
    queries, responses, _ = make_samples()
    stats = make_trainer(policy, lam=1.0).step(queries, responses, [torch.tensor(0.0)] * 8)
    assert stats["ppo/returns/var"] == stats["ppo/val/var_explained"] == 0
    assert stats["ppo/val/var_explained_before"] == 0


def test_explained_variance_is_that_of_the_values_that_made_the_advantages():
    """Not of the values after fitting, which flatter the critic."""
    policy = make_policy()
    groups = [{"params": [*policy.v_head.parameters()], "lr": 1e-2}]
    groups += [{"params": [*policy.pretrained_model.parameters()], "lr": 0.0}]
    trainer = make_trainer(policy, optimizer=torch.optim.Adam(groups), ppo_epochs=20)
    samples = make_samples()
    first, second = trainer.step(*samples), trainer.step(*samples)
    before = [stats["ppo/val/var_explained_before"] for stats in (first, second)]
    assert before[0] < first["ppo/val/var_explained"] < before[1]


@pytest.mark.parametrize("save", [save_checkpoint, lambda trainer, to: trainer.save_pretrained(to)])
def test_weights_that_are_not_finite_are_never_written(save, tmp_path):
    policy = make_policy()
    trainer = make_trainer(policy, optimizer=sgd(policy))
    save(trainer, tmp_path)
    kept = sorted(tmp_path.rglob("*"))
    trainer.current_step = 1
    policy.v_head.summary.bias.data[0] = INF
    with pytest.raises(FloatingPointError, match=r"weight v_head.summary.bias has NaN or Inf"):
        save(trainer, tmp_path)
    assert sorted(tmp_path.rglob("*")) == kept


@pytest.mark.parametrize("save", [save_checkpoint, lambda trainer, to: trainer.save_pretrained(to)])
def test_half_a_step_is_never_written(save, tmp_path, monkeypatch):
    trainer = make_trainer()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_course.ppo.update.step_stats", interrupt)
    with pytest.raises(KeyboardInterrupt):  # the weights have moved, the step is not counted
        trainer.step(*make_samples())
    monkeypatch.undo()
    trainer.step(*make_samples())  # which heals nothing
    with pytest.raises(RuntimeError, match="A step was interrupted while it changed weights"):
        save(trainer, tmp_path)
    assert not any(tmp_path.iterdir())
    load_checkpoint(trainer, save_checkpoint(make_trainer(), tmp_path / "whole"))
    save(trainer, tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "side"), [("queries", "left"), ("queries", "right"), ("responses", "right")]
)
def test_padding_is_said_to_be_learnt(name, side):
    samples = dict(zip(("queries", "responses", "scores"), make_samples(), strict=True))
    samples[name] = torch.nn.utils.rnn.pad_sequence(samples[name], True, EOS, padding_side=side)
    with pytest.warns(UserWarning, match=rf"\d of 8 {name} are padded \(token 39\)"):
        make_trainer().step(*samples.values())


def test_queries_of_a_tokenizer_that_appends_eos():
    queries, *rest = make_samples()
    queries = [torch.cat([query, torch.tensor([EOS])]) for query in queries]
    with pytest.warns(UserWarning, match=r"8 of 8 queries are padded \(token 39\) or contain EOS"):
        make_trainer().step(queries, *rest)


def test_a_schedule_of_another_optimizer_is_refused():
    policy = make_policy()
    one, other = (torch.optim.SGD(policy.parameters(), lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.5)
    with pytest.raises(ValueError, match="lr_scheduler has another optimizer"):
        make_trainer(policy, None, one, lr_scheduler=schedule)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "PPO learns nothing from greedy decoding"),
        (SAMPLING | {"logits_processor": LogitsProcessorList()}, None),
        (
            SAMPLING | {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(2.0)])},
            "logits_processor",
        ),
    ],
)
def test_sampling_that_ppo_cannot_learn_from_is_said(settings, words):
    trainer = make_trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.generate(make_samples()[0], **settings, max_new_tokens=2)
    assert [words for warning in caught if words in str(warning.message)] if words else not caught


def test_repeated_prompts_are_said_to_be_learned():
    queries, responses, scores = make_samples()
    queries[0] = queries[0][:1]
    repeated = [torch.cat([q, r]) for q, r in zip(queries, responses, strict=True)]
    with pytest.warns(UserWarning, match="Each response begins with its query"):
        make_trainer().step(queries, repeated, scores)


def test_one_eos_at_either_end_is_no_padding():
    queries, responses, scores = make_samples()
    queries = [torch.cat([torch.tensor([EOS]), q]) for q in queries]
    responses = [torch.cat([r, torch.tensor([EOS])]) for r in responses]
    with warnings.catch_warnings(action="error"):
        make_trainer().step(queries, responses, scores)


def test_a_tokenizer_that_ends_texts_elsewhere_is_refused():
    policy = make_policy()
    policy.pretrained_model.generation_config.eos_token_id = 7
    with invalid(r"ends texts with token 39, the model with \[7\]"):
        make_trainer(policy)
    policy.pretrained_model.generation_config.eos_token_id = [EOS, 99]
    with invalid("outside the vocabulary of 40; set generation_config"):
        make_trainer(policy)


def test_an_audit_of_nan_is_refused():
    prompts, answers = ["What is a map?", "What is a cat?"], ["A picture.", "A small animal."]
    with pytest.raises(FloatingPointError, match="The score of text 0 is nan"):
        audit(lambda _, texts: torch.full((len(texts),), NAN), prompts, answers)


def test_values_are_carried_across_masked_tokens():
    """A hole, as a tool's tokens leave it: V and A of the next token that counts are used."""
    mask = torch.tensor([[1.0, 1, 0, 0, 1, 1]])
    rewards, values = torch.tensor([[0.0, 0, 0, 0, 0, 1]]), torch.ones(1, 6)
    advantages, returns = gae(rewards, values, mask, lam=0.95)
    assert advantages.abs().max() == 0 and returns.tolist() == mask.tolist()
    kept, spread = torch.tensor([[0.3, -1.2, 0.8, 2.0]]), torch.zeros(1, 6)
    spread[:, mask[0] > 0] = kept
    holes = gae(rewards, spread, mask, 0.9, 0.7)
    dense = gae(rewards[:, mask[0] > 0], kept, torch.ones(1, 4), 0.9, 0.7)
    for found, wanted in zip(holes, dense, strict=True):
        torch.testing.assert_close(found[:, mask[0] > 0], wanted)
