"""Write rendered notebooks, run cards, and the README's table; detect stale outputs."""

import hashlib
import re
from argparse import Namespace
from pathlib import Path

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode

from rlhf_course.command_line.run_report import cost, headline, headline_of
from rlhf_course.runtime.files import atomic_file, read_json

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
MEASURED = ROOT / "figs" / "measured"  # run cards for figures, slides and the README
HASH_KEY = "source_sha256"
WIDGET = (  # mostly progress bars, which are empty without a kernel
    "application/vnd.jupyter.widget-view+json"
)


def source_hash(notebook: NotebookNode) -> str:
    """Return a hash of all cells' types and sources; outputs with another hash are stale."""
    text = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(text.encode()).hexdigest()


def strip_run_details(executed: NotebookNode, original: NotebookNode) -> NotebookNode:
    """Copy ``executed``'s outputs into ``original``, whose metadata is reset; return ``original``.

    Injected parameters, timings, widgets and kernel details are dropped. A progress bar of text
    keeps only its last state, as on a screen.
    """
    executed, _ = CoalesceStreamsPreprocessor().preprocess(executed, {})
    added = {"injected-parameters", "papermill-error-cell-tag"}
    cells = [cell for cell in executed.cells if not added & {*cell.metadata.get("tags", [])}]
    count = 0
    for cell, source in zip(cells, original.cells, strict=True):
        source.metadata = NotebookNode({k: v for k, v in source.metadata.items() if k == "tags"})
        if source.cell_type != "code":
            continue
        count += 1
        source.execution_count = count
        source.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        for output in source.outputs:
            if output.output_type == "error":  # a failed check
                output.traceback = [f"{output.ename}: {output.evalue}"]
            if output.output_type == "execute_result":
                output.execution_count = count
    original.metadata = NotebookNode(
        kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"},
        language_info={"name": "python"},
    )
    original.metadata[HASH_KEY] = source_hash(original)
    return original


def render(executed: NotebookNode, source: Path, chosen: Namespace, card: dict) -> None:
    """Write a run's outputs, time and memory into the repository's notebook.

    Each preset except tiny has a folder with the preset's name.
    """
    notebook, target = strip_run_details(executed, nbformat.read(source, as_version=4)), source
    first, measured = notebook.cells[0], f"{cost(card)}: preset {chosen.preset}, two CPU cores"
    first.source = re.sub(r"(\| Time and memory \|).*\|", rf"\1 {measured} |", first.source)
    notebook.metadata[HASH_KEY] = source_hash(notebook)
    if chosen.preset != "tiny":
        target = source.parent / chosen.preset / source.name
        settings = {"preset": repr(chosen.preset), "overrides": repr(chosen.overrides)}
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = re.sub(r"\]\((?=\.\./|exercises/)", "](../", cell.source)
                cell.source = cell.source.replace(f"]({chosen.preset}/", "](")
            elif "parameters" in cell.metadata.get("tags", []):
                lines = (line.split(" = ") for line in cell.source.splitlines())
                cell.source = "\n".join(
                    f"{key} = {settings.get(key, value)}" for key, value in lines
                )
    with atomic_file(target) as path:
        nbformat.write(notebook, path)


def keep(card: Path, preset: str) -> None:
    """Copy a run card to the folder that figures, slides and the README read."""
    with atomic_file(kept(preset) / card.name) as path:
        path.write_bytes(card.read_bytes())


def kept(preset: str) -> Path:
    """Return the folder of a preset's run cards."""
    return MEASURED if preset == "tiny" else MEASURED / preset


def read_card(path: Path) -> dict:
    """Return a run card, or {} if there is no file."""
    return read_json(path) if path.exists() else {}


def keep_day(day: Path, readme: Path = ROOT / "README.md", measured: Path = MEASURED) -> None:
    """Copy a GPU run's results to the measured folder, and update the README.

    Raises ``ValueError`` for a rehearsal.
    """
    if read_json(day)["environment"]["device"] == "CPU":
        raise ValueError(f"{day} is a rehearsal on a CPU. Repeat scripts/gpu_day.py on a GPU.")
    with atomic_file(measured / "gpu_day.json") as path:
        path.write_bytes(day.read_bytes())
    update_readme(readme, measured)


def update_readme(readme: Path = ROOT / "README.md", measured: Path = MEASURED) -> None:
    """Write costs and headlines from run cards into the README's table."""
    lines = readme.read_text(encoding="utf-8").splitlines(keepends=True)
    cards = {f"(notebooks/{path.stem}.ipynb)": path for path in measured.glob("[0-9]*.json")}
    seeds, day = (read_card(measured / f"{name}.json") for name in ("seeds", "gpu_day"))
    full = {name[2:-8]: gate for name, gate in day.get("gates", {}).items() if name[0] == "6"}
    full = {name: gate["measured"] for name, gate in full.items() if gate["passed"]}
    for i, line in enumerate(lines):
        cells = line.split(" | ")
        if line.startswith("| notebook |"):
            cells[2] = "time, memory: `tiny` on two CPU cores" + " / `full` on one GPU" * bool(full)
        elif path := next((path for link, path in cards.items() if link in cells[0]), None):
            card, name = read_card(path), path.stem
            cells[2] = cost(card) + (f" / {cost(full[name])}" if name in full else "")
            cells[3] = headline(card) + other_seeds(card, seeds.get(name, {}))
        elif line.startswith("**One GPU.**"):
            cells = [one_gpu(day)]
        lines[i] = " | ".join(cells)
    with atomic_file(readme) as path:
        path.write_text("".join(lines), encoding="utf-8")


def one_gpu(day: dict) -> str:
    """Return the README's line about a GPU; ``day`` is {} if there are no measurements."""
    command = "[`python scripts/gpu_day.py`](docs/on-a-gpu.md)"
    if not day:
        return f"**One GPU.** No notebook has been measured on a real GPU yet; {command} does it.\n"
    passed = [name[0] for name, gate in day["gates"].items() if gate["passed"]]
    slash = (
        "numbers after the slash are from there"
        if "6" in passed
        else "`full` has not been measured"
    )
    what = f"all checks of {passed.count('3')} notebooks passed at `tiny`; {slash}"
    return f"**One GPU.** We ran {command} on one {day['environment']['device']}: {what}.\n"


def other_seeds(card: dict, seeds: dict[str, dict]) -> str:
    """Return a phrase with the headline metric's final values at other seeds, or ""."""
    what = headline_of(card)
    ends = [
        f"{run[f'{what}_after']:.2f}" for seed, run in seeds.items() if seed != str(card["seed"])
    ]
    return f"; at other seeds {', '.join(ends)}" if what and ends else ""
