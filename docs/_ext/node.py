"""Install npm packages, each in a separate folder under build/."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"


def package(name: str, version: str) -> Path:
    """Return an installed package's folder; the first call downloads it, or exits with a reason."""
    folder = BUILD / f"{name}-{version}"
    if not folder.exists():
        if shutil.which("npm") is None:
            sys.exit(f"npm, which installs {name}, is missing. Run apt install npm.")
        BUILD.mkdir(exist_ok=True)
        # Two builds may run at the same time, so the folder is separate.
        part = Path(tempfile.mkdtemp(prefix=folder.name, suffix=".part", dir=BUILD))
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error"]
        done = subprocess.run(
            ["npm", "install", *quiet, "--prefix", part, f"{name}@{version}"], stdout=sys.stderr
        )
        if done.returncode:
            shutil.rmtree(part, ignore_errors=True)
            sys.exit(f"npm could not install {name}@{version}; its message is above.")
        with contextlib.suppress(OSError):  # another build installed it first
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
    return folder / "node_modules" / name
