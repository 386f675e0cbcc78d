"""Write a run card: a run's duration, its measurements, and whether its checks passed."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import warnings

import datasets
import huggingface_hub
import pandas as pd
import psutil
import torch
import transformers
from accelerate.utils import set_seed

from rlhf_course.course.presets import ROOT
from rlhf_course.runtime.files import atomic_file

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "pandas")


class CheckFailed(AssertionError):
    """Report failed checks of a completed run."""


class RunCard:
    """Collect a run's metrics and checks for ``OUTPUT/run_cards/<notebook>.json``.

    Creating a card seeds all random generators. A relative ``output_dir`` is under ``ROOT``.
    """

    def __init__(
        self, notebook: str, preset: str, seed: int, output_dir: str | os.PathLike = "build"
    ) -> None:
        self.notebook = notebook
        self.preset = preset
        self.seed = seed
        self.output_dir = ROOT / os.path.expanduser(output_dir)
        self.metrics = {}
        self.checks = {}
        self.curves = {}
        self.texts = None
        self._started = time.perf_counter()
        quiet_libraries()
        set_seed(seed)

    def metric(self, name: str, value: float) -> float:
        """Record and return a number; record NaN and Inf as null.

        The runner's report pairs metrics named …_before and …_after.
        """
        self.metrics[name] = float(value)
        return value

    def check(self, name: str, passed: bool, value: float, want: str) -> None:
        """Record a check's result, its ``value``, and ``want``, the expectation in words."""
        self.checks[name] = {"passed": bool(passed), "value": float(value), "want": want}

    def curve(self, name: str, table: pd.DataFrame) -> None:
        """Record a table's columns, rounded to six significant digits, for plotting."""
        self.curves[name] = {column: _rounded(table[column]) for column in table}

    def example(self, before: str, after: str) -> None:
        """Record one text before and after training, for the report's first screen."""
        self.texts = {"before": before, "after": after}

    def finish(self) -> pd.DataFrame:
        """Write the card and return its checks as a table; raise ``CheckFailed`` if one failed."""
        self._write()
        failed = [
            f"{name}: {check['value']:.4g}, wanted {check['want']}"
            for name, check in self.checks.items()
            if not check["passed"]
        ]
        if failed:
            raise CheckFailed(
                f"{self.notebook} ran, but these checks did not pass: {'; '.join(failed)}."
                " Compare the settings with the preset's."
            )
        pd.set_option("display.max_colwidth", None)  # never cut the expected value
        rows = [
            (name, f"{check['value']:.4g}", check["want"], "passed")
            for name, check in self.checks.items()
        ]
        return pd.DataFrame(rows, columns=["check", "value", "wanted", "result"])

    def _write(self) -> None:
        card = {
            "notebook": self.notebook,
            "preset": self.preset,
            "seed": self.seed,
            "versions": _versions(),
            "wall_s": round(time.perf_counter() - self._started, 2),
            "peak_rss_mb": round(peak_rss() / 2**20, 1),
            "peak_cuda_mb": round(torch.cuda.max_memory_allocated() / 2**20, 1),  # 0 on a CPU
            "metrics": self.metrics,
            "checks": self.checks,
            "curves": self.curves,
            "texts": self.texts,
        }
        # JSON has no NaN or Infinity; Python still writes them, and reads them back as None.
        card = json.loads(json.dumps(card), parse_constant=lambda name: None)
        with atomic_file(self.output_dir / "run_cards" / f"{self.notebook}.json") as path:
            path.write_text(json.dumps(card, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _rounded(values: pd.Series) -> list:
    """Return numbers with six significant digits, and texts unchanged."""
    return [value if isinstance(value, str) else float(f"{value:.6g}") for value in values]


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in ``_PACKAGES``."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        if importlib.util.find_spec(name):
            versions[name] = importlib.metadata.version(name)
    return versions


def peak_rss() -> int:
    """Return this process's peak main memory so far, in bytes; untested on macOS and Windows."""
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().peak_wset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def quiet_libraries() -> None:
    """Turn off libraries' progress bars, advice and telemetry; keep this package's warnings."""
    # trl's trainers would report their use to the hub.
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    # datasets would report dataset names to a host other than HF_ENDPOINT.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # transformers would ask a host to convert models that have only .bin files.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
