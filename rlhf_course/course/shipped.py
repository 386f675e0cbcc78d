"""Locate the files in models/: small models for film reviews, and review openings."""

from pathlib import Path
from types import SimpleNamespace

from rlhf_course.course.presets import ROOT, Settings, check_named
from rlhf_course.runtime.hub import download


def prepare(settings: Settings) -> SimpleNamespace:
    """Download models; return a folder or hub id for dataset, model, reward_model and judge.

    Raises ``ValueError`` if no dataset is named, and ``OSError`` if a model is unavailable.
    """
    check_named(settings, dataset="text and label")
    names = {"dataset", "model", "reward_model", "judge"} & vars(settings).keys()
    found = {name: shipped(getattr(settings, name)) for name in names}
    for name in ("model", "reward_model"):
        download(found[name])  # report a missing model before anything runs
    return SimpleNamespace(**found)


def shipped(source: str) -> str:
    """Return ``models/…`` as a path (here, or in the project), and any other source unchanged."""
    here = Path(source).resolve()
    return str(here if here.exists() else ROOT / source) if source.startswith("models/") else source
