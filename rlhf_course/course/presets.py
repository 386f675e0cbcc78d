"""Presets: every setting of a notebook at the sizes tiny, scratch and full, side by side in one YAML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import yaml
from pandas.io.formats.style import Styler

from rlhf_course.ppo.config import NUMBERS, check_number

PRESETS = ("tiny", "scratch", "full")
CONFIGS = Path(__file__).resolve().parent / "configs"
_CHECKOUT = CONFIGS.parents[2]
# Where relative output paths start: at the project's root, and for a copy that pip installed, where Python was started.
ROOT = _CHECKOUT if (_CHECKOUT / "scripts" / "run_notebooks.py").exists() else Path.cwd()


class Settings(SimpleNamespace):
    """One preset's settings as attributes; :meth:`table` shows it beside the others."""

    def __init__(self, preset: str, spec: dict[str, dict], overrides: Mapping) -> None:
        super().__init__(**{key: entry[preset] for key, entry in spec.items()} | dict(overrides))
        self._preset, self._spec, self._overrides = preset, spec, dict(overrides)

    def table(self) -> Styler:
        """Settings as rows, for display: the value in use, the three presets, and what the setting means."""
        rows = {
            key: {"in use": getattr(self, key), **{name: entry[name] for name in PRESETS}, "meaning": entry["help"]}
            for key, entry in self._spec.items()
        }
        table = pd.DataFrame.from_dict(rows, orient="index").astype(object).fillna("–")
        return table.style.format(lambda x: f"{x:g}" if isinstance(x, float) else x).set_properties(
            subset=["meaning"], **{"text-align": "left"}
        )


def read_spec(notebook: str) -> dict[str, dict]:
    """A notebook's settings: key → {tiny, scratch, full, help}. Raises ``FileNotFoundError`` for an unknown one.

    ``optional`` ones may be null at every preset, others where the preset has null; whole numbers are at least ``min``,
    which is 1 unless it is given.
    """
    path = CONFIGS / f"{notebook}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(f"No settings for {notebook!r} in {CONFIGS}; there are {known}.")
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    if shared := spec.pop("include", None):
        spec = read_spec(shared) | spec
    return {key: {**dict.fromkeys(PRESETS, entry.get("all")), **entry} for key, entry in spec.items()}


def read_options(file: str | Path | None) -> dict:
    """A YAML file's options, none where no file is named. Raises ``OSError``, or ``ValueError`` that names the file."""
    if not file:
        return {}
    try:
        text = Path(file).read_text(encoding="utf-8")
        options = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read as YAML in UTF-8: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{file} is no list of options like seed: 1.")
    names = [name.value for name, _ in yaml.compose(text).value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{file} has the option {twice[0]} twice. Leave one of them.")
    return options


def load_preset(notebook: str, preset: str, overrides: Mapping | None = None) -> Settings:
    """The settings of a notebook at a preset, with overrides on top.

    Raises ``ValueError``, listing what is valid, for an unknown preset or key, a value of another type, or a number
    that is not finite or out of range.
    """
    spec = read_spec(notebook)
    if preset not in PRESETS:
        raise ValueError(f"Unknown preset {preset!r}; choose one of {', '.join(PRESETS)}.")
    checked = {}
    for key, value in (overrides or {}).items():
        if key not in spec:
            raise ValueError(f"Unknown setting {key!r} for notebook {notebook}; it has {', '.join(spec)}.")
        entry = spec[key]
        examples = [entry[name] for name in (preset, *PRESETS) if entry[name] is not None]
        if not examples or value is None and (entry[preset] is None or entry.get("optional")):
            checked[key] = value
            continue
        checked[key] = like(key, value, examples[0], entry.get("min", 1))
        if key in NUMBERS:
            check_number(key, checked[key])
    settings = Settings(preset, spec, checked)
    for least, most in ((key, f"{key[:-4]}_max") for key in spec if key.endswith("_min") and f"{key[:-4]}_max" in spec):
        if getattr(settings, least) >= getattr(settings, most):
            raise ValueError(
                f"{least} is {getattr(settings, least)}, and {most}, which is exclusive, {getattr(settings, most)}: "
                "it must be larger."
            )
    return settings


def like(key: str, value, example, least: int = 1):
    """value in the type of example: YAML reads 1e-4 as text, for one. Lists item by item.

    Raises ``ValueError`` for other types, numbers that are not finite, and whole ones below ``least``.
    """
    if isinstance(example, str) and isinstance(value, bool):
        return "yes" if value else "no"  # YAML 1.1 reads a bare no as false
    kind, several = type(example), isinstance(value, list | tuple)
    wanted = f"a value of type {kind.__name__}, like {example!r}"
    try:
        if value is None or isinstance(value, dict) or several != (kind is list):
            raise ValueError
        if several:
            return [like(key, item, example[0], least) for item in value]
        if (kind is bool) != isinstance(value, bool):
            raise ValueError
        if kind not in (int, float):
            return kind(value)
        if not math.isfinite(float(value)):
            wanted = wanted.replace(", like", " that is finite, like")
        elif kind is int and float(value) < least:
            wanted = f"a whole number of at least {least}"
        elif kind(float(value)) == float(value):
            return kind(float(value))
        raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"Setting {key!r} takes {wanted}; got {value!r}.") from None
