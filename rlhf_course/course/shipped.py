"""What the course brings along in models/: small models of real film reviews, and openings of such
reviews.
"""

from types import SimpleNamespace

from rlhf_course.course.presets import ROOT, Settings, check_named
from rlhf_course.runtime.hub import download


def prepare(settings: Settings) -> SimpleNamespace:
    """Folders or hub ids for dataset, model and reward_model, and for the judge where the settings
    have one.

    Raises ``ValueError`` when no dataset is named, and ``OSError`` where a model cannot be had.
    """
    check_named(settings, dataset="text and label")
    names = [
        name for name in ("dataset", "model", "reward_model", "judge") if hasattr(settings, name)
    ]
    found = {name: from_root(getattr(settings, name)) for name in names}
    for source in (found["model"], found["reward_model"]):
        download(source)  # what cannot be had is said before anything runs
    return SimpleNamespace(**found)


def from_root(source: str) -> str:
    """``models/…`` is a folder of the project, wherever Python was started; anything else stays as
    it is.
    """
    return str(ROOT / source) if source and source.startswith("models/") else source
