"""Where the course is on the net: ``[project.urls]`` in pyproject.toml, and nowhere else.

    [project.urls]
    Repository = "https://github.com/…"   # what people clone
    Homepage = "https://…/"               # where the site is served

``python site/address.py`` writes the repository into the README, after a change. Without an address nothing points
anywhere: no clone line, no badge, no link to Colab, no sitemap.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def addresses() -> dict[str, str]:
    """``repository`` and ``homepage``, as far as they are set; without a slash at the end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {name.lower(): url.rstrip("/") for name, url in project.get("urls", {}).items()}


def open_in(repository: str, notebook: str) -> dict[str, str]:
    """Services that open a notebook of a GitHub repository, and the addresses for this one."""
    if "github.com/" not in repository:
        return {}
    name = repository.split("github.com/")[1]
    return {
        "Open in Colab": f"https://colab.research.google.com/github/{name}/blob/main/{notebook}",
        "Open in Binder": f"https://mybinder.org/v2/gh/{name}/main?labpath={notebook}",
    }


def written(readme: str, repository: str) -> str:
    """The README with the address in its three places, or without one."""
    begin = f"git clone {repository} hands-on-rlhf && cd hands-on-rlhf\n" if repository else ""
    readme = re.sub(r"(?:git clone \S+ hands-on-rlhf && cd hands-on-rlhf\n)?(make course   #)", rf"{begin}\1", readme)
    where = f"  url   = {{{repository}}},\n" if repository else ""
    readme = re.sub(r"(?:  url   = \{\S*\},\n)?(  year  = )", rf"{where}\1", readme)
    services = open_in(repository, "notebooks/00_hello_rlhf.ipynb").items()
    badges = " ".join(f"[{name}]({url})" for name, url in services)
    badges = f"\n<!-- address -->\n{badges}\n" if badges else ""
    return re.sub(r"(\A# [^\n]+\n)(?:\n<!-- address -->\n[^\n]*\n)?", rf"\1{badges}", readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(written(path.read_text(encoding="utf-8"), addresses().get("repository", "")), encoding="utf-8")
