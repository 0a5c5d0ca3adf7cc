"""A link, and what goes over equal links: the plain ring of gloo, and of links that were measured as one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.device import StrictFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes that one device sends another."""

    source: int
    """Index of a device."""
    target: int
    """Index of another."""
    num_bytes: float
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(StrictFile):
    """The bandwidth in one direction, and the latency of the first byte.

    By itself a network of equal devices with one such link each.
    """

    gb_per_s: float
    """Bandwidth in one direction, in 10^9 bytes a second: of a device within a node, of a NIC between nodes."""
    latency_us: float = 5.0
    """Time of one message whatever its size, in microseconds; on GPUs, of NCCL's Simple protocol."""
    ll128_us: float | None = None
    """The same of NCCL's LL128 protocol; None where it is not used."""
    ll_us: float | None = None
    """The same of NCCL's LL protocol; None where it is not used."""

    def __post_init__(self) -> None:
        if not 0 < self.gb_per_s < math.inf:  # also catches NaN
            raise ValueError(f"link: gb_per_s={self.gb_per_s}; use a finite number above 0")
        for name in ("latency_us", "ll128_us", "ll_us"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"link: {name}={value}; use a finite number, 0 or more")

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns the time of a ring all-reduce of ``num_bytes`` on each of ``degree`` devices, in milliseconds.

        Each device sends 2 (d-1)/d of the bytes in 2 (d-1) steps (Patarasuk and Yuan, 2009), as gloo does.
        """
        if degree <= 1 or num_bytes <= 0:
            return 0.0
        steps = 2 * (degree - 1)
        return steps * self.latency_us / 1e3 + steps / degree * num_bytes / self.gb_per_s / 1e6

    def exchange_ms(self, messages: Sequence[Message]) -> float:
        """Returns the time of messages that are sent together, in milliseconds.

        A device sends its messages one after the other, and receives meanwhile.
        """
        ways: defaultdict[tuple[bool, int], float] = defaultdict(float)
        for message in messages:
            own_ms = self.latency_us / 1e3 + message.num_bytes / self.gb_per_s / 1e6
            ways[True, message.source] += own_ms
            ways[False, message.target] += own_ms
        return max(ways.values(), default=0.0)
