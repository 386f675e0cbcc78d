"""Build the page of public names: docstrings come from autodoc, config fields from source code."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields

import rlhf_course

INTRODUCTION = """# Public names

This page shows the docstrings of the names that `from rlhf_course import …` provides.
[Sources](sources.md) lists all modules.
"""
LINE = re.compile(r"    (?P<name>\w+): (?P<type>[^=]+?) = [^#]*(?:#\s*(?P<says>.*))?$")


def settings_table(config: type) -> str:
    """Return a dataclass's fields as Markdown tables of name, type, default, comment.

    A comment on one or more separate lines starts a new table.
    """
    defaults = {}
    for entry in fields(config):
        given = entry.default_factory() if entry.default is MISSING else entry.default
        defaults[entry.name] = given.__name__ if callable(given) else repr(given)
    parts, comment = [], []
    for line in inspect.getsource(config).split("def __post_init__")[0].splitlines():
        if line.startswith("    # "):
            comment.append(line.strip("# "))
        elif found := LINE.match(line):
            if comment:
                parts.append(
                    f"\n{' '.join(comment)}\n\n| setting | type | default | |\n|---|---|---|---|"
                )
                comment = []
            kind = found["type"].replace("|", "or")
            says = (found["says"] or "").replace("|", "\\|")
            parts.append(
                f"| `{found['name']}` | `{kind}` | `{defaults.pop(found['name'])}` | {says} |"
            )
    if defaults:
        raise ValueError(f"{config.__name__}: put {', '.join(defaults)} on one line each.")
    return "\n".join(parts) + "\n"


def api_page() -> str:
    """Return the page's Markdown."""
    parts = [INTRODUCTION]
    for name in rlhf_course.__all__:
        thing = getattr(rlhf_course, name)
        kind = "autoclass" if inspect.isclass(thing) else "autofunction"
        members = "\n   :members:" if inspect.isclass(thing) else ""
        parts.append(
            f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: rlhf_course.{name}{members}\n```\n"
        )
        if name == "PPOConfig":
            parts.append(settings_table(thing))
    return "\n".join(parts)
