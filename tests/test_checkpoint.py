"""A resumed run goes on with its schedule, and with what its detectors have seen."""

import random

import numpy as np
import pytest
import torch
from builders import (
    difference,
    invalid,
    latest_checkpoint,
    make_policy,
    make_samples,
    make_trainer,
    sgd,
    snapshot,
)
from peft import LoraConfig, get_peft_model

from rlhf_course import AutoModelForCausalLMWithValueHead, PPOTrainer
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.quick


def scheduled() -> PPOTrainer:
    """A trainer whose learning rate halves with every step, and whose reference is far away."""
    policy = make_policy()
    optimizer = sgd(policy, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return make_trainer(
        policy, make_policy(1), optimizer, lr_scheduler=schedule, mini_batch_size=4, target=0.01
    )


@pytest.mark.filterwarnings("ignore:Step")
def test_a_learning_rate_schedule_goes_on_where_it_stopped(tmp_path):
    one, other = scheduled(), scheduled()
    for seed in range(2):
        one.step(*make_samples(seed=seed))
    load_checkpoint(other, save_checkpoint(one, tmp_path))
    rates = {}
    for name, trainer in (("one", one), ("other", other)):
        np.random.seed(0)
        rates[name] = [
            trainer.step(*make_samples(seed=seed))["ppo/learning_rate"] for seed in (2, 3)
        ]
    assert rates["one"] == rates["other"] == pytest.approx([0.025, 0.0125])
    assert difference(snapshot(one.model), snapshot(other.model)) == 0


def test_detectors_go_on_with_what_they_have_seen_and_say_nothing_twice(tmp_path, recwarn):
    """Responses shrink to a third, half of the run before the stop; neither half alone would show
    it.
    """

    def step(trainer, length: int) -> None:
        samples = [torch.arange(3)] * 8, [torch.arange(length)] * 8, [torch.zeros(())] * 8
        trainer.log_stats(trainer.step(*samples), {}, samples[2])

    whole, first, second = scheduled(), scheduled(), scheduled()
    for length in (9, 9, 9):
        step(whole, length), step(first, length)
    load_checkpoint(second, save_checkpoint(first, tmp_path))
    recwarn.clear()
    for length in (3, 3, 3):
        step(second, length)
    said = [str(warning.message) for warning in recwarn]
    for length in (3, 3, 3):
        step(whole, length)
    assert second.detectors.fired == whole.detectors.fired
    assert {"shorter answers", "reference differs"} <= second.detectors.fired.keys()
    assert any("shorter answers" in words for words in said) and not any(
        "reference differs" in words for words in said
    )


def scaled():
    config = {"mini_batch_size": 4, "learning_rate": 1e-3, "horizon": 100}
    return make_trainer(reference=make_policy(1), use_score_scaling=True, **config)


def test_a_checkpoint_restores_weights_optimizer_coefficient_moments_and_random_numbers(tmp_path):
    one, other = scaled(), scaled()
    one.step(*make_samples(seed=1))
    save_checkpoint(one, tmp_path)
    folder = latest_checkpoint(tmp_path)
    one.step(*make_samples(seed=2))
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    load_checkpoint(other, folder)
    assert other.current_step == 1
    other.step(*make_samples(seed=2))
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
    assert difference(snapshot(one.model), snapshot(other.model)) == 0
    assert one.kl_ctl.value == other.kl_ctl.value and vars(one.running) == vars(other.running)


def test_a_newer_checkpoint_replaces_the_older_one(tmp_path):
    trainer = scaled()
    for seed in range(2):
        trainer.step(*make_samples(seed=seed))
        save_checkpoint(trainer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    trainer = scaled()
    save_checkpoint(trainer, tmp_path)
    trainer.step(*make_samples())

    def full(state, path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(trainer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0"]
    load_checkpoint(scaled(), latest_checkpoint(tmp_path))


def test_a_checkpoint_of_another_policy_is_refused(tmp_path):
    save_checkpoint(scaled(), tmp_path)
    small = make_trainer(make_policy(n_embd=8), mini_batch_size=4)
    with invalid("belongs to another policy"):
        load_checkpoint(small, latest_checkpoint(tmp_path))


def test_nothing_is_removed_that_this_trainer_did_not_write(tmp_path):
    """Neither another trainer's checkpoint, a newer one, nor a folder beside them."""
    other, trainer = scaled(), scaled()
    other.current_step = 500
    save_checkpoint(other, tmp_path)
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4/adapter.safetensors").write_text("mine")
    for seed in range(3):
        trainer.step(*make_samples(seed=seed))
        folder = save_checkpoint(trainer, tmp_path, keep=2)
        if seed == 0:
            (folder / "notes.txt").write_text("mine")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"checkpoint-{n}" for n in (1, 2, 3, 4, 500)}
    assert [path.name for path in (tmp_path / "checkpoint-1").iterdir()] == ["notes.txt"]
    state = tmp_path / "checkpoint-3/trainer_state.pt"
    before, other.current_step = state.read_bytes(), 3
    with pytest.raises(FileExistsError, match="checkpoint-3 has files from another run"):
        save_checkpoint(other, tmp_path)
    assert state.read_bytes() == before
    resumed = scaled()
    load_checkpoint(resumed, tmp_path / "checkpoint-3")
    resumed.step(*make_samples())
    with pytest.raises(FileExistsError, match="checkpoint-4 has files from another run"):
        save_checkpoint(resumed, tmp_path)
    resumed.step(*make_samples())
    save_checkpoint(resumed, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names - {"checkpoint-3"} | {"checkpoint-5"}
    forked = scaled()
    load_checkpoint(forked, tmp_path / "checkpoint-5")
    forked.step(*make_samples())
    save_checkpoint(forked, tmp_path / "fork")
    assert (tmp_path / "checkpoint-5/trainer_state.pt").exists()


def test_without_a_schedule_a_run_goes_on_at_the_rate_and_fixed_kl_that_it_is_given(tmp_path):
    def trainer(rate, beta):
        policy = make_policy()
        how = {"adap_kl_ctrl": False, "init_kl_coef": beta}
        return make_trainer(policy, make_policy(1), sgd(policy, rate), **how)

    folder, lower = save_checkpoint(trainer(0.1, 0.2), tmp_path), trainer(0.01, 0.3)
    load_checkpoint(lower, folder)
    assert lower.kl_ctl.value == 0.3 and lower.optimizer.param_groups[0]["lr"] == 0.01


def test_a_checkpoint_needs_the_reference_that_it_had(tmp_path):
    """A trainer made of the saved policy would take that for its reference, and KL would be 0."""
    trainer = make_trainer()
    trainer.step(*make_samples())
    folder = save_checkpoint(trainer, tmp_path)
    with invalid("was saved with reference"):
        load_checkpoint(make_trainer(trainer.policy), folder)


def adapted(seed: int):
    """A trainer of an adapter on the base of this seed."""
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    network = get_peft_model(make_policy(seed).pretrained_model, lora)
    return make_trainer(AutoModelForCausalLMWithValueHead(network))


def test_a_checkpoint_of_an_adapter_needs_its_base(tmp_path):
    folder = save_checkpoint(adapted(0), tmp_path)
    load_checkpoint(adapted(0), folder)
    with invalid("was saved with reference"):
        load_checkpoint(adapted(1), folder)


def test_a_file_of_that_name_which_is_no_checkpoint_is_not_overwritten(tmp_path):
    notes = tmp_path / "checkpoint-0/trainer_state.pt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(FileExistsError, match="has files from another run"):
        save_checkpoint(make_trainer(), tmp_path)
    assert notes.read_text() == "mine"
