"""The page of faults names those that are tested, and no others."""

from pathlib import Path

import pytest
from fault_page import PAGE

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def faults(request) -> list:
    """The faults among the tests that were collected; all of them, when whole modules were."""
    return [item for item in request.session.items if item.get_closest_marker("fault")]


def test_every_fault_stands_on_the_page_once(faults):
    done = {(item.module.KIND, item.get_closest_marker("fault").args[0]) for item in faults}
    modules = {
        path for path in HERE.glob("test_*.py") if "mark.fault" in path.read_text(encoding="utf-8")
    }
    if {item.path for item in faults} == modules - {Path(__file__)}:
        rows = [
            line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
        ]
        kinds = {item.module.KIND for item in faults}
        assert len(rows) - len(kinds) == len(done)  # each kind has a line of headings
