"""What ranks tell each other in a step, as time: rows to the ranks that run a module and back, and gradients summed.

Each of W ranks holds 1/W of a batch's rows. A module on d of them runs on 1/d on each; a member keeps what it holds and
is short of 1/d - 1/W, and a rank that runs nothing of it sends all that it holds. So the busiest link carries
max(1/d - 1/W, 1/W) of what travels, nothing where d = W (``mosaic.ranks.RowRouting`` with equal slices). There
are four ways: arguments to the members and results home, then the gradients of results and those of arguments. Nothing
is taken to hide what travels: an upper bound.

Gradients are summed in B buckets, each as soon as it is there, while the backward goes on::

    backward  |  1  |  2  |  3  |                b = its time, ready in equal parts
    ring            |--1--|--2--|--3--|          r = the time of all buckets one after the other
                                |exposed|        max(r / B, r - b (B - 1) / B)

A collective on a GPU is a kernel and takes SMs (``CollectiveSms``). None of this was measured on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mosaic.cost.interference.measured import Beside, Interference
from mosaic.cost.model import Cost
from mosaic.cost.retimed import RetimedCost
from mosaic.hardware import Cluster, Link
from mosaic.profile import Phase

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSms:
    """SMs that a collective's kernel holds while it runs, one for each of its CTAs (NCCL: one a channel).

    On SMs that are reserved it takes nothing from modules. What it needs beyond these it takes from all modules of the
    device alike: they run at 1 - lost of their speed meanwhile, so that a collective of c milliseconds costs each
    c * lost. With ``max_ctas`` held to the reserved SMs nothing is lost. A formula, not measured on GPUs.
    """

    ctas: int
    """CTAs of a collective."""
    num_sms: int
    """SMs of the device."""
    reserved_sms: int = 0
    """SMs that no module has."""

    def __post_init__(self) -> None:
        if not (0 <= self.ctas <= self.num_sms and 0 <= self.reserved_sms < self.num_sms):
            raise ValueError(
                f"ctas={self.ctas}, reserved_sms={self.reserved_sms} of num_sms={self.num_sms}; neither is negative, "
                "and a device has more SMs than are reserved"
            )

    @property
    def lost(self) -> float:
        """Share of the modules' SMs that they lack while a collective runs, 0 to 1."""
        beyond = max(0, self.ctas - self.reserved_sms)
        return min(1.0, beyond / (self.num_sms - self.reserved_sms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Times of one module at one degree, in milliseconds; predicted."""

    route_forward_ms: float = 0.0
    """Arguments to its devices and results home."""
    route_backward_ms: float = 0.0
    """Gradients the other way."""
    reduce_ms: float = 0.0
    """Of summing its parameters' gradients what is left when its backward has ended."""
    hidden_ms: float = 0.0
    """Of summing them what the backward hides."""

    def of(self, phase: Phase) -> float:
        """Returns what is added to a phase."""
        return self.route_forward_ms if phase is Phase.FORWARD else self.route_backward_ms + self.reduce_ms

    def busy_ms(self, phase: Phase) -> float:
        """Returns how long messages of a phase travel, hidden or not."""
        return self.of(phase) + (self.hidden_ms if phase is Phase.BACKWARD else 0.0)


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


class RankedCost(RetimedCost):
    """A cost model for several ranks: another one's times with the communication of the engine beside them.

    Args:
        base: Times of compute, and of whatever else its backward has: ``included_ms``.
        traffic: What each module takes and makes.
        link: The link between the given number of devices, as fast as it really is.
        num_ranks: Ranks that hold the batch.
        included_ms: What the base's backward already has for summing gradients, of a module at a degree.
        with_routing: Whether rows that travel take time.
        with_reduction: Whether summing gradients takes time; where not, the base's is taken out.
        sms: What collectives take from modules; nothing by default.
        bucket_bytes: Bytes of gradients that are summed together.

    Raises:
        ValueError: There are no ranks.
    """

    def __init__(
        self,
        base: Cost,
        traffic: Mapping[str, ModuleTraffic],
        link: Callable[[int], Link],
        num_ranks: int,
        *,
        included_ms: Callable[[str, int], float] = lambda module, degree: 0.0,
        with_routing: bool = True,
        with_reduction: bool = True,
        sms: CollectiveSms | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}; there is at least one rank")
        super().__init__(base)
        self.num_ranks = num_ranks
        self._traffic = dict(traffic)
        self._link = link
        self._included_ms = included_ms
        self._with_routing, self._with_reduction = with_routing, with_reduction
        self._lost = sms.lost if sms is not None else 0.0
        self._bucket_bytes = bucket_bytes
        self._known: dict[tuple[str, int, int], Communication] = {}
        self._longest: dict[tuple[str, Phase], float] = {}
        if self._lost > 0 and num_ranks > 1:
            self.interference = CollectiveInterference(base.interference, self._lost, self.longest_ms)

    def communication(self, module: str, degree: int, quota: int) -> Communication:
        """Returns what a module's communication takes at a degree, and what its backward at a quota hides of it."""
        key = (module, degree, quota)
        if key not in self._known:
            self._known[key] = self._communication(module, degree, quota)
        return self._known[key]

    def longest_ms(self, module: str, phase: Phase) -> float:
        """Returns how long a module's messages of a phase travel at most, over its degrees and quotas."""
        if (module, phase) not in self._longest:
            self._longest[module, phase] = max(
                self.communication(module, degree, quota).busy_ms(phase)
                for degree in self.degrees(module)
                if degree <= self.num_ranks
                for quota in self.quotas(module, degree)
            )
        return self._longest[module, phase]

    def compute_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time without communication, in milliseconds."""
        base_ms = self.base.time_ms(module, phase, degree, quota)
        if phase is Phase.FORWARD or degree == 1:
            return base_ms
        return max(0.0, base_ms - self._included_ms(module, degree))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone on its devices, communication included, in milliseconds."""
        found = self.communication(module, degree, quota)
        taken = found.hidden_ms * self._lost if phase is Phase.BACKWARD else 0.0
        return self.compute_ms(module, phase, degree, quota) + found.of(phase) + taken

    def _communication(self, module: str, degree: int, quota: int) -> Communication:
        own = self._traffic.get(module, ModuleTraffic())
        forward_ms = backward_ms = exposed = hidden = 0.0
        if self._with_routing:
            link = self._link(self.num_ranks)
            forward_ms, backward_ms = (
                sum(route_ms(num_bytes, self.num_ranks, degree, link) for num_bytes in ways)
                for ways in ((own.arguments, own.results), (own.result_gradients, own.argument_gradients))
            )
        if self._with_reduction and degree > 1 and own.parameter_gradients > 0:
            total_ms = self._reduce_ms(own.parameter_gradients, degree)
            compute_ms = self.compute_ms(module, Phase.BACKWARD, degree, quota)
            exposed = exposed_ms(total_ms, compute_ms, self._num_buckets(own.parameter_gradients))
            hidden = total_ms - exposed
        return Communication(
            route_forward_ms=forward_ms, route_backward_ms=backward_ms, reduce_ms=exposed, hidden_ms=hidden
        )

    def _num_buckets(self, num_bytes: int) -> int:
        return max(1, -(-num_bytes // self._bucket_bytes))

    def _reduce_ms(self, num_bytes: int, degree: int) -> float:
        """A ring for each bucket: 2 (d-1) steps in which each device sends 1/d of the bytes."""
        link = self._link(degree)
        sent = 2 * (degree - 1) / degree * num_bytes
        steps = self._num_buckets(num_bytes) * 2 * (degree - 1)
        return steps * link.latency_us / 1e3 + sent / link.gb_per_s / 1e6


class CollectiveInterference:
    """Another form of interference, and the SMs that neighbours' collectives take meanwhile.

    A neighbour's messages are taken to travel as long as they do at its worst degree, and for no longer than the module
    runs: an upper bound, so that what one neighbour costs depends on no other.
    """

    def __init__(self, base: Interference, lost: float, longest_ms: Callable[[str, Phase], float]) -> None:
        """Takes the other form, the share of SMs that is lost, and how long a module's messages travel."""
        self._base = base
        self._lost = lost
        self._longest_ms = longest_ms

    @property
    def is_zero(self) -> bool:
        """Never: collectives take SMs."""
        return False

    @property
    def is_pairwise(self) -> bool:
        """Whether the other form is; what collectives take adds up."""
        return self._base.is_pairwise

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Beside) -> float:
        """Returns what neighbours add, in milliseconds."""
        if not beside:
            return 0.0
        taken = sum(min(alone_ms, self._longest_ms(name, phase)) * self._lost for name, _ in beside)
        return self._base.extra_ms(module, phase, quota=quota, alone_ms=alone_ms, beside=beside) + taken
