"""Planning functions for the tests of planning ahead; a worker imports this file, so it imports nothing heavy."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from mosaic.pipelining.orders import OrderLimits


class Unreadable:
    """Pickles, and cannot be read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse, ())


def _refuse() -> None:
    raise LookupError("no such class here")


def plan(metadata: dict[str, Any], limits: OrderLimits) -> Any:
    """Does what the metadata say."""
    what = metadata["do"]
    if what == "double":
        return 2 * metadata["value"]
    if what == "exit":
        sys.exit("enough")
    if what == "die":
        os._exit(7)
    if what == "hang":
        threading.Event().wait()
    if what == "search":
        end_s = time.monotonic() + limits.seconds
        while time.monotonic() < end_s and limits.should_stop is not None and not limits.should_stop():
            threading.Event().wait(0.005)
        return "stopped" if time.monotonic() < end_s else "over"
    if what == "unreadable":
        return Unreadable()
    raise AssertionError(what)
