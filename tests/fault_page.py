"""What leftover tests of faults still name; delete this file when none of them does."""

import pytest


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "fault(done): ignored")


@pytest.fixture
def outcome():
    return lambda text: None


def case(*values, done: str, named: bool = False):
    return pytest.param(*values, id=done if named else None)
