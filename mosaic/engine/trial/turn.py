"""Whose turn it is to try plans: two models of one process share its device, and would measure each other's changes."""

from __future__ import annotations

import weakref
from functools import cache

_MAX_REFUSALS = 200


class TrialTurn:
    """Held by one trial at a time; a trial whose loop has stopped stepping loses it to one whose loop goes on."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._refusals = 0

    def take(self, asker: object) -> bool:
        """Returns whether the asker has the turn now."""
        holder = self._holder() if self._holder is not None else None
        if holder is not None and holder is not asker and self._refusals < _MAX_REFUSALS:
            self._refusals += 1
            return False
        self._holder, self._refusals = weakref.ref(asker), 0
        return True

    def give(self, holder: object) -> None:
        """Gives the turn to the next that asks; does nothing for others than the holder."""
        if self._holder is not None and self._holder() is holder:
            self._holder, self._refusals = None, 0


@cache
def turn_of_process() -> TrialTurn:
    """Returns the turn that all trials of this process share."""
    return TrialTurn()
