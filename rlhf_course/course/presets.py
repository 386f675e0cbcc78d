"""Presets: every setting of a notebook at the sizes tiny, scratch and full, side by side in one
YAML file.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import yaml
from pandas.io.formats.style import Styler

from rlhf_course.runtime.argument_checks import read_number

PRESETS = ("tiny", "scratch", "full")
CONFIGS = Path(__file__).resolve().parent / "configs"
_CHECKOUT = CONFIGS.parents[2]
# Where relative output paths start: at the project's root, and for a copy that pip installed, where
# Python was started.
ROOT = _CHECKOUT if (_CHECKOUT / "scripts" / "run_notebooks.py").exists() else Path.cwd()


class Settings(SimpleNamespace):
    """One preset's settings as attributes; :meth:`table` shows it beside the others."""

    def __init__(self, preset: str, spec: dict[str, dict], overrides: Mapping) -> None:
        super().__init__(**{key: entry[preset] for key, entry in spec.items()} | dict(overrides))
        self._spec = spec

    def table(self) -> Styler:
        """Settings as rows, for display: the value in use, the three presets, and what the setting
        means.
        """
        rows = {
            key: {
                "in use": getattr(self, key),
                **{name: entry[name] for name in PRESETS},
                "meaning": entry["help"],
            }
            for key, entry in self._spec.items()
        }
        style = pd.DataFrame.from_dict(rows, orient="index").astype(object).fillna("–").style
        style = style.format(lambda x: f"{x:g}" if isinstance(x, float) else x)
        return style.set_properties(subset=["meaning"], **{"text-align": "left"})


def read_spec(notebook: str) -> dict[str, dict]:
    """A notebook's settings: key → {tiny, scratch, full, help}. Raises ``FileNotFoundError`` for an
    unknown one.

    ``optional`` ones may be null at every preset, others where the preset has null; whole numbers
    are at least ``min``, which is 1 unless it is given.
    """
    path = CONFIGS / f"{notebook}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(f"No settings for {notebook!r} in {CONFIGS}; there are {known}.")
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    if shared := spec.pop("include", None):
        spec = read_spec(shared) | spec
    return {
        key: {**dict.fromkeys(PRESETS, entry.get("all")), **entry} for key, entry in spec.items()
    }


def load_preset(notebook: str, preset: str, overrides: Mapping | None = None) -> Settings:
    """The settings of a notebook at a preset, with overrides on top.

    Raises ``ValueError``, listing what is valid, for an unknown preset or key, a value of another
    type, or a number that is not finite or out of range.
    """
    spec = read_spec(notebook)
    if preset not in PRESETS:
        raise ValueError(f"Unknown preset {preset!r}; choose one of {', '.join(PRESETS)}.")
    checked = {}
    for key, value in (overrides or {}).items():
        if key not in spec:
            raise ValueError(
                f"Unknown setting {key!r} for notebook {notebook}; it has {', '.join(spec)}."
            )
        entry = spec[key]
        examples = [entry[name] for name in (preset, *PRESETS) if entry[name] is not None]
        may_be_null = entry[preset] is None or entry.get("optional")
        if examples and not (value is None and may_be_null):
            value = like(key, value, examples[0], entry.get("min", 1))
        checked[key] = value
    settings = Settings(preset, spec, checked)
    for low in (key for key in spec if key.endswith("_min")):
        high = f"{low.removesuffix('_min')}_max"
        if high in spec and getattr(settings, low) >= getattr(settings, high):
            raise ValueError(
                f"{low} is {getattr(settings, low)}, and {high}, which is exclusive,"
                f" {getattr(settings, high)}: it must be larger."
            )
    return settings


def like(key: str, value, example, least: int = 1):
    """``value`` in the type of ``example``, lists item by item.

    Raises ``ValueError`` for other types, numbers that are not finite, and whole ones below
    ``least``.
    """
    kind = type(example)
    if kind is list and isinstance(value, list | tuple):
        with suppress(ValueError):
            return [like(key, item, example[0], least) for item in value]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, bool):
        return "yes" if value else "no"  # YAML 1.1 reads a bare no as false
    if kind is str and isinstance(value, str | int | float | Path):
        return str(value)
    if kind in (int, float):
        number = read_number(
            kind, value, lambda x: math.isfinite(x) and (kind is float or x >= least)
        )
        if number is not None:
            return number
    wanted = {int: f"a whole number of at least {least}", float: "a finite number"}
    wanted = wanted.get(kind, f"a value of type {kind.__name__}")
    raise ValueError(f"Setting {key!r} takes {wanted}, like {example!r}; got {value!r}.")


def check_named(settings: Settings, **columns: str) -> None:
    """Raise ``ValueError`` for a dataset without a name; ``columns`` are what each needs."""
    for option, needed in columns.items():
        if getattr(settings, option) is None:
            raise ValueError(
                f'This preset needs a dataset, with columns {needed}: overrides={{"{option}":'
                f" FOLDER}} in a notebook, --{option} FOLDER for a command."
            )
