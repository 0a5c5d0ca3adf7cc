"""Processes of their own for plain loops that Mosaic is compared with.

Mosaic's process has OpenMP's threads wait passively, which its lanes need. A plain loop is faster with torch's own way
of waiting on a quiet machine, and with the passive one where others use the CPU. It runs in both; the faster counts.
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

WAITING = {"in torch's own way": {}, "passively": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Waiting policies of the two plain loops' threads, with the variables that set them."""


@contextmanager
def child(factory: str, argument: str, waiting: str) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls methods of an object in a process of its own, which ends with the block.

    ``factory`` (``MODULE:FUNCTION``) makes the object from ``argument``.
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
    """Yields a ``child``'s function for each waiting policy."""
    with ExitStack() as stack:
        yield {waiting: stack.enter_context(child(factory, argument, waiting)) for waiting in WAITING}


def _serve(requests: Connection, factory: str, argument: str, waiting: str) -> None:
    assert "torch" not in sys.modules, "OpenMP has read its variables already"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the caller, who ends this process
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ.update(WAITING[waiting])
    sys.stdout = sys.stderr  # the command's own output is for its result
    target = pkgutil.resolve_name(factory)(argument)
    with suppress(EOFError):  # the caller was killed
        while True:
            method, arguments = requests.recv()
            requests.send(getattr(target, method)(*arguments))
