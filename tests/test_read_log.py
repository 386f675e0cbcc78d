"""What a log shows: formats, names of other trainers, symptoms, and the page of diagnosis."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from rlhf_course.command_line import exits
from rlhf_course.course.presets import ROOT
from rlhf_course.ppo.detectors import rules
from scripts import read_log

MAPS = yaml.safe_load(
    (ROOT / "rlhf_course/command_line/log_columns.yaml").read_text(encoding="utf-8")
)
STEPS = range(1, 61)


def healthy() -> list[dict]:
    """Rows as trl's GRPOTrainer logs them."""
    rng = np.random.default_rng(0)
    return [
        {
            "step": step,
            "epoch": step / 60,
            "loss": rng.normal(0, 0.01),
            "grad_norm": rng.uniform(0.5, 2),
            "learning_rate": 1e-5,
            "reward": step / 60 + rng.normal(0, 0.1),
            "reward_std": 0.5,
            "kl": 0.001 * (step - 1),
            "entropy": 3 - step / 60,
            "completions/mean_length": 40 + rng.normal(0, 2),
            "completions/clipped_ratio": 0.1,
            "frac_reward_zero_std": 0.1,
            "clip_ratio/region_mean": 0.01,
        }
        for step in STEPS
    ]


def run(log, output, *more, capsys=None) -> tuple[int, str]:
    code = exits.run("read_log.py", read_log.main, [str(log), "--output", str(output), *more])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def state(folder: Path, rows: list[dict], name: str = "trainer_state.json") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(json.dumps({"log_history": rows}), encoding="utf-8")
    return folder


FAULTS = {
    "KL is below 0": (2, 21, {"kl": -0.01}),
    "A statistic is NaN or Inf": (2, 21, {"loss": float("nan")}),
    "The norm of the gradient is 0": (2, 21, {"grad_norm": 0.0}),
    "Nothing changes, and nothing raises an error": (2, 1, {"learning_rate": 1e-8}),
    "Entropy falls to a fraction": (2, 21, {"entropy": 0.1}),
    "Answers get shorter": (0, 21, {"completions/mean_length": 8.0}),
    "Most groups of GRPO": (0, 21, {"frac_reward_zero_std": 0.95}),
}


@pytest.mark.parametrize("symptom", FAULTS)
def test_a_planted_fault_is_named_within_five_steps(symptom, tmp_path, capsys):
    code, begins, change = FAULTS[symptom]
    rows = [row | (change if row["step"] >= begins else {}) for row in healthy()]
    got, text = run(state(tmp_path, rows), tmp_path / "out", capsys=capsys)
    assert got == code, text
    since = re.search(rf"Since step (\d+) · \w+ · {symptom}", text)
    assert since and abs(int(since[1]) - begins) <= 5, text
    assert symptom in (tmp_path / "out/log.html").read_text(encoding="utf-8")


def test_a_healthy_run_has_no_symptom(tmp_path, capsys):
    code, text = run(state(tmp_path, healthy()), tmp_path / "out", capsys=capsys)
    assert code == 0 and "columns of trl GRPO" in text and "\n0 symptoms." in text


@pytest.mark.parametrize(("end", "symptoms"), [(0.8, 0), (0.5, 1)])
def test_an_accuracy_may_begin_at_one_half(end, symptoms, tmp_path, capsys):
    """As every DPO run does; what counts is where it goes."""
    rows = [
        {"step": s, "rewards/accuracies": 0.5 + (end - 0.5) * max(0, s - 10) / 50, "loss": 0.6}
        for s in STEPS
    ]
    code, text = run(state(tmp_path, rows), tmp_path / "out", capsys=capsys)
    assert code == 0 and f"\n{symptoms} symptoms." in text
    assert ("Accuracy stays at one half" in text) == bool(symptoms)


