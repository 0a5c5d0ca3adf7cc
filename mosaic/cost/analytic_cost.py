"""A cost model from operator counts and a device description. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from mosaic.cost.communication import gradient_sum
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.degrees import between_ms, degrees_between, neighbours
from mosaic.cost.interference import BandwidthInterference, Interference
from mosaic.cost.protocol import Cost
from mosaic.cost.roofline import phase_bandwidth, phase_ms
from mosaic.errors import InvalidProfileError
from mosaic.hardware import NOWHERE, Cluster, Hardware
from mosaic.profile import Phase

ASSUMED_CONTENTION = (
    "assumed: a neighbour slows a module down by the geometric mean of two estimates from counted bandwidths: only "
    "memory traffic at the same moment waits, or the whole module waits while its neighbour uses the memory"
)
"""Description of the interference that is assumed without measurements."""


class AnalyticCost(Cost):
    """Predicted time and memory of the modules of one graph; replaces a measured ``CostModel``.

    A module of degree d > 1 adds its gradient reduction to its backward without overlap: an upper bound.

    Args:
        counts: Counts of each module by data-parallel degree (``count_degrees``).
        cluster: Devices and their links, or one device for degree 1.
        interference: Slowdown by neighbours; by default ``ASSUMED_CONTENTION``.

    Raises:
        ValueError: A module has no counts, or there is one device and counts of higher degrees.
    """

    profile_fingerprint: str | None = None

    def __init__(
        self,
        counts: Mapping[str, Mapping[int, ModuleCounts]],
        cluster: Cluster | Hardware,
        *,
        interference: Interference | None = None,
    ) -> None:
        self._counts = {name: dict(sorted(by_degree.items())) for name, by_degree in counts.items()}
        empty = [name for name, by_degree in self._counts.items() if not by_degree]
        if empty:
            raise ValueError(f"no counts of {', '.join(empty)}; count each module at one or more degrees")
        if isinstance(cluster, Hardware):
            cluster = Cluster(hardware=cluster, intra_node=NOWHERE, inter_node=NOWHERE)
        self.cluster = cluster
        self.hardware = cluster.hardware
        self.interference = interference or BandwidthInterference(self.bandwidth)
        self._cached_ms = cache(self._phase_ms)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._counts)

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the counted degrees and those between them, within the cluster's devices, increasing."""
        return tuple(d for d in degrees_between(tuple(self._by_degree(module))) if d <= self.cluster.num_devices)

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        self._counts_at(module, degree)
        return tuple(range(1, self.hardware.num_slots + 1))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        return self._cached_ms(module, phase, degree, quota)

    def communication_ms(self, module: str, degree: int) -> float:
        """Returns the part of the backward in which gradients are reduced over ``degree`` devices, in milliseconds."""
        return gradient_sum(self._counts_at(module, degree).memory.gradient_bytes, degree, self.cluster).time_ms

    def memory_bytes(self, module: str, degree: int) -> int:
        return self._counts_at(module, degree).memory.total_bytes + self.hardware.lane_bytes

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes that a module holds while other stages run: all except temporaries."""
        memory = self._counts_at(module, degree).memory
        return memory.resident_bytes + memory.activation_bytes + self.hardware.lane_bytes

    def bandwidth(self, module: str, phase: Phase, quota: int) -> float:
        """Returns the share of the memory bandwidth that a phase uses at the least counted degree, 0 to 1."""
        counts = next(iter(self._by_degree(module).values())).phase(phase)
        return phase_bandwidth(counts, self.hardware, quota * self.hardware.sms_per_slot)

    def _phase_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        self._counts_at(module, degree)
        if not 1 <= quota <= self.hardware.num_slots:
            raise ValueError(f"quota={quota} slots of {self.hardware.name}; use 1 to {self.hardware.num_slots}")
        counts = self._by_degree(module)
        low, high = neighbours(tuple(counts), degree)
        low_ms, high_ms = (
            phase_ms(counts[at].phase(phase), self.hardware, quota * self.hardware.sms_per_slot) for at in (low, high)
        )
        batch_size = counts[1].batch if 1 in counts else 0
        if batch_size and counts[low].batch and counts[high].batch:  # the device with the most samples decides
            alone_ms = between_ms(low_ms, high_ms, counts[low].batch, counts[high].batch, -(-batch_size // degree))
        else:
            alone_ms = between_ms(low_ms, high_ms, low, high, degree)
        return alone_ms + (self.communication_ms(module, degree) if phase is Phase.BACKWARD else 0.0)

    def _by_degree(self, module: str) -> dict[int, ModuleCounts]:
        if module not in self._counts:
            raise InvalidProfileError(
                f"the cost model has no module {module!r}, only {', '.join(self.names) or 'none'}: count it"
            )
        return self._counts[module]

    def _counts_at(self, module: str, degree: int) -> ModuleCounts:
        """Returns the counts of a degree, or of the next lower one, which has more samples per device."""
        by_degree = self._by_degree(module)
        counted = tuple(by_degree)
        if not counted[0] <= degree <= counted[-1]:
            raise ValueError(
                f"{module!r} was counted at degrees {', '.join(map(str, counted))}, not at {degree}; count it there too"
            )
        return by_degree[neighbours(counted, degree)[0]]
