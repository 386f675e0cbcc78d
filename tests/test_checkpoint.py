"""A resumed run goes on with its schedule, and with what its detectors have seen."""

import numpy as np
import pytest
import torch
from builders import difference, make_policy, make_samples, make_trainer, sgd, snapshot

from rlhf_course import PPOTrainer
from rlhf_course.ppo.checkpoint import load_checkpoint, save_checkpoint


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
        trainer.step(*samples)

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
