"""Notebooks as files: rendering outputs into the repository, and telling whether they still belong to their cells."""

from __future__ import annotations

import hashlib

from nbformat import NotebookNode

HASH_KEY = "source_sha256"
WIDGET = (
    "application/vnd.jupyter.widget-view+json"  # a progress bar, mostly: nothing to look at once the kernel is gone
)


def source_hash(notebook: NotebookNode) -> str:
    """A hash of all cells' types and sources; stored at rendering, it tells outputs that have become stale."""
    text = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(text.encode()).hexdigest()


def strip_run_details(executed: NotebookNode, original: NotebookNode) -> NotebookNode:
    """The original's cells with the executed outputs: no injected parameters, timings, widgets or kernel details."""
    cells = [cell for cell in executed.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    for count, (cell, source) in enumerate(
        ((c, s) for c, s in zip(cells, original.cells, strict=True) if s.cell_type == "code"), start=1
    ):
        source.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        source.execution_count = count
        for output in source.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    for cell in original.cells:
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k == "tags"})
    original.metadata = NotebookNode(
        kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"},
        language_info={"name": "python"},
    )
    original.metadata[HASH_KEY] = source_hash(original)
    return original
