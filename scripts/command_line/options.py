"""Options of the training commands: preset, YAML file (--config) and command line, by TrlParser."""

import argparse
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from command_line import exits


@contextmanager
def read(
    name: str, first: Sequence[str], arguments: list[str] | None
) -> Iterator[tuple[dict, Callable]]:
    """Yield what the YAML file sets, and a function that parses it with the command line.

    Options named in ``first`` decide which others there are, or their defaults; they are among
    what is given also when the command line sets them. The function takes dataclasses, defaults, a
    description and formatters of argparse; the file wins over the defaults, the command line over
    the file. An invalid option, there or in the body, ends the command (``SystemExit``).
    """
    usage = f"{name} [--config FILE] [--{first[0]} {first[0].upper()}] [options]"
    early = argparse.ArgumentParser(name, usage, add_help=False, allow_abbrev=False)
    for option in ("config", *first):
        early.add_argument(f"--{option}")
    known, rest = early.parse_known_args(arguments)

    def parse(classes: Sequence[type], defaults: dict, about: str, formats: tuple = ()) -> tuple:
        from trl import TrlParser  # here, as it loads torch

        formatter = type("Formatter", (*formats, argparse.RawDescriptionHelpFormatter), {})
        how = {"description": about, "formatter_class": formatter}
        parser = TrlParser(classes, prog=name, usage=usage, **how)
        parser.set_defaults_with_config(**defaults)
        if unknown := parser.set_defaults_with_config(**given):
            raise ValueError(f"{known.config} sets {unknown[0]}, which {name} does not have here.")
        with warnings.catch_warnings(action="ignore"):  # about names that transformers changes
            return parser.parse_args_into_dataclasses(rest)

    try:
        text = Path(known.config).read_text(encoding="utf-8") if known.config else "{}"
        given = yaml.safe_load(text)
        if not isinstance(given, dict):
            raise ValueError(f"{known.config} holds no options like seed: 1.")
        os.environ.update({key: str(value) for key, value in given.pop("env", {}).items()})
        given |= {option: found for option in first if (found := getattr(known, option))}
        yield given, parse
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        where = f"{known.config}: " if isinstance(error, UnicodeError | yaml.YAMLError) else ""
        early.error(where + (str(error) if where else exits.sentence(error)))


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Parse the arguments, run with the result, and return the exit code."""

    def parse_and_run(arguments: list[str]) -> int:
        from rlhf_course.runtime.distributed import init_quietly, shutdown  # which load torch

        init_quietly()  # before trl's config asks which process this is
        code = run(*parse_arguments(arguments))
        shutdown()
        return code

    return exits.run(name, parse_and_run, arguments)
