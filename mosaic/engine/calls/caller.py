"""The line of the user's code that is being run."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mosaic.engine.placing import Executor

_LOG = logging.getLogger("mosaic")


def caller() -> str:
    """Returns file, line and function of the user's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("mosaic.engine", "mosaic.ranks", "torch.")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def note_in_place(notes: Executor, module: str, reason: str) -> None:
    """Counts a call that runs where it is made; the first one for a reason is told in the log, with its line."""
    notes.in_place[module, reason] += 1
    if (module, reason) not in notes.places:
        notes.places[module, reason] = caller()
        _LOG.warning("%s runs in place at %s: %s", module, notes.places[module, reason], reason)
