"""Load the presets, which set each notebook's size, and locate the models that they name."""

import html
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
import yaml
from pandas.io.formats.style import Styler

PRESETS = ("tiny", "scratch", "full")
SMALL = "small"  # a pretrained chat model; only some notebooks have this preset
CONFIGS = Path(__file__).resolve().parent / "configs"
_CHECKOUT = CONFIGS.parents[2]
# Relative output paths start in the project; for an installed copy, in the current folder.
ROOT = _CHECKOUT if (_CHECKOUT / "scripts" / "run_notebooks.py").exists() else Path.cwd()

# Map settings to (value with bf16, value without). Only a frozen base is float16, never an adapter.
PRECISION = {
    "mixed_precision": ("bf16", "fp16"),
    "dtype": ("bfloat16", "float16"),
    "bf16": (True, False),
}


def has_bf16() -> bool:
    """Return whether to use bf16: yes, except on a GPU that only emulates it (such as a T4)."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


class Settings(SimpleNamespace):
    """Store one preset's settings as attributes."""

    def __init__(self, preset: str, spec: dict[str, dict], overrides: Mapping) -> None:
        values = {key: entry[preset] for key, entry in spec.items()}
        values.update(overrides)
        super().__init__(**values)
        self._spec = spec

    def table(self, *names: str) -> Styler:
        """Return a table of each setting's meaning, its current value and its presets' values.

        ``names`` limits the table to these settings, in this order; by default it has all of them.
        """
        rows = {}
        for key in names or self._spec:
            entry = self._spec[key]
            presets = {name: entry[name] for name in presets_of(self._spec)}
            rows[key] = {"meaning": entry["help"], "in use": getattr(self, key), **presets}
        table = pd.DataFrame.from_dict(rows, orient="index").astype(object).fillna("–")
        style = table.style.format(_as_html)
        return style.set_properties(
            subset=["meaning"], **{"text-align": "left", "min-width": "13em"}
        )


def _as_html(value) -> str:
    """Return a setting as HTML; a long path may wrap after each slash."""
    if isinstance(value, float):
        return f"{value:g}"
    return html.escape(str(value)).replace("/", "/<wbr>")


def read_spec(notebook: str) -> dict[str, dict]:
    """Return a notebook's settings, a dict from key to {tiny, scratch, full, help}.

    If the notebook has the preset ``small``, each entry has a value for it as well. An ``optional``
    setting may be null in any preset; other settings may be null only in presets where the file has
    null. ``min`` (default 1) is the lower bound for whole numbers.
    """
    spec = yaml.safe_load((CONFIGS / f"{notebook}.yaml").read_text(encoding="utf-8"))
    included = spec.pop("include", None)
    if included:
        spec = read_spec(included) | spec
    complete = {}
    for key, entry in spec.items():
        same_for_all = dict.fromkeys(PRESETS, entry.get("all"))
        if "all" in entry:
            same_for_all[SMALL] = entry["all"]
        complete[key] = same_for_all | entry
    return complete


def presets_of(spec: dict[str, dict]) -> list[str]:
    """Return the names of a notebook's presets, in the order of their size."""
    names = list(PRESETS)
    is_complete = all(SMALL in entry for entry in spec.values())
    has_own_value = any(SMALL in entry and "all" not in entry for entry in spec.values())
    if is_complete and has_own_value:
        names.insert(1, SMALL)
    return names


def load_preset(notebook: str, preset: str, overrides: Mapping | None = None) -> Settings:
    """Return a notebook's settings with overrides; a GPU without bf16 gets ``PRECISION`` fallbacks.

    Raises ``ValueError`` for an unknown preset or key, and for values that ``coerce`` rejects.
    """
    spec = read_spec(notebook)
    names = presets_of(spec)
    if preset not in names:
        raise ValueError(
            f"Unknown preset {preset!r} for {notebook}; choose one of {', '.join(names)}."
        )
    changes = {}
    for key, (with_bf16, without) in PRECISION.items():
        if key in spec and spec[key][preset] == with_bf16 and not has_bf16():
            changes[key] = without
    for key, value in (overrides or {}).items():
        if key not in spec:
            raise ValueError(
                f"Unknown setting {key!r} for notebook {notebook}; it has {', '.join(spec)}."
            )
        changes[key] = _check_override(key, value, spec[key], preset)
    return Settings(preset, spec, changes)


def _check_override(key: str, value, entry: dict, preset: str):
    """Return an override as ``coerce`` converts it; the preset's value is the example.

    If the preset has null, another preset's value is the example; without any, all values are
    allowed.
    """
    may_be_null = entry[preset] is None or entry.get("optional")
    if value is None and may_be_null:
        return None
    examples = [entry[name] for name in (preset, *PRESETS) if entry.get(name) is not None]
    if not examples:
        return value
    return coerce(key, value, examples[0], entry.get("min", 1))


def coerce(key: str, value, example, least: int = 1):
    """Return ``value`` converted to the type of ``example``; lists are converted item by item.

    Raises ``ValueError`` for another type, NaN, Inf, and integers below ``least``.
    """
    kind = type(example)
    expected = f"a value of type {kind.__name__}"
    if kind is list and isinstance(value, list | tuple):
        return [coerce(key, item, example[0], least) for item in value]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | int | float | Path):
        return "no" if value is False else str(value)  # YAML 1.1 reads a bare no as false
    if kind is float:
        expected = "a finite number"
        number = _finite_number(value)
        if number is not None:
            return number
    if kind is int:
        expected = f"a whole number of at least {least}"
        number = _finite_number(value)
        if number is not None and number.is_integer() and number >= least:
            return int(number)
    raise ValueError(f"Setting {key!r} takes {expected}, like {example!r}; got {value!r}.")


def _finite_number(value) -> float | None:
    """Return a number, or a text such as 1e-5 (YAML reads it as text), as a float; or None."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def check_named(settings: Settings, **columns: str) -> None:
    """Raise ``ValueError`` if a dataset setting is None; ``columns`` maps settings to columns."""
    for option, needed in columns.items():
        if getattr(settings, option) is None:
            raise ValueError(
                f'This preset needs a dataset with columns {needed}: pass overrides={{"{option}":'
                f" FOLDER}} in a notebook, or --{option} FOLDER to a command."
            )


def prepare(settings: Settings) -> SimpleNamespace:
    """Download models; return a folder or hub id for dataset, model, reward_model and judge.

    The result has no judge if the notebook has no such setting. Makes the model of ``make real``,
    if it is named and missing. Raises ``ValueError`` if no dataset is named, and ``OSError`` if a
    model is unavailable.
    """
    from rlhf_course.runtime.hub import download  # imports transformers, which takes seconds
    from rlhf_course.runtime.smollm2 import make_if_missing

    check_named(settings, dataset="text and label")
    sources = {}
    for name in ("dataset", "model", "reward_model", "judge"):
        if hasattr(settings, name):
            sources[name] = shipped(getattr(settings, name))
    make_if_missing(sources["model"])
    for name in ("model", "reward_model"):
        download(sources[name])  # report a missing model before anything runs
    return SimpleNamespace(**sources)


def shipped(source: str) -> str:
    """Return ``models/…`` or ``build/models/…`` as a path, and any other source unchanged.

    The path starts here or, if it does not exist here, in the project.
    """
    if not source.startswith(("models/", "build/models/")):
        return source
    here = Path(source).resolve()
    return str(here if here.exists() else ROOT / source)
