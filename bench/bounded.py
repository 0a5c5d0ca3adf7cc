"""Parts of a study in processes of their own, each ended after a time; what it had made by then stays."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection

from bench.processes import die_with_parent
from bench.record import Figure, one_line

Make = Callable[[], Iterable[Figure]]


class PartFailedError(Exception):
    """A part raised, died, or was ended; the message says which."""


def within(make: Make, seconds: float) -> Iterator[Figure]:
    """Yields a part's figures as they are made, in a process that ends after ``seconds``.

    Raises:
        PartFailedError: It did not come to its end.
    """
    if seconds <= 0:
        raise PartFailedError("there was no time left for it")
    fork = multiprocessing.get_context("fork")  # a part is a closure, and needs what this process has loaded
    receiving, sending = fork.Pipe(duplex=False)
    child = fork.Process(target=_send, args=(make, sending), daemon=True)
    child.start()
    sending.close()
    ends = time.monotonic() + seconds
    try:
        while True:
            if not receiving.poll(max(0.0, ends - time.monotonic())):
                raise PartFailedError(f"not done after {seconds:g} s")
            try:
                made: Figure | str | None = receiving.recv()
            except EOFError:
                raise PartFailedError("its process died") from None
            if made is None:
                return
            if isinstance(made, str):
                raise PartFailedError(made)
            yield made
    finally:
        child.kill()
        child.join()
        receiving.close()


def _send(make: Make, sending: Connection) -> None:
    die_with_parent()
    try:
        for figure in make():
            sending.send(figure)
    except Exception as error:
        sending.send(one_line(error))
    else:
        sending.send(None)
