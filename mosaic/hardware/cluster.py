"""Devices in nodes, and the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mosaic.device import FORBID_EXTRA
from mosaic.hardware.description import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device sends to its neighbours, and how long the first byte takes."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    gb_per_s: float
    """Bandwidth of one device in one direction, in 10^9 bytes a second."""
    latency_us: float = 5.0
    """Time of one step of a collective whatever its size, in microseconds."""

    def __post_init__(self) -> None:
        if not 0 < self.gb_per_s < math.inf:  # also catches NaN
            raise ValueError(f"link: gb_per_s={self.gb_per_s}; use a finite number above 0")
        if not 0 <= self.latency_us < math.inf:
            raise ValueError(f"link: latency_us={self.latency_us}; use a finite number, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices."""

    hardware: Hardware
    """What one of the devices is."""
    nodes: int = 1
    """Nodes."""
    gpus_per_node: int = 1
    """Devices in each."""
    intra_node: Link
    """Between devices of one node."""
    inter_node: Link
    """Between devices of different nodes."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(f"nodes={self.nodes}, gpus_per_node={self.gpus_per_node}; a cluster has at least one each")

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.nodes * self.gpus_per_node

    def link(self, degree: int) -> Link:
        """Returns the slowest link of a ring over ``degree`` devices: within a node as long as they fit into one."""
        return self.intra_node if degree <= self.gpus_per_node else self.inter_node

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns the time of a ring all-reduce of ``num_bytes`` on each of ``degree`` devices, in milliseconds.

        Each device sends 2 (d-1)/d of the bytes in 2 (d-1) steps (Patarasuk and Yuan, 2009). A module's devices are
        taken to be neighbours; one that a plan spreads over more nodes than it needs takes longer.
        """
        if degree <= 1 or num_bytes <= 0:
            return 0.0
        link = self.link(degree)
        sent = 2 * (degree - 1) / degree * num_bytes
        return (
            sent / (link.gb_per_s * self.hardware.efficiency.network) / 1e6 + 2 * (degree - 1) * link.latency_us / 1e3
        )
