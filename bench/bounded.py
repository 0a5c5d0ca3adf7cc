"""Parts of a study in processes of their own, each ended after a time; what it had made by then stays."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    yield from side_by_side({"its process": make}, seconds)


def side_by_side(makes: Mapping[str, Make], seconds: float) -> Iterator[Figure]:
    """Yields what named processes make, which run at the same time and all end after ``seconds``.

    Raises:
        PartFailedError: One of them did not come to its end.
    """
    if seconds <= 0:
        raise PartFailedError("there was no time left for it")
    fork = multiprocessing.get_context("fork")  # a part is a closure, and needs what this process has loaded
    ends = time.monotonic() + seconds
    pipes = {name: fork.Pipe(duplex=False) for name in makes}
    children = [fork.Process(target=_send, args=(make, pipes[name][1])) for name, make in makes.items()]
    for child in children:
        child.start()
    for _, sending in pipes.values():
        sending.close()
    try:
        yield from _received({name: receiving for name, (receiving, _) in pipes.items()}, ends, seconds)
    finally:
        for child in children:
            child.kill()
            child.join()
        for receiving, _ in pipes.values():
            receiving.close()


def _received(waiting: dict[str, Connection], ends: float, seconds: float) -> Iterator[Figure]:
    while waiting:
        for name, pipe in tuple(waiting.items()):
            if not pipe.poll(0.05 if len(waiting) > 1 else max(0.0, ends - time.monotonic())):
                if time.monotonic() >= ends:
                    raise PartFailedError(f"{name} was not done after {seconds:g} s")
                continue
            try:
                made: Figure | str | None = pipe.recv()
            except EOFError:
                raise PartFailedError(f"{name} died") from None
            if isinstance(made, str):
                raise PartFailedError(f"{name}: {made}")
            if made is None:
                del waiting[name]
            else:
                yield made


def _send(make: Make, sending: Connection) -> None:
    die_with_parent()
    try:
        for figure in make():
            sending.send(figure)
    except Exception as error:  # of any kind: it becomes the reason of figures that are missing
        sending.send(one_line(error))
    else:
        sending.send(None)
    sending.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may wait for ranks that have gone
