"""Memory over time, from the lifetimes of tensors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A tensor's time in memory: from ``start_ns`` up to ``end_ns``."""

    device: str
    num_bytes: int
    """Its size."""
    start_ns: int
    """Start of its writer."""
    end_ns: int
    """End of its last reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes in use on one device."""

    at_ns: tuple[int, ...]
    """Times of changes, ascending; the first is 0."""
    in_use_bytes: tuple[int, ...]
    """Bytes from each of these times up to the next."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes."""
        return max(self.in_use_bytes)

    @property
    def peak_ns(self) -> int:
        """First time of the peak."""
        return self.at_ns[self.in_use_bytes.index(self.peak_bytes)]

    def bytes_at(self, time_ns: int) -> int:
        """Returns the bytes in use at ``time_ns``; 0 before 0."""
        place = bisect.bisect_right(self.at_ns, time_ns)
        return self.in_use_bytes[place - 1] if place else 0


def timeline_of(changes: Iterable[tuple[int, int]], base_bytes: int = 0) -> MemoryTimeline:
    """Returns a timeline from pairs of a time and a change of bytes.

    Changes at one time count together.
    """
    at_ns, in_use_bytes = [0], [base_bytes]
    for time_ns, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        total = in_use_bytes[-1] + sum(change[1] for change in group)
        if time_ns == at_ns[-1]:
            in_use_bytes[-1] = total
        elif total != in_use_bytes[-1]:
            at_ns.append(time_ns)
            in_use_bytes.append(total)
    return MemoryTimeline(at_ns=tuple(at_ns), in_use_bytes=tuple(in_use_bytes))


def changes_of(lifetimes: Iterable[Lifetime]) -> dict[str, list[tuple[int, int]]]:
    """Returns the changes of each device, for ``timeline_of``."""
    changes: dict[str, list[tuple[int, int]]] = {}
    for lifetime in lifetimes:
        if lifetime.start_ns < lifetime.end_ns and lifetime.num_bytes:
            own = changes.setdefault(lifetime.device, [])
            own += ((lifetime.start_ns, lifetime.num_bytes), (lifetime.end_ns, -lifetime.num_bytes))
    return changes
