"""Every notebook, executed by the runner as a newcomer would: tiny, without a network."""

import json
import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import torch
from builders import guarded
from IPython.display import SVG

from rlhf_course.command_line.notebook_files import (
    HASH_KEY,
    MEASURED,
    WIDGET,
    read_card,
    render,
    source_hash,
    strip_run_details,
)
from rlhf_course.course.presets import ROOT
from scripts import run_notebooks as runner

CARD = {"wall_s": 83.2, "peak_rss_mb": 1024}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
LABS = sorted((ROOT / "notebooks" / "classic").glob("*.ipynb"))
DEEPER = sorted((ROOT / "notebooks" / "deeper").glob("*.ipynb"))
# The notebooks in deeper/ that CI runs; `make test-all` runs all of them.
SAMPLE = ("engine_corrections", "length_drift")
# The only notebook that shows a progress bar, finished, as its originals do.
WITH_BAR = "imdb_lab"
FINISHED_BAR = re.compile(r"100%\|█+\| (\d+)/\1 \[[^\r\n]+\]\n?")


def seconds(path: Path) -> float:
    """How long a notebook took where it was rendered; a new one counts as long."""
    return read_card(MEASURED / f"{path.stem}.json").get("wall_s", float("inf"))


@pytest.fixture
def run_notebooks(tmp_path, monkeypatch):
    """Call to run the runner, whose kernels can reach this machine only; it has to pass."""
    for name in [*os.environ]:
        if name.startswith(("HF_", "WANDB", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    for name, value in guarded(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> None:
        assert runner.main(["--output", "out", *arguments]) == 0

    return run


@pytest.mark.notebook
@pytest.mark.parametrize(
    "path", sorted(NOTEBOOKS, key=seconds, reverse=True), ids=lambda path: path.stem
)
def test_a_notebook_learns_at_preset_tiny_without_a_network(path, tmp_path, run_notebooks, capsys):
    run_notebooks("--only", path.stem)
    assert not (tmp_path / "network.log").exists(), (tmp_path / "network.log").read_text()
    card = json.loads((tmp_path / "out" / "run_cards" / f"{path.stem}.json").read_text())
    libraries = 300 if torch.version.cuda else 0  # MB that a CUDA build's take
    assert card["preset"] == "tiny" and card["peak_rss_mb"] < 1500 + libraries
    assert card["checks"] and all(check["passed"] for check in card["checks"].values())
    assert f"{len(card['checks'])}/{len(card['checks'])} passed" in capsys.readouterr().out
    assert (tmp_path / "out" / "html" / f"{path.stem}.html").stat().st_size > 100_000
    executed = nbformat.read(tmp_path / "out" / "notebooks" / path.name, as_version=4)
    errors = [o for c in executed.cells for o in c.get("outputs", []) if o.get("name") == "stderr"]
    assert not errors, f"{path.stem} writes to stderr: {errors[0].text[:500]}"
    judge = {"04_gpt2_imdb_ppo": "second", "05_lora_rlhf_baichuan": "gold"}.get(path.stem)
    if judge:
        assert card["metrics"][f"{judge}_after"] > card["metrics"][f"{judge}_before"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.notebook if path.stem in SAMPLE else pytest.mark.slow)
        for path in DEEPER
    ],
    ids=lambda path: path.stem,
)
def test_a_deeper_notebook_passes_its_checks(path, tmp_path, run_notebooks):
    run_notebooks("--only", path.stem)
    assert not (tmp_path / "network.log").exists()
    card = json.loads((tmp_path / "out" / "run_cards" / f"{path.stem}.json").read_text())
    assert card["checks"] and all(check["passed"] for check in card["checks"].values())


@pytest.mark.quick
@pytest.mark.parametrize("path", [*NOTEBOOKS, *DEEPER], ids=lambda path: path.stem)
def test_a_notebook_can_be_read_in_an_evening(path):
    cells = nbformat.read(path, as_version=4).cells
    most_cells, most_words = 50, 2200
    if path.stem == "00_hello_rlhf":
        most_cells, most_words = 30, 1200
    if path in DEEPER:
        most_cells = 40
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    code = [cell.source.splitlines() for cell in cells if cell.cell_type == "code"]
    assert len(cells) <= most_cells
    assert words <= most_words
    assert max(len(lines) for lines in code) <= 25
    if path in NOTEBOOKS:
        assert len(read_card(MEASURED / f"{path.stem}.json")["checks"]) <= 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_in_outputs_are_those_of_figs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            if found := output.get("data", {}).get("image/svg+xml"):
                (name,) = re.findall(r'"figs" / "(\w+\.svg)"', cell.source)
                assert found == SVG(filename=ROOT / "figs" / name)._repr_svg_(), (
                    f"{name} changed since `make render`"
                )


@pytest.mark.parametrize("path", [*NOTEBOOKS, *LABS, *DEEPER], ids=lambda path: path.stem)
def test_committed_outputs_belong_to_their_cells(path):
    """Rendered by ``make render``; whoever edits a cell renders again."""
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.get(HASH_KEY) == source_hash(notebook), (
        "cells changed since `make render`"
    )
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any("parameters" in cell.metadata.get("tags", []) for cell in code)
    assert all(cell.execution_count for cell in code) and path.stat().st_size < 1_000_000
    for cell, after in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            assert after.cell_type == "markdown" and "**Figure" in after.source, (
                f"no caption after {cell.source[:60]}"
            )
    bars = [
        output
        for cell in code
        for output in cell.outputs
        if output.get("name") == "stderr" and FINISHED_BAR.fullmatch(output.text)
    ]
    assert len(bars) == (path.stem == WITH_BAR)
    for cell in code:
        assert len(cell.source.splitlines()) <= 30
        for output in cell.outputs:
            if output in bars:
                continue
            assert output.output_type != "error" and output.get("name") != "stderr"
            words = output.get("text", "") + output.get("data", {}).get("text/plain", "")
            assert (
                WIDGET not in output.get("data", {}) and "it/s" not in words
            )  # no progress bar either
            assert "Warning: " not in words
            assert not any(root in str(output) for root in (str(ROOT), str(Path.home()), "/tmp/"))


def test_a_rendered_bar_keeps_its_last_state():
    states = ["\r  0%|          | 0/2", "\r 50%|█████     | 1/2", "\r100%|██████████| 2/2", "\n"]
    outputs = [nbformat.v4.new_output("stream", name="stderr", text=text) for text in states]
    original = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("train()")])
    executed = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("train()", outputs=outputs)]
    )
    [cell] = strip_run_details(executed, original).cells
    assert [output.text for output in cell.outputs] == ["100%|██████████| 2/2\n"]


