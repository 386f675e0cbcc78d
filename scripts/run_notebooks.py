"""Execute the course's notebooks with papermill, check what they measured, and print one table.

Leaves executed notebooks, HTML, run cards, and a page over all of them (index.html) under OUTPUT.
Exits with 1 when a cell fails, a check fails, or a notebook executed no cell.
"""

from rlhf_course.runtime import command

if __name__ == "__main__":
    command.loading()

import argparse
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import nbformat
import pandas as pd
import papermill
import yaml
import zmq
from nbclient.exceptions import DeadKernelError
from nbclient.util import run_sync
from notebook_files import strip_run_details
from notebook_html import page
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from progress import Progress, duration
from report import cost, headline, headline_of, write

from rlhf_course.course.presets import CONFIGS, PRESETS, load_preset
from rlhf_course.runtime.files import atomic_file, hold, read_json

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
MEASURED = (
    ROOT / "figs" / "measured"
)  # run cards that figures, slides and the README's table are made from
# Of glibc's malloc: a large tensor is made of memory that was freed, not fetched from the kernel
# page by page.
MALLOC = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**28))  # bytes


class Client(PapermillNotebookClient):
    """Runs in this very Python, and kills the kernel after Ctrl-C: interrupted, it would print what
    it was doing.
    """

    def create_kernel_manager(self):
        manager = super().create_kernel_manager()
        # A python3 there may be of another environment
        manager.kernel_spec_manager.kernel_dirs = []
        if zmq.has("curve"):  # otherwise each kernel warns that others on this machine could listen
            manager.transport_encryption = "auto"
        return manager

    def papermill_execute_cells(self) -> None:
        try:
            super().papermill_execute_cells()
        except KeyboardInterrupt:
            run_sync(
                self.km.provisioner.kill
            )()  # jupyter_client interrupts a kernel even before it kills it
            logging.getLogger("asyncio").setLevel(
                logging.CRITICAL
            )  # it prints that the cell's task died, too
            raise


class Engine(NBClientEngine):
    """papermill's own, with that client."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, **kwargs):
        nb_man.nb.metadata.papermill.pop("output_path")  # it is renamed at the end
        return Client(
            nb_man, kernel_name=kernel_name, startup_timeout=kwargs["start_timeout"]
        ).execute()


papermill_engines.register("course", Engine)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; raises SystemExit with a sentence for an unknown notebook or a malformed
    override.
    """
    parser = argparse.ArgumentParser(
        "run_notebooks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", default="tiny", choices=PRESETS, help="size of the run (default: tiny)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NN", help="notebooks by the start of their name"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build"), help="where results go (default: build)"
    )
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="a setting; repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs (default: 0)")
    parser.add_argument(
        "--jobs", type=int, help="notebooks at a time (default: 2 at preset tiny; 1 with --render)"
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help=(
            "keep outputs in notebooks/ (of other presets: in notebooks/PRESET/), run cards in"
            " figs/measured/"
        ),
    )
    chosen = parser.parse_args(arguments)
    if not 0 <= chosen.seed < 2**32:
        parser.error("--seed takes a whole number from 0 on")
    names = sorted(
        path.stem
        for path in NOTEBOOKS.glob("[0-9]*.ipynb")
        if (CONFIGS / f"{path.stem}.yaml").exists()
    )
    if chosen.jobs is not None and chosen.jobs < 1:
        parser.error("--jobs takes a whole number from 1 on")
    unknown = [start for start in chosen.only if not any(name.startswith(start) for name in names)]
    if unknown:
        parser.error(f"no notebook starts with {', '.join(unknown)}; there are {', '.join(names)}")
    chosen.names = [
        name for name in names if not chosen.only or name.startswith(tuple(chosen.only))
    ]
    default = (
        2 if chosen.preset == "tiny" and not chosen.render and (os.cpu_count() or 1) > 1 else 1
    )
    chosen.jobs = min(chosen.jobs or default, len(chosen.names))
    chosen.overrides = {}
    for text in chosen.override:
        key, equals, value = text.partition("=")
        try:
            chosen.overrides[key] = _source(key, yaml.safe_load(value))
        except yaml.YAMLError:
            equals = ""
        if not equals:
            parser.error(f"--override takes KEY=VALUE, the value as in YAML; got {text!r}")
    chosen.output = chosen.output.expanduser().resolve()
    return chosen


def _source(key: str, value):
    """A folder of data or a model is relative to where the command was typed, not to the notebooks
    folder.
    """
    if not key.endswith(("dataset", "model", "checkpoint")) or not isinstance(value, str):
        return value
    folder = Path(value).expanduser()
    return (
        str(folder.resolve()) if folder.exists() and value not in ("offline", "scratch") else value
    )


