"""Tracking is optional, asks nothing, and needs no logging directory to be named."""

import os
import subprocess

from tests.builders import make_samples, make_trainer, python


def run_one_step(log_with):
    trainer = make_trainer(log_with=log_with)
    queries, responses, scores = make_samples()
    batch = {"query": ["q"] * 8, "response": ["r"] * 8}
    stats = trainer.step(queries, responses, scores)
    trainer.log_stats(stats, batch, scores)
    return trainer


def test_without_a_tracker_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_one_step(None)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_works_without_naming_a_logging_dir(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    trainer = run_one_step("tensorboard")
    trainer.accelerator.end_training()
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents*")).parent)).Reload()
    assert {"objective/kl", "env/reward_mean", "ppo/mean_scores"} <= set(events.Tags()["scalars"])
    assert "ppo/policy/advantages" in events.Tags()["histograms"]


def test_wandb_without_a_key_writes_offline_and_asks_nothing(tmp_path):
    code = (
        "from tests.test_tracking import run_one_step\n"
        "run_one_step('wandb').accelerator.end_training()\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {
        "HOME": str(tmp_path)
    }
    how = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 120}
    done = python("-c", code, **how)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.rglob("*.wandb"))
