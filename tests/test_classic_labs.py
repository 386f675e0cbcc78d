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

from rlhf_course.course.presets import ROOT
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
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_", "WANDB"))
    }
    environment |= {"NETRC": str(tmp_path / "netrc")} | guarded(tmp_path, environment)
    command = [ROOT / "scripts/run_notebooks.py", "--only", "imdb_lab", "--output", "out"]
    done = python(*command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "network.log").exists(), (tmp_path / "network.log").read_text()
    card = json.loads((tmp_path / "out" / "run_cards" / "imdb_lab.json").read_text())
    assert card["checks"]["score rises"]["passed"]
    [file] = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    history = wandb_history(file.read_bytes())
    for name, values in card["curves"]["history"].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6)
    scores = card["curves"]["history"]["ppo/mean_scores"]
    np.testing.assert_allclose(history["env/reward_mean"], scores, rtol=1e-5, atol=1e-6)


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
