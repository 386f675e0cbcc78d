"""A GPU for machines without one: tensors that say ``cuda:0``, are computed on the CPU, and refuse
to mix devices.

It finds what only a GPU shows: operations that mix devices, tensors made on the wrong one, and
waits of the host. It says nothing of speed, memory or the numerics of a real card.

``install()`` comes before the first import of torch; ``sitecustomize.py`` in ``site/`` calls it in
every Python process whose PYTHONPATH names that folder. ``COUNTS`` holds what a real GPU would have
been asked to do.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "pretend_gpu"
COMPILER = os.environ.get("CXX", "g++")


def available() -> bool:
    """Whether there is a C++ compiler, which the device guard needs."""
    return shutil.which(COMPILER) is not None


def build_guard() -> Path:
    """The device guard as a shared library, compiled once per version of torch."""
    source, torch = HERE / "guard.cpp", Path(importlib.util.find_spec("torch").origin).parent
    key = hashlib.sha256(
        source.read_bytes() + importlib.metadata.version("torch").encode()
    ).hexdigest()[:12]
    target = BUILT / f"guard-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_suffix(f".{os.getpid()}")
        libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = [
            COMPILER,
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            f"-I{torch / 'include'}",
            source,
            *libraries,
        ]
        subprocess.run([*command, "-o", aside], check=True)
        os.replace(aside, target)  # other processes may be building it too
    return target


def install() -> None:
    """Make this process believe in one GPU. Raises ``RuntimeError`` when torch has been imported
    already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("The pretend GPU comes before the first import of torch.")
    sys.modules["triton"] = None  # a CUDA build brings it, and its kernels need a driver
    library = ctypes.CDLL(str(build_guard()), mode=ctypes.RTLD_GLOBAL)
    from pretend_gpu import device

    library.pretend_guard()
    device.install()


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a child with a pretend GPU."""
    paths = [str(HERE / "site"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
