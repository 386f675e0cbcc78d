"""The page "What happens when …": tests marked as faults say what was done, and what came of it.

A fault is a test with ``@pytest.mark.fault("what was done, as a user says it")`` in a module with
``KIND = "…"``. It takes the fixture ``outcome`` and calls it with the sentence that the user reads,
or with what holds afterwards. ``make faults`` writes the page; every other run holds the page
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
found: dict[str, dict[str, list[str]]] = {}


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--fault-page", type=Path, metavar="FILE", help="write the page of faults here"
    )


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "fault(done): a fault, and what was done")


@pytest.fixture
def outcome(request, tmp_path) -> Callable[[str], None]:
    """Keeps what a user reads or finds after a fault; the test's own folder is called FOLDER."""
    kind, done = request.module.KIND, request.node.get_closest_marker("fault").args[0]
    writing = request.config.getoption("--fault-page")

    def keep(text: str) -> None:
        text = escape(text.replace(str(tmp_path), "FOLDER"))
        texts = found.setdefault(kind, {}).setdefault(done, [])
        texts += [text] if text not in texts else []
        page = PAGE.read_text(encoding="utf-8").splitlines() if not writing else []
        rows = [row for row in page if row.startswith(f"| {escape(done)} | ") and text in row]
        assert text and (writing or rows), f"make faults; now it is: {text}"

    yield keep
    assert done in found.get(kind, {}), "a fault calls outcome()"


def case(*values, done: str, named: bool = False):
    """A case of a parametrized test that is a fault; ``named`` after what was done, or as pytest
    does.
    """
    return pytest.param(*values, marks=pytest.mark.fault(done), id=done if named else None)


def escape(text: str) -> str:
    """A text for a cell of a table; <brackets> would be taken for HTML. Code spans stay."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([<*])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def table(kind: str) -> list[str]:
    """One kind's faults; the same fault in several places may have several outcomes."""
    head = [f"\n## {kind}\n", "| what was done | what happens |", "|---|---|"]
    return head + [
        f"| {escape(done)} | {'<br>'.join(texts)} |" for done, texts in found[kind].items()
    ]


def pytest_sessionfinish(session, exitstatus) -> None:
    if (page := session.config.getoption("--fault-page")) and exitstatus == 0:
        lines = [row for kind in sorted(found) for row in table(kind)]
        page.with_suffix(".part").write_text(
            INTRODUCTION + "\n".join(lines) + "\n", encoding="utf-8"
        )
        os.replace(page.with_suffix(".part"), page)
