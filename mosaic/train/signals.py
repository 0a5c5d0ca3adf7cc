"""Stop signals: the first finishes the step and saves, the second exits at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

from mosaic.train.exits import INTERRUPTED

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Slurm sends SIGUSR1 before the time limit."""


class StopRequests:
    """Signal handlers that only set a flag.

    Attributes:
        received: Name of the first signal; empty before.
    """

    def __init__(self) -> None:
        self.received = ""
        for number in STOPPING:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(INTERRUPTED)
        self.received = signal.Signals(number).name
