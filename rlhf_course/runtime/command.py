"""How a command ends: with a sentence and an exit code, and with its traceback only under --debug."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from traceback import walk_stack
from types import SimpleNamespace

HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # the terminal is gone; Windows has none


def loading() -> None:
    """Call this before a command's imports, so that Ctrl-C or a missing working folder gives no
    traceback there.
    """
    try:
        os.getcwd()
    except OSError as error:
        sys.exit(sentence(error))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    name: str, main: Callable[[list[str]], int | None], arguments: list[str] | None = None
) -> int:
    """Call ``main`` with the command line, without ``--debug``; returns the exit code.

    0 when it is done, 1 with a sentence for an error, 128 + the signal's number after Ctrl-C,
    SIGTERM or SIGHUP (a second one ends it at once), and 141, silently, when nobody reads its
    output any more, as with ``| head``.
    """
    arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal shows ? in place of → and ±
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with _on_first_signal(_interrupt) as stopped:
        try:
            code = main([argument for argument in arguments if argument != "--debug"]) or 0
            print(end="", flush=True)  # a BrokenPipeError comes here rather than at exit
            return code
        except (Exception, KeyboardInterrupt) as error:
            if stopped.code or isinstance(
                error, KeyboardInterrupt
            ):  # a library may raise another error from it
                print(f"\n{name}: stopped.", file=sys.stderr)
                return stopped.code or 130
            if isinstance(error, BrokenPipeError):
                _silence()
                return 141
            if "--debug" in arguments:
                raise
            print(f"{name}: {sentence(error)}", file=sys.stderr)
            return 1


def sentence(error: BaseException) -> str:
    """An exception's message on one line, with its name unless it speaks for itself."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, OSError) and text.startswith("[Errno"):
        if isinstance(error, FileNotFoundError) and not error.filename:  # os.getcwd()
            return "The folder that this was started in is gone. Change to another one."
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | FloatingPointError):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where.)"


def stop_between_steps() -> AbstractContextManager[SimpleNamespace]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request: an object whose ``code`` is then no
    longer 0.

    The code is the exit code of a run that stops after the current step. A second signal interrupts
    at once.
    """
    text = "\nStopping after this step; press Ctrl-C again to stop at once."
    return _on_first_signal(lambda signum, frame: print(text, flush=True))


def _interrupt(signum: int, frame) -> None:
    """Raise KeyboardInterrupt; or end the process, where a module loads: it would abort torch's
    C++, or get lost.
    """
    if any(
        above.f_code.co_filename.startswith("<frozen importlib") for above, _ in walk_stack(frame)
    ):
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
    raise KeyboardInterrupt


@contextmanager
def _on_first_signal(handle: Callable) -> Iterator[SimpleNamespace]:
    """Handle the first Ctrl-C, SIGTERM or SIGHUP in the body; later ones go where they went before.

    Yields an object with the exit code, 0 until then. What is ignored stays so, as SIGHUP under
    nohup.
    """
    # With several ranks, the others may wait in gloo, where no handler runs: the launcher's SIGTERM
    # has to end them.
    alone = os.environ.get("WORLD_SIZE", "") in ("", "1")
    kinds = (signal.SIGINT, signal.SIGTERM, HANGUP) if alone else (signal.SIGINT,)
    before = {
        kind: found for kind in kinds if (found := signal.getsignal(kind)) is not signal.SIG_IGN
    }
    stopped = SimpleNamespace(code=0)

    def install(handlers: dict) -> None:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)

    def first(signum: int, frame) -> None:
        install(before)
        if signum == HANGUP:
            _silence()
        stopped.code = 128 + signum
        handle(signum, frame)

    try:
        install(dict.fromkeys(before, first))
        yield stopped
    finally:
        install(before)


def _silence() -> None:
    """Write to nowhere from now on, as the terminal or the reader is gone, and ignore further
    hang-ups.
    """
    signal.signal(HANGUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # no file
            os.dup2(nowhere, stream.fileno())
