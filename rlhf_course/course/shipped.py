"""The contents of models/: small models of real film reviews, and openings of such reviews."""

from types import SimpleNamespace

from rlhf_course.course.presets import ROOT, Settings, check_named
from rlhf_course.runtime.hub import download


def prepare(settings: Settings) -> SimpleNamespace:
    """Return folders or hub ids for dataset, model, reward_model and, in some settings, judge.

    Raises ``ValueError`` when no dataset is named, and ``OSError`` where a model is unavailable.
    """
    check_named(settings, dataset="text and label")
    names = {"dataset", "model", "reward_model", "judge"} & vars(settings).keys()
    found = {name: shipped(getattr(settings, name)) for name in names}
    for name in ("model", "reward_model"):
        download(found[name])  # report what is unavailable before anything runs
    return SimpleNamespace(**found)


def shipped(source: str) -> str:
    """Return ``models/…`` as a path in the project, wherever Python was started; others as is."""
    return str(ROOT / source) if source.startswith("models/") else source
