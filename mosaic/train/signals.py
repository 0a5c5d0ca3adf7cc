"""Being told to stop: the first signal finishes the step and saves, the second ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

from mosaic.train.exits import INTERRUPTED

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""SIGUSR1 is what Slurm sends before the time is over."""


class StopRequests:
    """Listens to signals; nothing but a flag is set when one comes.

    Attributes:
        received: Name of the first signal; empty before.
    """

    def __init__(self) -> None:
        self.received = ""
        for each in STOPPING:
            signal.signal(each, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(INTERRUPTED)
        self.received = signal.Signals(number).name
