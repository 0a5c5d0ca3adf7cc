"""Ctrl-C while a search runs: the first ends it with the best plan so far, the second ends the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """Gives an event that the first interrupt in here sets; a second one raises KeyboardInterrupt, as everywhere.

    In a thread other than the main one, which gets no signals, nothing sets it.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
