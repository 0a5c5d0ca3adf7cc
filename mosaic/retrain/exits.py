"""Exit codes and stop signals of the processes of a day. No torch."""

from __future__ import annotations

import os
import signal
from types import FrameType

DONE = 0
"""The work is done."""
FAILED = 1
"""An error that a restart does not cure."""
QUARANTINED = 5
"""Today's data was quarantined, not trained on."""
OUT_OF_MEMORY = 71
"""Memory ran out; a restart may find more."""
LOADER_DIED = 72
"""A worker of the loader was killed; a restart may help."""
INTERRUPTED = 75
"""A signal came, or the window is over; the run resumes later (``EX_TEMPFAIL``)."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Stop signals: the first finishes the step and saves, the second exits at once. Slurm sends SIGUSR1 before the time
limit."""


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
