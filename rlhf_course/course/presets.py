"""Load the presets, which set each notebook's size, from a YAML file per notebook."""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
import yaml
from pandas.io.formats.style import Styler

PRESETS = ("tiny", "scratch", "full")
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
        super().__init__(**{key: entry[preset] for key, entry in spec.items()} | dict(overrides))
        self._spec = spec

    def table(self) -> Styler:
        """Return a table of each setting's current value, three preset values and meaning."""
        rows = {
            key: {"in use": getattr(self, key), **{name: entry[name] for name in PRESETS}}
            | {"meaning": entry["help"]}
            for key, entry in self._spec.items()
        }
        table = pd.DataFrame.from_dict(rows, orient="index").astype(object).fillna("–")
        style = table.style.format(lambda x: f"{x:g}" if isinstance(x, float) else x, escape="html")
        return style.set_properties(subset=["meaning"], **{"text-align": "left"})


def read_spec(notebook: str) -> dict[str, dict]:
    """Return a notebook's settings, a dict from key to {tiny, scratch, full, help}.

    An ``optional`` setting may be null in any preset; other settings may be null only in presets
    where the file has null. ``min`` (default 1) is the lower bound for whole numbers.
    """
    spec = yaml.safe_load((CONFIGS / f"{notebook}.yaml").read_text(encoding="utf-8"))
    if shared := spec.pop("include", None):
        spec = read_spec(shared) | spec
    return {
        key: {**dict.fromkeys(PRESETS, entry.get("all")), **entry} for key, entry in spec.items()
    }


def load_preset(notebook: str, preset: str, overrides: Mapping | None = None) -> Settings:
    """Return a notebook's settings with overrides; a GPU without bf16 gets ``PRECISION`` fallbacks.

    Raises ``ValueError`` for an unknown preset or key, and for values that ``coerce`` rejects.
    """
    spec = read_spec(notebook)
    if preset not in PRESETS:
        raise ValueError(f"Unknown preset {preset!r}; choose one of {', '.join(PRESETS)}.")
    checked = {
        key: older
        for key, (usual, older) in PRECISION.items()
        if key in spec and spec[key][preset] == usual and not has_bf16()
    }
    for key, value in (overrides or {}).items():
        if key not in spec:
            raise ValueError(
                f"Unknown setting {key!r} for notebook {notebook}; it has {', '.join(spec)}."
            )
        entry = spec[key]
        examples = [entry[name] for name in (preset, *PRESETS) if entry[name] is not None]
        is_free = value is None and (entry[preset] is None or entry.get("optional"))
        if examples and not is_free:
            value = coerce(key, value, examples[0], entry.get("min", 1))
        checked[key] = value
    return Settings(preset, spec, checked)


def coerce(key: str, value, example, least: int = 1):
    """Return ``value`` converted to the type of ``example``; lists are converted item by item.

    Raises ``ValueError`` for another type, NaN, Inf, and integers below ``least``.
    """
    kind = type(example)
    if kind is list and isinstance(value, list | tuple):
        return [coerce(key, item, example[0], least) for item in value]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | int | float | Path):
        return "no" if value is False else str(value)  # YAML 1.1 reads a bare no as false
    if kind in (int, float) and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):  # YAML reads 1e-5 as text
            number = kind(float(value))
            fits = math.isfinite(number) and (kind is float or number >= least)
            if fits and number == float(value):
                return number
    names = {int: f"a whole number of at least {least}", float: "a finite number"}
    wanted = names.get(kind, f"a value of type {kind.__name__}")
    raise ValueError(f"Setting {key!r} takes {wanted}, like {example!r}; got {value!r}.")


def check_named(settings: Settings, **columns: str) -> None:
    """Raise ``ValueError`` if a dataset setting is None; ``columns`` maps settings to columns."""
    for option, needed in columns.items():
        if getattr(settings, option) is None:
            raise ValueError(
                f'This preset needs a dataset with columns {needed}: pass overrides={{"{option}":'
                f" FOLDER}} in a notebook, or --{option} FOLDER to a command."
            )
