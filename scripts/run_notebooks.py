"""Execute the course's notebooks with papermill, and print one table of their checks.

Writes executed notebooks, HTML, run cards, and a report (index.html) to OUTPUT. Exits with 1 if a
cell or a check fails, or if a notebook executes no cell.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import chain
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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rlhf_course.command_line import exits, notebook_files, run_report
from rlhf_course.command_line.notebook_html import page
from rlhf_course.course.presets import CONFIGS, PRESETS, SMALL, load_preset
from rlhf_course.runtime.files import hold

NOTEBOOKS = notebook_files.NOTEBOOKS
# The folders of notebooks that run only on request.
FOLDERS = ("classic", "deeper")
# Thresholds for glibc's malloc, in bytes. Smaller tensors reuse freed memory instead of getting
# new pages. Larger tensors would fragment the heap, so their memory returns to the system.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}
# Folder → suffix, and a text that every file from a run contains; other files are the user's.
RESULTS = {
    "notebooks": ("ipynb", '"papermill"'),
    "html": ("html", "jp-Notebook"),
    "run_cards": ("json", '"checks"'),
}
processes = {}  # notebook → its kernel's process
# One line per running notebook, in a terminal only.
live_lines = Progress(
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("cells"),
    TimeElapsedColumn(),
    TextColumn("{task.fields[usual]}"),
    console=Console(),
    transient=True,
    disable=not sys.stdout.isatty(),
)


class Client(PapermillNotebookClient):
    """Start kernels with this Python, record their processes, and keep their stderr in a file."""

    def __init__(self, nb_man, log: Path, **kwargs):
        super().__init__(nb_man, **kwargs)
        self.log_file = log

    def create_kernel_manager(self):
        manager = super().create_kernel_manager()
        manager.kernel_spec_manager.kernel_dirs = []  # installed kernels may run another Python
        if zmq.has("curve"):  # otherwise each kernel warns about unencrypted ports
            manager.transport_encryption = "auto"
        return manager

    def start_new_kernel(self, **kwargs):
        with self.log_file.open("wb") as log:
            super().start_new_kernel(stderr=log, **kwargs)

    def start_new_kernel_client(self, **kwargs):
        processes[self.nb.metadata.course] = self.km.provisioner.process
        return super().start_new_kernel_client(**kwargs)


class Engine(NBClientEngine):
    """Run papermill's engine with :class:`Client`."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, **kwargs):
        client = Client(
            nb_man,
            log=kwargs["log"],
            kernel_name=kernel_name,
            startup_timeout=kwargs["start_timeout"],
            # papermill's cwd option is not thread-safe.
            resources={"metadata": {"path": str(NOTEBOOKS)}},
            on_cell_executed=kwargs["on_cell_executed"],
        )
        return client.execute()


papermill_engines.register("course", Engine)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "run_notebooks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset",
        default="tiny",
        choices=(*PRESETS, SMALL),
        help="size of the run (default: tiny); small: a pretrained chat model (04, 08 and 10)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NN",
        help="notebooks whose name starts with NN; classic or deeper: all in that folder",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build"), help="output folder (default: build)"
    )
    parser.add_argument(
        "--override",
        type=parse_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting; repeatable",
    )
    parser.add_argument("--seed", type=int, help="seed of the runs (default: the notebook's, 0)")
    parser.add_argument(
        "--jobs", type=int, help="notebooks at a time (default: 1; 2 at tiny without --render)"
    )
    parser.add_argument(
        "--render", action="store_true", help="save outputs in notebooks/, cards in figs/measured/"
    )
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise ``SystemExit`` with a message if one is invalid."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None and not 0 <= chosen.seed < 2**32:
        parser.error(f"--seed {chosen.seed} must be from 0 to {2**32 - 1}")
    if chosen.jobs is not None and chosen.jobs < 1:
        parser.error(f"--jobs {chosen.jobs} must be at least 1")
    chosen.names = choose_names(parser, chosen.only)
    if chosen.jobs is None:
        chosen.jobs = default_jobs(chosen)
    chosen.jobs = min(chosen.jobs, len(chosen.names))
    chosen.overrides = dict(chosen.override)
    chosen.output = chosen.output.expanduser().resolve()
    return chosen


