"""Run a check so that an endless loop or a crash does not end the notebook."""

from __future__ import annotations

import _thread
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable

import torch

TOO_LONG = (
    "Your function has not finished after {:.0f} seconds. Does every loop end? (If a "
    "cell hangs outside of `check`, interrupt the kernel: ■ in the toolbar.)"
)
DIED = "Your function ended Python (exit status {}): it crashed or called `os._exit`."


def guarded(work: Callable[[], tuple], limit: float) -> tuple[str | None, str]:
    """Return work()'s verdict and printed text, after ``limit`` seconds at most.

    If the system can fork, work runs in a child process, which shares loaded modules.
    Autograd cannot fork once it has accelerator threads. In that case, and on systems
    without fork, a timer interrupts work. The timer cannot stop code that never returns
    to Python.
    """
    if hasattr(os, "fork") and not torch.accelerator.is_available():
        return _in_a_child(work, limit)
    late = threading.Event()
    timer = threading.Timer(limit, lambda: (late.set(), _thread.interrupt_main()))
    timer.start()
    try:
        return work()
    except KeyboardInterrupt:
        if late.is_set():
            return TOO_LONG.format(limit), ""
        raise
    finally:
        timer.cancel()


def _in_a_child(work: Callable[[], tuple], limit: float) -> tuple[str | None, str]:
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()  # Python 3.12 warns about threads, but the child uses none
    if child == 0:
        try:
            os.close(reading)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills the child
            torch.set_num_threads(1)
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        sent = _read(reading, time.monotonic() + limit)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # even if the user interrupts
        _, status = os.waitpid(child, 0)
    if sent is None:
        return TOO_LONG.format(limit), ""
    try:
        verdict, printed = json.loads(sent)  # no pickle: the child ran untrusted code
    except (TypeError, ValueError):
        return DIED.format(os.waitstatus_to_exitcode(status)), ""
    return verdict, printed


def _read(pipe: int, deadline: float) -> bytes | None:
    """Return a child's output, or None if it is not done by the deadline."""
    sent = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (more := os.read(pipe, 1 << 16)):
            return sent
        sent += more
    return None
