"""Vector clocks: what was surely done before what, whatever the device's timing."""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = dict[int, int]
"""For each stream, how many of its launches are known to have ended."""


def merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


@dataclass(frozen=True)
class Launch:
    """One operator on one stream."""

    name: str
    stream: int
    number: int
    """Position among the launches of its stream, from 1."""
    clock: Clock = field(repr=False, compare=False)
    """The launches that it was ordered after, and itself."""

    def is_after(self, other: Launch) -> bool:
        """Returns True if ``other`` has surely ended before this one starts."""
        return self is not other and self.clock.get(other.stream, 0) >= other.number

    def is_concurrent_with(self, other: Launch) -> bool:
        """Returns True if nothing orders the two."""
        return not self.is_after(other) and not other.is_after(self)
