"""A simulated GPU: its tensors report ``cuda:0``, but the CPU computes them.

It finds operations that mix devices, tensors created on the wrong device, and waits of the host. It
does not show the speed, memory or numerics of a real GPU.

Call ``install()`` before the first import of torch; ``docs/sitecustomize.py`` calls it in every
Python process whose PYTHONPATH contains that folder.
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
BUILT = HERE.parents[1] / "build" / "simulated_gpu"
COMPILER = os.environ.get("CXX", "g++")
AT_START = (HERE / "site/sitecustomize.py").read_text()
LOG = "PRETEND_GPU_LOG"  # names a file; each process appends its number of operations when it exits


def available() -> bool:
    """Whether there is a C++ compiler, which the device guard needs."""
    return shutil.which(COMPILER) is not None


def build_guard() -> Path:
    """The device guard as a shared library, compiled once per version of torch."""
    source = HERE / "guard.cpp"
    torch = Path(importlib.util.find_spec("torch").origin).parent
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:12]
    target = BUILT / f"guard-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_suffix(f".{os.getpid()}")
        libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = [COMPILER, *"-std=c++20 -O1 -shared -fPIC".split(), f"-I{torch / 'include'}"]
        subprocess.run([*command, source, *libraries, "-o", aside], check=True)
        os.replace(aside, target)  # other processes may be building it too
    return target


def install() -> None:
    """Simulate one GPU in this process; raises ``RuntimeError`` if torch is already imported."""
    if "torch" in sys.modules:
        raise RuntimeError("The simulated GPU comes before the first import of torch.")
    sys.modules["triton"] = None  # a CUDA build brings it, and its kernels need a driver
    library = ctypes.CDLL(str(build_guard()), mode=ctypes.RTLD_GLOBAL)
    from dev.simulated_gpu import device

    library.simulated_guard()
    device.install()


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a child with a simulated GPU."""
    paths = [
        str(HERE / "site"),
        str(HERE.parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
