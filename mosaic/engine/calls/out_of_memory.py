"""No memory for a module beside the others: telling it from other errors, and what came of it."""

from __future__ import annotations

import logging
from collections import Counter

import torch

_LOG = logging.getLogger("mosaic")

_HOST_ALLOCATOR = ("can't allocate memory", "not enough memory")
"""What ``c10::alloc_cpu`` says, on POSIX and elsewhere; it raises a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _HOST_ALLOCATOR)


class SecondTries:
    """Calls for which there was no memory on their lane, and which were run again with all other lanes at rest."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, module: str, place: str) -> None:
        """Takes one down, from the lane's thread."""
        self._counts[module, place] += 1
        if self._counts[module, place] == 1:
            _LOG.warning("%s ran out of memory on its lane (%s); run again with the others at rest", module, place)

    def sentences(self) -> tuple[str, ...]:
        """Says how many there were of which module, and where they were called."""
        return tuple(
            f"{count} call{'s' if count > 1 else ''} of {module} ran out of memory on its lane ({place}) and was run "
            "again, with the other lanes at rest"
            for (module, place), count in self._counts.copy().items()
        )
