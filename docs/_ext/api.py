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
TABLE = ("| setting | type | default | |", "|---|---|---|---|")


def settings_table(config: type) -> str:
    """Return a dataclass's fields as Markdown tables of name, type, default, comment.

    A comment on one or more separate lines starts a new table.
    """
    defaults = _defaults(config)
    lines = []
    comment = []
    for line in inspect.getsource(config).split("def __post_init__")[0].splitlines():
        setting = LINE.match(line)
        if line.startswith("    # "):
            comment.append(line.strip("# "))
        elif setting:
            if comment:
                lines += ["", " ".join(comment), "", *TABLE]
                comment = []
            name = setting["name"]
            kind = setting["type"].replace("|", "or")
            says = (setting["says"] or "").replace("|", "\\|")
            lines.append(f"| `{name}` | `{kind}` | `{defaults.pop(name)}` | {says} |")
    if defaults:
        raise ValueError(f"{config.__name__}: put {', '.join(defaults)} on one line each.")
    return "\n".join(lines) + "\n"


def _defaults(config: type) -> dict[str, str]:
    """Return each field's default as source code."""
    defaults = {}
    for field in fields(config):
        value = field.default_factory() if field.default is MISSING else field.default
        defaults[field.name] = value.__name__ if callable(value) else repr(value)
    return defaults


def api_page() -> str:
    """Return the page's Markdown."""
    sections = [INTRODUCTION]
    for name in rlhf_course.__all__:
        public = getattr(rlhf_course, name)
        directive = [f".. autofunction:: rlhf_course.{name}"]
        if inspect.isclass(public):
            directive = [f".. autoclass:: rlhf_course.{name}", "   :members:"]
        lines = [f"## {name}", "", "```{eval-rst}", *directive, "```", ""]
        sections.append("\n".join(lines))
        if name == "PPOConfig":
            sections.append(settings_table(public))
    return "\n".join(sections)
