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
    """Whose memory."""
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
    """When it changes, ascending; the first is 0."""
    in_use_bytes: tuple[int, ...]
    """From each of these times on, up to the next."""

    @property
    def peak_bytes(self) -> int:
        """Most in use at any time."""
        return max(self.in_use_bytes)

    @property
    def peak_ns(self) -> int:
        """When that is first reached."""
        return self.at_ns[self.in_use_bytes.index(self.peak_bytes)]

    def bytes_at(self, time_ns: int) -> int:
        """Returns the bytes in use from ``time_ns`` on; before 0 nothing is."""
        place = bisect.bisect_right(self.at_ns, time_ns)
        return self.in_use_bytes[place - 1] if place else 0


def timeline_of(changes: Iterable[tuple[int, int]], base_bytes: int = 0) -> MemoryTimeline:
    """Returns a timeline from pairs of a time and the bytes by which memory grows then.

    Changes at one time count together: what ends as another thing starts makes room for it.
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
    """Returns for each device what ``timeline_of`` takes."""
    changes: dict[str, list[tuple[int, int]]] = {}
    for one in lifetimes:
        if one.start_ns < one.end_ns and one.num_bytes:
            changes.setdefault(one.device, []).extend(((one.start_ns, one.num_bytes), (one.end_ns, -one.num_bytes)))
    return changes
