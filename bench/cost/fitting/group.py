"""Modules that ran side by side on partitions of one device (paper section 3.3), all of them timed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from mosaic.profile import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """What one of several modules took while all the others of its group kept running."""

    module: str
    """Name in the graph."""
    phase: Phase
    """Forward or backward, of this member."""
    quota: int
    """Slots it ran on."""
    times_ms: tuple[float, ...]
    """Raw measurements in milliseconds while all others ran."""
    alone_ms: tuple[float, ...]
    """Raw measurements with the other partitions idle, taken in turn with them."""

    @property
    def slowdown(self) -> float:
        """Median time beside the others over median time alone."""
        return statistics.median(self.times_ms) / statistics.median(self.alone_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSample:
    """Two or more modules that ran side by side."""

    members: tuple[GroupMember, ...]
    """Everyone that ran, in any order."""
