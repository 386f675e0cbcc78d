"""Fixtures and hooks: a network that refuses everything but this machine, and groups for several processes."""

import socket
import sys

import pytest

pytest.register_assert_rewrite("builders")
from builders import SCRIPTS  # noqa: E402 - its assertions shall say what they found

pytest_plugins = ["fault_page"]
sys.path.insert(0, str(SCRIPTS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """For ``--dist loadgroup``: a notebook is a group, and comes first, being longest; so is every other file."""
    for item in items:
        alone = item.path.name == "test_notebooks.py"
        item.add_marker(pytest.mark.xdist_group(item.name if alone else item.path.stem))
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """Datasets keeps its copies of a test's files out of the home folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any connection beyond this machine fails the test at once."""
    connect = socket.socket.connect

    def guarded(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to connect to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
