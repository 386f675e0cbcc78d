"""What is in models/: small models of real film reviews, and openings of such reviews."""

from types import SimpleNamespace

from rlhf_course.course.presets import ROOT, Settings, check_named
from rlhf_course.runtime.hub import download


def prepare(settings: Settings) -> SimpleNamespace:
    """Return folders or hub ids for dataset, model, reward_model and, in some settings, judge.

    Raises ``ValueError`` when no dataset is named, and ``OSError`` where a model is unavailable.
    """
    check_named(settings, dataset="text and label")
    names = {"dataset", "model", "reward_model", "judge"}
    found = {  # what is in models/ is the project's, wherever Python was started
        name: str(ROOT / source) if source.startswith("models/") else source
        for name, source in vars(settings).items()
        if name in names
    }
    for name in ("model", "reward_model"):
        download(found[name])  # what is unavailable is reported before anything runs
    return SimpleNamespace(**found)
