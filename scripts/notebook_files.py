"""Notebooks as files: rendering outputs into the repository, and telling whether they are stale."""

import hashlib

from nbformat import NotebookNode

HASH_KEY = "source_sha256"
WIDGET = (  # a progress bar, mostly, which shows nothing without its kernel
    "application/vnd.jupyter.widget-view+json"
)


def source_hash(notebook: NotebookNode) -> str:
    """A hash of all cells' types and sources; outputs rendered under another hash are stale."""
    text = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(text.encode()).hexdigest()


def strip_run_details(executed: NotebookNode, original: NotebookNode) -> NotebookNode:
    """The original's cells with the executed outputs: no injected parameters, timings, widgets or
    kernel details.
    """
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
            if (
                output.output_type == "error"
            ):  # of a check that failed: what was wrong, not where it was noticed
                output.traceback = [f"{output.ename}: {output.evalue}"]
            if output.output_type == "execute_result":
                output.execution_count = count
    original.metadata = NotebookNode(
        kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"},
        language_info={"name": "python"},
    )
    original.metadata[HASH_KEY] = source_hash(original)
    return original
