"""The labs in notebooks/classic: short, in the originals' order, and tracked by wandb offline."""

import json
import os
import struct
import subprocess
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
from builders import guarded, invalid, python, reviews, save_classifier, write_rows
from transformers import pipeline

from dev.simulated_hub import serve
from dev.simulated_hub.repositories import repositories
from rlhf_course.course.presets import ROOT, load_preset
from rlhf_course.helpers import build_dataset, collator, sentiment_scores
from scripts import run_notebooks as runner

LABS = sorted((ROOT / "notebooks" / "classic").glob("*.ipynb"))
CONFIG = SimpleNamespace(model_name=str(ROOT / "models" / "gpt2-imdb-mini"))
SENT_KWARGS = {"top_k": None, "function_to_apply": "none", "batch_size": 16}
BLOCK = 2**15  # bytes of a block in a .wandb file


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_is_as_short_as_its_original(path):
    cells = nbformat.read(path, as_version=4).cells
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    lines = [
        line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()
    ]
    assert len(cells) <= 32
    assert sum(len(text.split()) for text in prose) <= 900
    assert sum(bool(line.strip()) for line in lines) <= 200
    assert "](../0" in prose[-1] and cells[-1].cell_type == "markdown"


def test_labs_run_only_on_request():
    labs = [path.stem for path in LABS]
    assert not {*labs} & {*runner.parse_arguments([]).names}
    assert runner.parse_arguments(["--only", "classic"]).names == labs
    assert runner.parse_arguments(["--only", "imdb", "04"]).names == [
        "04_gpt2_imdb_ppo",
        "imdb_lab",
    ]


def wandb_records(data: bytes):
    """Yield the records of a .wandb file: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data.startswith(b":W&B")
    position, parts = 7, []
    while position < len(data):
        rest = BLOCK - position % BLOCK
        if rest < 7:  # too little for a header; zeros fill the block
            position += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + size])
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(b"".join(parts))
            parts = []


def wandb_history(data: bytes) -> pd.DataFrame:
    """Return the numbers that a run logged, a row per step."""
    rows = {}
    for record in wandb_records(data):
        if record.HasField("history"):
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            numbers = {key: x for key, x in items.items() if isinstance(x, int | float)}
            rows.setdefault(record.history.step.num, {}).update(numbers)
    return pd.DataFrame(rows).T.sort_index()


@pytest.mark.notebook
def test_imdb_lab_learns_and_wandb_has_its_statistics(tmp_path):
    """Without a key, wandb asks nothing, reaches nothing, and its file has the run's numbers."""
    done = run_without_a_key(tmp_path, "--only", "imdb_lab")
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads((tmp_path / "out" / "run_cards" / "imdb_lab.json").read_text())
    assert card["checks"]["score rises"]["passed"]
    [history] = tracked_runs(tmp_path)
    for name, values in card["curves"]["history"].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6)
    scores = card["curves"]["history"]["ppo/mean_scores"]
    np.testing.assert_allclose(history["env/reward_mean"], scores, rtol=1e-5, atol=1e-6)


