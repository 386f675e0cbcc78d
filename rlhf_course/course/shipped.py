"""What is in models/: small models of real film reviews, and openings of such reviews."""

from types import SimpleNamespace

from rlhf_course.course.presets import ROOT, Settings, check_named
from rlhf_course.runtime.hub import download


def prepare(settings: Settings) -> SimpleNamespace:
    """Return folders or hub ids for dataset, model, reward_model and, in some settings, judge.

    Raises ``ValueError`` when no dataset is named, and ``OSError`` where a model is unavailable.
    """
    check_named(settings, dataset="text and label")
    names = {"dataset", "model", "reward_model", "judge"} & vars(settings).keys()
    found = {name: from_root(getattr(settings, name)) for name in names}
    for name in ("model", "reward_model"):
        download(found[name])  # what is unavailable is reported before anything runs
    return SimpleNamespace(**found)


def from_root(source: str) -> str:
    """Return ``models/…`` as the project's folder, wherever Python started; others unchanged."""
    return str(ROOT / source) if source and source.startswith("models/") else source
