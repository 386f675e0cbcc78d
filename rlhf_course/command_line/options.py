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


def option(default, text: str, **how):
    """Return a dataclass field with its help text; argparse receives ``how``."""
    return field(default=default, metadata={"help": text, **how})


def parse(about: str, first: Sequence[str], choose: Callable, arguments: list[str] | None) -> tuple:
    """Return options as dataclasses; the command line overrides the file, which overrides defaults.

    Options named in ``first`` determine the classes and their defaults: ``choose`` receives these
    options and the file's, and returns dataclasses and defaults. Raises ``ValueError`` for an
    invalid option.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", *first):
        early.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    known, rest = early.parse_known_args(arguments)
    given = yaml.safe_load(Path(known.config).read_bytes()) if known.config else {}
    if not isinstance(given, dict):
        raise ValueError(f"{known.config} has no options. Write lines like seed: 1.")
    given |= {name: value for name in first if (value := getattr(known, name))}
    classes, defaults = choose(given)
    formats = argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
    how = {"formatter_class": type("", formats, {}), "allow_abbrev": False}
    parser = TrlParser(classes, description=about, **how)
    parser.set_defaults_with_config(**defaults)
    if unknown := parser.set_defaults_with_config(**given):
        raise ValueError(f"{known.config} sets {unknown[0]}, which is not an option. Remove it.")
    with warnings.catch_warnings(action="ignore"):  # transformers warns about renamed options
        return parser.parse_args_into_dataclasses(rest)


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Parse the arguments, call ``run``, and return the exit code."""

    def parse_and_run(arguments: list[str]) -> int:
        init_quietly()  # before trl's config reads the rank
        code = run(*parse_arguments(arguments))
        shutdown()
        return code

    return exits.run(name, parse_and_run, arguments)
