"""Execute the course's notebooks with papermill, and print one table of their checks.

Writes executed notebooks, HTML, run cards, and a report (index.html) to OUTPUT. Exits with 1 if a
cell or a check fails, or if a notebook executes no cell.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from threading import Event

import nbformat
import papermill
import yaml
import zmq
from nbclient.exceptions import DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError

from rlhf_course.command_line import exits, notebook_files
from rlhf_course.command_line import run_report as report
from rlhf_course.command_line.notebook_html import page
from rlhf_course.course.presets import CONFIGS, PRESETS, load_preset
from rlhf_course.runtime.files import hold

NOTEBOOKS = notebook_files.NOTEBOOKS
# Thresholds for glibc's malloc, in bytes. Smaller tensors reuse freed memory instead of getting
# new pages. Larger tensors would fragment the heap, so their memory returns to the system.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}
# Folder → suffix, and a text that every file from a run contains; other files are the user's.
OWN = {"notebooks": ("ipynb", '"papermill"'), "html": ("html", "jp-Notebook")}
OWN |= {"run_cards": ("json", '"checks"')}
processes = {}  # notebook → its kernel's process


class Client(PapermillNotebookClient):
    """Start kernels with this Python, and record their processes."""

    def create_kernel_manager(self):
        manager = super().create_kernel_manager()
        manager.kernel_spec_manager.kernel_dirs = []  # installed kernels may run another Python
        if zmq.has("curve"):  # otherwise each kernel warns about unencrypted ports
            manager.transport_encryption = "auto"
        return manager

    def start_new_kernel_client(self, **kwargs):
        processes[self.nb.metadata.course] = self.km.provisioner.process
        return super().start_new_kernel_client(**kwargs)


class Engine(NBClientEngine):
    """Run papermill's engine with :class:`Client`."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, **kwargs):
        # papermill's cwd option is not thread-safe.
        how = {"resources": {"metadata": {"path": str(NOTEBOOKS)}}}
        how |= {"startup_timeout": kwargs["start_timeout"]}
        return Client(nb_man, kernel_name=kernel_name, **how).execute()


papermill_engines.register("course", Engine)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise ``SystemExit`` with a message if one is invalid."""
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    add = (parser := argparse.ArgumentParser("run_notebooks.py", **how)).add_argument
    add("--preset", default="tiny", choices=PRESETS, help="size of the run (default: tiny)")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="NN",
        help="notebooks whose name starts with NN; classic: the labs in notebooks/classic",
    )
    add("--output", type=Path, default=Path("build"), help="output folder (default: build)")
    how = {"type": _setting, "action": "append", "default": [], "metavar": "KEY=VALUE"}
    add("--override", **how, help="change a setting; repeatable")
    add("--seed", type=int, help="seed of the runs (default: the notebook's, 0)")
    add("--jobs", type=int, help="notebooks at a time (default: 1; 2 at tiny without --render)")
    add("--render", action="store_true", help="save outputs in notebooks/, cards in figs/measured/")
    chosen = parser.parse_args(arguments)
    if not 0 <= (chosen.seed or 0) < 2**32:
        parser.error(f"--seed {chosen.seed} must be from 0 to {2**32 - 1}")
    if chosen.jobs is not None and chosen.jobs < 1:
        parser.error(f"--jobs {chosen.jobs} must be at least 1")
    chosen.names = _choose(parser, chosen.only)
    two = chosen.preset == "tiny" and not chosen.render and (os.cpu_count() or 1) > 1
    chosen.jobs = min(chosen.jobs or 1 + two, len(chosen.names))
    chosen.overrides, chosen.output = dict(chosen.override), chosen.output.expanduser().resolve()
    return chosen


def _choose(parser: argparse.ArgumentParser, starts: list[str]) -> list[str]:
    """Return the notebooks whose names begin with one of ``starts``, or else all numbered ones.

    The labs in ``classic`` run only on request: by their names, or all of them as ``classic``.
    """
    numbered = _names("[0-9]*.ipynb")
    labs = _names("classic/*.ipynb")
    requests = {name: (name,) for name in numbered} | {name: (name, "classic") for name in labs}
    unknown = [
        start
        for start in starts
        if not any(name.startswith(start) for names in requests.values() for name in names)
    ]
    if unknown:
        known = ", ".join(requests)
        parser.error(f"no notebook starts with {', '.join(unknown)}; there are {known}")
    if not starts:
        return numbered
    return [
        notebook
        for notebook, names in requests.items()
        if any(name.startswith(tuple(starts)) for name in names)
    ]


def _names(pattern: str) -> list[str]:
    """Return the names of the notebooks that have settings, in order."""
    names = sorted(path.stem for path in NOTEBOOKS.glob(pattern))
    return [name for name in names if (CONFIGS / f"{name}.yaml").exists()]


def source_of(name: str) -> Path:
    """Return a notebook's path from its name; names are unique across the folders."""
    numbered = NOTEBOOKS / f"{name}.ipynb"
    return numbered if numbered.exists() else NOTEBOOKS / "classic" / f"{name}.ipynb"


def _setting(text: str) -> tuple:
    """Return a setting's name and value; make the path of an existing folder absolute."""
    key, equals, value = text.partition("=")
    try:
        value = yaml.safe_load(value)
    except yaml.YAMLError:
        equals = ""
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE with a YAML value; got {text!r}")
    is_place = key.endswith(("dataset", "model", "checkpoint")) and isinstance(value, str)
    if is_place and Path(value).expanduser().exists() and value not in ("offline", "scratch"):
        value = str(Path(value).expanduser().resolve())
    return key, value


