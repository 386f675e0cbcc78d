"""A hub on this machine for tests: as much of the Hugging Face hub's HTTP API as its client
libraries use.

    with serve({"me/model": folder, "datasets/me/data": {"a.jsonl": b"{}"}}) as hub:
        subprocess.run(command, env=hub.environment(tmp_path / "home"))

In this process, ``hub.use(monkeypatch, tmp_path / "home")`` points the libraries to it until the
test ends.
"""

from dev.simulated_hub.hub import Hub, serve

__all__ = ["Hub", "serve"]
