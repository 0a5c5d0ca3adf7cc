"""The messages of a step, as time: rows to the ranks that run a module and back, and gradients summed.

Each of W ranks holds 1/W of a batch's rows. A module on d of them runs on 1/d on each; a member keeps what it holds and
is short of 1/d - 1/W, and a rank that runs nothing of it sends all that it holds. So the busiest link carries
max(1/d - 1/W, 1/W) of what travels, nothing where d = W (``mosaic.ranks.RowRouting`` with equal slices). There
are four ways: arguments to the members and results home, then the gradients of results and those of arguments. Nothing
is taken to hide what travels: an upper bound.

Gradients are summed in B buckets, each as soon as it is there, while the backward goes on::

    backward  |  1  |  2  |  3  |                b = its time, ready in equal parts
    ring            |--1--|--2--|--3--|          r = the time of all buckets one after the other
                                |exposed|        max(r / B, r - b (B - 1) / B)

None of this was measured on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mosaic.hardware import Cluster, Link


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


def busiest_share(num_ranks: int, degree: int) -> float:
    """Returns the share of all rows that the busiest rank sends or receives, one way; 0 where all ranks run it."""
    if degree >= num_ranks:
        return 0.0
    return max(1 / degree - 1 / num_ranks, 1 / num_ranks)


def route_ms(num_bytes: float, num_ranks: int, degree: int, link: Link) -> float:
    """Returns the time of one way between all ranks and ``degree`` of them, for ``num_bytes`` of all rows.

    The busiest rank talks to as many others as its rows come from, one after the other.
    """
    share = busiest_share(num_ranks, degree)
    if share <= 0 or num_bytes <= 0:
        return 0.0
    others = math.ceil(share * num_ranks)
    return others * link.latency_us / 1e3 + share * num_bytes / link.gb_per_s / 1e6


def exposed_ms(total_ms: float, backward_ms: float, num_buckets: int) -> float:
    """Returns what is left of summing gradients when the backward has ended; see the head of this file.

    Args:
        total_ms: All buckets one after the other.
        backward_ms: The backward in which they become ready, in equal parts.
        num_buckets: How many.
    """
    if num_buckets < 1:
        return 0.0
    return max(total_ms / num_buckets, total_ms - backward_ms * (num_buckets - 1) / num_buckets)


def links_of(cluster: Cluster) -> Callable[[int], Link]:
    """Returns what ranks reach of a cluster's links, by the number of devices that take part."""

    def reached(degree: int) -> Link:
        link = cluster.link(degree)
        return Link(gb_per_s=link.gb_per_s * cluster.hardware.efficiency.network, latency_us=link.latency_us)

    return reached