def check(chosen: argparse.Namespace) -> None:
    """Raise, before anything runs, for settings that a notebook does not have and files that are no
    results of ours.
    """
    for name in chosen.names:
        load_preset(name, chosen.preset, chosen.overrides)
        target, source = _target(name, chosen), NOTEBOOKS / f"{name}.ipynb"
        try:
            ours = (
                not target.exists() or "papermill" in nbformat.read(target, as_version=4).metadata
            )
        except Exception:  # whatever nbformat makes of a file that is no notebook
            ours = False
        if not ours or target == source:
            raise FileExistsError(
                f"{target} is not the result of a run and stays as it is. Name another --output."
            )
    index = chosen.output / "index.html"
    if index.exists() and "<title>Hands-on RLHF: run report" not in index.read_text(
        "utf-8", "replace"
    ):
        raise FileExistsError(
            f"{index} is not the page over a run and stays as it is. Name another --output."
        )


def _target(name: str, chosen: argparse.Namespace) -> Path:
    return chosen.output / "notebooks" / f"{name}.ipynb"


def execute(name: str, chosen: argparse.Namespace) -> dict:
    """Run one notebook; returns its row of the table, with the reason under ``problem`` when it did
    not pass.
    """
    card_path = chosen.output / "run_cards" / f"{name}.json"
    problem = ""
    try:
        card_path.unlink(missing_ok=True)
        with atomic_file(_target(name, chosen)) as path:
            problem = run_cells(NOTEBOOKS / f"{name}.ipynb", path, chosen)
        notebook = nbformat.read(_target(name, chosen), as_version=4)
        with atomic_file(chosen.output / "html" / f"{name}.html") as path:
            path.write_text(page(notebook, NOTEBOOKS), encoding="utf-8")
        card = read_card(card_path)
        if not any(cell.get("execution_count") for cell in notebook.cells):
            problem = problem or "no cell was executed"
        if not card:
            problem = problem or "it wrote no run card"
        if chosen.render and (
            not problem or (card and chosen.preset != "tiny")
        ):  # real data may teach nothing
            render(notebook, NOTEBOOKS / f"{name}.ipynb", chosen)
            with atomic_file(kept(chosen.preset) / f"{name}.json") as path:
                path.write_bytes(card_path.read_bytes())
        return row(name, card, problem)
    except Exception as error:  # a full disk, no kernel: the other notebooks may run
        return row(name, {}, "; ".join(filter(None, [problem, f"{type(error).__name__}: {error}"])))


def execute_all(chosen: argparse.Namespace, progress: Progress, rows: list[dict]) -> None:
    """Run the notebooks and add their rows: one after the other here, or several at a time in their
    own processes.
    """
    if chosen.jobs == 1:
        for name in chosen.names:
            with progress.at(name):
                rows.append(execute(name, chosen))
        return
    seconds, running, stopped = expected(chosen), set(), Event()

    def one(name: str) -> None:
        with progress.at(name):
            found = execute_beside(name, chosen, running)
        if not stopped.is_set():
            rows.append(found)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        longest_first = sorted(chosen.names, key=lambda name: -seconds.get(name, 0))
        try:
            wait(
                [pool.submit(one, name) for name in longest_first]
            )  # a join that Ctrl-C interrupts is a thread lost
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                process.terminate()
            raise
        finally:
            rows.sort(key=lambda row: row["notebook"])


