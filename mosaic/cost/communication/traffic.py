"""The messages of a step, as time: rows to the ranks that run a module and back, and gradients summed.

Each of W ranks holds 1/W of a batch's rows. A module on d of them runs on 1/d on each; a member keeps what it holds and
is short of 1/d - 1/W, and a rank that runs nothing of it sends all that it holds: nothing travels where d = W
(``mosaic.ranks.RowRouting`` with equal slices and the first d ranks as members). There are four ways: arguments to the
members and results home, then the gradients of results and those of arguments. Nothing is taken to hide what travels:
an upper bound.

Gradients are summed in B buckets, each as soon as it is there, while the backward goes on::

    backward  |  1  |  2  |  3  |                b = its time, ready in equal parts
    network         |--1--|--2--|--3--|          r = the time of all buckets one after the other
                                |exposed|        max(r / B, r - b (B - 1) / B)

How long a message or a bucket takes is the network's matter: ``mosaic.hardware.Cluster``, or one ``Link`` for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mosaic.hardware import Cluster, Link, Message

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are summed together, as in the engine and in DDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTraffic:
    """Bytes that a module takes and makes in a step, of the whole batch on all ranks."""

    arguments: int = 0
    """Of its arguments that have a batch."""
    results: int = 0
    """Of its results."""
    argument_gradients: int = 0
    """Of the gradients of its arguments; of those that take one."""
    result_gradients: int = 0
    """Of the gradients of its results."""
    parameter_gradients: int = 0
    """Of its parameters' gradients, on each of its devices; the batch does not matter."""

    def __post_init__(self) -> None:
        if min(self.arguments, self.results, self.argument_gradients, self.result_gradients) < 0:
            raise ValueError(f"{self}: bytes are 0 or more")


def route_ms(num_bytes: float, num_ranks: int, degree: int, network: Cluster | Link) -> float:
    """Returns the time of one way between all ranks and ``degree`` of them, for ``num_bytes`` of all rows."""
    return network.exchange_ms(
        [
            Message(source=source, target=target, num_bytes=share * num_bytes)
            for source, target, share in routed(num_ranks, degree)
            if num_bytes > 0
        ]
    )


@lru_cache(maxsize=1024)
def routed(num_ranks: int, degree: int) -> tuple[tuple[int, int, float], ...]:
    """Returns which rank sends which member what share of all rows: ranks in their order fill members in theirs."""
    messages: list[tuple[int, int, float]] = []
    member, short = 0, num_ranks - degree  # in units of 1 / (ranks x degree): a rank holds ``degree`` of them
    for source in range(degree, num_ranks):
        left = degree
        while left:
            given = min(left, short)
            messages.append((source, member, given / (num_ranks * degree)))
            left, short = left - given, short - given
            if not short:
                member, short = member + 1, num_ranks - degree
    return tuple(messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSum:
    """What summing a module's gradients takes."""

    time_ms: float = 0.0
    """All buckets one after the other, hidden by nothing, in milliseconds."""
    buckets: int = 1
    """How many; all of one size."""


def gradient_sum(num_bytes: int, degree: int, network: Cluster | Link) -> GradientSum:
    """Returns what summing ``num_bytes`` of gradients over ``degree`` devices takes."""
    buckets = max(1, -(-num_bytes // BUCKET_BYTES))
    return GradientSum(time_ms=buckets * network.all_reduce_ms(num_bytes / buckets, degree), buckets=buckets)


def exposed_ms(total_ms: float, backward_ms: float, buckets: int) -> float:
    """Returns what is left of summing gradients when the backward has ended; see the head of this file.

    Args:
        total_ms: All buckets one after the other.
        backward_ms: The backward in which they become ready, in equal parts.
        buckets: How many.
    """
    if buckets < 1:
        return 0.0
    return max(total_ms / buckets, total_ms - backward_ms * (buckets - 1) / buckets)
