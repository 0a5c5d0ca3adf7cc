"""Planning functions for the tests of planning ahead; a worker imports this file, so it imports nothing heavy."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from mosaic.pipelining.next_step import Search


class Unreadable:
    """Pickles, and cannot be read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse, ())


def _refuse() -> None:
    raise LookupError("no such class here")


def plan(metadata: dict[str, Any], search: Search) -> Any:
    """Does what the metadata say."""
    what = metadata["do"]
    if what == "double":
        return 2 * metadata["value"]
    if what == "offer":  # better and better ones until it is told to stop; the last counts
        for value in metadata["values"]:
            search.offer(value)
        wait_until_stopped(search)
        return None
    if what == "exit":
        sys.exit("enough")
    if what == "die":
        os._exit(7)
    if what == "hang":
        search.offer("hanging")
        threading.Event().wait()
    if what == "environment":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return {"torch": "torch" in sys.modules, "cores": cores, "threads": search.num_threads, "pid": os.getpid()}
    if what == "seconds":
        return [search.seconds_left]
    if what == "until over":
        wait_until_stopped(search)
        return "over"
    if what == "unreadable":
        return Unreadable()
    raise AssertionError(what)


def wait_until_stopped(search: Search) -> None:
    event = threading.Event()
    while not search.should_stop():
        event.wait(0.005)
