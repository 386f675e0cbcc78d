"""How a command ends: with a sentence and an exit code, and with its traceback only under --debug."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

SAYS_ALL = (ValueError, OSError, FloatingPointError)  # errors that are sentences; others need their name


def run(name: str, main: Callable[[list[str]], int | None], arguments: list[str] | None = None) -> int:
    """Call ``main`` with the command line; returns the exit code.

    0 when it is done, 1 with a sentence for whatever went wrong, 2 from argparse, 130 after Ctrl-C, 143 after SIGTERM.
    ``--debug``, which every command has and ``main`` does not see, shows the traceback.
    """
    arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows ASCII alone shows ? in place of → and ±
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    code = 130

    def terminate(signum, frame) -> None:
        nonlocal code
        code = 143
        raise KeyboardInterrupt  # so that what was being written aside is removed

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # the others may wait in gloo, where no handler runs
        signal.signal(signal.SIGTERM, terminate)
    try:
        return main([argument for argument in arguments if argument != "--debug"]) or 0
    except KeyboardInterrupt:
        print(f"\n{name}: stopped.", file=sys.stderr)
        return code
    except Exception as error:
        if debug:
            raise
        print(f"{name}: {sentence(error)}", file=sys.stderr)
        return 1


def sentence(error: BaseException) -> str:
    """An exception's message on one line, with its name unless it speaks for itself."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, SAYS_ALL):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where.)"
