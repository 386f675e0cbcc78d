"""Commands with other people's files: options, logs, checkpoints, grades, reports."""

import json
import os
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
import torch
from builders import (
    invalid,
    write_rows,
)

from dev.exercises import make_handout
from dev.exercises.make_exercises import SETS, notebook
from rlhf_course.command_line import run_report, trl_run
from rlhf_course.ppo.detectors import starts_apart
from rlhf_course.runtime import tracking
from scripts import grade, read_log, train_ppo


def test_a_vertical_bar_stays_in_its_cell():
    logged = {}
    tracker = SimpleNamespace(
        name="tensorboard", writer=SimpleNamespace(add_histogram=lambda *_: None)
    )
    accelerator = SimpleNamespace(
        gather=lambda x: x,
        is_main_process=True,
        trackers=[tracker],
        log=lambda values, step: logged.update(values),
    )
    tracking.log_step(accelerator, {}, {"query": ["a | b"]}, torch.zeros(1), 0)
    assert logged["game_log"].splitlines()[-1] == r"a \| b | 0.0"


def test_the_runner_keeps_what_the_parameters_cell_says(tmp_path, monkeypatch):
    from scripts import run_notebooks

    seen = {}
    monkeypatch.setattr(
        run_notebooks.papermill, "execute_notebook", lambda *given, **_: seen.update(given[2])
    )
    for more, names in (
        ([], set()),
        (["--seed", "0", "--override", "steps=3"], {"seed", "overrides"}),
    ):
        seen.clear()
        options = ["--only", "00", "--output", str(tmp_path), *more]
        run_notebooks.run_cells("00_hello_rlhf", run_notebooks.parse_arguments(options))
        assert seen.keys() == {"preset", "output_dir"} | names


def test_people_whose_folders_have_the_same_names(tmp_path):
    card = {"wall_s": 1, "peak_rss_mb": 1, "checks": {"a": {"passed": True}}}
    for who in ("alice", "bob"):
        folder = tmp_path / who / "course" / "course" / "build" / "run_cards"
        folder.mkdir(parents=True)
        (folder / "00_x.json").write_text(json.dumps(card))
    found = run_report.write([tmp_path], tmp_path / "report.html")
    assert [entry["who"].split("/")[0] for entry in found] == ["alice", "bob"]


def test_grades_of_a_copy_of_a_missing_notebook_and_of_others(tmp_path, capsys):
    path, solved = notebook(SETS[0], True)
    folder = tmp_path / "in" / "alice"
    folder.mkdir(parents=True)
    nbformat.write(notebook(SETS[0], False)[1], folder / "00_hello_rlhf-Copy1.ipynb")
    nbformat.write(solved, folder / "00_hello_rlhf.ipynb")
    given = [str(tmp_path / "in"), "--seed", "5000", "--output", str(tmp_path / "out")]
    grade.main([*given, "--only", "00"])
    assert "alice: 4 of 4 points" in capsys.readouterr().out
    with invalid("would lose the grade of alice in 00_hello_rlhf/"):
        grade.main([*given, "--only", "01"])
    grade.main([*given[:-1], str(tmp_path / "other"), "--only", "01"])
    rows = (tmp_path / "other" / "grades.csv").read_text().splitlines()[1:]
    assert rows and all(",missing,No notebook defines this function." in row for row in rows)
    (mine := tmp_path / "class" / "alice" / "results.json").parent.mkdir(parents=True)
    mine.write_text('{"score": 17, "comment": "oral exam"}')
    with invalid("was not written by grade.py"):
        grade.main([*given[:-1], str(tmp_path / "class"), "--only", "00", "--format", "gradescope"])
    assert "oral exam" in mine.read_text()
    grade.main([str(folder), *given[1:-1], str(folder), "--only", "00", "--format", "classroom50"])
    assert json.loads((folder / "result.json").read_text())["score"] == 4


def test_options_are_not_guessed_and_may_have_dashes(tmp_path):
    with pytest.raises((SystemExit, ValueError)):
        train_ppo.parse_arguments(["--prese", "full"])
    for name in ("a", "b"):
        write_rows(tmp_path / name, b"{}", "adapter_config.json")
    given = [f"--sft-adapter={tmp_path / 'a'}", f"--reward-adapter={tmp_path / 'b'}"]
    assert train_ppo.parse_arguments(given)[0].reward_adapter == str(tmp_path / "b")


def test_the_best_checkpoint_is_kept(tmp_path):
    names = [f"checkpoint-{step}" for step in (1, 2, 3)]
    for name in names:
        (tmp_path / name).mkdir()
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=1)
    steps = trl_run.Steps(SimpleNamespace(args=args), SimpleNamespace(checkpoint=None), None)
    best = {"best_model_checkpoint": str(tmp_path / names[0]), "is_world_process_zero": True}
    for step in (1, 2, 3):
        steps.on_save(args, SimpleNamespace(global_step=step, **best), None)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [names[0], names[2]]


def test_a_log_that_begins_at_zero_and_the_last_state(tmp_path, capsys):
    rows = [{"step": step, "objective/kl": step, "tokens/responses_len_mean": 9} for step in (0, 1)]
    log = pd.DataFrame(rows).set_index("step")
    assert not starts_apart(log).any() and starts_apart(log.loc[1:]).any()
    for step in (9, 120):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "log_history": [{"step": step, "loss": 1}]}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    os.utime(tmp_path / "checkpoint-120" / "trainer_state.json", (0, 0))  # as cp -r may leave it
    assert read_log.read_rows(tmp_path) == [{"step": 120, "loss": 1}]
    assert "checkpoint-120" in capsys.readouterr().out


def test_files_of_others_and_archives_of_students(tmp_path, capsys):
    (mine := tmp_path / "teaching" / "lecture.ipynb").parent.mkdir()
    mine.write_text("{}")
    with pytest.raises(SystemExit, match="has other files"):
        make_handout.main(["--output", str(mine.parent)])
    folder = tmp_path / "in" / "alice"
    folder.mkdir(parents=True)
    nbformat.write(notebook(SETS[0], True)[1], folder / "00_hello_rlhf.ipynb")
    (tmp_path / "in" / "bob.zip").touch()
    given = [str(tmp_path / "in"), "--seed", "5000", "--output", str(tmp_path / "out"), "--only"]
    with invalid("--only 1 matches no notebook"):
        grade.main([*given, "00", "1"])
    grade.main([*given, "00"])
    assert "Not graded: bob.zip" in capsys.readouterr().out


def test_a_notebook_run_again_by_hand_is_no_longer_failed(tmp_path):
    card = {"wall_s": 1, "peak_rss_mb": 1, "checks": {"a": {"passed": True}}}
    run_report.add_results(tmp_path, {"00_x": "cell 8: NameError"})
    (file := tmp_path / "run_cards" / "00_x.json").parent.mkdir()
    file.write_text(json.dumps(card))
    for age, problem in ((-60, "cell 8: NameError"), (60, "")):
        later = (tmp_path / run_report.RESULTS).stat().st_mtime + age
        os.utime(file, (later, later))
        assert run_report.read(file, tmp_path / "report.html")["problem"] == problem