def execute_beside(name: str, chosen: argparse.Namespace, running: set[subprocess.Popen]) -> dict:
    """Run one notebook in a process of its own with its share of the cores; returns its row of the
    table.

    The process is in ``running`` as long as it lives, and ends by SIGTERM as this command itself
    would.
    """
    line = [
        sys.executable,
        __file__,
        "--only",
        name,
        "--preset",
        chosen.preset,
        "--seed",
        str(chosen.seed),
    ]
    line += [
        "--output",
        str(chosen.output),
        "--jobs",
        "1",
        *(f"--override={text}" for text in chosen.override),
    ]
    threads = str(max(1, (os.cpu_count() or 1) // chosen.jobs))
    pipes = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
        "encoding": "utf-8",
    }
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(line, env=environment, start_new_session=True, **pipes) as process:
        running.add(process)
        _, said = process.communicate()
        running.discard(process)
    problem = (said.strip().splitlines() or [f"It ended with exit code {process.returncode}."])[-1]
    problem = problem.removeprefix(f"{name} did not pass. ").removeprefix("run_notebooks.py: ")
    card = read_card(chosen.output / "run_cards" / f"{name}.json")
    return row(name, card, problem if process.returncode else "")


def run_cells(source: Path, target: Path, chosen: argparse.Namespace) -> str:
    """Execute one notebook; the result is in ``target`` whatever happens. Returns what went wrong,
    if anything did.
    """
    parameters = {"preset": chosen.preset, "overrides": chosen.overrides, "seed": chosen.seed}
    parameters["output_dir"] = str(chosen.output)
    try:
        how = {
            "engine_name": "course",
            "kernel_name": "python3",
            "progress_bar": False,
            "cwd": NOTEBOOKS,
        }
        papermill.execute_notebook(source, target, parameters, **how)
    except PapermillExecutionError as error:
        return f"cell {error.exec_count}: {error.ename}: {error.evalue}"
    except DeadKernelError:
        return (
            "Its process was killed. Most often memory ran out: a smaller preset, or batch_size,"
            " needs less."
        )
    return ""


def render(executed: nbformat.NotebookNode, source: Path, chosen: argparse.Namespace) -> None:
    """Put the outputs of a run into the notebook of the repository, or of another preset than tiny
    beside it.
    """
    notebook, target = strip_run_details(executed, nbformat.read(source, as_version=4)), source
    if chosen.preset != "tiny":
        target = source.parent / chosen.preset / source.name
        settings = {"preset": repr(chosen.preset), "overrides": repr(chosen.overrides)}
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = re.sub(r"\]\((?=\.\./|exercises/)", "](../", cell.source)
            elif "parameters" in cell.metadata.get("tags", []):
                lines = (line.split(" = ") for line in cell.source.splitlines())
                cell.source = "\n".join(
                    f"{key} = {settings.get(key, value)}" for key, value in lines
                )
    with atomic_file(target) as path:
        nbformat.write(notebook, path)


def kept(preset: str) -> Path:
    """Where run cards of a preset are kept."""
    return MEASURED if preset == "tiny" else MEASURED / preset


def update_readme(readme: Path = ROOT / "README.md", measured: Path = MEASURED) -> None:
    """Write what the kept run cards say into the README's table: the columns for cost and headline."""
    lines = readme.read_text(encoding="utf-8").splitlines(keepends=True)
    for name in (path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb")):
        card, full = (
            read_card(measured / f"{name}.json"),
            read_card(measured / "full" / f"{name}.json"),
        )
        seeds = read_card(measured / "seeds.json").get(name, {})
        for i, line in enumerate(lines):
            if card and line.startswith("|") and f"(notebooks/{name}.ipynb)" in line:
                cells = line.split(" | ")
                cells[2:4] = (
                    f"{cost(card)} / {cost(full)}",
                    headline(card) + other_seeds(card, seeds),
                )
                lines[i] = " | ".join(cells)
    with atomic_file(readme) as path:
        path.write_text("".join(lines), encoding="utf-8")


def read_card(path: Path) -> dict:
    """A run card, {} where there is none."""
    return read_json(path) if path.exists() else {}


def other_seeds(card: dict, seeds: dict[str, dict]) -> str:
    """Where the headline ended at the other seeds, of what measure_seeds.py kept."""
    what = headline_of(card)
    ends = [
        f"{run[f'{what}_after']:.2f}" for seed, run in seeds.items() if seed != str(card["seed"])
    ]
    return f"; at other seeds {', '.join(ends)}" if what and ends else ""


def row(name: str, card: dict, problem: str) -> dict:
    """One line of the table that is printed."""
    checks = card.get("checks", {})
    passed = sum(check["passed"] for check in checks.values())
    return {
        "notebook": name,
        "time, memory": cost(card) if card else "–",
        "headline": headline(card),
        "checks": f"{passed}/{len(checks)} passed",
        "problem": problem,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run what was chosen and report; the exit code is 1 when anything did not pass.

    Ctrl-C reports what is done. Raises ``ValueError`` or ``OSError`` when nothing can run.
    """
    chosen, rows = parse_arguments(arguments), []
    check(chosen)
    for name, value in MALLOC.items():  # kernels inherit them
        os.environ.setdefault(name, value)
    progress = Progress(chosen.names, expected(chosen), chosen.jobs)
    with ExitStack() as held:
        for name in chosen.names if chosen.jobs == 1 else ():  # else each process holds its own
            held.enter_context(hold(chosen.output / "notebooks", name))
        many = f"{len(chosen.names)} notebooks" if len(chosen.names) > 1 else "One notebook"
        many += f", {chosen.jobs} at a time," if chosen.jobs > 1 else ""
        print(
            f"{many} at preset {chosen.preset}"
            + (f", {duration(progress.left())}" if progress.known else "")
        )
        try:
            with progress.shown():
                execute_all(chosen, progress, rows)
        finally:
            report(rows, chosen)
    if chosen.render and chosen.preset == "tiny":
        update_readme()
    return int(any(r["problem"] for r in rows))


def expected(chosen: argparse.Namespace) -> dict[str, float]:
    """Seconds that the notebooks took where their kept run cards were measured; of none at preset
    scratch.
    """
    names = chosen.names if chosen.preset != "scratch" else ()
    cards = {name: read_card(kept(chosen.preset) / f"{name}.json") for name in names}
    return {name: card["wall_s"] for name, card in cards.items() if card}


def report(rows: list[dict], chosen: argparse.Namespace) -> None:
    """Print the table, what did not pass and why, where everything is, and what to open next."""
    index = chosen.output / "index.html"
    try:
        write([chosen.output], index)
        following = f"Open next: {index}"
    except OSError as error:  # nothing was measured, or the disk is full
        following = f"There is no page over them. {error}"
    if rows:
        print("\n" + pd.DataFrame(rows).drop(columns="problem").to_string(index=False) + "\n")
    for failed in (r for r in rows if r["problem"]):
        print(f"{failed['notebook']} did not pass. {failed['problem']}", file=sys.stderr)
    print(f"Executed notebooks, HTML and run cards are in {chosen.output}\n{following}", flush=True)


if __name__ == "__main__":
    sys.exit(command.run("run_notebooks.py", main))
