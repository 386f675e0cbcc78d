"""Options of a command from a YAML file, as the training commands' --config takes it."""

from __future__ import annotations

from pathlib import Path

import yaml


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
