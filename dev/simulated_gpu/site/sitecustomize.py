"""Give a simulated GPU to each process with this folder in PYTHONPATH: Python runs this file."""

from dev import simulated_gpu

simulated_gpu.install()