def check(chosen: argparse.Namespace) -> None:
    """Raise an error for invalid settings or notebooks, and for output files that no run wrote."""
    for name in chosen.names:
        load_preset(name, chosen.preset, chosen.overrides)
        source = source_of(name)
        cells = nbformat.read(source, as_version=4).cells
        if not any("parameters" in cell.metadata.get("tags", []) for cell in cells):
            cure = f"Restore it: git checkout notebooks/{source.relative_to(NOTEBOOKS)}"
            raise ValueError(f"{name}.ipynb has no cell tagged parameters. {cure}")
        for folder, (ending, word) in OWN.items():
            file = chosen.output / folder / f"{name}.{ending}"
            if file.exists() and word not in file.read_text("utf-8", "replace"):
                raise FileExistsError(f"{file} is not a run's result. Choose another --output.")
    report.check_own(chosen.output / "index.html")


def execute(name: str, chosen: argparse.Namespace) -> str:
    """Run one notebook; return the problem, or "" if it passed."""
    card = chosen.output / "run_cards" / f"{name}.json"
    target, source = chosen.output / "notebooks" / f"{name}.ipynb", source_of(name)
    problem = ""
    try:
        for old in (card, target):
            old.unlink(missing_ok=True)
        problem = run_cells(source, target, chosen)
        notebook = nbformat.read(target, as_version=4)
        (chosen.output / "html").mkdir(exist_ok=True)
        html = chosen.output / "html" / f"{name}.html"
        html.write_text(page(notebook, source.parent), encoding="utf-8")
        ran = any(cell.get("execution_count") for cell in notebook.cells)
        problem = problem or ("" if ran else "No cell was executed.")
        problem = problem or (report.failure(card) if card.exists() else "No run card was written.")
        is_kept = not problem or chosen.preset != "tiny"  # on real data, checks may fail
        if chosen.render and is_kept and card.exists():
            notebook_files.render(notebook, source, chosen, notebook_files.read_card(card))
            notebook_files.keep(card, chosen.preset)
        return problem
    except Exception as error:  # full disk, no kernel: other notebooks may still run
        return "; ".join(filter(None, [problem, f"{type(error).__name__}: {error}"]))


def run_cells(source: Path, target: Path, chosen: argparse.Namespace) -> str:
    """Execute one notebook into ``target``, even if a cell fails; return the problem or ""."""
    parameters = {"preset": chosen.preset, "output_dir": str(chosen.output)}
    given = {"overrides": chosen.overrides or None, "seed": chosen.seed}  # else: the notebook's
    parameters |= {name: value for name, value in given.items() if value is not None}
    how = {"engine_name": "course", "kernel_name": "python3", "progress_bar": False}
    notebook = nbformat.read(source, as_version=4)
    notebook.metadata.course = source.stem
    try:
        papermill.execute_notebook(notebook, target, parameters, **how)
    except PapermillExecutionError as error:
        return f"cell {error.exec_count}: {error.ename}: {error.evalue}"
    except DeadKernelError:
        code = processes[source.stem].wait()
        if code == 0:
            return "A cell ended the notebook's process. Remove calls such as exit()."
        advice = "Memory probably ran out; use a smaller preset or batch_size."
        return f"The kernel was killed. {advice}" if code == -9 else f"The kernel returned {code}."
    return ""


def execute_all(chosen: argparse.Namespace, results: dict[str, str]) -> None:
    """Run the notebooks, longest first if in parallel; add their problems to ``results``."""
    stopped, begun, kept = Event(), count(1), notebook_files.kept(chosen.preset)
    cards = {name: notebook_files.read_card(kept / f"{name}.json") for name in chosen.names}
    usual = {name: card.get("wall_s", 0) for name, card in cards.items()}
    names = sorted(usual, key=lambda name: -usual[name]) if chosen.jobs > 1 else chosen.names

    def one(name: str) -> None:
        time = f": {usual[name]:.0f} s when rendered" if usual[name] else ""
        line = f"[{next(begun)}/{len(names)}] {name}{time}\n"
        print(line, end="", flush=True)  # in one write, because two threads print
        problem = execute(name, chosen)
        if not stopped.is_set():
            results[name] = problem

    with ThreadPoolExecutor(chosen.jobs) as pool:
        try:
            wait([pool.submit(one, name) for name in names])
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*processes.values()]:
                process.kill()
            raise


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen notebooks and report; return 1 if any did not pass, else 0."""
    chosen, results = parse_arguments(arguments), {}
    check(chosen)
    share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // chosen.jobs))}
    os.environ |= MALLOC | (share if chosen.jobs > 1 else {}) | os.environ  # for the kernels
    with ExitStack() as held:
        for name in chosen.names:
            held.enter_context(hold(chosen.output / "notebooks", name))
        try:
            execute_all(chosen, results)
        finally:
            tell(results, chosen)
    if chosen.render and chosen.preset == "tiny":
        notebook_files.update_readme()
    return int(any(results.values()))


def tell(results: dict[str, str], chosen: argparse.Namespace) -> None:
    """Save the results, write the report, and print the table, failures, and paths."""
    try:
        report.add_results(chosen.output, results)
        entries = report.write([chosen.output], chosen.output / "index.html")
        report.show([entry for entry in entries if entry["name"] in results])
    except OSError as error:  # no notebook ran, or the disk is full
        print(f"No report was written. {error}", file=sys.stderr)
    print(f"Results are in {chosen.output}\nOpen next: {chosen.output / 'index.html'}")


if __name__ == "__main__":
    sys.exit(exits.run("run_notebooks.py", main))
