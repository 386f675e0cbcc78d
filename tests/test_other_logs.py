"""Logs of other trainers, and what people paste: which trainer, which rows, which columns."""

import json

import numpy as np
import pytest

from rlhf_course.command_line import exits
from scripts import read_log

STEPS = range(1, 31)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A function from a log's text and file name to the exit code and what was printed."""
    monkeypatch.setattr(read_log, "write_page", lambda *_: None)

    def read(text: str, name: str = "log.jsonl", *more) -> tuple[int, str]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        code = exits.run("read_log.py", read_log.main, [str(tmp_path / name), *more])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return read


def lines(rows) -> str:
    return "\n".join(map(json.dumps, rows))


def verl(step: int) -> dict:
    return {
        "actor/entropy": 3 * 0.8**step,
        "critic/score/mean": 0.1 * step,
        "actor/grad_norm": 1.0,
        "actor/ppo_kl": 0.001,
    }


def grpo(number: int, **more) -> dict:
    row = {"loss": 0.0, "grad_norm": 0.3, "reward": 0.01 * number, "reward_std": 0.2, "kl": -0.01}
    return row | {"completion_length": 100.0} | more


def printed(step: int) -> str:
    return f"step:{step} - " + " - ".join(f"{name}:{x:.4f}" for name, x in verl(step).items())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", lines({"step": step, "data": verl(step)} for step in STEPS)),
        ("a.json", json.dumps([{"step": step} | verl(step) for step in STEPS])),
        ("a.log", "\n".join(map(printed, STEPS))),
        ("a.txt", "\n".join(f"\x1b[36m(Task pid=12)\x1b[0m {printed(step)}" for step in STEPS)),
        ("b.log", "\n".join(map(printed, STEPS)).replace("norm:1.0000", "norm:np.float64(1.0)")),
        ("c.log", "\n".join(map(printed, reversed(STEPS)))),
    ],
)
def test_verl_is_read_from_its_file_and_from_the_console(name, text, run):
    code, said = run(text, name)
    assert code == 2 and "30 steps, columns of verl" in said
    assert "· stop · Entropy falls" in said
    assert "Not used: actor/ppo_kl." in said


@pytest.mark.parametrize("change", [str, lambda row: {name: str(x) for name, x in row.items()}])
def test_printed_dicts_between_progress_bars(change, run):
    text = "".join(f" {step}%|█  | {step}/80 [00:10]\n{change(grpo(step))}\n" for step in STEPS)
    code, said = run(text, "nohup.out")
    assert code == 2 and "30 steps, columns of trl GRPO" in said and "KL is below 0" in said
    code, said = run(text.replace("0.3,", "nan,").replace("'0.3'", "'nan'"), "nohup.out")
    assert code == 2 and "NaN or Inf" in said


def test_trls_later_ppo_is_not_taken_for_this_course(run):
    rows = [
        {
            "step": step,
            "objective/kl": 0.01 * step,
            "objective/entropy": 50.0,
            "objective/scores": 0.1 if step < 15 else -5.0,
            "objective/rlhf_reward": 0.1,
            "policy/clipfrac_avg": 0.6,
            "lr": 1e-9,
        }
        for step in STEPS
    ]
    code, said = run(lines(rows))
    assert code == 2 and "columns of TRL 0.12 to 1.12 PPO" in said
    assert "ppo/mean_scores 0.1 → -5" in said and "clipfrac` is large" in said
    assert "Nothing changes" in said and "Not used: objective/entropy" in said


@pytest.mark.parametrize("length", ["completion_length", "completions/mean_length"])
def test_both_names_of_the_length_give_the_kl_of_a_response(length, run):
    rows = [grpo(step, kl=0.02 * step, step=step) for step in STEPS]
    text = lines(rows).replace("completion_length", length)
    assert "objective/kl 4 → 58" in run(text)[1] and "KL grows without end" in run(text)[1]


def test_llama_factorys_log_of_dpo_is_recognized_and_its_accuracy_read(run):
    rows = [
        {
            "current_steps": 10 * step,
            "total_steps": 300,
            "loss": 0.7,
            "accuracy": 0.5 - 0.01 * step,
            "lr": 5e-6,
            "percentage": 3.3 * step,
            "elapsed_time": "0:00:10",
        }
        for step in STEPS
    ]
    code, said = run(lines(rows), "trainer_log.jsonl")
    assert code == 2 and "columns of LLaMA-Factory's trainer_log.jsonl" in said
    assert "stop · Accuracy falls" in said and "ppo/learning_rate" in said