def choose_names(parser: argparse.ArgumentParser, starts: list[str]) -> list[str]:
    """Return the notebooks whose names begin with one of ``starts``, or else all numbered ones.

    The notebooks in ``FOLDERS`` run only on request: by their names, or a whole folder by its name.
    """
    numbered = names_in("[0-9]*.ipynb")
    in_folders = {folder: names_in(f"{folder}/*.ipynb") for folder in FOLDERS}
    if not starts:
        return numbered
    names = [*numbered, *chain.from_iterable(in_folders.values())]
    chosen = set()
    for start in starts:
        matches = in_folders.get(start) or [name for name in names if name.startswith(start)]
        if not matches:
            parser.error(f"no notebook starts with {start}; there are {', '.join(names)}")
        chosen |= set(matches)
    return [name for name in names if name in chosen]


def names_in(pattern: str) -> list[str]:
    """Return the names of the notebooks that have settings, in order."""
    names = sorted(path.stem for path in NOTEBOOKS.glob(pattern))
    return [name for name in names if (CONFIGS / f"{name}.yaml").exists()]


def source_of(name: str) -> Path:
    """Return a notebook's path from its name; names are unique across the folders."""
    paths = [NOTEBOOKS / folder / f"{name}.ipynb" for folder in ("", *FOLDERS)]
    return next(path for path in paths if path.exists())


def default_jobs(chosen: argparse.Namespace) -> int:
    """Return how many notebooks run at a time; rendered times are measured one at a time."""
    has_cores = (os.cpu_count() or 1) > 1
    return 2 if chosen.preset == "tiny" and not chosen.render and has_cores else 1


def parse_setting(text: str) -> tuple:
    """Return a setting's name and value; make the path of an existing folder absolute."""
    key, equals, value_text = text.partition("=")
    error = argparse.ArgumentTypeError(f"expected KEY=VALUE with a YAML value; got {text!r}")
    if not equals:
        raise error
    try:
        value = yaml.safe_load(value_text)
    except yaml.YAMLError:
        raise error from None
    is_place = key.endswith(("dataset", "model", "checkpoint")) and isinstance(value, str)
    if is_place and value not in ("offline", "scratch"):
        path = Path(value).expanduser()
        if path.exists():
            value = str(path.resolve())
    return key, value


def check_arguments(chosen: argparse.Namespace) -> None:
    """Raise an error for invalid settings or notebooks, and for output files that no run wrote."""
    for name in chosen.names:
        load_preset(name, chosen.preset, chosen.overrides)
        source = source_of(name)
        cells = nbformat.read(source, as_version=4).cells
        if not any("parameters" in cell.metadata.get("tags", []) for cell in cells):
            raise ValueError(
                f"{name}.ipynb has no cell tagged parameters. Restore it: git checkout"
                f" notebooks/{source.relative_to(NOTEBOOKS)}"
            )
        for folder, (suffix, text) in RESULTS.items():
            file = chosen.output / folder / f"{name}.{suffix}"
            if file.exists() and text not in file.read_text("utf-8", "replace"):
                raise FileExistsError(f"{file} is not a run's result. Choose another --output.")
    run_report.check_own(chosen.output / "index.html")


def execute(name: str, chosen: argparse.Namespace) -> str:
    """Run one notebook; return the problem, or "" if it passed."""
    problem = ""
    try:
        problem = run_cells(name, chosen)
        return save_results(name, chosen, problem)
    except Exception as error:  # full disk, no kernel: other notebooks may still run
        problems = [problem, f"{type(error).__name__}: {error}"]
        return "; ".join(text for text in problems if text)


def save_results(name: str, chosen: argparse.Namespace, problem: str) -> str:
    """Write an executed notebook's page, and render it if asked; return the first problem."""
    card = chosen.output / "run_cards" / f"{name}.json"
    notebook = nbformat.read(chosen.output / "notebooks" / f"{name}.ipynb", as_version=4)
    html = chosen.output / "html" / f"{name}.html"
    html.parent.mkdir(exist_ok=True)
    source = source_of(name)
    html.write_text(page(notebook, source.parent), encoding="utf-8")
    if not problem and not any(cell.get("execution_count") for cell in notebook.cells):
        problem = "No cell was executed."
    if not problem:
        problem = run_report.failure(card) if card.exists() else "No run card was written."
    may_fail = chosen.preset != "tiny"  # on real data, checks may fail
    if chosen.render and card.exists() and (may_fail or not problem):
        notebook_files.render(notebook, source, chosen, notebook_files.read_card(card))
        notebook_files.keep(card, chosen.preset)
    return problem