def test_an_accuracy_may_fall_from_one_half(tmp_path, capsys):
    rows = [
        {"step": s, "rewards/accuracies": 0.5 - max(0, s - 10) / 150, "loss": 0.7} for s in STEPS
    ]
    code, text = run(state(tmp_path, rows), tmp_path / "out", capsys=capsys)
    assert code == 2 and "stop · Accuracy falls" in text


@pytest.mark.parametrize("card", sorted((ROOT / "figs/measured").glob("0[45]*.json")))
def test_the_courses_own_runs_are_read(card, tmp_path, capsys):
    code, text = run(card, tmp_path / "out", capsys=capsys)
    assert code == 0 and "columns of course" in text


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tensorboard"])
def test_one_run_in_every_format(kind, tmp_path, capsys):
    rows = [row | {"kl": -0.01} for row in healthy()]
    log = tmp_path / f"log.{kind}"
    if kind == "csv":
        pd.DataFrame(rows).to_csv(log, index=False)
    elif kind == "jsonl":
        log.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        with SummaryWriter(log) as writer:
            for row in rows:
                for name, value in row.items():
                    writer.add_scalar(f"train/{name}", value, row["step"])
    code, text = run(log, tmp_path / "out", capsys=capsys)
    assert code == 2 and "Since step 5 · stop · KL is below 0" in text


def test_names_of_ones_own(tmp_path, capsys):
    pd.DataFrame({"step": STEPS, "r": np.linspace(0, 1, 60), "div": -1.0}).to_csv(
        log := tmp_path / "mine.csv"
    )
    code, text = run(log, tmp_path / "out", capsys=capsys)
    assert code == 1 and "No known trainer has these columns" in text and "r, div" in text
    columns = {"ppo/mean_scores": "r", "objective/kl": "div"}
    (tmp_path / "map.yaml").write_text(yaml.dump({"mine": {"columns": columns}}))
    code, text = run(log, tmp_path / "out", "--map", str(tmp_path / "map.yaml"), capsys=capsys)
    assert code == 2 and "columns of mine" in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"log_history": [', "Cannot read"),
        ("a.json", '{"model": 1}', "contains model, not a log"),
        ("a.csv", "", "Cannot read"),
        ("a.jsonl", "step 1", "Cannot read"),
        ("folder/notes.txt", "", "contains notes.txt, not a log"),
        ("a.txt", "", "Cannot read"),
        ("a.jsonl", '{"step": 1}\n{"ste\n{"step": 3}', "line 2"),
        ("a.csv", "step,accuracy,margin\n1,60,0\n2,70,0", "Divide percentages by 100"),
    ],
)
def test_what_is_no_log_is_said(name, text, message, tmp_path, capsys):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    code, text = run(tmp_path / name.split("/")[0], tmp_path / "out", capsys=capsys)
    assert code == 1 and re.search(message, text) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        ("-5,3", 1, "'-5,3', not a number. Correct the log"),
        ("-nan(ind)", 2, "NaN or Inf"),
        (None, 2, "NaN or Inf"),
    ],
)
def test_a_number_that_cannot_be_read_is_no_healthy_number(value, status, said, tmp_path, capsys):
    rows = [row | {"kl": row["kl"] if row["step"] < 21 else value} for row in healthy()]
    code, text = run(state(tmp_path / "run", rows), tmp_path / "out", capsys=capsys)
    assert code == status and said in text


@pytest.mark.parametrize("trainer", [name for name in MAPS if name.startswith("trl")])
def test_trls_columns_are_those_of_the_installed_version(trainer):
    package = Path(find_spec("trl").origin).parent
    source = (package.parent / MAPS[trainer]["source"]).read_text(encoding="utf-8")
    columns = set()
    for column in MAPS[trainer]["columns"].values():
        newest = column[0] if isinstance(column, list) else column
        columns |= {newest} if isinstance(newest, str) else set(newest.values())
    of_transformers = {"loss", "grad_norm", "learning_rate", "eval_loss"}
    assert not [name for name in columns - of_transformers if f'"{name}"' not in source]