def test_a_rendering_of_another_preset_lies_beside_and_says_its_settings(tmp_path):
    source = tmp_path / "01_reward_modeling.ipynb"
    shutil.copy(ROOT / "notebooks" / source.name, source)
    before = source.read_bytes()
    line = "--only 01 --preset scratch --override dataset=owner/name --override epochs=2.0"
    render(nbformat.read(source, as_version=4), source, runner.parse_arguments(line.split()), CARD)
    assert source.read_bytes() == before
    cells = nbformat.read(tmp_path / "scratch" / source.name, as_version=4).cells
    [parameters] = (cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))
    assert "preset = 'scratch'" in parameters
    assert "overrides = {'dataset': 'owner/name', 'epochs': 2.0}" in parameters
    assert "| Time and memory | 83 s, 1.0 GB: preset scratch, two CPU cores |" in cells[0].source
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in target]
    assert links and all((ROOT / "notebooks/scratch" / target).exists() for target in links)


@pytest.mark.parametrize("folder", ["scratch", "small"])
def test_the_links_of_recorded_notebooks_lead_somewhere(folder):
    for file in (ROOT / "notebooks" / folder).glob("*.ipynb"):
        cells = nbformat.read(file, as_version=4).cells
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        links = [target for target in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in target]
        if folder == "scratch":  # recorded when the pages were in site/
            links = [target.replace("../../site/", "../../docs/") for target in links]
        assert links
        assert not [target for target in links if not (file.parent / target).exists()]
