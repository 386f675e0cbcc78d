"""The page "What happens when …": tests marked as faults say what was done, and what came of it.

A fault is a test with ``@pytest.mark.fault("what was done, as a user says it")`` in a module with ``KIND = "…"``. It
takes the fixture ``outcome`` and calls it once, with the sentence that the user reads, or with what holds afterwards.
``pytest --fault-page site/what-happens-when.md`` over all of them writes the page; every other run holds the page
against what happens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "site" / "what-happens-when.md"
INTRODUCTION = """# What happens when …

Each row is a test that does what the left column says; the right column is what the user reads, or finds afterwards, as
the test saw it. `make faults` writes this page.
"""
found: dict[str, dict[str, str]] = {}


def pytest_addoption(parser) -> None:
    parser.addoption("--fault-page", type=Path, metavar="FILE", help="write the page of faults here")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "fault(done): a fault, and what was done")


@pytest.fixture
def outcome(request, tmp_path) -> Callable[[str], None]:
    """Keeps what a user reads or finds after a fault; the test's own folder is called FOLDER."""
    kind, done = request.module.KIND, request.node.get_closest_marker("fault").args[0]

    def keep(text: str) -> None:
        text = " ".join(re.sub(rf"(/private)?{re.escape(str(tmp_path))}", "FOLDER", text).split())
        assert text, "say what came of the fault"
        found.setdefault(kind, {})[done] = text

    yield keep
    assert done in found.get(kind, {}), "a fault calls outcome() once"


def rows(kind: str) -> list[str]:
    """One kind's faults as a table."""
    cells = [(text.replace("|", "\\|") for text in row) for row in found[kind].items()]
    return [f"\n## {kind}\n", "| what was done | what happens |", "|---|---|", *(f"| {a} | {b} |" for a, b in cells)]


def pytest_sessionfinish(session, exitstatus) -> None:
    if (page := session.config.getoption("--fault-page")) and exitstatus == 0:
        lines = [line for kind in sorted(found) for line in rows(kind)]
        page.with_suffix(".part").write_text(INTRODUCTION + "\n".join(lines) + "\n", encoding="utf-8")
        os.replace(page.with_suffix(".part"), page)
