"""How many bytes this rank sent to others, by module and phase."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

Phase = Literal["forward", "backward", "reduce"]
"""Rows of arguments and results, their gradients, or gradients of parameters."""


class Traffic:
    """Counts what is sent; threads may count at the same time.

    What a rank keeps for itself is not sent and not counted. Of a reduction the gradients that are handed to it are
    counted, not what the library makes of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes: Counter[tuple[str, Phase]] = Counter()

    def add(self, module: str, phase: Phase, num_bytes: int) -> None:
        """Counts bytes."""
        with self._lock:
            self._num_bytes[module, phase] += num_bytes

    def of(self, module: str, phase: Phase) -> int:
        """Returns the bytes of a module and phase since the start or the last ``clear``."""
        with self._lock:
            return self._num_bytes[module, phase]

    def metrics(self) -> dict[str, float]:
        """Returns all of it as ``sent_bytes/PHASE/MODULE``, for a flat dict of metrics."""
        with self._lock:
            return {f"sent_bytes/{phase}/{name}": float(n) for (name, phase), n in sorted(self._num_bytes.items())}

    def clear(self) -> None:
        """Starts again from zero."""
        with self._lock:
            self._num_bytes.clear()
