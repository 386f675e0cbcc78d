"""How a command ends: with a sentence and an exit code, and with its traceback only under --debug."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

SAYS_ALL = (ValueError, OSError, FloatingPointError)  # errors that are sentences; others need their name
HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # the terminal is gone; Windows has none
STOPS = (signal.SIGINT, signal.SIGTERM, HANGUP)


def loading() -> None:
    """To be called before a command's imports: Ctrl-C while they load ends it without a traceback.

    So does a working folder that is gone, of which libraries would die without a reason.
    """
    try:
        os.getcwd()
    except OSError as error:
        sys.exit(sentence(error))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(name: str, main: Callable[[list[str]], int | None], arguments: list[str] | None = None) -> int:
    """Call ``main`` with the command line; returns the exit code.

    0 when it is done, 1 with a sentence for whatever went wrong, 2 from argparse, 130 after Ctrl-C, 143 after SIGTERM,
    129 after the terminal was closed; what was being written is tidied up first, unless a second signal ends it at
    once. 141, without a word, when nobody reads its output any more, as of ``| head``. ``--debug``, which every command
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
        _fall_silent() if signum == HANGUP else signal.signal(signum, signal.SIG_DFL)
        raise KeyboardInterrupt

    # Of several processes the others may wait in gloo, where no handler runs, and a launcher passes signals on.
    alone = os.environ.get("WORLD_SIZE", "") in ("", "1")
    handlers = dict.fromkeys(STOPS, stop) if alone else {signal.SIGINT: signal.default_int_handler}
    before = {s: signal.signal(s, h) for s, h in handlers.items() if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        code = main([argument for argument in arguments if argument != "--debug"]) or 0
        print(end="", flush=True)  # here, where it is seen that nobody reads it
        return code
    except (Exception, KeyboardInterrupt) as error:
        if stopped or isinstance(error, KeyboardInterrupt):  # a library may have made an error of it
            print(f"\n{name}: stopped.", file=sys.stderr)
            return stopped or 130
        if isinstance(error, BrokenPipeError):
            _fall_silent()
            return 141
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
    if isinstance(error, OSError) and text.startswith("[Errno"):
        if isinstance(error, FileNotFoundError) and not error.filename:  # getcwd
            return "The folder that this was started in is gone. Change to another one."
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, SAYS_ALL):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where.)"


def _fall_silent() -> None:
    """Write to nowhere from now on, where the terminal or the reader is gone, and do not be told of that again."""
    signal.signal(HANGUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # no file
            os.dup2(nowhere, stream.fileno())


@contextmanager
def stop_between_steps() -> Iterator[SimpleNamespace]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request to stop after the current step.

    A second one interrupts at once. Yields an object whose ``code`` is 0 until then, and then the exit code.
    """
    asked = SimpleNamespace(code=0)
    found = {kind: signal.getsignal(kind) for kind in STOPS}
    left = (signal.SIG_DFL, (HANGUP, signal.SIG_IGN))  # see run(); nohup ignores SIGHUP
    found = {kind: handler for kind, handler in found.items() if handler not in left and (kind, handler) not in left}

    def restore() -> None:
        for kind, handler in found.items():
            signal.signal(kind, handler)

    def request(signum, frame) -> None:
        asked.code = 128 + signum
        restore()
        if signum == HANGUP:
            _fall_silent()
        print("\nStopping after this step; press Ctrl-C again to stop at once.", flush=True)

    for kind in found:
        signal.signal(kind, request)
    try:
        yield asked
    finally:
        restore()
