"""Python runs this at its start: every process with this folder in PYTHONPATH has a pretend GPU."""

import pretend_gpu

pretend_gpu.install()
