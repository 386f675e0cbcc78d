"""Check exercise 6, predict, then run: commit a prediction's hash before the run."""

import hashlib
import json
import math
from pathlib import Path

import pandas as pd
from rlhf_course.course.presets import ROOT
from rlhf_course.course.run_card import RunCard
from rlhf_course.runtime.files import atomic_file, read_json

from predict_runs import RUNS, STATS, STEPS, change, runs

FACTOR = 3  # largest allowed ratio between predicted and measured change
FOLDER = ROOT / "build" / "practice"


def base(seed: int = 0) -> pd.DataFrame:
    """Return the base setting's statistics per step, and their mean, over four runs."""
    table = pd.DataFrame(runs(seed, ()).mean(0), range(1, STEPS + 1), STATS)
    table.loc["mean"] = table.mean()
    return table.round(3)


def digest(prediction: dict, seed: int) -> str:
    """Write seed and prediction as JSON, keys sorted, no spaces; return its SHA-256."""
    if set(prediction) != set(STATS):
        raise ValueError(f"Predict one number for each of {', '.join(STATS)}.")
    numbers = {name: float(value) for name, value in prediction.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"Every prediction must be a finite number; got {numbers}.")
    text = json.dumps([seed, numbers], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def files(seed: int, folder) -> tuple[Path, Path]:
    """Return the paths of a seed's commitment and run card."""
    name = f"6_predict_then_run_{seed}.json"
    return Path(folder) / "commitments" / name, Path(folder) / "run_cards" / name


def unready(prediction: dict, seed: int) -> bool:
    """Return whether a prediction is invalid, and print the reason."""
    try:
        digest(prediction, seed)
    except (TypeError, ValueError) as error:
        empty = isinstance(prediction, dict) and None in prediction.values()
        print("✘", "Not written yet: predictions are None." if empty else error)
        return True
    return False


def commit(prediction: dict, seed: int = 0, folder=FOLDER) -> None:
    """Write a prediction's hash, unless the predicted runs exist already."""
    if unready(prediction, seed):
        return
    commitment, card = files(seed, folder)
    if card.exists():
        print(f"✘ The runs of seed {seed} exist. Predict another seed's runs.")
        return
    text = json.dumps({"sha256": digest(prediction, seed)})
    with atomic_file(commitment) as path:
        path.write_text(text, encoding="utf-8")
    print(f"committed for {change(seed)}: {text}")


def run_both(committed: str, seed: int, folder) -> None:
    """Run both settings, and write the run card with the commitment."""
    card = RunCard(f"6_predict_then_run_{seed}", "tiny", seed, folder)
    before, after = (runs(seed, x).mean(1) for x in ((), tuple(change(seed).items())))
    noise = (after - before).std(0, ddof=1) / RUNS**0.5
    rows = {"before": before.mean(0), "after": after.mean(0), "noise": noise}
    for key, row in rows.items():
        for name, value in zip(STATS, row):
            card.metric(f"{name}_{key}", value)
    card.curve("commitment", pd.DataFrame({"sha256": [committed]}))
    card.finish()


def check(prediction: dict, seed: int = 0, folder=FOLDER) -> bool:
    """Run both settings if needed, print the score, and return whether it passes."""
    if unready(prediction, seed):
        return False
    commitment, card = files(seed, folder)
    if not commitment.exists():
        print(f"✘ There is no commitment. Run commit(prediction, seed={seed}) first.")
        return False
    committed = read_json(commitment)["sha256"]
    if digest(prediction, seed) != committed:
        print("✘ This prediction differs from your commitment. Use the committed one.")
        return False
    if not card.exists():
        run_both(committed, seed, folder)
    found = read_json(card)
    if found["curves"]["commitment"]["sha256"] != [committed]:
        print("✘ Another commitment preceded the runs. Predict another seed's runs.")
        return False
    return score(prediction, found["metrics"])


def score(prediction: dict, metrics: dict) -> bool:
    """Print a line per statistic; return whether the prediction passes.

    It passes if every scored direction is right and at most one scored size is wrong.
    """
    wrong, sizes, decided = 0, 0, 0
    for name in STATS:
        keys = (f"{name}_{x}" for x in ("before", "after", "noise"))
        before, after, noise = map(metrics.get, keys)
        moved, guess = after - before, float(prediction[name])
        said = "too close to call, not scored"
        if abs(moved) > 3 * noise:
            is_right = moved * (guess - before) > 0
            is_near = is_right and 1 / FACTOR <= (guess - before) / moved <= FACTOR
            decided, wrong, sizes = decided + 1, wrong + (not is_right), sizes + is_near
            said = "✔" if is_near else "✘ size" if is_right else "✘ direction"
        run = f"{before:8.3f} → {after:7.3f}"
        print(f"{name:<30}{run}, predicted {guess:7.3f}  {said}")
    passed, sign = not wrong and sizes >= decided - 1, "✘✔"
    score = f"wrong directions: {wrong}; right sizes: {sizes} of {decided}"
    print(sign[passed], score)
    return passed
