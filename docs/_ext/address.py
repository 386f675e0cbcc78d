"""Read the course's addresses from pyproject.toml, ``[project.urls]``, their only source.

    [project.urls]
    Repository = "https://github.com/…"   # the repository to clone
    Homepage = "https://…/"               # where the site is served

``python docs/_ext/address.py`` writes a changed repository address into the README and the
notebooks. Without an address, there is no clone line, badge, link to Colab, or sitemap.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nbformat

from rlhf_course.command_line.notebook_files import HASH_KEY, source_hash

ROOT = Path(__file__).resolve().parents[2]

FETCH = """# If you open a notebook on its own, for example on Colab, this cell fetches the course.
import importlib.util

if importlib.util.find_spec("rlhf_course") is None:
    !git clone --depth 1 {repository} hands-on-rlhf
    %cd hands-on-rlhf
    # This keeps a torch of 2.11 or newer.
    %pip install --quiet .[notebooks,track]"""


def addresses() -> dict[str, str]:
    """Return ``repository`` and ``homepage`` if they are set, without a trailing slash."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {name.lower(): url.rstrip("/") for name, url in project.get("urls", {}).items()}


def open_in(repository: str, notebook: str) -> dict[str, str]:
    """Return a dict from each service to its URL for opening a notebook from GitHub."""
    if "github.com/" not in repository:
        return {}
    name = repository.split("github.com/")[1]
    return {
        "Open in Colab": f"https://colab.research.google.com/github/{name}/blob/main/{notebook}",
        "Open in Binder": f"https://mybinder.org/v2/gh/{name}/main?labpath={notebook}",
    }


def written(readme: str, repository: str) -> str:
    """Return the README with the address in three places, or with no address."""
    begin = f"git clone {repository} hands-on-rlhf && cd hands-on-rlhf\n" if repository else ""
    readme = re.sub(
        r"(?:git clone \S+ hands-on-rlhf && cd hands-on-rlhf\n)?(make course   #)",
        rf"{begin}\1",
        readme,
    )
    where = f"  url   = {{{repository}}},\n" if repository else ""
    readme = re.sub(r"(?:  url   = \{\S*\},\n)?(  year  = )", rf"{where}\1", readme)
    services = open_in(repository, "notebooks/00_hello_rlhf.ipynb").items()
    badges = " ".join(f"[{name}]({url})" for name, url in services)
    badges = f"\n<!-- address -->\n{badges}\n" if badges else ""
    return re.sub(r"(\A# [^\n]+\n)(?:\n<!-- address -->\n[^\n]*\n)?", rf"\1{badges}", readme)


def fetching(notebook: nbformat.NotebookNode, repository: str) -> nbformat.NotebookNode:
    """Add (without an address: remove) the cell that fetches the course; return the notebook."""
    notebook.cells = [cell for cell in notebook.cells if cell.get("id") != "fetch"]
    if "github.com/" in repository:
        cell = nbformat.v4.new_code_cell(
            FETCH.format(repository=repository), id="fetch", execution_count=1
        )
        cell.metadata["tags"] = ["hide-cell"]
        notebook.cells.insert(1, cell)
    notebook.metadata[HASH_KEY] = source_hash(notebook)
    return notebook


if __name__ == "__main__":
    repository = addresses().get("repository", "")
    for path in ROOT.glob("notebooks/[0-9]*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.write(fetching(notebook, repository), path)
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    path.write_text(written(readme, repository), encoding="utf-8")