@pytest.mark.parametrize("steps", [12, 60])
@pytest.mark.parametrize("fall", ["steady", "sudden"])
def test_a_falling_score_is_a_symptom_and_a_dip_is_none(steps, fall, tmp_path, capsys):
    def column(step: int) -> float:
        if fall == "steady":
            return 1 - 6 * step / steps
        return 1.0 if step <= steps // 2 else -5.0

    rows = [row | {"reward": column(row["step"])} for row in healthy()[:steps]]
    _, text = run(state(tmp_path / "falls", rows), tmp_path / "out", capsys=capsys)
    [begins] = re.findall(r"Since step (\d+) · watch · The score falls", text)
    assert int(begins) <= steps // 2 + 3
    rows = healthy()
    for row in rows[20:25]:
        row["reward"] = -1.0
    _, text = run(state(tmp_path / "dips", rows), tmp_path / "out", capsys=capsys)
    assert "The score falls" not in text


def test_every_symptom_of_a_detector_is_in_the_registry():
    groups = yaml.safe_load(read_log.SYMPTOMS.read_text(encoding="utf-8"))
    known = {row["id"] for group in groups for row in group["symptoms"]}
    assert {rule.symptom for rule in rules()} < known


def test_a_cell_that_is_empty_is_no_nan_and_appended_runs_are_not_mixed(tmp_path, capsys):
    sparse = [row | ({"eval_loss": 1.0} if row["step"] % 10 == 0 else {}) for row in healthy()]
    pd.DataFrame(sparse).to_csv(tmp_path / "log.csv", index=False)
    code, text = run(tmp_path / "log.csv", tmp_path / "out", capsys=capsys)
    assert code == 0 and "NaN" not in text.partition("no columns")[0]
    ruined = [row | {"grad_norm": 0.0} for row in healthy()]
    lines = "\n".join(map(json.dumps, healthy() + ruined))
    (tmp_path / "two.jsonl").write_text(lines, encoding="utf-8")
    code, text = run(tmp_path / "two.jsonl", tmp_path / "out", capsys=capsys)
    assert code == 2 and "Steps restart at row 61" in text


def test_two_runs_in_one_tensorboard_folder_and_a_foreign_page_are_refused(tmp_path, capsys):
    for name in ("good", "bad"):
        with SummaryWriter(tmp_path / "runs" / name) as writer:
            for row in healthy():
                writer.add_scalar("train/reward", row["reward"], row["step"])
    code, text = run(tmp_path / "runs", tmp_path / "out", capsys=capsys)
    assert code == 1 and "several runs: " in text
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out/log.html").write_text("mine")
    code, text = run(state(tmp_path / "run", healthy()), tmp_path / "out", capsys=capsys)
    assert code == 1 and "is not a page of this course" in text
    assert (tmp_path / "out/log.html").read_text() == "mine"


NAMED = {  # short runs of trl on a CPU, with a fault each that somebody planted without this reader
    "run1": "Accuracy falls from above one half to below it",
    "run2": "KL grows without end",
    "run3": "Margins are exactly 0",
    "run5": "A reward function gives every response the same number",
    "run7": "Entropy falls to a fraction of its start",
    "run8": "Nothing changes, and nothing raises an error",
}
TRL_LOGS = json.loads((ROOT / "tests/fixtures/trl_logs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", TRL_LOGS)
def test_a_fault_planted_in_a_run_of_trl_is_named_within_five_steps(name, tmp_path, capsys):
    truth = TRL_LOGS[name]
    folder = state(tmp_path / "run", truth["log_history"])
    code, text = run(folder, tmp_path / "out", capsys=capsys)
    said = re.findall(r"Since step (\d+) · \w+ · (.*)", text)
    steps = {symptom: int(step) for step, symptom in said}
    if truth["healthy"]:
        assert code == 0
    else:
        assert abs(steps[NAMED[name]] - truth["first_step"]) <= 5
