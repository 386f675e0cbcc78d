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
    cells = [cell for cell in executed.cells if not added & set(cell.metadata.get("tags", []))]
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
    notebook = strip_run_details(executed, nbformat.read(source, as_version=4))
    first = notebook.cells[0]
    measured = f"{cost(card)}: preset {chosen.preset}, two CPU cores"
    first.source = re.sub(r"(\| Time and memory \|).*\|", rf"\1 {measured} |", first.source)
    notebook.metadata[HASH_KEY] = source_hash(notebook)
    target = source
    if chosen.preset != "tiny":
        target = source.parent / chosen.preset / source.name
        move_to_subfolder(notebook, chosen)
    with atomic_file(target) as path:
        nbformat.write(notebook, path)


def move_to_subfolder(notebook: NotebookNode, chosen: Namespace) -> None:
    """Adapt a notebook's links to its preset's folder, and its parameters to the run's."""
    run_parameters = {"preset": chosen.preset, "overrides": chosen.overrides}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((?![a-z]+:|#)", "](../", cell.source)  # relative links
            cell.source = cell.source.replace(f"](../{chosen.preset}/", "](")
        elif "parameters" in cell.metadata.get("tags", []):
            lines = []
            for line in cell.source.splitlines():
                name, value = line.split(" = ")
                if name in run_parameters:
                    value = repr(run_parameters[name])
                lines.append(f"{name} = {value}")
            cell.source = "\n".join(lines)


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
    cards = {path.stem: read_card(path) for path in measured.glob("[0-9]*.json")}
    seeds = read_card(measured / "seeds.json")
    day = read_card(measured / "gpu_day.json")
    gpu_costs = {}  # notebook → time and memory of preset full on one GPU
    for gate_name, gate in day.get("gates", {}).items():
        if gate_name.startswith("6 ") and gate["passed"]:
            notebook = gate_name.removeprefix("6 ").removesuffix(" at full")
            gpu_costs[notebook] = cost(gate["measured"])
    lines = readme.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith("**One GPU.**"):
            lines[number] = one_gpu(day)
        elif line.startswith("| notebook |"):
            cells = line.split(" | ")
            cells[2] = "time, memory: `tiny` on two CPU cores"
            if gpu_costs:
                cells[2] += " / `full` on one GPU"
            lines[number] = " | ".join(cells)
        elif line.startswith("|"):
            lines[number] = update_row(line, cards, seeds, gpu_costs)
    with atomic_file(readme) as path:
        path.write_text("".join(lines), encoding="utf-8")


def update_row(
    line: str, cards: dict[str, dict], seeds: dict[str, dict], gpu_costs: dict[str, str]
) -> str:
    """Return a table's row with its notebook's numbers; other rows stay as they are."""
    cells = line.split(" | ")
    for name, card in cards.items():
        if f"(notebooks/{name}.ipynb)" in cells[0]:
            cells[2] = cost(card)
            if name in gpu_costs:
                cells[2] += f" / {gpu_costs[name]}"
            cells[3] = headline(card) + other_seeds(card, seeds.get(name, {}))
    return " | ".join(cells)


def one_gpu(day: dict) -> str:
    """Return the README's line about a GPU; ``day`` is {} if there are no measurements."""
    command = "[`python scripts/gpu_day.py`](docs/on-a-gpu.md)"
    if not day:
        return f"**One GPU.** No notebook has been measured on a real GPU yet; {command} does it.\n"
    passed = [name[0] for name, gate in day["gates"].items() if gate["passed"]]
    full = "`full` has not been measured"
    if "6" in passed:
        full = "numbers after the slash are from there"
    return (
        f"**One GPU.** We ran {command} on one {day['environment']['device']}: all checks of"
        f" {passed.count('3')} notebooks passed at `tiny`; {full}.\n"
    )


def other_seeds(card: dict, seeds: dict[str, dict]) -> str:
    """Return a phrase with the headline metric's final values at other seeds, or ""."""
    metric = headline_of(card)
    if metric is None:
        return ""
    others = [run for seed, run in seeds.items() if seed != str(card["seed"])]
    if not others:
        return ""
    ends = []
    for run in others:
        failed = run["checks"] - run["passed"]
        note = f" ({failed} failed)" if failed else ""
        ends.append(f"{run[f'{metric}_after']:.2f}{note}")
    return f"; at other seeds {', '.join(ends)}"
