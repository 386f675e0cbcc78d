"""Fixtures and hooks: no network beyond this machine, and which tests run where and first."""

import signal
import socket
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

pytest.register_assert_rewrite("builders")
pytest_plugins = ["training_runs", "baichuan_checkpoints"]
# What is started in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

ONE_BY_ONE = "test_notebooks.py", "test_simulated_gpu.py"
# In this order, before the others: nothing long begins at the end.
LONG = (
    "test_notebooks.py test_site.py test_parallel.py test_simulated_gpu.py test_scripts.py".split()
)


class Scheduling(LoadFileScheduling):
    """With ``-n``, the tests of a file stay together, except in the longest files."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return nodeid if file.endswith(ONE_BY_ONE) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """Datasets keeps its copies of a test's files out of the home folder."""
    monkeypatch.setattr(
        "datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets"))
    )


@pytest.fixture
def fails(capsys):
    """Return the one line with which a command fails, with exit code 1."""

    def check(script, options: list[str], message: str) -> str:
        assert script.main(options) == 1
        said = capsys.readouterr().err
        assert (
            message in said
            and said.startswith(f"{Path(script.__file__).name}: ")
            and said.count("\n") == 1
        )
        return said

    return check


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any connection beyond this machine fails the test at once."""
    connect = socket.socket.connect

    def guarded(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to connect to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
