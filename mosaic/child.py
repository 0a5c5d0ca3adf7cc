"""Runs plain loops, for comparisons, in child processes.

In Mosaic's process OpenMP threads wait passively, because lanes need this. A plain loop is faster with OpenMP's default
on an idle machine, and with passive waiting on a busy one. It runs with both; the faster counts.
"""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from mosaic.errors import MosaicError

WAITING = {"by OpenMP's default": {}, "passively": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Wait policies of the two plain loops' threads, with their environment variables."""


@contextmanager
def child(factory: str, argument: str, waiting: str) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls methods of an object in a child process, which ends with the context.

    ``factory`` (``MODULE:FUNCTION``) creates the object from ``argument``.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, factory, argument, waiting), daemon=True)
    process.start()
    theirs.close()

    def call(method: str, *arguments: Any) -> Any:
        try:
            ours.send((method, arguments))
            return ours.recv()
        except (EOFError, OSError):
            process.join()
            raise MosaicError(f"the plain loop's process ended with exit code {process.exitcode}; see above") from None

    try:
        yield call
    finally:
        process.kill()
        process.join()


@contextmanager
def plain_loops(factory: str, argument: str) -> Iterator[dict[str, Callable[..., Any]]]:
    """Yields a ``child``'s function for each wait policy."""
    with ExitStack() as stack:
        yield {waiting: stack.enter_context(child(factory, argument, waiting)) for waiting in WAITING}


def _serve(requests: Connection, factory: str, argument: str, waiting: str) -> None:
    assert "torch" not in sys.modules, "OpenMP has already read its variables"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles interrupts and ends this process
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ.update(WAITING[waiting])
    sys.stdout = sys.stderr  # standard output is for the command's result
    target = pkgutil.resolve_name(factory)(argument)
    with suppress(EOFError):  # the caller was killed
        while True:
            method, arguments = requests.recv()
            requests.send(getattr(target, method)(*arguments))
