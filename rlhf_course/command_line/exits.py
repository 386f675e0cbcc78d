"""End a command with a message and an exit code; print a traceback only if --debug is set."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace


def run(name: str, main: Callable[[list[str]], int | None], arguments: list[str] | None = None):
    """Call ``main`` with the command-line arguments except ``--debug``; return the exit code.

    Codes: 0 if done, 1 after an error (printed on one line), 130 after Ctrl-C, 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):  # a terminal without → or ± shows ? instead
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with _on_first_signal(_interrupt) as stopped:
        try:
            if sys.flags.optimize:
                raise ValueError("Python runs without assert (PYTHONOPTIMIZE or -O). Unset it.")
            return main([argument for argument in arguments if argument != "--debug"]) or 0
        except BrokenPipeError:
            for stream in (1, 2):  # Python flushes both at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            return stopped.code or 1
        except (Exception, KeyboardInterrupt) as error:
            # A library may turn KeyboardInterrupt into another error.
            if stopped.code or isinstance(error, KeyboardInterrupt):
                print(f"\n{name}: stopped.", file=sys.stderr)
                return stopped.code or 130
            if "--debug" in arguments:
                raise
            print(f"{name}: {sentence(error)}", file=sys.stderr)
            return 1


def sentence(error: BaseException) -> str:
    """Return an error's message on one line; name the type of an unexpected error."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, ValueError | OSError | FloatingPointError):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where.)"


def watch_for_stop():
    """Return a context manager that yields an object; Ctrl-C or SIGTERM sets its ``code``."""

    def announce(signum: int, frame) -> None:
        with suppress(OSError):  # the same Ctrl-C may have ended a pipe's reader, such as tee
            print("\nStopping after this step; press Ctrl-C again to stop immediately.", flush=True)

    return _on_first_signal(announce)


def stop_code(stop_request: SimpleNamespace, accelerator) -> int:
    """Return, in every process, the exit code if any process was asked to stop, else 0."""
    import torch

    code = torch.tensor(float(stop_request.code), device=accelerator.device)
    any_request = accelerator.reduce(code).item() > 0
    if not any_request:
        return 0
    return stop_request.code or 130  # 130: only another process was stopped


def _interrupt(signum: int, frame) -> None:
    raise KeyboardInterrupt


@contextmanager
def _on_first_signal(handle: Callable) -> Iterator[SimpleNamespace]:
    """Handle the first Ctrl-C or SIGTERM; yield an object whose ``code`` is 0 until then."""
    # Ranks may wait in gloo, where no handler runs, so the launcher's SIGTERM must end them.
    is_single_process = os.environ.get("WORLD_SIZE", "") in ("", "1")
    kinds = [signal.SIGINT]
    if is_single_process:
        kinds.append(signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    stopped = SimpleNamespace(code=0)

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def first(signum: int, frame) -> None:
        restore()
        stopped.code = 128 + signum
        handle(signum, frame)

    try:
        for kind, handler in before.items():
            if handler is not signal.SIG_IGN:  # background jobs ignore Ctrl-C
                signal.signal(kind, first)
        yield stopped
    finally:
        restore()
