"""Load the commands' presets: those of the notebooks, and ``small`` for a small chat model."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from rlhf_course.course.presets import PRESETS, ROOT, Settings, load_preset

SMALL = "small"
NAMES = (*PRESETS, SMALL)
HELP = f"size of the run: {', '.join(NAMES)} (a chat model of 100 to 500 million weights)"
FILE = Path(__file__).with_name("small.yaml")
REAL_MODEL = "build/models/SmolLM2-135M-Instruct-T0.7"
MAKE_REAL = "python scripts/get_real_model.py --temperature 0.7"


def load_settings(experiment: str, preset: str, changes: Mapping | None = None) -> Settings:
    """Return a notebook's settings at a command's preset, with changes.

    ``small`` is preset scratch with the settings in small.yaml; a notebook that is not in that file
    has its own preset small. Raises ``load_preset``'s errors.
    """
    small = read_small(experiment) if preset == SMALL else {}
    if not small:
        return load_preset(experiment, preset, changes)
    return load_preset(experiment, "scratch", small["settings"] | dict(changes or {}))


def load_options(experiment: str, preset: str) -> dict:
    """Return a preset's values of options that are not settings of the notebook."""
    if preset != SMALL:
        return {}
    return read_small(experiment).get("options", {})


def read_small(experiment: str) -> dict[str, dict]:
    """Return small.yaml's settings and options for a notebook; {} if it is not in the file."""
    return yaml.safe_load(FILE.read_text("utf-8")).get(experiment, {})


def find_real_model(source: str) -> str:
    """Return the folder of a base that ``make real`` writes, and any other source unchanged.

    Raises ``FileNotFoundError`` if that folder is missing.
    """
    if source != REAL_MODEL:
        return source
    for folder in (Path(REAL_MODEL), ROOT / REAL_MODEL):
        if folder.exists():
            return str(folder.resolve())
    raise FileNotFoundError(
        f"{REAL_MODEL} is missing. Run {MAKE_REAL}, or name another base with --model_name_or_path."
    )