def test_a_null_column_does_not_hide_the_reward(run):
    noise = np.random.default_rng(0).normal(0, 0.01, len(STEPS))
    rows = [{"loss": 1.0, "eval_loss": None, "reward": x, "learning_rate": 1e-5} for x in noise]
    code, said = run(lines(rows))
    assert code == 0 and "The score does not move" in said and "LLaMA-Factory" in said


def test_a_tie_is_an_error_and_trainer_chooses(run):
    rows = [{"step": step, "reward_std": 0.1, "policy_loss": 0.1, "reward": 1} for step in STEPS]
    code, said = run(lines(rows))
    assert code == 1 and "could be of trl GRPO or RLOO or OpenRLHF" in said and "--trainer" in said
    assert "columns of OpenRLHF" in run(lines(rows), "log.jsonl", "--trainer", "openrlhf")[1]
    code, said = run(lines(rows), "log.jsonl", "--trainer", "trl")
    assert code == 1 and "the beginning of 6 names" in said


def test_a_resumed_run_keeps_the_rows_before_it(run):
    def row(step):
        return {"step": step, "reward": 0.1 * step, "reward_std": 0.1, "loss": 0.1}

    code, said = run(lines(row(step) for step in [*range(1, 21), *range(16, 31)]))
    assert "The run resumes at step 16" in said and "30 steps" in said
    code, said = run(lines(row(step) for step in [*STEPS, *range(1, 11)]))
    assert "Steps restart at row 31" in said and "10 steps" in said
    code, said = run(lines(row(step) for step in STEPS for _ in range(2)))
    assert "Several rows have the same step" in said and "30 steps" in said


def test_two_runs_without_steps_are_separated_by_their_epochs(run):
    def cell(sign, steps=STEPS):
        rows = [grpo(step, reward=sign * step, epoch=f"{step / 30:.2f}") for step in steps]
        return "\n".join(map(str, rows))

    code, said = run(cell(1) + "\n{'train_runtime': 9.1, 'epoch': '1'}\n" + cell(-1), "a.txt")
    assert "Epochs restart at row 32: earlier rows are ignored" in said
    assert "30 steps" in said and "ppo/mean_scores -2 → -29" in said
    code, said = run(cell(1, range(1, 21)) + "\n" + cell(1, range(16, 31)), "a.txt")
    assert "The run resumes at epoch 0.53" in said and "30 steps" in said
    passes = "\n".join(str(grpo(step, epoch=step % 4)) for step in STEPS)
    code, said = run(passes, "a.txt")
    assert "restart" not in said and "30 steps" in said


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("name", ["a.txt", "a.tsv"])
def test_a_notebooks_table_is_read(run, name, separator):
    header = ["Step", "Training Loss", "Validation Loss", "reward", "completions / mean_length"]
    cells = [[str(step), "0.1", "No log", str(step), "100"] for step in STEPS]
    text = "\n".join(separator.join(row) for row in [header, *cells])
    if name == "a.txt":
        text = f"[30/30 10:00, Epoch 1/1]\n{text}\n{text}"
    code, said = run(text, name, "--trainer", "trl GRPO")
    assert "ppo/mean_scores 2 → 29" in said and "tokens/responses_len_mean" in said
    assert ("Steps restart at row 31" in said) == (name == "a.txt")


def test_a_table_exported_from_wandb(run):
    header = "Step,run - train/reward,run - train/reward__MIN,run - train/reward_std\n"
    text = header + "".join(f"{step},{step},0,0.5\n" for step in STEPS)
    assert "ppo/mean_scores 2 → 29" in run(text, "panel.csv")[1]
    assert "30 steps" in run(text.replace(",", ";"), "panel.csv")[1]
    code, said = run(text.replace("run - train/reward_std", "b - train/reward_std"), "panel.csv")
    assert code == 1 and "it has several runs: b, run" in said
    two_runs = "Step,a - 1 - reward,a - 2 - reward\n1,0.5,0.6\n"
    code, said = run(two_runs, "panel.csv")
    assert code == 1 and "it has several runs: a - 1, a - 2" in said


def test_minimind_and_deepspeed_console_lines(run):
    text = "\n".join(
        f"Epoch: 1, Step: {step}/100, Actor Loss: 0.01, Reward: -1.2, KL: 0.1, Actor LR: 8e-8"
        for step in STEPS
    )
    code, said = run(text, "train.log")
    assert code == 2 and "columns of MiniMind" in said and "Not used: Epoch, KL" in said
    code, said = run("Epoch: 0 | Step: 1 | Actor_Loss: 0.1 | Mean: 0.2", "train.log")
    assert code == 1 and "No known trainer has these columns: Step, Epoch, Actor_Loss" in said