def run_without_a_key(folder, *options):
    """Run notebooks as a user without wandb's key or a network; return the process."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_", "WANDB"))
    }
    environment |= {"NETRC": str(folder / "netrc")} | guarded(folder, environment)
    command = [ROOT / "scripts/run_notebooks.py", "--output", "out", *options]
    done = python(*command, cwd=folder, env=environment, stdin=subprocess.DEVNULL)
    log = folder / "network.log"
    assert not log.exists(), log.read_text()
    return done


def tracked_runs(folder) -> list[pd.DataFrame]:
    """Return the numbers of each run that wandb wrote, in the order of the runs."""
    files = (folder / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    ordered = sorted(files, key=lambda file: file.stat().st_mtime)
    return [wandb_history(file.read_bytes()) for file in ordered]


@pytest.mark.notebook
def test_notebook_00_logs_its_statistics_on_request(tmp_path):
    done = run_without_a_key(tmp_path, "--only", "00", "--override", "log_with=wandb")
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads((tmp_path / "out" / "run_cards" / "00_hello_rlhf.json").read_text())
    shown = card["curves"]["history"]
    [history] = tracked_runs(tmp_path)
    for column, name in {"reward": "ppo/mean_scores", "KL": "objective/kl"}.items():
        assert len(shown[column]) == load_preset("00_hello_rlhf", "tiny").steps
        np.testing.assert_allclose(history[name], shown[column], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_notebook_01_logs_each_reward_training_in_a_run_of_its_own(tmp_path):
    few = {"train_subset": 200, "eval_subset": 60, "fix_pairs": 60, "audit_prompts": 20}
    few |= {"evaluations": 2, "report_to": "wandb"}
    options = [f"--override={name}={value}" for name, value in few.items()]
    done = run_without_a_key(tmp_path, "--only", "01", *options)
    assert "CheckFailed" in done.stderr, done.stdout + done.stderr  # too few pairs to learn from
    first, fix = (run["train/loss"].dropna() for run in tracked_runs(tmp_path))
    assert len(first) > len(fix) > 1
    assert first.iloc[0] == pytest.approx(np.log(2), abs=0.1)


FULL = {  # overrides of preset full, for toys and few steps
    "imdb_lab": {"steps": 2, "one_by_one": 1, "batch_size": 16, "mini_batch_size": 16},
    "reward_modeling_lab": {"train_subset": 100, "eval_subset": 40},
    "one_ppo_step": {},
    "lora_rlhf_lab": {
        "sft_subset": 60,
        "train_subset": 60,
        "eval_subset": 40,
        "steps": 2,
        "save_at": "[1, 2]",
        "eval_prompts": 8,
        "max_new_tokens": 12,
        "max_prompt": 64,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_a_lab_runs_at_full_on_the_simulated_hub(name, tmp_path):
    """Each cell runs with the ids of preset full; after so few steps, checks may fail."""
    contents = repositories(tmp_path)
    contents["openai-community/gpt2"] = contents["lvwerra/gpt2-imdb"]
    options = [f"--override={key}={value}" for key, value in FULL[name].items()]
    command = [ROOT / "scripts/run_notebooks.py", "--only", name, "--preset", "full", *options]
    with serve(contents) as hub:
        environment = hub.environment(tmp_path / "home")
        environment |= {"NETRC": str(tmp_path / "netrc")} | guarded(tmp_path, environment)
        done = python(*command, "--output", "out", cwd=tmp_path, env=environment)
        hub.check(tmp_path)
    assert done.returncode == 0 or "CheckFailed" in done.stderr, done.stdout + done.stderr
    card = json.loads((tmp_path / "out" / "run_cards" / f"{name}.json").read_text())
    assert card["preset"] == "full"
    executed = nbformat.read(tmp_path / "out" / "notebooks" / f"{name}.ipynb", as_version=4)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")


@pytest.mark.notebook
@pytest.mark.parametrize("folder", [".", "notebooks"])
def test_papermill_runs_a_notebook_on_its_own(folder, tmp_path):
    source = ROOT / "notebooks" / "00_hello_rlhf.ipynb"
    target = tmp_path / "executed.ipynb"
    parameters = "-p preset tiny -p seed 1 -p output_dir".split()
    command = ["-m", "papermill", os.path.relpath(source, ROOT / folder), target, *parameters]
    done = python(*command, tmp_path, cwd=ROOT / folder)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "run_cards" / "00_hello_rlhf.json").read_text())
    assert (card["preset"], card["seed"]) == ("tiny", 1)
    cells = nbformat.read(target, as_version=4).cells
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code")


def test_queries_begin_long_reviews_and_follow_the_seed(tmp_path):
    rows = [*reviews(30), {"text": "Too short.", "label": 0}]
    write_rows(tmp_path, rows)
    queries = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        queries.append(build_dataset(CONFIG, str(tmp_path)))
    assert all(len(review) > 200 for review in queries[0]["review"])
    texts = [dataset["query"][:] for dataset in queries]
    assert texts[0] == texts[1] != texts[2]
    batch = collator(list(queries[0]))
    assert {len(ids) for ids in batch["input_ids"]} == {2, 3, 4, 5, 6, 7}
    pairs = zip(batch["review"], batch["query"], strict=True)
    assert all(review.startswith(query) for review, query in pairs)


def test_a_dataset_without_text_is_named(tmp_path):
    write_rows(tmp_path, [{"sentence": "A film.", "label": 1}])
    with invalid("No column text in split 'train' of .*; it has sentence, label"):
        build_dataset(CONFIG, str(tmp_path))


def test_scores_are_found_by_their_label(tmp_path):
    sentiment_pipe = pipeline("sentiment-analysis", model=save_classifier(tmp_path / "usual"))
    outputs = sentiment_pipe(["A film.", "Another, better film."], **SENT_KWARGS)
    positive, negative = (sentiment_scores(outputs, name) for name in ("POSITIVE", "NEGATIVE"))
    for output, scores in zip(outputs, zip(positive, negative, strict=True), strict=True):
        assert sorted(entry["score"] for entry in output) == sorted(map(float, scores))
    assert sentiment_scores(outputs) == positive

    unnamed = save_classifier(tmp_path / "unnamed", ("LABEL_0", "LABEL_1"))
    outputs = pipeline("sentiment-analysis", model=unnamed)(["A film."], **SENT_KWARGS)
    with invalid("has no label 'POSITIVE'; pass one that it has as label: LABEL_0, LABEL_1"):
        sentiment_scores(outputs)
    assert sentiment_scores(outputs, "LABEL_1")
