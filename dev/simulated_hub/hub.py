"""What the hub holds, what is wrong with it, and how processes and tests are pointed to it."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

Content = bytes | str | Path
# kept by LFS, served by a CDN
LARGE = (".bin", ".safetensors", ".parquet", ".gz", ".model", ".h5", ".msgpack")


class Hub:
    """Repositories by id; a dataset's begins with ``datasets/``, and ``@revision`` at the end names
    a branch.

    Attributes to change what happens:
        gated: ids that only a request with a token may read.
        cut: file name → the byte from which on nothing comes: the connection is closed there.
        asked: (method, path) of every request so far.
    """

    def __init__(self, repositories: Mapping[str, Path | Mapping[str, Content]]) -> None:
        self.files: dict[str, dict[str, Content]] = {}  # id@revision → path → content
        for name, content in repositories.items():
            if isinstance(content, str | Path):
                root = Path(content)
                content = {
                    str(p.relative_to(root)): p for p in sorted(root.rglob("*")) if p.is_file()
                }
            self.files[name if "@" in name else f"{name}@main"] = dict(content)
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []
        self.endpoint = self.cdn = ""
        self.server: ThreadingHTTPServer | None = None

    def revision(self, name: str, revision: str) -> tuple[str, dict[str, Content]] | None:
        """The commit and the files of a branch, or of a commit; None where there is no such
        revision.
        """
        for key, files in self.files.items():
            owner, _, branch = key.partition("@")
            if owner == name and revision in (branch, commit_of(key, files)):
                return commit_of(key, files), files
        return None

    def unplug(self) -> None:
        """Stop the server: from now on, the hub cannot be reached."""
        self.server.shutdown()
        self.server.server_close()

    def check(self, folder: Path) -> None:
        """Assert that no model's code was asked for, nor anything beyond the hub.

        The process ran with ``guarded(folder)``. The hub's own viewer is no part of a mirror.
        """
        log = folder / "network.log"
        beyond = set(log.read_text().split()) if log.exists() else set()
        assert beyond <= {"datasets-server.127.0.0.1"}
        models = [path for _, path in self.asked if "datasets/" not in path]
        assert not [path for path in models if path.endswith(".py")]

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that knows only this hub, with its caches in ``home``."""
        hidden = ("HF_", "HUGGING", "TRANSFORMERS_", "WANDB")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        variables |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}
        return variables | {"NO_PROXY": "127.0.0.1,localhost"}

    def use(self, monkeypatch, home: Path) -> None:
        """Point this process's libraries to this hub, with their caches in ``home``."""
        import datasets.config
        import huggingface_hub
        from huggingface_hub import constants

        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.endpoint + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", self.endpoint)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", self.endpoint)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        huggingface_hub.HfFileSystem.clear_instance_cache()


def commit_of(key: str, files: Mapping[str, Content]) -> str:
    """A commit hash that changes with the names and contents."""
    digest = hashlib.sha1(key.encode())
    for path in sorted(files):
        digest.update(path.encode() + digest_of(path, files[path]).encode())
    return digest.hexdigest()


def read(content: Content) -> bytes:
    """The bytes of a file, wherever they are."""
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode() if isinstance(content, str) else content


def digest_of(path: str, content: Content) -> str:
    """What the hub names a file's content by: SHA-256 where LFS keeps it, git's blob hash
    otherwise.
    """
    data = read(content)
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(repositories: Mapping[str, Path | Mapping[str, Content]]) -> Iterator[Hub]:
    """A hub with these repositories (id → folder, or path → content) at ``hub.endpoint`` until the
    block ends.
    """
    from dev.simulated_hub.server import Handler

    hub = Hub(repositories)
    hub.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{hub.server.server_port}"
    hub.cdn = (  # another host: on one they are followed unseen
        f"http://localhost:{hub.server.server_port}/cdn"
    )
    threading.Thread(target=hub.server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.unplug()