def run_cells(name: str, chosen: argparse.Namespace) -> str:
    """Execute one notebook into the output, even if a cell fails; return the problem or ""."""
    source = source_of(name)
    target = chosen.output / "notebooks" / f"{name}.ipynb"
    for old in (chosen.output / "run_cards" / f"{name}.json", target):
        old.unlink(missing_ok=True)
    parameters = {"preset": chosen.preset, "output_dir": str(chosen.output)}
    if chosen.overrides:
        parameters["overrides"] = chosen.overrides
    if chosen.seed is not None:
        parameters["seed"] = chosen.seed
    notebook = nbformat.read(source, as_version=4)
    notebook.metadata.course = name
    code_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    line = live_lines.add_task(name, total=code_cells + 1, usual=usual_time(name, chosen.preset))
    try:
        papermill.execute_notebook(
            notebook,
            target,
            parameters,
            engine_name="course",
            kernel_name="python3",
            progress_bar=False,
            on_cell_executed=lambda **_: live_lines.advance(line),
            log=target.with_suffix(".log"),
        )
    except PapermillExecutionError as error:
        return f"cell {error.exec_count}: {error.ename}: {error.evalue}"
    except DeadKernelError:
        code = processes[name].wait()
        if code == 0:
            return "A cell ended the notebook's process. Remove calls such as exit()."
        if code == -9:
            advice = "Memory probably ran out; use a smaller preset or batch_size."
            return f"The kernel was killed. {advice}"
        return f"The kernel returned {code}; its messages are in {target.with_suffix('.log')}."
    finally:
        live_lines.remove_task(line)
    return ""


def usual_time(name: str, preset: str) -> str:
    """Return how long the rendered run took, or "" if there is none."""
    card = notebook_files.read_card(notebook_files.kept(preset) / f"{name}.json")
    return f"of about {card['wall_s']:.0f} s" if "wall_s" in card else ""


def execute_all(chosen: argparse.Namespace, results: dict[str, str]) -> None:
    """Run the notebooks, longest first if in parallel; add their problems to ``results``."""
    kept = notebook_files.kept(chosen.preset)
    cards = {name: notebook_files.read_card(kept / f"{name}.json") for name in chosen.names}
    seconds = {name: card.get("wall_s", 0) for name, card in cards.items()}
    names = chosen.names
    if chosen.jobs > 1:
        names = sorted(names, key=seconds.get, reverse=True)
    is_stopped = Event()

    def run_one(position: int, name: str) -> None:
        time = f": {seconds[name]:.0f} s when rendered" if seconds[name] else ""
        line = f"[{position}/{len(names)}] {name}{time}\n"
        print(line, end="", flush=True)  # in one write, because two threads print
        problem = execute(name, chosen)
        if not is_stopped.is_set():
            results[name] = problem

    with live_lines, ThreadPoolExecutor(chosen.jobs) as pool:
        try:
            wait([pool.submit(run_one, position, name) for position, name in enumerate(names, 1)])
        except BaseException:
            is_stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(processes.values()):  # threads may still add one
                process.kill()
            raise


def set_environment(chosen: argparse.Namespace) -> None:
    """Set the kernels' environment variables, except those that the user has set."""
    defaults = dict(MALLOC)
    if chosen.jobs > 1:
        threads = max(1, (os.cpu_count() or 1) // chosen.jobs)
        defaults["OMP_NUM_THREADS"] = str(threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen notebooks and report; return 1 if any did not pass, else 0."""
    chosen = parse_arguments(arguments)
    check_arguments(chosen)
    set_environment(chosen)
    results = {}
    with ExitStack() as locks:
        for name in chosen.names:
            locks.enter_context(hold(chosen.output / "notebooks", name))
        try:
            execute_all(chosen, results)
        finally:
            report(results, chosen)
    if chosen.render and chosen.preset == "tiny":
        notebook_files.update_readme()
    return int(any(results.values()))


def report(results: dict[str, str], chosen: argparse.Namespace) -> None:
    """Save the results, write the report, and print the table, failures, and paths."""
    target = chosen.output / "index.html"
    try:
        run_report.add_results(chosen.output, results)
        entries = run_report.write([chosen.output], target)
        folder = run_report.run_folder(chosen.output)  # subfolders may have other runs' cards
        of_this_run = [
            entry
            for entry in entries
            if entry["name"] in results and entry["folder"].resolve() == folder
        ]
        run_report.show(of_this_run)
    except OSError as error:  # no notebook ran, or the disk is full
        print(f"No report was written. {error}", file=sys.stderr)
    print(f"Results are in {chosen.output}\nOpen next: {target}")


if __name__ == "__main__":
    sys.exit(exits.run("run_notebooks.py", main))
