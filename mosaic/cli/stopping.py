"""Ctrl-C while a search runs: the first ends it with the best plan so far, the second ends the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first interrupt in the block sets; a second raises KeyboardInterrupt.

    Only the main thread receives signals, so in other threads the event is never set.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
