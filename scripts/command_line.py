"""Options of the training commands, from the command line and a YAML file, by trl's parser."""

import argparse
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from trl import TrlParser

from rlhf_course.runtime import command


def read_options(file: str | Path | None) -> dict:
    """A YAML file's options, none where no file is named. Raises ``OSError``, or ``ValueError``
    that names the file.
    """
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
    return {str(name): value for name, value in options.items()}


@contextmanager
def read(
    name: str, first: Sequence[str], arguments: list[str] | None
) -> Iterator[tuple[dict, Callable]]:
    """Yield what is given by a YAML file (--config), and a function that parses it with the command
    line, which wins.

    Options named in ``first`` decide which others there are, or what their defaults are: the
    command line's, too, are among what is given. The function takes dataclasses, defaults below
    what is given, and arguments of TrlParser. Whatever is not valid, there or in the body, ends the
    command with a sentence (``SystemExit``).
    """
    usage = f"{name} [--config FILE] [--{first[0]} {first[0].upper()}] [options]"
    early = argparse.ArgumentParser(name, usage, add_help=False, allow_abbrev=False)
    for option in ("config", *first):
        early.add_argument(f"--{option}")
    known, rest = early.parse_known_args(arguments)

    def parse(classes: Sequence[type], defaults: dict, **how) -> tuple:
        parser = TrlParser(classes, prog=name, usage=usage, **how)
        parser.set_defaults_with_config(**defaults)
        number = (
            int,
            float,
            datetime.date,
        )  # what YAML reads 2024 and 2024-05-01 as, folders' names or not
        texts = {action.dest for action in parser._actions if action.type is str}
        asked = {
            key: str(value) if key in texts and type(value) in number else value
            for key, value in given.items()
        }
        if unknown := parser.set_defaults_with_config(**asked):
            raise ValueError(
                f"{known.config} has {', '.join(unknown[::2])}, which {name} does not know here."
            )
        return parser.parse_args_into_dataclasses(rest)

    try:
        given = read_options(known.config)
        os.environ.update(
            {key: str(value) for key, value in dict(given.pop("env", None) or {}).items()}
        )
        given |= {
            option: value for option in first if (value := getattr(known, option)) is not None
        }
        yield given, parse
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        early.error(str(error) if isinstance(error, ValueError) else command.sentence(error))


def main(name: str, parse_arguments: Callable, run: Callable, arguments: list[str] | None) -> int:
    """Parse the arguments and run with what comes of it; returns the exit code.

    0 when finished, 1 with a sentence for what is not valid, 130 when stopped by Ctrl-C.
    """

    def parse_and_run(arguments: list[str]) -> int:
        options = parse_arguments(arguments)
        from rlhf_course.runtime.distributed import (
            shutdown,
        )  # here, as it loads torch, which takes seconds

        code = run(*options)
        shutdown()
        return code

    return command.run(name, parse_and_run, arguments)
