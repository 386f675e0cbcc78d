"""What the course does on a GPU, on the pretend one: in processes of their own, because it comes before torch."""

import os
import subprocess
import sys

import pretend_gpu
import pytest

from rlhf_course.presets import ROOT

pytestmark = pytest.mark.skipif(not pretend_gpu.available(), reason="the pretend GPU needs a C++ compiler, g++ or $CXX")


def run(*command) -> subprocess.CompletedProcess:
    """Python with these arguments on the pretend GPU; without a network."""
    environment = pretend_gpu.environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("file", ["check_tool.py", "check_ppo.py"])
def test_on_the_gpu(file):
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", ROOT / "tests/on_gpu" / file
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
