"""Execute the course's notebooks with papermill, check what they measured, and print one table.

Leaves executed notebooks, HTML and run cards under OUTPUT. Exits with 1 when a cell fails, a check fails, or a
notebook executed no cell.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import nbformat
import pandas as pd
import papermill
import yaml
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError

from rlhf_course.files import atomic_file
from rlhf_course.notebook_files import strip_run_details
from rlhf_course.presets import PRESETS, ROOT

NOTEBOOKS = ROOT / "notebooks"
MARKS = "<!-- measured: written by make render -->", "<!-- end of measured -->"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; raises SystemExit with a sentence for an unknown notebook or a malformed override."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", choices=PRESETS, help="size of the run (default: tiny)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="notebooks by the start of their name")
    parser.add_argument("--output", type=Path, default=Path("build"), help="where results go (default: build)")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="a setting; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs (default: 0)")
    parser.add_argument("--render", action="store_true", help="write the outputs back into notebooks/ as well")
    chosen = parser.parse_args(arguments)
    names = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
    unknown = [start for start in chosen.only if not any(name.startswith(start) for name in names)]
    if unknown:
        parser.error(f"no notebook starts with {', '.join(unknown)}; there are {', '.join(names)}")
    chosen.names = [name for name in names if not chosen.only or name.startswith(tuple(chosen.only))]
    pairs = [text.partition("=") for text in chosen.override]
    if bad := [key for key, equals, _ in pairs if not equals]:
        parser.error(f"--override takes KEY=VALUE, got {bad[0]!r}")
    chosen.overrides = {key: _absolute(yaml.safe_load(value)) for key, _, value in pairs}
    chosen.output = chosen.output.resolve()
    return chosen


def _absolute(value):
    """Folders given on the command line are relative to where it was typed, not to the notebooks folder."""
    return str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value


def execute(name: str, chosen: argparse.Namespace) -> dict:
    """Run one notebook; returns its row of the table, with the reason under ``problem`` when it did not pass."""
    target = chosen.output / "notebooks" / f"{name}.ipynb"
    card_path = chosen.output / "run_cards" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    card_path.unlink(missing_ok=True)
    problem = ""
    print(f"{name} at preset {chosen.preset}", flush=True)
    try:
        papermill.execute_notebook(
            NOTEBOOKS / f"{name}.ipynb",
            target,
            parameters={
                "preset": chosen.preset,
                "overrides": chosen.overrides,
                "output_dir": str(chosen.output),
                "seed": chosen.seed,
            },
            kernel_name="python3",
            cwd=NOTEBOOKS,
        )
    except PapermillExecutionError as error:
        problem = f"cell {error.exec_count}: {error.ename}: {error.evalue}"
    notebook = nbformat.read(target, as_version=4)
    write_html(notebook, chosen.output / "html" / f"{name}.html")
    if not problem and not any(cell.get("execution_count") for cell in notebook.cells):
        problem = "no cell was executed"
    if not problem and not card_path.exists():
        problem = "it wrote no run card"
    card = json.loads(card_path.read_text(encoding="utf-8")) if card_path.exists() else {}
    if chosen.render and not problem:
        render(notebook, NOTEBOOKS / f"{name}.ipynb")
    return row(name, card, problem)


def write_html(notebook: nbformat.NotebookNode, target: Path) -> None:
    """The notebook as one HTML page."""
    page, _ = HTMLExporter().from_notebook_node(notebook)
    with atomic_file(target) as path:
        path.write_text(page, encoding="utf-8")


def render(executed: nbformat.NotebookNode, target: Path) -> None:
    """Put the outputs of a run into the notebook of the repository."""
    with atomic_file(target) as path:
        nbformat.write(strip_run_details(executed, nbformat.read(target, as_version=4)), path)


def update_readme(table: pd.DataFrame) -> None:
    """Put these rows into the README's table of measurements, in place of older ones of the same notebooks."""
    readme = ROOT / "README.md"
    head, _, rest = readme.read_text(encoding="utf-8").partition(MARKS[0])
    body, _, tail = rest.partition(MARKS[1])
    kept = {line.split("|")[1].strip(): line for line in body.strip().splitlines()[2:]}
    measured = {row[0]: "| " + " | ".join(map(str, row)) + " |" for row in table.to_numpy()}
    names = [path.stem for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))]
    rows = [line for name, line in sorted((kept | measured).items()) if name in names]
    header = ["| " + " | ".join(cells) + " |" for cells in (table.columns, ["---"] * len(table.columns))]
    with atomic_file(readme) as path:
        path.write_text("\n".join([head + MARKS[0], *header, *rows, MARKS[1] + tail]), encoding="utf-8")


def row(name: str, card: dict, problem: str) -> dict:
    """One line of the table, from a run card."""
    metrics, checks = card.get("metrics", {}), card.get("checks", {})
    found = [key.removesuffix("_before") for key in metrics if key.endswith("_before")]
    what = next((name for name in found if f"{name}_after" in metrics), None)
    headline = "–"
    if what:
        headline = f"{what.replace('_', ' ')} {metrics[f'{what}_before']:.2f} → {metrics[f'{what}_after']:.2f}"
    passed = sum(check["passed"] for check in checks.values())
    return {
        "notebook": name,
        "time": f"{card['wall_s']:.0f} s" if card else "–",
        "memory": f"{card['peak_rss_mb'] / 1024:.2f} GB" if card else "–",
        "GPU": f"{card['peak_cuda_mb'] / 1024:.2f} GB" if card.get("peak_cuda_mb") else "–",
        "headline": headline,
        "checks": f"{passed}/{len(checks)} passed",
        "problem": problem,
    }


def main() -> int:
    """Run what was chosen and report; the exit code is 1 when anything did not pass."""
    chosen = parse_arguments()
    rows = [execute(name, chosen) for name in chosen.names]
    table = pd.DataFrame(rows)
    if chosen.render and not any(table["problem"]):
        update_readme(table.drop(columns=["problem", "GPU"]))
    print("\n" + table.drop(columns="problem").to_string(index=False) + "\n")
    for failed in (r for r in rows if r["problem"]):
        print(f"{failed['notebook']} did not pass. {failed['problem']}", file=sys.stderr)
    print(f"Executed notebooks, HTML and run cards are in {chosen.output}")
    return int(any(r["problem"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
