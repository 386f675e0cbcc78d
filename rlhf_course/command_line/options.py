"""Parse the training commands' options from the preset, --config FILE, and the command line."""

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path

import yaml
from trl import TrlParser

from rlhf_course.command_line import exits
from rlhf_course.command_line.processes import init_quietly, shutdown


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, and keep the description's line breaks."""


def option(default, text: str, **argparse_options):
    """Return a dataclass field with its help text and further options of ``add_argument``."""
    metadata = {"help": text, **argparse_options}
    if isinstance(default, list):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def parse(about: str, first: Sequence[str], choose: Callable, arguments: list[str] | None) -> tuple:
    """Return options as dataclasses; the command line overrides the file, which overrides defaults.

    Options named in ``first`` determine the classes and their defaults: ``choose`` receives these
    options and the file's, and returns dataclasses and defaults. Raises ``ValueError`` for an
    invalid option.
    """
    early_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", *first):
        early_parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    known, rest = early_parser.parse_known_args(arguments)
    early = read_config(known.config) if known.config else {}
    for name in first:
        value = getattr(known, name)
        if value:
            early[name] = value
    classes, defaults = choose(early)

    parser = TrlParser(
        classes,
        description=about,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.set_defaults_with_config(**defaults)
    unknown = parser.set_defaults_with_config(**early)
    if unknown:
        raise ValueError(f"{known.config} sets {unknown[0]}, which is not an option. Remove it.")
    try:
        with warnings.catch_warnings(action="ignore"):  # transformers warns about renamed options
            return parser.parse_args_into_dataclasses(rest)
    except argparse.ArgumentError as error:  # a value of another type
        raise ValueError(f"{error.argument_name}: {error.message}.") from None


def read_config(file: str) -> dict:
    """Return the options in a YAML file."""
    content = yaml.safe_load(Path(file).read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{file} has no options. Write lines like seed: 1.")
    return content


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Parse the arguments, call ``run``, and return the exit code."""

    def parse_and_run(arguments: list[str]) -> int:
        init_quietly()  # before trl's config reads the rank
        code = run(*parse_arguments(arguments))
        shutdown()
        return code

    return exits.run(name, parse_and_run, arguments)
