"""How a command ends: with a sentence and an exit code, and with its traceback only under --debug."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

SAYS_ALL = (ValueError, OSError, FloatingPointError)  # errors that are sentences; others need their name


def loading() -> None:
    """To be called before a command's imports: Ctrl-C while they load ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(name: str, main: Callable[[list[str]], int | None], arguments: list[str] | None = None) -> int:
    """Call ``main`` with the command line; returns the exit code.

    0 when it is done, 1 with a sentence for whatever went wrong, 2 from argparse, 130 after Ctrl-C, 143 after SIGTERM;
    what was being written is tidied up first, unless a second signal ends it at once. ``--debug``, which every command
    has and ``main`` does not see, shows the traceback.
    """
    arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows ASCII alone shows ? in place of → and ±
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    stopped = 0

    def stop(signum, frame) -> None:
        nonlocal stopped
        stopped = 128 + signum
        signal.signal(signum, signal.SIG_DFL)
        raise KeyboardInterrupt

    # Of several processes the others may wait in gloo, where no handler runs, and a launcher passes signals on.
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop} if alone else {signal.SIGINT: signal.default_int_handler}
    before = {s: signal.signal(s, h) for s, h in handlers.items() if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        return main([argument for argument in arguments if argument != "--debug"]) or 0
    except (Exception, KeyboardInterrupt) as error:
        if stopped or isinstance(error, KeyboardInterrupt):  # a library may have made an error of it
            print(f"\n{name}: stopped.", file=sys.stderr)
            return stopped or 130
        if debug:
            raise
        print(f"{name}: {sentence(error)}", file=sys.stderr)
        return 1
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def sentence(error: BaseException) -> str:
    """An exception's message on one line, with its name unless it speaks for itself."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, SAYS_ALL):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where.)"


@contextmanager
def stop_between_steps() -> Iterator[SimpleNamespace]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the current step; a second one interrupts at once.

    Yields an object whose ``code`` is 0 until then, and then the exit code.
    """
    asked = SimpleNamespace(code=0)
    found = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    found = {kind: handler for kind, handler in found.items() if handler != signal.SIG_DFL}  # see run()

    def restore() -> None:
        for kind, handler in found.items():
            signal.signal(kind, handler)

    def request(signum, frame) -> None:
        asked.code = 128 + signum
        restore()
        print("\nStopping after this step; press Ctrl-C again to stop at once.", flush=True)

    for kind in found:
        signal.signal(kind, request)
    try:
        yield asked
    finally:
        restore()
