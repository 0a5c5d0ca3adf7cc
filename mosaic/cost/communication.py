"""Communication time of a step: rows to a module's ranks and back, and gradient reduction.

Each of W ranks holds 1/W of a batch's rows. A module on d ranks (its members) runs on 1/d of the rows on each: a member
keeps its own rows and receives 1/d - 1/W, and every other rank sends all of its rows. Nothing is sent if d = W
(``RowRouting`` with equal slices and the first d ranks as members). Rows are sent four times: arguments, results,
gradients of results, and gradients of arguments. No overlap with compute is assumed: an upper bound.

Gradients are reduced in B buckets, each as soon as it is ready, during the backward::

    backward  |  1  |  2  |  3  |                b = its time, ready in equal parts
    network         |--1--|--2--|--3--|          r = the time of all buckets one after the other
                                |exposed|        max(r / B, r - b (B - 1) / B)

The time of a message or a bucket is that of a ``mosaic.hardware.Cluster``, or of one ``Link`` for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from mosaic.cost.protocol import Cost, RetimedCost
from mosaic.hardware import Cluster, Link, Message
from mosaic.profile import Phase

BUCKET_BYTES = 25 * 2**20
"""Size of a gradient bucket, as in the engine and in DDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTraffic:
    """Bytes sent to and from a module in a step, for the whole batch on all ranks."""

    arguments: int = 0
    """Arguments with a batch dimension."""
    results: int = 0
    argument_gradients: int = 0
    result_gradients: int = 0
    parameter_gradients: int = 0
    """Gradients of its parameters on each of its devices."""

    def __post_init__(self) -> None:
        if min(self.arguments, self.results, self.argument_gradients, self.result_gradients) < 0:
            raise ValueError(f"{self}: use 0 or more bytes")


def route_ms(num_bytes: float, num_ranks: int, degree: int, network: Cluster | Link) -> float:
    """Returns the time to send ``num_bytes`` of rows one way between all ranks and the first ``degree`` ranks."""
    return network.exchange_ms(
        [
            Message(source=source, target=target, num_bytes=share * num_bytes)
            for source, target, share in routed(num_ranks, degree)
            if num_bytes > 0
        ]
    )


@lru_cache(maxsize=1024)
def routed(num_ranks: int, degree: int) -> tuple[tuple[int, int, float], ...]:
    """Returns messages as (rank, member, share of all rows), in rank order."""
    messages: list[tuple[int, int, float]] = []
    member, needed_units = 0, num_ranks - degree  # in units of 1 / (ranks x degree): a rank holds ``degree`` units
    for source in range(degree, num_ranks):
        unsent = degree
        while unsent:
            units = min(unsent, needed_units)
            messages.append((source, member, units / (num_ranks * degree)))
            unsent, needed_units = unsent - units, needed_units - units
            if not needed_units:
                member, needed_units = member + 1, num_ranks - degree
    return tuple(messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSum:
    """The gradient reduction of a module."""

    time_ms: float = 0.0
    """All buckets one after the other, without a concurrent backward, in milliseconds."""
    buckets: int = 1
    """Number of buckets of equal size."""


@lru_cache(maxsize=1024)
def gradient_sum(num_bytes: int, degree: int, network: Cluster | Link) -> GradientSum:
    """Returns the reduction of ``num_bytes`` of gradients over ``degree`` devices."""
    buckets = max(1, -(-num_bytes // BUCKET_BYTES))
    return GradientSum(time_ms=buckets * network.all_reduce_ms(num_bytes / buckets, degree), buckets=buckets)


def exposed_ms(total_ms: float, backward_ms: float, buckets: int) -> float:
    """Returns the part of a gradient reduction after the end of the backward (see the module docstring)."""
    return max(total_ms / buckets, total_ms - backward_ms * (buckets - 1) / buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Predicted times of one module at one degree, in milliseconds."""

    route_forward_ms: float = 0.0
    """Arguments to its devices and results back."""
    route_backward_ms: float = 0.0
    """Gradients in the opposite direction."""
    reduce_ms: float = 0.0
    """Gradient reduction after the end of its backward."""

    def of(self, phase: Phase) -> float:
        """Returns the time added to a phase."""
        return self.route_forward_ms if phase is Phase.FORWARD else self.route_backward_ms + self.reduce_ms


class RankedCost(RetimedCost):
    """A cost model for several ranks: times of another model plus the engine's communication.

    Each module has the network to itself. ``mosaic.simulate`` models concurrent reductions.

    Args:
        base: Compute times; its backward may include ``included_ms``.
        traffic: Bytes of each module.
        network: Network between the ranks; a link is a plain ring, such as gloo's or a measured one.
        num_ranks: Number of ranks that hold the batch.
        included_ms: Gradient reduction included in the base's backward, for a module at a degree.
        with_reduction: If False, gradient reduction takes no time, and the base's is subtracted.
        routes: Link for rows, if it differs, as on the host, where reductions use both directions at a time.

    Attributes:
        communication: Returns the ``Communication`` of a module at a degree and quota.
        summed: Returns the ``GradientSum`` of a module at a degree.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """

    def __init__(
        self,
        base: Cost,
        traffic: Mapping[str, ModuleTraffic],
        network: Cluster | Link,
        num_ranks: int,
        *,
        included_ms: Callable[[str, int], float] = lambda module, degree: 0.0,
        with_reduction: bool = True,
        routes: Link | None = None,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}; use at least 1")
        super().__init__(base)
        self.num_ranks = num_ranks
        self._traffic = dict(traffic)
        self._network = network
        self._route_network = routes or network
        self._included_ms = included_ms
        self._with_reduction = with_reduction
        # decorators on the methods would keep every object alive
        self.summed = cache(self._summed)
        self.communication = cache(self._communication)
        self._routed_ms = cache(self._route_ms)

    def _communication(self, module: str, degree: int, quota: int) -> Communication:
        """Returns the communication of a module at a degree, less the overlap with its backward at a quota."""
        forward_ms, backward_ms = self._routed_ms(module, degree)
        reduction, exposed = self.summed(module, degree), 0.0
        if reduction.time_ms > 0:
            compute_ms = self.compute_ms(module, Phase.BACKWARD, degree, quota)
            exposed = exposed_ms(reduction.time_ms, compute_ms, reduction.buckets)
        return Communication(route_forward_ms=forward_ms, route_backward_ms=backward_ms, reduce_ms=exposed)

    def compute_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time without communication, in milliseconds."""
        base_ms = self.base.time_ms(module, phase, degree, quota)
        if phase is Phase.FORWARD or degree == 1:
            return base_ms
        return max(0.0, base_ms - self._included_ms(module, degree))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone on its devices, including communication, in milliseconds."""
        return self.compute_ms(module, phase, degree, quota) + self.communication(module, degree, quota).of(phase)

    def _summed(self, module: str, degree: int) -> GradientSum:
        num_bytes = self._traffic.get(module, ModuleTraffic()).parameter_gradients
        if not self._with_reduction or degree <= 1 or num_bytes <= 0:
            return GradientSum()
        return gradient_sum(num_bytes, degree, self._network)

    def _route_ms(self, module: str, degree: int) -> tuple[float, float]:
        """Forward and backward."""
        own = self._traffic.get(module, ModuleTraffic())
        arguments_ms, results_ms, result_gradients_ms, argument_gradients_ms = (
            route_ms(num_bytes, self.num_ranks, degree, self._route_network)
            for num_bytes in (own.arguments, own.results, own.result_gradients, own.argument_gradients)
        )
        return arguments_ms + results_ms, result_gradients_ms + argument_gradients_ms
